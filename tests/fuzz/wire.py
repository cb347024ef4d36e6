"""Messages of hostile clients: the server uses them or refuses them, and says why."""

from __future__ import annotations

import random
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedflat.core.views import Update
from fedflat.flower.messages import Expected, Instruction, read_reply, reply, tensors_of
from fedflat.flower.validation import RefusedError, form_of
from fuzz.mutants import mutate

NUMBERS = (-1, 0, 1 << 62, -(1 << 63), 1e308, -1e308, float("nan"), float("inf"), True)
VALUES = (*NUMBERS, "", "\x1b[2J" * 50, b"\xff" * 9, [1, 2], [])
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
