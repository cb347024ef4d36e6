"""A make-believe accelerator: tensors that say `gpu:0`, hold the CPU's numbers and obey the rules of a real device.

    @on_make_believe
    def test_...() -> None: ...     runs in a process of its own, in which device="gpu:0" and "gpu:1" exist

The rules are CUDA's. Operands must be on one device, except numbers (tensors without dimensions) and indices; random
draws need a generator of the device; NumPy sees nothing. `HERE.waits` counts when the host waits for the
device: reading a number, copying back, copying there without `non_blocking`, results whose size depends on values.
An operation that has no deterministic CUDA kernel warns as PyTorch does. Results have the bits of the CPU.

PyTorch can fork no process that computes gradients once such a device is known and a gradient was computed, as
with CUDA. So every test has a process of its own, and a run that forked too late would fail.
It knows nothing of streams, of real memory, of the rounding of GPUs or of their speed.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # PyTorch imports it when a mode is first used: once here, not in every child
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from fedflat.core.devices import KINDS, Kind

DEVICES = 2
aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
VALUES_DECIDE_THE_SIZE = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
WITHOUT_DETERMINISTIC_KERNEL = {  # those of torch.use_deterministic_algorithms' documentation that networks may meet
    "_adaptive_avg_pool2d_backward",
    "adaptive_max_pool2d_backward",
    "avg_pool3d_backward",
    "fractional_max_pool2d_backward",
    "grid_sampler_2d_backward",
    "max_pool3d_with_indices_backward",
    "nll_loss2d_forward",
    "reflection_pad2d_backward",
    "replication_pad2d_backward",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_linear1d_backward",
    "_ctc_loss_backward",
    "_embedding_bag_per_sample_weights_backward",
    "histc",
    "median",
    "kthvalue",
    "put",
}


class Labelled(torch.Tensor):
    """A tensor that says it is on a device; `numbers` is on the CPU."""

    numbers: torch.Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, device: torch.device) -> Labelled:
        layout = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "dtype": numbers.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, device=torch.device("gpu:0"), **layout)
        made.numbers, made.place = numbers, device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where it says it is. PyTorch itself knows one device of a kind that is written in Python, `gpu:0`."""
        return self.place

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = Labelled(self.numbers.detach().clone(), self.place)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self, **_: Any) -> str:
        return f"{self.numbers} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return HERE.computed(func, args, kwargs or {})


class GroupNorms:
    """Computes GroupNorm's gradient in the layout of its input, as PyTorch does on the CPU.

    On other devices PyTorch first makes contiguous copies of input and gradient, and the kernel for that layout adds
    up in another order.
    """

    def __init__(self) -> None:
        self._channels_last: dict[int, bool] = {}  # by the address of the means, which the gradient is given, too

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation gives."""
        if func is aten.native_group_norm_backward.default and self._channels_last.get(args[2].data_ptr()):
            args = (*(tensor.contiguous(memory_format=torch.channels_last) for tensor in args[:2]), *args[2:])
        out = func(*args, **kwargs)
        if func is aten.native_group_norm.default and args[0].dim() == 4:
            last = args[0].is_contiguous(memory_format=torch.channels_last) and not args[0].is_contiguous()
            self._channels_last[out[1].data_ptr()] = last
        return out


class MakeBelieve(TorchDispatchMode):
    """The devices of this process.

    Attributes:
        waits: How often the host waited, by operation.
        copies, bytes: Copies between host and devices, "cpu to gpu" and "gpu to cpu", and their size.
        computed_on: Operations, by device.
        limit: Bytes of the largest tensor allowed.
        last, asked: Where the last result was, and whether Python names a device now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.computed_on: Counter[str] = Counter()
        self.limit: int | None = None
        self.last: torch.device | None = None
        self._norms = GroupNorms()
        self.asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.computed(func, args, kwargs or {})

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operation gives, on the device where it would be."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = self._device(func, args, kwargs, tensors)
        labelled = [tensor for tensor in tensors if isinstance(tensor, Labelled)]
        if labelled or device.type == "gpu":
            self._notice(func, args, kwargs, tensors, device)
        inner = dict(kwargs, device=torch.device("cpu")) if kwargs.get("device") is not None else kwargs
        plain_args, plain_kwargs = tree_map_only(Labelled, lambda tensor: tensor.numbers, (args, inner))
        out = self._norms.computed(func, plain_args, plain_kwargs)
        if device.type == "cpu":
            return out
        self.computed_on[str(device)] += func not in COPIES
        self.last = device
        out = tree_map_only(torch.Tensor, lambda tensor: self._label(tensor, device), out)
        fresh = func is aten._to_copy.default or not labelled
        return out if fresh else return_and_correct_aliasing(func, args, kwargs, out)

    def _label(self, tensor: torch.Tensor, device: torch.device) -> Labelled:
        if self.limit is not None and tensor.nbytes > self.limit:
            raise torch.OutOfMemoryError(f"make-believe: {tensor.nbytes} bytes, {self.limit} allowed")
        return Labelled(tensor, device)

    def _device(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> torch.device:
        """Where the result is; refuses what CUDA refuses."""
        found = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
        if func in INDEXED:  # indices of the CPU find their way into a tensor of the device, not the other way round
            found = {args[0].device} | {
                tensor.device for tensor in tensors if tensor.device.type != "cpu" and tensor.dim()
            }
        if len({device.index for device in found if device.type == "gpu"}) > 1:  # PyTorch puts numbers on `gpu:0`
            found -= {tensor.device for tensor in tensors if not tensor.dim() and tensor.device.index == 0}
            found |= {tensor.device for tensor in tensors if tensor.dim()}
        if len(found) > 1 and func not in COPIES:
            raise RuntimeError(f"{func}: expected all tensors on one device, found {sorted(map(str, found))}")
        wanted, generator = kwargs.get("device"), kwargs.get("generator")
        # Asked from C++ for a tensor like another or for another type, PyTorch names `gpu:0`; see also `Made`.
        stays = func is aten._to_copy.default or func.overloadpacket.__name__.startswith("new_")
        like = bool(args) and isinstance(args[0], Labelled) and stays
        if wanted is not None and not (like and torch.device(wanted).type == "gpu"):
            device = torch.device(wanted)
            if (
                device.type == "gpu" and not tensors and not self.asked
            ):  # vmap's rules, written in C++, know `gpu:0` only
                device = self.last or device
        elif func in COPIES:
            device = args[0].device
        else:
            device = next(iter(found), torch.device("cpu"))
        if generator is not None and generator.device.type != device.type:
            raise RuntimeError(f"{func}: expected a generator of {device.type}, found one of {generator.device.type}")
        return torch.device(device.type, device.index or 0) if device.type == "gpu" else device

    def _notice(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], device: torch.device) -> None:
        name = func.overloadpacket.__name__
        if func in COPIES:
            source = (args[0] if func is aten._to_copy.default else args[1]).device.type
            target, waits = device.type, not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if source != target:
                self.copies[f"{source} to {target}"] += 1
                self.bytes[f"{source} to {target}"] += args[0 if func is aten._to_copy.default else 1].nbytes
                number = (
                    func is aten.copy_.default and args[1].dim() == 0 and source == "cpu"
                )  # an argument of a kernel
                if target == "cpu" or (waits and not number):
                    self.waits[f"copy to {target}"] += 1
            return
        masks = func in INDEXED and any(
            t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if t is not None
        )
        if func in READS or func in VALUES_DECIDE_THE_SIZE or masks:
            self.waits[name] += 1
        if name in WITHOUT_DETERMINISTIC_KERNEL and torch.are_deterministic_algorithms_enabled():
            warnings.warn(f"{name} does not have a deterministic implementation", stacklevel=2)


class OnNumbers(torch.autograd.Function):
    """A function of labelled tensors that computes as on the CPU, its gradient as well."""

    @staticmethod
    def forward(ctx: Any, func: Any, structure: Any, *leaves: Any) -> Any:
        ctx.place = next(leaf.place for leaf in leaves if isinstance(leaf, Labelled))
        ctx.own = [
            leaf.numbers.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Labelled) else leaf
            for leaf in leaves
        ]
        with torch.enable_grad():
            ctx.found = func(*tree_unflatten(ctx.own, structure))
        return tuple(Labelled(each.detach(), ctx.place) for each in ctx.found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        wanted = [leaf for leaf in ctx.own if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        made = iter(torch.autograd.grad(ctx.found, wanted, [grad.numbers for grad in grads]))
        learns = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in ctx.own]
        return None, None, *(Labelled(next(made), ctx.place) if yes else None for yes in learns)


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """Attention by the kernel that PyTorch chooses on the CPU; on a device that it does not know, it takes another."""
    own = tree_map_only(Labelled, lambda tensor: tensor.numbers.detach(), (args, kwargs))
    if SDPBackend(torch._fused_sdp_choice(*own[0], **own[1])) != SDPBackend.FLASH_ATTENTION:
        return func(*args, **kwargs)
    return aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]


def _names_another(args: Any, kwargs: Any) -> bool:
    """Whether the arguments of `to` name another make-believe device than that of the tensor."""
    named = [each for each in (*args[1:], kwargs.get("device")) if isinstance(each, (str, torch.device))]
    wanted = [torch.device(each) for each in named]
    return any(device.type == "gpu" and (device.index or 0) != args[0].place.index for device in wanted)


class Made(TorchFunctionMode):
    """Makes tensors of Python's numbers and numbers of tensors, which PyTorch does below the level of operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.new_tensor:
            wanted = kwargs.pop("device", None) or args[0].device
            return torch.tensor(args[1], **({"dtype": args[0].dtype} | kwargs)).to(wanted)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], Labelled):
            return func(args[0], args[1].device, args[1].dtype, **kwargs)
        if func is torch.Tensor.to and isinstance(args[0], Labelled) and _names_another(args, kwargs):
            return func(args[0].cpu(), *args[1:], **kwargs)  # PyTorch would think that it is there already
        if func is torch.nn.functional.scaled_dot_product_attention and isinstance(args[0], Labelled):
            return _attention(func, args, kwargs)
        if func is torch.lstm and isinstance(args[0], Labelled):  # elsewhere PyTorch wants a fused kernel
            leaves, structure = tree_flatten(args)
            return tuple(OnNumbers.apply(func, structure, *leaves))
        if func is torch.Tensor.tolist:
            return args[0].cpu().tolist() if isinstance(args[0], Labelled) else func(*args)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            wanted = kwargs.pop("device")
            return func(*args, **kwargs).to(wanted)
        before, HERE.asked = HERE.asked, HERE.asked or kwargs.get("device") is not None
        try:
            return func(*args, **kwargs)
        finally:
            HERE.asked = before


class Pretended(Kind):
    """What the package knows about these devices."""

    precisions = ("float32",)
    used = False
    room: tuple[int, int] | None = None

    def count(self) -> int:
        return DEVICES

    def name(self, device: torch.device) -> str:
        return "make-believe"

    def in_use(self) -> bool:
        return self.used

    def can_fork(self) -> bool:
        return not self.used

    def memory(self, device: torch.device) -> tuple[int, int] | None:
        return self.room

    def prepare(self, device: torch.device, precision: str) -> None:
        self.used = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


HERE = MakeBelieve()
KIND = Pretended()


def begin() -> None:
    """Make the devices known to this process, for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    torch.set_num_threads(1)  # also for the thread that PyTorch starts for the devices' backward passes
    _setup_privateuseone_for_python_backend("gpu")
    KINDS["gpu"] = KIND
    HERE.__enter__()
    Made().__enter__()


def on_make_believe(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a process of its own in which the devices exist; its error is the test's error.

    The arguments must be picklable. The process is forked from one that has imported everything and computed nothing.
    """

    @functools.wraps(test)
    def elsewhere(*args: Any, **kwargs: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["make_believe", "helpers", "fedflat.runs.runner", "fedflat.analysis"])
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, test.__module__, test.__qualname__, args, kwargs))
        child.start()
        theirs.close()
        try:
            failure = ours.recv()
        except EOFError:
            failure = "the process ended without a word"
        child.join()
        assert not failure, failure

    return elsewhere


def _child(answer: Connection, module: str, name: str, args: Any, kwargs: Any) -> None:
    failure = ""
    try:
        test = getattr(importlib.import_module(module), name).__wrapped__
        begin()
        test(*args, **kwargs)
    except BaseException:
        failure = traceback.format_exc()
    answer.send(failure)
