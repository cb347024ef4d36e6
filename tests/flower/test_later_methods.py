"""The methods since the five papers over Flower's wire: what they send and keep arrives, and lies are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedflat.core.views import Update
from fedflat.engine.assembly import make_setup
from fedflat.parts.global_momentum import FedWMSAM
from fedflat.parts.global_sam import FedGF
from fedflat.parts.personal.ifca import IFCA
from fedflat.parts.server_rates import FedExP, QFedAvg

from .trials import assert_same, deployed, federation, simulated, trial

METHODS = (
    *("fedacg", "fedwmsam(rho=0.1)", "fedsmoo", "fedgloss", "fedlesam", "fedgf", "fedmoswa", "fedinit(variant='code')"),
    *("fedexp", "qfedavg", "fedswa+fedcm", "fedlc+fedntd", "ifca"),
)


@pytest.mark.parametrize("method", METHODS)
def test_a_deployment_gives_the_bits_of_the_simulation(method: str, tmp_path: Path) -> None:
    experiment = trial(method)
    assert_same(deployed(tmp_path, experiment)[0], simulated(experiment))


def test_numbers_that_cannot_be_are_noticed() -> None:
    setup = make_setup(trial("fedavg"), federation=federation())
    delta = torch.tensor([3.0, 4.0])

    def said(part: FedExP | FedGF | QFedAvg | FedWMSAM | IFCA, **numbers: float) -> str | None:
        sent = {name: torch.tensor([value]) for name, value in numbers.items()}
        return part.inspect(setup, Update(0, 0, 0.0, delta=delta, sent={part.name: sent}))

    size = setup.federation.size(0)
    assert said(FedExP(), square=25.0 * size) is None and "square" in str(said(FedExP(), square=1e9))
    assert said(FedGF(), norm=5.0) is None and "norm" in str(said(FedGF(), norm=0.0))
    assert said(QFedAvg(), h=0.1) is None and "h=" in str(said(QFedAvg(), h=0.0))
    assert said(FedWMSAM(), similarity=1.5) is None and "similarity" in str(said(FedWMSAM(), similarity=-3.0))
    assert said(IFCA(k=2), choice=1) is None and "model 2 of 2" in str(said(IFCA(k=2), choice=2))
