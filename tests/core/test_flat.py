"""FlatModel: a module and its vector are one thing."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import draws, flat, network, restless
from torch import Tensor, nn
from torch.nn import functional as F

from fedflat import FlatModel
from fedflat.core.flat import channels_last
from fedflat.core.rows import unit
from fedflat.errors import InputError


class Tied(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.out = nn.Linear(3, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).mean(dim=1))


def test_theta_is_parameters_to_vector() -> None:
    module = restless()
    assert torch.equal(FlatModel(module).theta, flat(module))


def test_writing_theta_changes_the_module_and_not_the_users_module() -> None:
    module = network()
    before, model = flat(module), FlatModel(module, torch.float64)
    model.theta.copy_(torch.arange(model.size, dtype=torch.float64))
    assert torch.equal(flat(model.module), torch.arange(model.size, dtype=torch.float64))
    assert torch.equal(flat(module), before)


def test_backward_fills_grad_with_the_gradient_autograd_gives() -> None:
    module, x = network(), torch.randn(6, 4, generator=draws(), dtype=torch.float64)
    model = FlatModel(module, torch.float64)
    model(x).square().sum().backward()
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    assert torch.equal(model.grad, torch.cat([g.reshape(-1) for g in expected]))


def test_two_backwards_accumulate_and_zeroing_grad_zeroes_the_modules_gradients() -> None:
    model, x = FlatModel(network(), torch.float64), torch.ones(2, 4, dtype=torch.float64)
    model(x).sum().backward()
    once = model.grad.clone()
    model(x).sum().backward()
    assert torch.equal(model.grad, 2 * once)
    model.grad.zero_()
    assert all(not p.grad.any() for p in model.module.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in model.module.parameters())


def test_spans_name_the_pieces() -> None:
    model = FlatModel(network(), torch.float64)
    for span in model.spans:
        piece = model.module.get_parameter(span.name)
        assert torch.equal(span.of(model.theta), piece)
        assert span.of(model.theta).data_ptr() == piece.data_ptr()
        assert span.channels(model.theta).shape[0] == piece.shape[0]
    assert model.spans[0].start == 0
    assert model.spans[-1].stop == model.size


def test_tied_parameters_count_once_and_stay_tied() -> None:
    model = FlatModel(Tied())
    assert model.size == 21
    model.theta.fill_(2.0)
    assert model.module.out.weight is model.module.embed.weight
    exported = model.export(torch.full((21,), 3.0), model.buffers, model.counters)
    assert exported.out.weight is exported.embed.weight
    assert (exported.out.weight == 3).all()


def test_frozen_parameters_are_no_part_of_the_vector_but_of_the_export() -> None:
    module = network()
    module[0].requires_grad_(False)
    model = FlatModel(module, torch.float64)
    assert [span.name for span in model.spans] == ["2.weight", "2.bias"]
    exported = model.export(torch.zeros(model.size, dtype=torch.float64), model.buffers, model.counters)
    assert torch.equal(exported[0].weight, module[0].weight)
    assert not exported[2].weight.any()


@pytest.mark.parametrize("module", [nn.Sequential(), nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_nothing_to_learn_is_refused(module: nn.Module) -> None:
    with pytest.raises(InputError, match="no trainable parameter"):
        FlatModel(module)


def test_running_statistics_follow_training_as_in_a_plain_module() -> None:
    module, x = restless(), torch.randn(12, 4, generator=draws(3))
    model, reference = FlatModel(module), copy.deepcopy(module)
    for step in range(3):
        model(x + step)
        reference(x + step)
    norm = reference[1]
    assert torch.equal(model.buffers, torch.cat([norm.running_mean, norm.running_var]))
    assert model.counters.tolist() == [3]
    model.buffers.fill_(0.5)
    assert (model.module[1].running_mean == 0.5).all()


def test_export_is_an_equal_module_that_shares_nothing() -> None:
    module, x = restless(), torch.randn(5, 4, generator=draws(4))
    model = FlatModel(module)
    model(x)
    exported = model.export(model.theta, model.buffers, model.counters)
    model.module.eval()
    assert not exported.training
    assert torch.equal(exported(x), model(x))
    assert exported[1].num_batches_tracked == 1
    before = copy.deepcopy(exported.state_dict())
    for vector in (model.theta, model.buffers, model.counters):
        vector.zero_()
    assert all(torch.equal(before[k], v) for k, v in exported.state_dict().items())


class Masked(nn.Module):
    """Attention over earlier positions only; the mask is a boolean buffer, as in most transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.register_buffer("later", torch.triu(torch.ones(3, 3, dtype=torch.bool), 1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.out((h @ h.mT).masked_fill(self.later, -torch.inf).softmax(-1) @ h)


def test_buffers_of_other_types_keep_their_types() -> None:
    module, x = Masked(), torch.tensor([[1, 2, 3]])
    model = FlatModel(module)
    assert torch.equal(model(x), module(x))
    exported = model.export(model.theta, model.buffers, model.counters)
    assert exported.later.dtype == torch.bool
    assert torch.equal(exported(x), module(x))


class Shared(nn.Module):
    """Two layers that read and write one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Module(), nn.Module(), nn.Linear(2, 2)
        scale = torch.tensor([2.0, 3.0])
        self.a.register_buffer("scale", scale)
        self.b.register_buffer("scale", scale)
        self.out.register_buffer("last", torch.tensor([5.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.a.scale * self.b.scale) + self.out.last


def test_a_buffer_that_two_modules_share_survives_the_export() -> None:
    module, x = Shared(), torch.ones(1, 2)
    model = FlatModel(module)
    exported = model.export(model.theta, model.buffers, model.counters)
    assert torch.equal(exported(x), module(x))


def test_loaded_brings_everything_back_bit_for_bit() -> None:
    model = FlatModel(restless())
    before = [v.clone() for v in (model.theta, model.buffers, model.counters)]
    with pytest.raises(ZeroDivisionError), model.loaded(model.theta * 1.1, model.buffers + 1):
        model(torch.randn(6, 4, generator=draws()))
        assert not torch.equal(model.theta, before[0])
        raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(before, (model.theta, model.buffers, model.counters), strict=True))


def test_double_precision_reaches_parameters_and_buffers() -> None:
    model = FlatModel(restless(), torch.float64)
    assert {model.theta.dtype, model.grad.dtype, model.buffers.dtype} == {torch.float64}
    assert model(torch.ones(3, 4)).dtype == torch.float64


def test_the_head_is_the_last_linear_unless_named() -> None:
    assert FlatModel(network()).head == "2"
    assert FlatModel(network(), head="0").head == "0"
    with pytest.raises(InputError, match=r"head='…'"):
        FlatModel(nn.Conv1d(1, 1, 1)).require_head("moon")


@pytest.mark.parametrize("role", ["head", "features", "last_stage"])
def test_an_unknown_submodule_is_answered_with_the_known_ones(role: str) -> None:
    with pytest.raises(InputError, match=r"no submodule 'fc'.*0, 1, 2"):
        FlatModel(network(), **{role: "fc"})


def test_the_mask_of_a_submodule_is_one_on_its_parameters() -> None:
    model = FlatModel(network())
    assert model.mask("2").sum() == 5 * 3 + 3
    assert torch.equal(model.mask("0") + model.mask("1") + model.mask("2"), torch.ones(model.size))


def test_the_mask_of_a_model_that_is_its_own_head_is_one_everywhere() -> None:
    model = FlatModel(nn.Linear(2, 3))
    assert torch.equal(model.mask(model.require_head("fedrep")), torch.ones(9))


def test_captured_features_are_the_heads_input() -> None:
    model, x = FlatModel(network(), torch.float64), torch.randn(3, 4, generator=draws(), dtype=torch.float64)
    model.capture_features("moon")
    output = model(x)
    assert torch.equal(F.linear(model.captured, model.module[2].weight, model.module[2].bias), output)


def test_captured_features_are_the_named_modules_output() -> None:
    model, x = FlatModel(network(), torch.float64, features="0"), torch.ones(3, 4, dtype=torch.float64)
    model.capture_features("moon")
    model(x)
    assert torch.equal(model.captured, model.module[0](x))


def test_unit_has_length_one_and_zero_stays_zero() -> None:
    assert torch.allclose(unit(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8]))
    assert torch.equal(unit(torch.zeros(3)), torch.zeros(3))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_computed_channels_last(channels: int) -> None:
    """Grey ones as well, whose memory is the same in both layouts: a convolution must be told by the strides."""
    x, layer = torch.randn(4, channels, 6, 5), nn.Conv2d(channels, 8, 3)
    made = layer(channels_last(x))
    assert torch.equal(channels_last(x), x)
    assert made.is_contiguous(memory_format=torch.channels_last) and not made.is_contiguous()
    torch.testing.assert_close(made, layer(x))


class Viewing(nn.Module):
    """Ends as many networks do: with a view, which takes contiguous images only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(channels, 40, 3), nn.Linear(40 * 12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        out: Tensor = self.head(x.view(x.size(0), -1))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_that_view_images_as_vectors_run(channels: int, dtype: torch.dtype) -> None:
    """Also where images come channels-last, as those of CIFAR do."""
    network = Viewing(channels).to(dtype)
    model, x = FlatModel(network, dtype), torch.randn(4, channels, 6, 5, dtype=dtype)
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        torch.testing.assert_close(model(images), network(x.contiguous()))
