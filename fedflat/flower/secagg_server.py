"""The server's side of secure aggregation: four exchanges with the clients of a round, and then their sum."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from torch import Tensor

from fedflat.core.sums import Terms
from fedflat.core.tensors import nest
from fedflat.core.updates import Updates
from fedflat.core.views import Update
from fedflat.engine.setup import Broadcast, Setup
from fedflat.engine.terms import BUFFERS, DELTA
from fedflat.errors import InputError, TooFewError
from fedflat.flower import validation
from fedflat.flower.messages import Expected, Instruction, failed, read_told
from fedflat.flower.secagg import (
    CLIENTS,
    FEWEST,
    LIMIT,
    RECORD,
    Masked,
    agreed,
    mask,
    new_key,
    pair_mask,
    public_of,
    restored,
    ring,
    threshold,
)
from fedflat.flower.validation import Form, RefusedError

LONGEST = 4096  # bytes of a key, a share, or a sealed pair of shares
Answers = dict[int, RecordDict | RefusedError]
Exchange = Callable[[str, Mapping[int, RecordDict]], Answers]
"""Sends contents to clients, with the name of a step, and returns what they answer."""


@dataclass
class SecureRound:
    """One round. After each step, who has not taken it is lost, and the others go on while they are enough.

    Attributes:
        exchange: See `Exchange`.
        lost: Why a client is not in the sum.
    """

    setup: Setup
    broadcast: Broadcast
    exchange: Exchange
    expected: Expected
    steps: Callable[[int], int]
    lost: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {name: kind for name, kind in self.expected.form.kinds.items() if name != "counters"}
        for name, (_, dtype) in kinds.items():
            if not dtype.is_floating_point:
                raise InputError(f"{name.split('/')[1]} sends whole numbers, which secure aggregation cannot add")
        self._kinds = kinds | {"loss": ((2,), torch.float64)}
        self._sizes = [int(np.prod(shape, dtype=np.int64)) for shape, _ in self._kinds.values()]

    def run(self, asked: Mapping[int, tuple[Instruction, float, RecordDict]]) -> Updates:
        """The updates of a round, without vectors, and the sums.

        Args:
            asked: For each client what to do, its weight, and the message that has it train.
        """
        publics = self._keys(list(asked))
        order = list(publics)
        secrets.SystemRandom().shuffle(order)
        peers = ring(order)
        sealed, seals = self._shares(publics, peers)
        told, total = self._masked(asked, peers, sealed)
        absent = [client for client in sealed if client not in told]
        total = self._unmasked(total, publics, peers, list(told), absent, seals)
        return self._updates(asked, told, restored(total))

    # ---- the four steps ----
    def _keys(self, clients: Sequence[int]) -> dict[int, tuple[bytes, bytes]]:
        """Clients' public keys for masks and for shares."""
        mine, publics = new_key(), dict[int, tuple[bytes, bytes]]()
        for client, record in self._answers("keys", {client: RecordDict() for client in clients}).items():
            try:
                pair = _bytes(record, "masks"), _bytes(record, "shares")
                for public in pair:
                    agreed(mine, public)  # a key that cannot be used would stop the others
                publics[client] = pair
            except (RefusedError, InputError, ValueError):
                self.lost[client] = "sent no keys that can be used"
        self._require(len(publics), FEWEST)
        if len(publics) > CLIENTS:
            raise TooFewError(f"secure aggregation sums at most {CLIENTS} clients, not {len(publics)}")
        return publics

    def _shares(
        self, publics: Mapping[int, tuple[bytes, bytes]], peers: Mapping[int, list[int]]
    ) -> tuple[dict[int, dict[int, bytes]], dict[int, bytes]]:
        """What each client has sealed for each neighbour, and what its seed must hash to."""
        orders = {
            client: _record(peers=near, masks=[publics[i][0] for i in near], shares=[publics[i][1] for i in near])
            for client, near in peers.items()
        }
        sealed, seals = dict[int, dict[int, bytes]](), dict[int, bytes]()
        for client, record in self._answers("shares", orders).items():
            pieces, seal, near = record.get("sealed"), record.get("seal"), peers[client]
            if not isinstance(pieces, list) or len(pieces) != len(near) or not isinstance(seal, bytes):
                self.lost[client] = "sent no shares for its neighbours"
                continue
            kept = [one if isinstance(one, bytes) and len(one) <= LONGEST else b"" for one in pieces]
            sealed[client], seals[client] = dict(zip(near, kept, strict=True)), seal
        self._enough(peers, sealed)
        return sealed, seals

    def _masked(
        self,
        asked: Mapping[int, tuple[Instruction, float, RecordDict]],
        peers: Mapping[int, list[int]],
        sealed: Mapping[int, Mapping[int, bytes]],
    ) -> tuple[dict[int, Update], Masked]:
        """What clients tell of their rounds, and the sum of their masked updates."""
        contents, total, told = dict[int, RecordDict](), np.zeros(sum(self._sizes), np.uint64), dict[int, Update]()
        for client in sealed:
            _, weight, content = asked[client]
            sources = [peer for peer in peers[client] if peer in sealed and peer != client]
            pieces = [sealed[peer][client] for peer in sources]
            layout: dict[str, Any] = {"names": list(self._kinds), "sizes": self._sizes, "weight": weight}
            content[RECORD] = ConfigRecord(layout | {"sources": sources, "sealed": pieces})
            contents[client] = content
        kinds = {name: kind for name, kind in self.expected.form.kinds.items() if name == "counters"}
        form = Form(kinds | {"masked": ((len(total),), torch.int64)})
        for client, answer in self.exchange("train", contents).items():
            try:
                if isinstance(answer, RefusedError):
                    raise answer
                update = read_told(answer, asked[client][0], self.steps(client))
                tensors = validation.tensors(answer, "update", form)
                total += tensors["masked"].numpy().view(np.uint64)
                told[client] = replace(update, counters=tensors.get("counters", update.counters))
            except RefusedError as error:
                self.lost[client] = str(error)
        self._enough(peers, told)
        return told, total

    def _unmasked(
        self,
        total: Masked,
        publics: Mapping[int, tuple[bytes, bytes]],
        peers: Mapping[int, list[int]],
        heard: Sequence[int],
        absent: Sequence[int],
        seals: Mapping[int, bytes],
    ) -> Masked:
        """The sum without masks: the own ones of those that were heard, and those that they share with the others."""
        orders = {
            client: _record(
                heard=[i for i in peers[client] if i in heard], lost=[i for i in peers[client] if i in absent]
            )
            for client in heard
        }
        pieces: dict[int, list[bytes]] = {}
        for record in self._answers("secrets", orders, blame=False).values():
            owners, shares = record.get("owners"), record.get("pieces")
            if isinstance(owners, list) and isinstance(shares, list) and len(owners) == len(shares):
                for owner, share in zip(owners, shares, strict=True):
                    if isinstance(share, bytes) and len(share) <= LONGEST:
                        pieces.setdefault(owner, []).append(share)
        for client in (*heard, *absent):
            secret = _together(client, pieces.get(client, []), threshold(len(peers[client])))
            near = [peer for peer in peers[client] if peer in heard and peer != client]
            if client in heard:
                _check(client, hashlib.sha256(secret).digest() == seals[client])
                total -= mask(secret, len(total))
            elif near:
                _check(client, _public(secret) == publics[client][0])
                for peer in near:
                    common = pair_mask(secret, publics[peer][0], len(total))
                    total -= common if peer < client else np.negative(common)
        return total

    # ---- the result ----
    def _updates(
        self, asked: Mapping[int, tuple[Instruction, float, RecordDict]], told: Mapping[int, Update], total: Tensor
    ) -> Updates:
        if bool((total.abs() > LIMIT * len(told)).any()):
            raise TooFewError("the sum is out of range: a client has sent something else than its masked update")
        values = dict(zip(self._kinds, torch.split(total, self._sizes), strict=True))
        loss, weight = values.pop("loss").tolist()
        shares = sum(asked[client][0].share for client in told)
        terms = Terms({name.removeprefix("sent/"): self._shaped(name, v) for name, v in values.items()})
        if BUFFERS in terms:  # weighted by samples, as elsewhere; clients send what has changed
            size = self.setup.samples / self.setup.clients
            terms[BUFFERS] = (values[BUFFERS] + shares * self.broadcast.buffers.double()) * size
        sent = nest({name: tensor for name, tensor in terms.items() if name not in (DELTA, BUFFERS)})
        floats, mean = self.setup.floats(sent.values()), loss / weight if weight else torch.nan
        updates = []
        for client, (_, own, _) in asked.items():
            if client not in told:
                updates.append(failed(client, f"it {self.lost.get(client, 'was lost')}"))
                continue
            updates.append(replace(told[client], weight=own, loss=mean, norm=torch.nan, floats=floats))
        return Updates.of(updates, terms if told else None)

    def _shaped(self, name: str, values: Tensor) -> Tensor:
        shape, dtype = self._kinds[name]
        return values.reshape(shape).to(dtype)

    # ---- who is left ----
    def _answers(self, step: str, contents: Mapping[int, RecordDict], *, blame: bool = True) -> dict[int, ConfigRecord]:
        found = dict[int, ConfigRecord]()
        for client, answer in self.exchange(step, contents).items():
            try:
                if isinstance(answer, RefusedError):
                    raise answer
                found[client] = validation.values(answer, RECORD)
            except RefusedError as error:
                if blame:
                    self.lost[client] = str(error)
        return found

    def _enough(self, peers: Mapping[int, list[int]], left: Mapping[int, object]) -> None:
        """Every client that is left hides among enough neighbours, and enough hold the shares of each."""
        for near in peers.values():
            self._require(sum(peer in left for peer in near), threshold(len(near)))

    def _require(self, there: int, needed: int) -> None:
        if there < needed:
            why = "; ".join(f"client {client} {reason}" for client, reason in list(self.lost.items())[:3])
            raise TooFewError(f"secure aggregation needs {needed} clients, and {there} are left ({why})")


def _record(**values: Any) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord(values)})


def _bytes(record: ConfigRecord, name: str) -> bytes:
    value = record.get(name)
    if not isinstance(value, bytes) or len(value) > LONGEST:
        raise RefusedError(f"sent no {name!r}")
    return value


def _together(client: int, shares: Sequence[bytes], needed: int) -> bytes:
    """A secret out of its shares."""
    if len(shares) < needed:
        raise TooFewError(f"{len(shares)} of {needed} shares of client {client}'s secret are left")
    try:
        return bytes(combine_shares(list(shares)))
    except (ValueError, IndexError):
        return b""


def _public(secret: bytes) -> bytes:
    try:
        return public_of(secret)
    except (ValueError, TypeError):
        return b""


def _check(client: int, fine: bool) -> None:
    if not fine:
        raise TooFewError(f"the shares of client {client}'s secret do not fit together: it, or who holds them, lies")
