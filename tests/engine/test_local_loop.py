"""The local loop is plain SGD: checked step by step against a loop of our own with torch.optim."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from helpers import blobs, draws, flat, network, plain, same, world
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Experiment, Federation
from fedflat.core import streams
from fedflat.engine.minibatches import minibatch_sizes
from fedflat.errors import InputError


class Witness(nn.Module):
    """A network that remembers every batch it was trained on."""

    seen: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            type(self).seen.append(x.clone())
        return self.net(x)


@pytest.fixture(autouse=True)
def forget() -> None:
    Witness.seen = []


def positions(batch: Tensor, x: Tensor) -> Tensor:
    """Which samples a batch consists of."""
    return (batch[:, None] == x[None]).all(-1).float().argmax(1)


def centralised(exp: Experiment, x: Tensor, y: Tensor, batches: list[Tensor]) -> Tensor:
    """SGD by PyTorch on the batches given, with a new optimiser every round."""
    model = network()
    for t in range(exp.rounds):
        optimiser = torch.optim.SGD(
            model.parameters(),
            lr=exp.lr * exp.lr_decay**t,
            momentum=exp.momentum,
            nesterov=exp.nesterov,
            weight_decay=exp.weight_decay,
        )
        share = len(batches) // exp.rounds
        for batch in batches[t * share : (t + 1) * share]:
            optimiser.zero_grad()
            F.cross_entropy(model(batch), y[positions(batch, x)]).backward()
            if exp.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), exp.clip)
            optimiser.step()
    return flat(model)


OPTIONS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"clip": 0.3},
    {"clip": 0.3, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "lr_decay": 0.5},
    {"local_steps": 7},
    {"drop_last": True},
    {"batch_size": 0},
    {"batch_size": 100},
    {"local_epochs": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_client_is_centralised_sgd(options: dict[str, Any]) -> None:
    exp = plain(**({"rounds": 3, "local_epochs": 2, "lr": 0.5} | options))
    x, y = blobs(10)
    run = fedflat.run(exp, federation=Federation([(x, y)]), model=Witness())
    assert torch.allclose(run.server_weights, centralised(exp, x, y, Witness.seen), rtol=0, atol=1e-12)


def test_an_epoch_meets_every_sample_once_in_an_order_of_its_own() -> None:
    x, y = blobs(10)
    fedflat.run(plain(rounds=2, local_epochs=2), federation=Federation([(x, y)]), model=Witness())
    assert [len(batch) for batch in Witness.seen] == [4, 4, 2] * 4
    epochs = [torch.cat([positions(b, x) for b in Witness.seen[3 * e : 3 * e + 3]]).tolist() for e in range(4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_dropping_the_last_batch_drops_different_samples_every_epoch() -> None:
    x, y = blobs(10)
    fedflat.run(plain(local_epochs=6, drop_last=True), federation=Federation([(x, y)]), model=Witness())
    assert [len(batch) for batch in Witness.seen] == [4, 4] * 6
    epochs = [torch.cat([positions(b, x) for b in Witness.seen[2 * e : 2 * e + 2]]).tolist() for e in range(6)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert len({frozenset(epoch) for epoch in epochs}) > 1


def test_the_data_set_does_not_change_while_its_order_does() -> None:
    x, y = blobs(10)
    before = x.clone(), y.clone()
    fedflat.run(plain(rounds=2), federation=Federation([(x, y)]), model=network())
    assert torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"local_epochs": 3, "batch_size": 5}, [3 * math.ceil(n / 5) for n in (5, 7, 11)]),
        ({"local_epochs": 3, "batch_size": 5, "drop_last": True}, [3 * (n // 5) for n in (5, 7, 11)]),
        ({"local_epochs": 2, "batch_size": 0}, [2, 2, 2]),
        ({"local_steps": 9, "batch_size": 5, "local_epochs": 1}, [9, 9, 9]),
        ({"local_steps": 1, "batch_size": 5, "local_epochs": 4}, [1, 1, 1]),
        ({"local_steps": 0}, [0, 0, 0]),
    ],
)
def test_number_of_local_steps(options: dict[str, Any], steps: list[int]) -> None:
    run = fedflat.run(plain(**options), federation=world((5, 7, 11)), model=network())
    assert [row["steps"] for row in run.clients] == steps
    assert run.metrics[0]["steps"] == sum(steps)


@pytest.mark.parametrize(
    ("count", "size", "drop", "sizes"),
    [(7, 3, False, [3, 3, 1]), (7, 3, True, [3, 3]), (6, 3, False, [3, 3]), (2, 3, False, [2]), (7, 0, True, [7])],
)
def test_minibatch_sizes(count: int, size: int, drop: bool, sizes: list[int]) -> None:
    assert minibatch_sizes(count, size, drop) == sizes


def test_dropping_the_only_batch_is_refused_naming_the_client() -> None:
    exp = plain(drop_last=True, batch_size=8)
    with pytest.raises(InputError, match=r"client 1 has 7 samples.*drop_last"):
        fedflat.run(exp, federation=world((8, 7)), model=network())


def test_local_steps_are_the_first_steps_of_longer_training() -> None:
    x, y = blobs(10)
    fedflat.run(plain(local_steps=5), federation=Federation([(x, y)]), model=Witness())
    short, Witness.seen = Witness.seen, []
    fedflat.run(plain(local_epochs=2), federation=Federation([(x, y)]), model=Witness())
    assert all(torch.equal(a, b) for a, b in zip(short, Witness.seen, strict=False))
    assert (len(short), len(Witness.seen)) == (5, 6)


def test_momentum_starts_at_zero_in_every_round() -> None:
    """Two rounds of one step are two steps of plain SGD, whatever the momentum."""
    one_step = plain(rounds=2, batch_size=0, lr=0.3)
    heavy = fedflat.run(one_step.replace(momentum=0.9), federation=world(), model=network())
    light = fedflat.run(one_step, federation=world(), model=network())
    assert same(heavy.server_weights, light.server_weights)


def test_an_inactive_clip_leaves_the_bits() -> None:
    runs = [fedflat.run(plain(clip=c, rounds=2), federation=world(), model=network()) for c in (None, 1e6)]
    assert same(runs[0].server_weights, runs[1].server_weights)


@pytest.mark.parametrize("clip", [1e-3, 0.05])
def test_an_active_clip_shortens_the_whole_gradient_to_its_bound(clip: float) -> None:
    one_step = plain(batch_size=0, lr=1.0)
    start, federation = flat(network()), Federation([blobs(12)])
    free = fedflat.run(one_step, federation=federation, model=network()).server_weights - start
    bound = fedflat.run(one_step.replace(clip=clip), federation=federation, model=network()).server_weights - start
    assert free.norm() > clip
    assert bound.norm() <= clip
    assert torch.allclose(bound, free * clip / (free.norm() + 1e-6), rtol=0, atol=1e-14)


def test_weight_decay_is_added_after_the_clip() -> None:
    """With a tiny clip only the decay is left: w ← (1 − η·λ)·w."""
    exp = plain(batch_size=0, lr=0.5, weight_decay=0.1, clip=1e-12)
    run = fedflat.run(exp, federation=Federation([blobs(12)]), model=network())
    assert torch.allclose(run.server_weights, 0.95 * flat(network()), rtol=0, atol=1e-11)


def test_weight_decay_reaches_biases_and_norm_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).double()
    exp = plain(batch_size=0, lr=0.5, weight_decay=0.1, clip=1e-12)
    run = fedflat.run(exp, federation=Federation([blobs(12)]), model=model)
    assert torch.allclose(run.server_weights, 0.95 * flat(model), rtol=0, atol=1e-11)


def test_train_loss_is_the_mean_over_the_samples_at_the_weights_they_met() -> None:
    """At learning rate 0 that is the loss of the initial model on all training data."""
    federation = world((5, 7, 11))
    run = fedflat.run(plain(lr=0.0, local_epochs=2), federation=federation, model=network())
    x, y = (torch.cat([blobs(n, seed=i)[k] for i, n in enumerate((5, 7, 11))]) for k in (0, 1))
    assert run.metrics[0]["train_loss"] == pytest.approx(F.cross_entropy(network()(x), y).item(), rel=1e-13)
    assert same(run.server_weights, flat(network()))


def test_evaluation_counts_right_answers_and_averages_the_loss() -> None:
    x, y = blobs(2345, seed=7)
    run = fedflat.run(plain(lr=0.0), federation=Federation([blobs(8)], test=(x, y)), model=network())
    output = network()(x)
    assert run.metrics[0]["accuracy"] == (output.argmax(1) == y).double().mean().item()
    assert run.metrics[0]["loss"] == pytest.approx(F.cross_entropy(output, y).item(), rel=1e-13)


def test_evaluation_uses_running_statistics_and_no_dropout() -> None:
    from helpers import restless

    federation = Federation([blobs(8, seed=1)], test=blobs(50, seed=2))
    run = fedflat.run(plain(rounds=2), federation=federation, model=restless())
    x, y = blobs(50, seed=2)
    with torch.no_grad():
        assert run.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(run.model(x), y).item(), rel=1e-13)


# ---- models and data of the user's own ----


class Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens).mean(1))


def test_token_sequences_stay_whole_numbers() -> None:
    tokens = torch.randint(0, 11, (40, 7), generator=draws())
    label = (tokens == 3).any(1).long()
    federation = Federation([(tokens[i::4], label[i::4]) for i in range(4)], test=(tokens, label))
    exp = plain(rounds=80, lr=2.0, lr_decay=0.99, dtype="float32")
    run = fedflat.run(exp, federation=federation, model=Sentences())
    assert run.metrics[-1]["accuracy"] > 0.9


class NextToken(nn.Module):
    """Scores for every position: (batch, classes, positions), as PyTorch's cross-entropy wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens)).mT


def test_a_label_for_every_position() -> None:
    tokens = torch.randint(0, 5, (24, 6), generator=draws())
    pairs = tokens, (tokens + 1) % 5
    run = fedflat.run(plain(rounds=60, lr=2.0), federation=Federation([pairs], test=pairs), model=NextToken())
    assert run.metrics[-1]["accuracy"] == 1.0


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], int(self.y[i])


def test_a_map_style_dataset_gives_the_bits_of_the_same_tensors() -> None:
    pairs = [blobs(n, seed=n) for n in (6, 10)]
    tensors = Federation(pairs, test=blobs(9))
    datasets = Federation([Pairs(*p) for p in pairs], test=Pairs(*blobs(9)))
    a, b = (fedflat.run(plain(rounds=2), federation=f, model=network()) for f in (tensors, datasets))
    assert same(a.server_weights, b.server_weights)
    assert a.metrics[-1]["loss"] == b.metrics[-1]["loss"]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.linear(inputs["a"] * inputs["b"])


def test_inputs_may_be_dictionaries(tmp_path: Any) -> None:
    x, y = blobs(8)
    samples = [({"a": row.float(), "b": row.float()}, int(label)) for row, label in zip(x, y, strict=True)]
    run = fedflat.run(
        plain(dtype="float32"), federation=Federation([samples], test=samples), model=TwoInputs(), out=tmp_path / "run"
    )
    assert run.metrics[0]["accuracy"] is not None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("out", [False, True])
def test_a_loss_of_your_own(tmp_path: Any, dtype: str, out: bool) -> None:
    """Least squares by full-batch gradient descent comes to the solution of the normal equations."""
    x = torch.randn(40, 3, generator=draws())
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn(40, 1, generator=draws(1))
    federation = Federation([(x[:15], y[:15]), (x[15:], y[15:])], test=(x, y))
    run = fedflat.run(
        plain(rounds=60, lr=0.4, batch_size=0, dtype=dtype),
        federation=federation,
        model=nn.Linear(3, 1, bias=False),
        loss=F.mse_loss,
        out=tmp_path / "run" if out else None,
    )
    solution = torch.linalg.lstsq(x.double(), y.double()).solution.flatten()
    assert torch.allclose(run.weights.double(), solution, atol=1e-5 if dtype == "float32" else 1e-7)
    assert run.weights.dtype == getattr(torch, dtype)
    assert "accuracy" not in run.metrics[-1]  # it is a regression: its errors are measured instead
    assert run.metrics[-1]["rmse"] == pytest.approx(run.metrics[-1]["loss"] ** 0.5, rel=1e-6)
    assert run.best == {"round": 60, "rmse": run.metrics[-1]["rmse"]} or run.best["round"] < 60
    assert run.metrics[-1]["loss"] == pytest.approx(
        (x @ solution.float()[:, None] - y).square().mean().item(), rel=1e-4
    )


@pytest.mark.parametrize("where", ["client 1", "the test set"])
@pytest.mark.parametrize("label", [3, 9, -1])
def test_a_label_beyond_the_models_outputs_is_refused_by_name(where: str, label: int) -> None:
    pairs = [blobs(6, seed=i) for i in range(3)]
    pairs[1 if where == "client 1" else 2][1][4] = label
    with pytest.raises(InputError, match=rf"{where} has label {label}.*3 outputs"):
        fedflat.run(plain(), federation=Federation(pairs[:2], test=pairs[2]), model=network())


def test_an_empty_client_is_refused_by_name() -> None:
    pairs = [blobs(6), (torch.empty(0, 4), torch.empty(0, dtype=torch.int64)), blobs(6)]
    with pytest.raises(InputError, match="client 1 has no training samples"):
        fedflat.run(plain(), federation=Federation(pairs), model=network())


def test_data_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(InputError, match="does not take the data"):
        fedflat.run(plain(), federation=Federation([blobs(6, features=5)]), model=network())


@pytest.mark.parametrize("module", [nn.Sequential(), nn.ReLU()])
def test_a_model_with_nothing_to_learn_is_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match="no trainable parameter"):
        fedflat.run(plain(model="mlp"), federation=world(), model=module)


def test_the_users_module_is_left_as_it_was() -> None:
    module = network()
    before = copy.deepcopy(module.state_dict())
    fedflat.run(plain(dtype="float32"), federation=world(), model=module)
    assert same(before, module.state_dict())
    assert module.training


def test_bfloat16_kernels_keep_float32_weights() -> None:
    with streams.isolated(0, "tests"):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x, y = torch.randn(24, 1, 8, 8, generator=draws()), torch.arange(24) % 3
    federation = Federation([(x[:12], y[:12]), (x[12:], y[12:])], test=(x, y))
    exp = plain(rounds=3, dtype="float32", precision="bfloat16")
    low = fedflat.run(exp, federation=federation, model=model)
    high = fedflat.run(exp.replace(precision="float32"), federation=federation, model=model)
    assert low.weights.dtype == torch.float32
    assert torch.isfinite(low.weights).all()
    assert not torch.equal(low.weights, high.weights)
    assert torch.allclose(low.weights, high.weights, atol=0.02)


def test_double_precision_from_end_to_end() -> None:
    run = fedflat.run(plain(model="mlp"), federation=world())
    assert run.weights.dtype == run.server_weights.dtype == torch.float64
    assert {p.dtype for p in run.model.parameters()} == {torch.float64}
