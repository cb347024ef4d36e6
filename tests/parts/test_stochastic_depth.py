"""Stochastic depth: which blocks are dropped, what a dropped one still does, and what evaluation makes of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import draws, network, plain, world
from torch import Tensor, nn
from torch.nn import functional as F

import fedflat
from fedflat import Federation, InputError, load_run
from fedflat.core.streams import isolated
from fedflat.models import ResidualBlock, build_model

RULES = {"paper": 0.95, "code": 0.90}
"""Expected number of dropped blocks of 18 at keep=0.9."""


def survival(blocks: int, keep: float, rule: str) -> list[float]:
    """ρ_ℓ of the blocks, first to last."""
    if rule == "paper":
        return [1 - number / blocks * (1 - keep) for number in range(1, blocks + 1)]
    return [1 - number / (blocks - 1) * (1 - keep) for number in range(blocks)]


def ladder(blocks: int) -> nn.Module:
    """Block ℓ adds the ℓ-th unit vector to its input and nothing else: the output of 0 shows the blocks' factors."""
    net = nn.Sequential()
    for number in range(blocks):
        step = nn.Linear(blocks, blocks)
        nn.init.zeros_(step.weight)
        step.bias.data = F.one_hot(torch.tensor(number), blocks).float()
        net.append(ResidualBlock(step, nn.Identity(), after=nn.Identity()))
    return net.double()


class Notes:
    """A loss of the user's that keeps the outputs it is given while training."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        if output.requires_grad:
            self.outputs.append(output.detach().clone())
        return F.cross_entropy(output, y)


def zeros(count: int, blocks: int) -> Federation:
    """One client whose inputs are all 0."""
    x, y = torch.zeros(count, blocks, dtype=torch.float64), torch.arange(count) % blocks
    return Federation([(x, y)], test=(x, y))


def still(method: str, federation: Federation, model: nn.Module, **changes: Any) -> fedflat.Run:
    """A run that moves no weight."""
    loss, out = changes.pop("loss", None), changes.pop("out", None)
    settings = {"method": method, "lr": 0.0, "batch_size": 0, "local_steps": 1}
    experiment = plain(**(settings | changes))
    return fedflat.run(experiment, federation=federation, model=model, loss=loss, out=out, progress=False)


def resnet(blocks: int = 1, width: int = 4) -> nn.Module:
    with isolated(0, "tests"):
        net = build_model(f"resnet56(blocks={blocks}, width={width})", (3, 8, 8), 4).double()
    for module in net.modules():  # statistics that matter
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.2, 0.2, generator=draws(1))
            module.running_var.uniform_(0.5, 1.5, generator=draws(2))
    return net


def pictures(count: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8, generator=draws(seed), dtype=torch.float64), torch.arange(count) % 4


def walk(net: nn.Module, x: Tensor, factors: Sequence[float]) -> Tensor:
    """The network's output with each block's branch multiplied by its factor; a factor of 0 skips the branch."""
    left = list(factors)
    x = net.get_submodule("stem")(x)
    for name in ("layer1", "layer2", "layer3"):
        for block in net.get_submodule(name).children():
            assert isinstance(block, ResidualBlock)
            factor, total = left.pop(0), block.shortcut(x)
            if factor:
                total = total + factor * block.branch(x)
            x = block.after(total)
    assert not left
    out: Tensor = net.get_submodule("head")(x)
    return out


# ---- the rules ----


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("blocks", "keep"), [(18, 0.9), (18, 0.5), (6, 0.8), (2, 0.9)])
def test_evaluation_scales_each_branch_by_its_probability(rule: str, blocks: int, keep: float) -> None:
    run = still(f"stochdepth(keep={keep}, rule='{rule}')", zeros(6, blocks), ladder(blocks))
    factors = run.model(torch.zeros(1, blocks, dtype=torch.float64))[0].detach()
    expected = torch.tensor(survival(blocks, keep, rule), dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=1e-12, atol=1e-12)
    assert float(factors[-1]) == pytest.approx(keep)
    assert (float(factors[0]) == 1) == (rule == "code")
    if (blocks, keep) == (18, 0.9):
        assert float((1 - factors).sum()) == pytest.approx(RULES[rule], abs=1e-12)


def test_the_papers_rule_and_nine_tenths_are_the_default() -> None:
    run = still("stochdepth", zeros(6, 18), ladder(18))
    factors = run.model(torch.zeros(1, 18, dtype=torch.float64))[0]
    expected = torch.tensor(survival(18, 0.9, "paper"), dtype=torch.float64)
    torch.testing.assert_close(factors, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_training_drops_whole_blocks_a_batch_with_these_probabilities(rule: str) -> None:
    """So the mean over draws of what precedes the last activation is what evaluation computes."""
    notes, steps, blocks = Notes(), 600, 8
    method = f"stochdepth(keep=0.4, rule='{rule}')"
    run = still(method, zeros(3, blocks), ladder(blocks), loss=notes, local_steps=steps)
    outputs = torch.stack(notes.outputs)
    assert outputs.shape == (steps, 3, blocks)
    assert torch.equal(outputs, outputs[:, :1].expand_as(outputs)), "one draw a batch, not a sample"
    assert set(outputs.unique().tolist()) == {0.0, 1.0}
    evaluated = run.model(torch.zeros(1, blocks, dtype=torch.float64))[0]
    spread = (evaluated * (1 - evaluated) / steps).sqrt()
    assert ((outputs[:, 0].mean(0) - evaluated).abs() <= 4 * spread + 1e-9).all()
    together = torch.corrcoef(outputs[:, 0, -3:].T) - torch.eye(3)
    assert together.abs().max() < 5 / steps**0.5, "blocks are dropped independently"


def test_keeping_every_block_is_the_plain_network_bit_for_bit() -> None:
    x, y = pictures()
    federation = Federation([(x, y), (x[:6] * 2, y[:6])], test=(x, y))
    settings = {"lr": 0.1, "local_steps": 3, "rounds": 2, "batch_size": 4}
    base = still("fedavg", federation, resnet(2), **settings)
    for rule in RULES:
        run = still(f"stochdepth(keep=1.0, rule='{rule}')", federation, resnet(2), **settings)
        assert torch.equal(run.weights, base.weights)
        assert torch.equal(run.model(x), base.model(x))
        assert [row["loss"] for row in run.metrics] == [row["loss"] for row in base.metrics]
        for ours, theirs in zip(run.model.buffers(), base.model.buffers(), strict=True):
            assert torch.equal(ours, theirs)


# ---- a real residual network ----


@pytest.mark.parametrize("rule", RULES)
def test_a_trained_network_evaluates_with_scaled_branches(rule: str) -> None:
    x, y = pictures()
    run = still(f"stochdepth(keep=0.5, rule='{rule}')", Federation([(x, y)], test=(x, y)), resnet(2), lr=0.05)
    plainly = resnet(2)
    nn.utils.vector_to_parameters(run.weights, plainly.parameters())
    for ours, theirs in zip(plainly.buffers(), run.model.buffers(), strict=True):
        ours.copy_(theirs)
    expected = walk(plainly.eval(), x, survival(6, 0.5, rule))
    torch.testing.assert_close(run.model(x), expected, rtol=1e-10, atol=1e-12)
    assert run.metrics[-1]["loss"] == pytest.approx(F.cross_entropy(expected, y).item(), rel=1e-10)
    assert not torch.allclose(plainly(x), expected, rtol=1e-4)


def test_a_training_pass_is_that_of_the_blocks_kept_and_a_dropped_one_still_projects() -> None:
    """Each recorded output is that of exactly one choice of blocks; all three blocks here change the shape."""
    (x, y), notes = pictures(), Notes()
    still("stochdepth(keep=0.1)", Federation([(x, y)]), resnet(), loss=notes, local_steps=12)
    reference = {choice: walk(resnet().train(), x, choice) for choice in product((0.0, 1.0), repeat=3)}
    chosen = []
    for output in notes.outputs:  # the order of samples within the batch is the loop's own
        fits = [choice for choice, expected in reference.items() if same_rows(output, expected)]
        assert len(fits) == 1
        chosen += fits
    assert len(set(chosen)) > 2
    assert any(choice[2] == 0 for choice in chosen)


def same_rows(left: Tensor, right: Tensor) -> bool:
    """Whether two sets of rows are equal, whatever their order."""
    distances = torch.cdist(left, right).min(1)
    return bool((distances.values < 1e-9).all()) and len(set(distances.indices.tolist())) == len(left)


def test_statistics_of_dropped_blocks_do_not_move() -> None:
    """With fixed weights and one batch a layer that saw k passes holds 0.9ᵏ of its start and 1 − 0.9ᵏ of the batch."""
    (x, y), steps = pictures(), 12
    run = still("stochdepth(keep=0.2)", Federation([(x, y)]), resnet(), local_steps=steps)
    start, once = resnet(), resnet().train()
    once(x)
    counts = {}
    trained = [m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d)]
    for (name, before), after_one, after in zip(norms(start), norms(once), trained, strict=True):
        passes = int(after.num_batches_tracked)
        counts[name] = passes
        if name == "stem.norm" or passes == 0:  # deeper layers see inputs that depend on what was dropped before
            share = 0.9**passes
            batch = (after_one[1].running_mean - 0.9 * before.running_mean) / 0.1
            torch.testing.assert_close(after.running_mean, share * before.running_mean + (1 - share) * batch)
    branches = {stage: {n for k, n in counts.items() if k.startswith(f"{stage}.0.branch")} for stage in STAGES}
    assert counts["stem.norm"] == steps
    assert all(counts[f"{stage}.0.shortcut.norm"] == steps for stage in STAGES)
    assert all(len(passes) == 1 for passes in branches.values())
    assert branches["layer3"].pop() < steps


STAGES = ("layer1", "layer2", "layer3")


def norms(net: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)]


def test_a_branch_that_is_never_run_keeps_its_statistics() -> None:
    """With keep next to 0 the last block is always dropped. Eight samples, so that their mean rounds nothing."""
    x, y = pictures(8)
    run = still("stochdepth(keep=1e-12)", Federation([(x, y)]), resnet(), local_steps=5)
    trained = [m for m in run.model.modules() if isinstance(m, nn.BatchNorm2d)]
    for (name, before), after in zip(norms(resnet()), trained, strict=True):
        if name.startswith("layer3.0.branch"):
            assert torch.equal(after.running_mean, before.running_mean)
            assert torch.equal(after.running_var, before.running_var)
            assert int(after.num_batches_tracked) == 0
        elif name.startswith("layer3.0.shortcut"):
            assert not torch.equal(after.running_mean, before.running_mean)


def test_a_dropped_branch_gets_no_gradient() -> None:
    x, y = pictures()
    run = still("stochdepth(keep=1e-12)", Federation([(x, y)]), resnet(), lr=0.1)
    names = [name for name, _ in resnet().named_parameters()]
    for name, before, after in zip(names, resnet().parameters(), run.model.parameters(), strict=True):
        if name.startswith("layer3.0.branch"):
            assert torch.equal(before, after), name
        elif name.startswith(("layer3.0.shortcut", "head", "stem")):
            assert not torch.equal(before, after), name


@pytest.mark.parametrize("text", ["mobilenetv2", "resnet18_nonorm"])
def test_every_residual_network_of_the_package_is_taken(text: str) -> None:
    x, y = (tensor.float() if tensor.is_floating_point() else tensor for tensor in pictures(3))
    settings = {"model": text, "dtype": "float32", "lr": 1e-3}
    experiment = plain(method="stochdepth(keep=0.5)", batch_size=0, **settings)
    run = fedflat.run(experiment, federation=Federation([(x, y)], test=(x, y)), progress=False)
    assert run.weights.isfinite().all()


# ---- on disk ----


def test_the_scaling_is_in_the_model_that_is_loaded(tmp_path: Path) -> None:
    x, y = pictures()
    federation = Federation([(x, y)], test=(x, y))
    experiment = plain(
        method="stochdepth(keep=0.5)", model="resnet56(blocks=1, width=4)", rounds=2, batch_size=0, lr=0.05
    )
    run = fedflat.run(experiment, federation=federation, out=tmp_path / "named", progress=False)
    assert torch.equal(load_run(tmp_path / "named").model(x), run.model(x))
    own = fedflat.run(experiment, federation=federation, model=resnet(), out=tmp_path / "own", progress=False)
    assert torch.equal(load_run(tmp_path / "own", model=resnet()).model(x), own.model(x))
    assert copy.deepcopy(own.model)(x).equal(own.model(x))


# ---- refused ----


def test_a_network_without_residual_blocks_is_refused() -> None:
    with pytest.raises(InputError, match=r"stochdepth.*[Rr]esidual"):
        fedflat.run(plain(method="stochdepth"), federation=world(), model=network())


@pytest.mark.parametrize("text", ["keep=-0.1", "keep=1.1", "keep='x'", "rule='linear'", "rule=2"])
def test_a_value_out_of_range_is_refused_naming_part_and_field(text: str) -> None:
    with pytest.raises(InputError, match=rf"stochdepth.*{text.split('=')[0]}"):
        still(f"stochdepth({text})", zeros(4, 4), ladder(4))
