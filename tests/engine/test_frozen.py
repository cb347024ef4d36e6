"""Parameters that are not trained are not sent, kept or saved, and a run goes on with the same ones only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedflat
from fedflat import Experiment, Federation
from fedflat.errors import CheckpointError

HIDDEN = 50


def network(seed: int = 0) -> nn.Sequential:
    """A random frozen layer, and a trained head that starts at zero."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(8, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))
    layers[0].requires_grad_(False)
    nn.init.zeros_(layers[2].weight)
    nn.init.zeros_(layers[2].bias)
    return layers


def federation() -> Federation:
    generator = torch.Generator().manual_seed(1)
    clients = [(torch.randn(20, 8, generator=generator), torch.randint(3, (20,), generator=generator)) for _ in "ab"]
    return Federation(clients, test=clients[0])


def test_only_what_is_trained_is_sent_kept_and_saved(tmp_path: Path) -> None:
    e = Experiment(rounds=2, local_epochs=1, batch_size=10, method="scaffold", backend="serial")
    run = fedflat.run(e, federation=federation(), model=network(), out=tmp_path)
    trained = 3 * HIDDEN + 3
    assert run.weights.numel() == run.details["parameters"] == trained
    assert run.details["frozen"] == 9 * HIDDEN and "450 frozen" in repr(run)
    assert run.metrics[-1]["floats_down"] == run.metrics[-1]["floats_up"] == 2 * trained
    assert run.client_state(0)["scaffold"]["c"].numel() == trained
    saved = [load_file(path) for path in tmp_path.glob("checkpoint-*.safetensors")]
    assert saved and all(tensor.numel() <= trained for file in saved for tensor in file.values())
    assert run.model[0].weight.equal(network()[0].weight)  # type: ignore[index]
    stacked = fedflat.run(e.replace(stack=2), federation=federation(), model=network())
    assert torch.allclose(stacked.weights, run.weights, atol=1e-6)


def test_a_run_is_not_continued_with_other_frozen_weights(tmp_path: Path) -> None:
    e = Experiment(rounds=1, local_epochs=1, batch_size=10, backend="serial")
    fedflat.run(e, federation=federation(), model=network(), out=tmp_path)
    with pytest.raises(CheckpointError, match="model"):
        fedflat.run(e, federation=federation(), model=network(seed=2), out=tmp_path)
