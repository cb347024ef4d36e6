"""Every method on text: next characters of five speakers, a small LSTM. Those that need images say so."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedflat
from fedflat.data.text import Windows
from fedflat.errors import InputError
from fedflat.parts import PARTS as SHIPPED
from parts.conformance.parts import IMAGE_PARTS, PARTS
from parts.personal.federations import METHODS as PERSONAL

LENGTH, SYMBOLS, LSTM = 6, 7, "char_lstm(hidden=8, layers=1)"
REFUSED = {
    "cutmix": "real numbers",
    "cutout": "real numbers",
    "mixup": "real numbers",
    "fedalign": "stage",
    "gradaug": "real numbers",
    "stochdepth": "residual blocks",
}
"""Parts that text or recurrent networks have nothing for, and a word of the reason that they give."""


def speakers(high: int = 4) -> fedflat.Federation:
    """After symbol s comes s + d modulo 7, where d is drawn from 2 … high − 1."""
    draw = np.random.default_rng(0)
    texts = [torch.from_numpy(np.cumsum(draw.integers(2, high, 40)) % SYMBOLS) for _ in range(5)]
    windows = [Windows(text, torch.arange(0, 24, 2), LENGTH) for text in texts]
    tests = [Windows(text, torch.arange(28, 33), LENGTH) for text in texts]
    more = {"classes": SYMBOLS, "task": "next_token", "name": "speakers", "trusted": windows[0]}
    return fedflat.Federation(windows, tests[0], tests, **more)  # type: ignore[arg-type]


def run(method: str, data: fedflat.Federation, model: str, **fields: object) -> fedflat.Run:
    fields = {"rounds": 2, "local_steps": 2, "batch_size": 4, "lr": 0.5, "backend": "serial", **fields}
    return fedflat.run(fedflat.Experiment(method=method, model=model, **fields), federation=data)  # type: ignore[arg-type]


EVERY = [*map(str, PARTS), *map(str, IMAGE_PARTS), *PERSONAL]


def test_every_part_is_tried() -> None:
    assert {text.split("(")[0] for text in EVERY} >= {part.name for part in SHIPPED} - {"keep_momentum"}


@pytest.mark.parametrize("text", EVERY)
def test_a_method_trains_on_text_or_says_what_it_needs(text: str) -> None:
    reason = REFUSED.get(text.split("(")[0])
    if reason is not None:
        with pytest.raises(InputError, match=reason):
            run(text, speakers(), LSTM)
        return
    done = run(text, speakers(), LSTM)
    assert torch.isfinite(done.weights).all() and done.metrics[-1]["left_out"] == 0
    if not text.startswith("local_only"):
        assert done.metrics[-1]["train_loss"] is not None


@pytest.mark.parametrize("model", [LSTM, "char_transformer(width=16, heads=2, layers=1)"])
def test_networks_learn_a_rule_of_the_text(model: str) -> None:
    """Where the next symbol follows from the last one, a model can be sure of it: perplexity 1, against 7 by chance."""
    done = run("fedavg+sam(rho=0.01)", speakers(high=3), model, rounds=12, local_steps=10, clip=1.0)
    assert done.metrics[-1]["accuracy"] == 1 and done.metrics[-1]["perplexity"] < 1.5
