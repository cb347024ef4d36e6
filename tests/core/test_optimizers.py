"""The clients' optimisers: torch's own bits to 1e-12, under methods, in stacks, kept from round to round, resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedflat
from fedflat import Experiment, Federation, InputError

STEPS, LR, DECAY = 6, 0.03, 0.05
PAIRS: list[tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer]]] = [
    ("sgd", {}, torch.optim.SGD),
    ("sgd(momentum=0.9)", {"momentum": 0.9}, torch.optim.SGD),
    ("sgd(momentum=0.9, nesterov=True)", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
    ("adam", {}, torch.optim.Adam),
    ("adam(beta1=0.5, beta2=0.9, eps=0.001)", {"betas": (0.5, 0.9), "eps": 0.001}, torch.optim.Adam),
    ("adamw", {}, torch.optim.AdamW),
    ("rmsprop(alpha=0.9)", {"alpha": 0.9}, torch.optim.RMSprop),
    ("adagrad", {}, torch.optim.Adagrad),
]
every_optimizer = pytest.mark.parametrize(("text", "options", "theirs"), PAIRS, ids=[pair[0] for pair in PAIRS])


def world(clients: int = 1, size: int = 12) -> tuple[Federation, nn.Module]:
    generator = torch.Generator().manual_seed(3)
    draw = [
        (torch.randn(size + 3 * i, 5, generator=generator), torch.randint(3, (size + 3 * i,), generator=generator))
        for i in range(clients)
    ]
    torch.manual_seed(4)
    return Federation(draw, test=draw[0]), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def experiment(**changes: Any) -> Experiment:
    given: dict[str, Any] = {"rounds": 1, "local_steps": STEPS, "batch_size": 0, "lr": LR, "lr_decay": 1.0}
    given |= {"weight_decay": DECAY, "clip": None, "dtype": "float64", "backend": "serial", "evaluate_clients": None}
    return Experiment(**given | changes)


def torch_run(
    federation: Federation,
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    steps: int,
    rho: float = 0.0,
    mu: float = 0.0,
) -> Tensor:
    """Plain full-batch training with torch's optimiser; with SAM's gradient and FedProx's pull, if asked for."""
    module = copy.deepcopy(model).double()
    weights = list(module.parameters())
    ours = optimizer(weights, lr=LR, weight_decay=DECAY, **options)
    x, y = federation.samples(0).batch(torch.arange(federation.size(0)))
    origin = [w.detach().clone() for w in weights]

    def gradient() -> list[Tensor]:
        loss = nn.functional.cross_entropy(module(x.double()), y)
        return list(torch.autograd.grad(loss, weights))

    for _ in range(steps):
        grads, here = gradient(), [w.detach().clone() for w in weights]
        if rho:
            length = torch.stack([g.norm() for g in grads]).norm()
            with torch.no_grad():
                for w, g in zip(weights, grads, strict=True):
                    w.add_(rho * g / length)
            grads = gradient()
        for w, g, before, start in zip(weights, grads, here, origin, strict=True):
            w.data.copy_(before)
            w.grad = g + mu * (before - start)
        ours.step()
    return nn.utils.parameters_to_vector(weights).detach()


@every_optimizer
@pytest.mark.parametrize(
    ("method", "extra"), [("fedavg", {}), ("sam(rho=0.2)+fedprox(mu=0.3)", {"rho": 0.2, "mu": 0.3})]
)
def test_a_client_trains_as_torch_does(
    text: str,
    options: dict[str, Any],
    theirs: Callable[..., torch.optim.Optimizer],
    method: str,
    extra: dict[str, float],
) -> None:
    federation, model = world()
    run = fedflat.run(experiment(optimizer=text, method=method), federation=federation, model=model)
    wanted = torch_run(federation, model, theirs, options, STEPS, **extra)
    assert torch.allclose(run.weights, wanted, rtol=0, atol=1e-12)


@every_optimizer
def test_a_kept_state_makes_three_rounds_one_long_training(
    text: str, options: dict[str, Any], theirs: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    federation, model = world()
    e = experiment(optimizer=text, method="keep_momentum", rounds=3, clip=1e9)

    class Break(fedflat.Callback):
        def round(self, run: fedflat.Run, metrics: dict[str, Any]) -> bool:
            return len(run.metrics) == 2

    parts: dict[str, Any] = {"federation": federation, "model": model, "out": tmp_path / "run"}
    fedflat.run(e, callbacks=[Break()], **parts)
    run = fedflat.run(e, **parts)
    wanted = torch_run(federation, model, theirs, options, 3 * STEPS)
    assert len(run.metrics) == 3 and torch.allclose(run.weights, wanted, rtol=0, atol=1e-12)
    assert run.weights.equal(fedflat.run(e, federation=federation, model=model).weights)


@every_optimizer
def test_rows_of_a_stack_are_the_clients_alone(
    text: str, options: dict[str, Any], theirs: Callable[..., torch.optim.Optimizer]
) -> None:
    """Clients of different sizes finish at different steps; those that have finished keep weights and state."""
    federation, model = world(clients=4)
    e = experiment(optimizer=text, method="sam+keep_momentum", rounds=3, batch_size=4, local_steps=None, local_epochs=2)
    alone = fedflat.run(e, federation=federation, model=model)
    stacked = fedflat.run(e.replace(stack=4), federation=federation, model=model)
    assert torch.allclose(stacked.weights, alone.weights, rtol=0, atol=1e-12)
    for client in range(4):
        for name, tensor in alone.client_state(client).get("keep_momentum", {}).items():
            assert torch.allclose(stacked.client_state(client)["keep_momentum"][name], tensor, rtol=0, atol=1e-12)


def test_a_branch_of_its_own_has_a_state_of_its_own() -> None:
    """Ditto's personal model with a pull of 0 is the client's own training, whatever the global branch did before."""
    federation, model = world()
    run = fedflat.run(
        experiment(optimizer="adam", method="ditto(lam=0.0)+keep_momentum"), federation=federation, model=model
    )
    wanted = torch_run(federation, model, torch.optim.Adam, {}, STEPS)
    own = nn.utils.parameters_to_vector(run.personal(0).parameters()).detach()
    assert torch.allclose(own, wanted, rtol=0, atol=1e-12) and torch.allclose(run.weights, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("text", ["adamw", "sgd(momentum=0.9)"])
def test_what_is_not_trained_does_not_move(text: str) -> None:
    """FedBABU never trains the head, though means that were kept from a whole training would move it."""
    federation, model = world()
    e = experiment(optimizer=text, rounds=2)
    run = fedflat.run(e.replace(method="fedbabu+keep_momentum"), federation=federation, model=model)
    assert torch.equal(run.model[2].weight, model[2].weight.double())  # type: ignore[index]
    assert not torch.equal(run.model[0].weight, model[0].weight.double())  # type: ignore[index]


def test_constraints_hold_after_the_steps() -> None:
    """`const`: the displacement of a channel has mean 0 and is orthogonal to the centred channel."""
    federation, model = world()
    run = fedflat.run(experiment(optimizer="adam", method="const"), federation=federation, model=model)
    start = model[0].weight.detach().double()  # type: ignore[index]
    moved = run.model[0].weight.detach() - start  # type: ignore[index]
    assert moved.norm() > 0.01 and moved.mean(1).abs().max() < 1e-12
    assert (moved * (start - start.mean(1, keepdim=True))).sum(1).abs().max() < 1e-12


def test_the_fields_that_an_optimizer_shares_with_the_experiment_are_recorded_once() -> None:
    federation, model = world()
    written = [
        {"optimizer": "sgd(momentum=0.5, weight_decay=0.01)", "weight_decay": Experiment.weight_decay},
        {"optimizer": "sgd", "momentum": 0.5, "weight_decay": 0.01},
    ]
    runs = [fedflat.run(experiment(**each), federation=federation, model=model) for each in written]
    assert runs[0].experiment == runs[1].experiment and runs[0].weights.equal(runs[1].weights)
    assert runs[0].experiment.optimizer == "sgd" and runs[0].experiment.momentum == 0.5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"optimizer": "adma"}, "adam"),
        ({"optimizer": ""}, "optimizer"),
        ({"optimizer": "adam(beta3=0.1)"}, "beta"),
        ({"optimizer": "adam(beta2=1)"}, "beta2 must be at least 0 and below 1"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum=0.9 does not fit"),
        ({"optimizer": "adamw(weight_decay=0.5)"}, "give weight_decay once"),
        ({"optimizer": "sgd(nesterov=True)"}, "nesterov needs a momentum"),
        ({"optimizer": "adam", "method": "fednova"}, "fednova takes the weight a_i"),
        ({"optimizer": "adam", "method": "scaffold"}, "option=2 takes the control variate"),
        ({"optimizer": "adam", "method": "fedmoswa"}, "option=2 takes the control variate"),
        ({"optimizer": "adam", "method": "feddc"}, "the control variate"),
        ({"optimizer": "adam", "method": "mofedsam"}, "the last direction m"),
    ],
)
def test_what_cannot_be_meant_or_has_no_theory_is_refused(wrong: dict[str, Any], words: str) -> None:
    federation, model = world()
    with pytest.raises(InputError, match=words):
        fedflat.run(experiment(**wrong), federation=federation, model=model)


def test_control_variates_of_gradients_hold_for_every_optimizer() -> None:
    """SCAFFOLD's option 1: c_i is the gradient over all samples at the received weights."""
    federation, model = world()
    run = fedflat.run(experiment(optimizer="adam", method="scaffold(option=1)"), federation=federation, model=model)
    module = copy.deepcopy(model).double()
    x, y = federation.samples(0).batch(torch.arange(federation.size(0)))
    nn.functional.cross_entropy(module(x.double()), y).backward()  # type: ignore[no-untyped-call]
    wanted = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    assert torch.allclose(run.client_state(0)["scaffold"]["c"], wanted, rtol=0, atol=1e-12)
