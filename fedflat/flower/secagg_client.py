"""A client's side of secure aggregation: keys, shares, masks. What it must remember lies in the node's memory."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from cryptography.fernet import InvalidToken
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.common.secure_aggregation.crypto.shamir import create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt
from torch import Tensor

from fedflat.core.views import Update
from fedflat.errors import InputError
from fedflat.flower import validation
from fedflat.flower.messages import Instruction, tensors_of, told_of
from fedflat.flower.secagg import FEWEST, RECORD, agreed, mask, new_key, pair_mask, public_of, quantised, threshold


class Memory:
    """What a client knows of the round: the protocol goes one way, and each of its steps is taken once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.known: dict[str, Any] = dict(context.state.config_records.get(RECORD, ConfigRecord({})))

    def require(self, step: str, run: str, round: int) -> None:
        """Refuse what is not the next step of the round."""
        if (self.known.get("step"), self.known.get("run"), self.known.get("round")) != (step, run, round):
            raise InputError(
                f"in round {round} this client and the server have not agreed upon masks, without which it sends "
                "nothing: does the server use secure aggregation, too?"
            )

    def keep(self, **values: Any) -> None:
        """Remember values for the next step."""
        self.known |= values
        self._context.state[RECORD] = ConfigRecord(self.known)


def send_keys(asked: Instruction, content: RecordDict, context: Context) -> RecordDict:
    """First step: two new keys, one for masks and one for shares."""
    memory = Memory(context)
    memory.known = {}
    masks, shares = new_key(), new_key()
    memory.keep(step="keys", run=asked.run, round=asked.round, client=asked.client, masks=masks, shares=shares)
    return _answer({"masks": public_of(masks), "shares": public_of(shares)})


def send_shares(asked: Instruction, content: RecordDict, context: Context) -> RecordDict:
    """Second step: shares of the key for masks, and of the seed of the own mask, encrypted for each neighbour."""
    memory, told = Memory(context), validation.values(content, RECORD)
    memory.require("keys", asked.run, asked.round)
    peers, masks, shares = _list(told, "peers", int), _list(told, "masks", bytes), _list(told, "shares", bytes)
    known, number = memory.known, threshold(len(peers))
    own = peers.index(asked.client) if asked.client in peers else -1
    honest = own >= 0 and masks[own] == public_of(known["masks"]) and shares[own] == public_of(known["shares"])
    if not honest or len({*peers}) < len(peers) or len({*masks, *shares}) < 2 * len(peers) or len(peers) < FEWEST:
        raise InputError("the server's list of keys is not one of different clients with this one among them")
    seed = secrets.token_bytes(32)
    of_key, of_seed = (create_shares(secret, number, len(peers)) for secret in (known["masks"], seed))
    sealed, kept = [], b""
    for peer, public, key_share, seed_share in zip(peers, shares, of_key, of_seed, strict=True):
        plain = _joined(asked.round, asked.client, peer, key_share, seed_share)
        if peer == asked.client:
            kept = plain
        sealed.append(b"" if peer == asked.client else encrypt(agreed(known["shares"], public), plain))
    memory.keep(step="shares", peers=peers, publics=masks, share_keys=shares, seed=seed, own=kept)
    return _answer({"sealed": sealed, "seal": hashlib.sha256(seed).digest()})


def require_shares(asked: Instruction, context: Context) -> None:
    """Refuse to train for a server that has not had masks agreed upon before."""
    Memory(context).require("shares", asked.run, asked.round)


def masked_reply(
    update: Update, asked: Instruction, kept: int, content: RecordDict, like: Tensor, context: Context
) -> RecordDict:
    """Third step: the update, weighted and masked. Nothing else of it is told but its number of steps.

    Args:
        update: What training has given.
        asked: The server's instruction.
        kept: Of which round the client's state is now.
        content: The server's message, with the shares of the neighbours.
        like: The buffers as they were received.
        context: Of the node.
    """
    memory, order = Memory(context), validation.values(content, RECORD)
    told = told_of(update, asked, kept)
    if update.failure is not None:
        return RecordDict({"told": ConfigRecord(told)})
    known, sealed, sources = memory.known, _list(order, "sealed", bytes), _list(order, "sources", int)
    if len(sealed) != len(sources) or not {*sources} <= {*known["peers"]} or len({*sources}) < len(sources):
        raise InputError("the server forwards shares of clients that are no neighbours")
    if len({*sources, asked.client}) < threshold(len(known["peers"])):
        raise InputError("too few clients are left to hide among")
    units = quantised(_vector(update, order, asked.share, like)).copy()
    units += mask(known["seed"], len(units))
    held = [known["own"]]
    for source, secret in zip(sources, sealed, strict=True):
        place = known["peers"].index(source)
        held.append(_opened(agreed(known["shares"], known["share_keys"][place]), secret))
        common = pair_mask(known["masks"], known["publics"][place], len(units))
        units += common if asked.client < source else np.negative(common)
    memory.keep(step="masked", sources=[asked.client, *sources], held=held, seed=b"", masks=b"", shares=b"")
    return RecordDict({"told": ConfigRecord(told), "update": _arrays(units, update.counters)})


def send_secrets(asked: Instruction, content: RecordDict, context: Context) -> RecordDict:
    """Last step: for each neighbour one of its two shares, that of the seed if it was heard, else that of the key."""
    memory, told = Memory(context), validation.values(content, RECORD)
    memory.require("masked", asked.run, asked.round)
    known, heard, lost = memory.known, _list(told, "heard", int), _list(told, "lost", int)
    held, least = dict(zip(known["sources"], known["held"], strict=True)), threshold(len(known["peers"]))
    if {*heard} & {*lost} or not {*heard, *lost} <= held.keys() or asked.client not in heard or len({*heard}) < least:
        raise InputError("the server asks for shares with which it could see a single update")
    memory.keep(step="done", held=[], sources=[])
    pieces = dict[int, bytes]()
    for client in (*heard, *lost):
        key_share, seed_share = _parted(held[client], asked.round, client, asked.client)
        pieces[client] = seed_share if client in heard else key_share
    pieces = {client: piece for client, piece in pieces.items() if piece}
    return _answer({"owners": list(pieces), "pieces": list(pieces.values())})


def _vector(update: Update, order: Mapping[str, Any], share: float, like: Tensor) -> Tensor:
    """All that is summed, one after the other, in the order that the server gives."""
    names, sizes, weight = _list(order, "names", str), _list(order, "sizes", int), order.get("weight")
    tensors = tensors_of(update)
    tensors.pop("counters", None)
    if not isinstance(weight, float) or not 0 < weight <= 1 or not tensors.keys() <= {*names}:
        raise InputError("the server asks for other sums than those of the method")
    loss = (0.0, 0.0) if math.isnan(update.loss) else (share * float(update.loss), share)
    values = {name: tensor.double() for name, tensor in tensors.items()} | {
        "loss": torch.tensor(loss, dtype=torch.float64)
    }
    values["delta"] = weight * values["delta"]
    if "buffers" in values:  # an unchanged one may be infinite
        values["buffers"] = share * torch.where(update.buffers == like, 0.0, values["buffers"] - like.double())
    pieces = [values.get(name, torch.zeros(size)).reshape(-1) for name, size in zip(names, sizes, strict=True)]
    if [piece.numel() for piece in pieces] != sizes:
        raise InputError("the server asks for sums of another size")
    return torch.cat([piece.double() for piece in pieces])


def _arrays(units: Any, counters: Tensor) -> ArrayRecord:
    record = {"masked": Array(units.view(np.int64))}
    return ArrayRecord(record | ({"counters": Array(counters.numpy())} if counters.numel() else {}))


def _joined(round: int, source: int, target: int, key: bytes, seed: bytes) -> bytes:
    return b"".join(number.to_bytes(8, "little") for number in (round, source, target, len(key))) + key + seed


def _parted(plain: bytes, round: int, source: int, target: int) -> tuple[bytes, bytes]:
    """The shares of a client's key and seed, if they are what it sent for this round and this neighbour; else none."""
    numbers = [int.from_bytes(plain[8 * i : 8 * i + 8], "little") for i in range(4)]
    if numbers[:3] != [round, source, target]:
        return b"", b""
    return plain[32 : 32 + numbers[3]], plain[32 + numbers[3] :]


def _opened(key: bytes, sealed: bytes) -> bytes:
    """What a neighbour has sealed; nothing if it cannot be opened, since one client must not stop the others."""
    try:
        return bytes(decrypt(key, sealed))
    except InvalidToken:
        return b""


def _list(record: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    value = record.get(name, [])
    if not isinstance(value, list) or not all(type(one) is kind for one in value):
        raise InputError(f"the server sent no list {name!r}")
    return value


def _answer(values: dict[str, Any]) -> RecordDict:
    return RecordDict({RECORD: ConfigRecord(values)})


STEPS = {"keys": send_keys, "shares": send_shares, "secrets": send_secrets}
"""The steps beside training, by the kind of instruction and of query."""
