"""Gradient signal, steps and drift against direct computation and their identities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.worlds import blobs, convnet, draws, images, network
from fedflat import InputError, analysis


def sample_gradients(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    rows = []
    for x, y in zip(*data, strict=True):
        loss = F.cross_entropy(model.eval()(x[None]), y[None])
        rows.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


@pytest.mark.parametrize("memory", [2.0, 1e-4])
def test_moments_of_single_gradients(memory: float) -> None:
    data = images(11)
    rows = sample_gradients(convnet(), data)
    found = analysis.gsnr(convnet(), data, memory=memory)
    torch.testing.assert_close(found.mean, rows.mean(0), rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(found.variance, rows.var(0), rtol=1e-10, atol=1e-14)
    loud = rows.var(0) >= 1e-20
    ratio = (rows.mean(0) ** 2 / rows.var(0))[loud]
    assert found.excluded == int((~loud).sum()) and found.samples == 11
    assert found.total == pytest.approx(float(ratio.sum()), rel=1e-9)
    assert found.average == pytest.approx(float(ratio.mean()), rel=1e-9)


def test_silent_parameters_are_counted_and_left_out() -> None:
    model, (x, y) = network(), blobs(12)
    x[:, 2] = 0  # its weights get no gradient
    found = analysis.gsnr(model, (x, y))
    assert found.excluded == 5
    silent = torch.arange(20).view(5, 4)[:, 2]
    assert float(found.ratio[silent].abs().sum()) == 0 and math.isfinite(found.total)


def test_debiased_signal_is_smaller_by_the_noise_of_the_mean() -> None:
    data = blobs(12)
    raw, less = analysis.gsnr(network(), data), analysis.gsnr(network(), data, debias=True)
    torch.testing.assert_close(less.ratio, (raw.ratio - 1 / 12).clamp_min(0), rtol=1e-9, atol=1e-12)


def test_osgr_of_the_paper_and_in_short() -> None:
    """R = 1 − (1/n) Σ W_j/(r_j + 1/n) with W_j ∝ ḡ² + s²/n is Σḡ²/(Σḡ² + Σs²/n)."""
    found = analysis.gsnr(network(), blobs(12))
    n = found.samples
    share = found.mean.square() + found.variance / n
    r = found.mean.square() / found.variance
    expected = 1 - float((share / share.sum() / (r + 1 / n)).sum()) / n
    assert found.osgr == pytest.approx(expected, rel=1e-10)
    assert found.to_dict()["osgr"] == found.osgr


def test_signal_from_batches_estimates_that_of_samples() -> None:
    rows = 0.3 + torch.randn(4000, 6, generator=draws(), dtype=torch.float64)
    found = analysis.signal_from_batches(rows.view(500, 8, 6).mean(1), 8)
    torch.testing.assert_close(found.mean, rows.mean(0))
    torch.testing.assert_close(found.variance, rows.var(0), rtol=0.2, atol=0)


def test_models_that_vmap_cannot_handle() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x if float(x.detach().sum()) < 1e9 else -x)  # data-dependent

    data = blobs(7)
    torch.testing.assert_close(analysis.gsnr(Stubborn(), data).mean, analysis.gsnr(network(), data).mean)


def test_one_step_on_the_same_data_generalises_fully() -> None:
    data = blobs(20)
    same = analysis.osgr(network(), data, data, lr=0.1)
    assert same.measured == 1.0 and same.first_order == pytest.approx(1, rel=1e-12)


def test_first_order_ratio_is_the_limit_of_small_steps() -> None:
    found = analysis.osgr(network(), blobs(20), blobs(30, seed=7), lr=1e-5)
    assert found.measured == pytest.approx(found.first_order, rel=1e-3)


def test_gradient_variance_is_that_of_batches() -> None:
    x, y = blobs(40)
    found = analysis.gradient_variance(network(), (x, y), batch_size=10)
    rows = torch.stack([sample_gradients(network(), (x[i : i + 10], y[i : i + 10])).mean(0) for i in range(0, 40, 10)])
    expected = float((rows - rows.mean(0)).square().sum(1).mean())
    assert found.variance == pytest.approx(expected, rel=1e-10) and found.batches == 4
    assert found.relative == pytest.approx(expected / float(rows.mean(0).square().sum()), rel=1e-10)


@pytest.mark.parametrize("count", [30, 90])
def test_minibatches_have_the_size_asked_for(count: int) -> None:
    found = analysis.gradient_variance(network(), blobs(count), batch_size=10)
    assert found.batches == count // 10


def test_one_minibatch_has_no_variance() -> None:
    with pytest.raises(InputError, match=r"two minibatches or more.*smaller batch_size"):
        analysis.gradient_variance(network(), blobs(30))


def test_no_gradient_is_no_signal() -> None:
    """A loss that the weights do not move: nothing to divide by, and no error."""
    found = analysis.gsnr(network(), blobs(9), loss=lambda output, y: 0 * output.sum())
    assert (found.total, found.excluded) == (0.0, 43) and math.isnan(found.osgr) and found.to_dict()["osgr"] == "nan"
    flat = analysis.gradient_variance(network(), blobs(9), loss=lambda output, y: torch.ones(()), batch_size=3)
    assert flat.variance == 0 and math.isnan(flat.relative)


def test_parameters_by_movement() -> None:
    moved = torch.arange(-5, 5).double()
    found = analysis.by_movement(torch.arange(10.0), moved, torch.arange(10.0) * 2, share=0.1)
    assert (found.most_weight, found.most_ratio, found.least_weight, found.least_ratio) == (0, 0, 5, 10)


DELTAS = torch.randn(4, 9, generator=draws(), dtype=torch.float64)
P = [0.1, 0.2, 0.3, 0.4]


def test_drift_diversity_is_one_only_for_equal_updates() -> None:
    assert analysis.drift_diversity(DELTAS[:1].expand(4, 9), P) == pytest.approx(1, rel=1e-12)
    assert analysis.drift_diversity(DELTAS, P) > 1
    assert analysis.drift_diversity(torch.stack([DELTAS[0], -DELTAS[0]])) == math.inf


def test_uniform_diversity_is_m_times_that_of_the_sums() -> None:
    sums = float(DELTAS.square().sum() / DELTAS.sum(0).square().sum())
    assert analysis.drift_diversity(list(DELTAS)) == pytest.approx(4 * sums, rel=1e-12)


def test_centred_consistency_is_less_by_the_mean() -> None:
    p = torch.tensor(P, dtype=torch.float64)
    literal, centred = (analysis.client_consistency(DELTAS, P, centred=c) for c in (False, True))
    assert literal == pytest.approx(float(p @ DELTAS.square().sum(1)), rel=1e-12)
    assert centred == pytest.approx(literal - float((p @ DELTAS).square().sum()), rel=1e-10)
    assert analysis.client_consistency(DELTAS, [10 * value for value in P]) == pytest.approx(literal, rel=1e-12)


def test_updates_at_right_angles() -> None:
    """‖w_m‖² = ‖w‖² + ‖Δ‖² and cos = 1/√(1 + ‖Δ‖²/‖w‖²)."""
    w, delta = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([4.0, 1.0, -3.0])
    assert float(analysis.weight_norms([w + delta])[0]) == pytest.approx(math.sqrt(25 + 26))
    assert float(analysis.weight_cosines([w + delta], w)[0]) == pytest.approx(1 / math.sqrt(1 + 26 / 25))


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0], [0.0, 0.0], [math.nan, 1.0]])
def test_bad_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(InputError, match="2 weights"):
        analysis.drift_diversity(DELTAS[:2], weights)
