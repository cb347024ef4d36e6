"""Messages of hostile clients: the server uses them or refuses them, and says why."""

from __future__ import annotations

import contextlib
import logging
import random
from typing import Any, cast

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedflat.core.views import Update
from fedflat.experiment import Experiment
from fedflat.flower.admission import Admission
from fedflat.flower.data_summary import DataSummary
from fedflat.flower.identity import fresh_nonce, public_text, sign
from fedflat.flower.members import Members
from fedflat.flower.messages import Expected, Instruction, read_reply, reply, tensors_of
from fedflat.flower.validation import RefusedError, fingerprint, form_of
from fuzz.mutants import mutate

NUMBERS = (-1, 0, 1 << 62, -(1 << 63), 1e308, -1e308, float("nan"), float("inf"), True)
VALUES = (*NUMBERS, "", "\x1b[2J" * 50, b"\xff" * 9, [1, 2], [])
SMALL = Experiment(clients=4)
ASKED = Instruction(run="0" * 32, round=3, client=1, kind="train", lr=0.1, share=1.0, classes=4, kept=2)


def good() -> tuple[RecordDict, Expected, torch.Tensor]:
    """A reply as an honest client sends it, and what is expected of it."""
    update = Update(1, 0, 0.5, delta=torch.ones(6), steps=4, weighted_steps=4.0, loss=1.0)
    expected = Expected(form_of(tensors_of(update)), frozenset({"drift"}), 10)
    return reply(update, ASKED, 3), expected, torch.zeros(0)


def worse(content: RecordDict, luck: random.Random) -> RecordDict:
    """A reply with one to three lies."""
    for _ in range(luck.randint(1, 3)):
        name = luck.choice(list(content) or ["told"])
        kind = luck.randrange(6)
        if kind == 0:
            content.pop(name, None)
        elif kind == 1:
            name = luck.choice(["told", "metrics", "update", "more"])
            content.pop(name, None)
            content[name] = luck.choice([ConfigRecord({}), ArrayRecord({}), ConfigRecord({"x" * 500: 1})])
        elif isinstance(record := content.get(name), ConfigRecord):
            key = luck.choice([*record, "failure", "drift", "\x1b[2J"])
            record[key] = luck.choice(VALUES)
        elif isinstance(record, ArrayRecord) and record:
            key = luck.choice(list(record))
            old = record[key]
            changes: dict[str, Any] = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data}
            what = luck.choice(list(changes))
            lies: dict[str, list[Any]] = {
                "dtype": ["float64", "O", "nonsense", ">f4"],
                "shape": [(-1,), (10**12,), (), (2, 3), (6, 0)],
                "stype": ["pickle", "", "numpy.ndarray"],
                "data": [mutate(old.data, luck), b"", b"\x80\x04K\x01."],
            }
            changes[what] = luck.choice(lies[what])
            record[key] = Array(**changes)
    return content


def messages(count: int, first: int = 0) -> list[str]:
    """What is wrong after so many messages."""
    wrong = []
    for number in range(first, first + count):
        content, expected, like = good()
        try:
            update = read_reply(worse(content, random.Random(number)), ASKED, expected, like)
            if not bool(torch.isfinite(update.delta).all()) or update.steps > expected.steps:
                wrong.append(f"message {number}: used what it should have refused")
        except RefusedError as error:
            if "\x1b" in str(error) or len(str(error)) > 1000:
                wrong.append(f"message {number}: repeats what it was sent")
        except Exception as error:
            wrong.append(f"message {number}: unexpected {type(error).__name__}: {error}")
    return wrong


class Lines(logging.Handler):
    """What the server logs."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


FORM = DataSummary(20, 0, ((6,), torch.float32), ((), torch.int64), 4)


def claim(luck: random.Random, nonce: bytes, key: Any) -> RecordDict:
    """A hello of client 1 with one to three lies, most of them signed: a client may sign what it wants."""
    told: dict[str, Any] = FORM.values() | {"client": 1, "experiment": fingerprint(SMALL), "key": public_text(key)}
    for _ in range(luck.randint(1, 3)):
        name = luck.choice([*told, "more", "\x1b[2J"])
        told[name] = luck.choice([*VALUES, 0, 3, 4, [6] * 40, [-1], "O", "float64", 1 << 53, told.get(name, 1)])
        if luck.randrange(8) == 0:
            told.pop(name)
    with contextlib.suppress(TypeError, ValueError):  # what JSON cannot hold cannot be signed
        told["signature"] = sign(key, nonce if luck.randrange(5) else b"old", told)
    if luck.randrange(8) == 0:
        told["signature"] = luck.choice([b"", b"x" * 5000, "text", 3])
    name = "hello" if luck.randrange(12) else "other"
    return RecordDict({name: ConfigRecord(told) if luck.randrange(12) else ArrayRecord({})})


def hellos(count: int, first: int = 0) -> list[str]:
    """What is wrong after so many clients that want to join; client 0 is somebody else, with another key."""
    own, other = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    admission, wrong = Admission(4, FORM.x, FORM.y, keys={0: public_text(other)}), list[str]()
    logger, lines = logging.getLogger("fedflat.flower.members"), Lines()
    logger.addHandler(lines)
    try:
        for number in range(first, first + count):
            nonce, members = fresh_nonce(), Members(cast(Any, None), SMALL, admission)
            try:
                members._admit(7, nonce, claim(random.Random(number), nonce, own))
            except Exception as error:
                wrong.append(f"hello {number}: unexpected {type(error).__name__}: {error}")
            for client, told in members._told.items():
                if client == 0 or (told.x, told.y) != (FORM.x, FORM.y) or told.classes > 4 or told.samples < 1:
                    wrong.append(f"hello {number}: joined as client {client} with {told}")
        wrong += [f"the log repeats {line!r}" for line in lines.said if "\x1b" in line or len(line) > 1000]
    finally:
        logger.removeHandler(lines)
    return wrong
