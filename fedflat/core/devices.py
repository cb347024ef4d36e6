"""Devices: which there are, which an experiment names, and what a process does before it computes on one.

Nothing here touches an accelerator in a process that only asks: a process that has initialised CUDA cannot fork.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedflat.core import streams
from fedflat.errors import InputError

CPU = torch.device("cpu")
AUTO = ("cuda", "cpu")  # the kinds that "auto" tries, in this order
PINNED = 1 << 16, 1 << 26  # bytes of a copy that goes through pinned memory: the driver stages smaller ones itself


class Kind:
    """One kind of device, here the CPU; others override what differs."""

    precisions: tuple[str, ...] = ("float32", "bfloat16")
    dtypes: tuple[str, ...] = ("float32", "float64")
    compiles: tuple[str, ...] = ("none",)
    """Modes of `torch.compile`, and "none"."""
    workers_per_device: int | None = 1
    """Worker processes per device unless the experiment says; None: one per core."""
    widest = 64
    """Samples in the largest batch of an analysis; more are not faster on a CPU."""

    def count(self) -> int:
        """How many there are, without initialising any."""
        return 1

    def name(self, device: torch.device) -> str:
        """What the device calls itself; may initialise it."""
        return str(device)

    def in_use(self) -> bool:
        """Whether this process has initialised devices of this kind."""
        return False

    def can_fork(self) -> bool:
        """Whether a process that is forked from this one can compute on devices of this kind."""
        return True

    def memory(self, device: torch.device) -> tuple[int, int] | None:
        """Free and total bytes; None where a program need not care."""
        return None

    def prepare(self, device: torch.device, precision: str) -> None:
        """Set this process up to compute the same bits every time. Call it before the device is first used."""

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor on the device; the host does not wait for the copy."""
        return tensor.to(device, non_blocking=True)

    def random_state(self) -> Any:
        """The state of the devices' global generators."""

    def set_random_state(self, state: Any) -> None:
        """The inverse of `random_state`."""

    def seed(self, number: int) -> None:
        """Seed the devices' global generators, from which dropout draws."""


class Host(Kind):
    """The CPU."""

    workers_per_device = None
    compiles = ("none", "default")


class Cuda(Kind):
    """NVIDIA's GPUs, and AMD's, which PyTorch calls the same."""

    precisions = ("float32", "bfloat16", "tf32")
    compiles = ("none", "default", "reduce-overhead")
    widest = 512  # small batches are bound by kernel launches

    def count(self) -> int:
        """See `Kind`."""
        name = "PYTORCH_NVML_BASED_CUDA_CHECK"
        given = os.environ.get(name)
        os.environ[name] = given or "1"  # the other way to count initialises CUDA
        try:
            return torch.cuda.device_count()
        finally:
            if given is None:
                del os.environ[name]

    def name(self, device: torch.device) -> str:
        """See `Kind`."""
        return torch.cuda.get_device_name(device)

    def in_use(self) -> bool:
        """See `Kind`."""
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def can_fork(self) -> bool:
        """See `Kind`."""
        return not self.in_use()

    def memory(self, device: torch.device) -> tuple[int, int] | None:
        """See `Kind`."""
        return torch.cuda.mem_get_info(device)

    def prepare(self, device: torch.device, precision: str) -> None:
        """See `Kind`."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        # A model may need an operation without a deterministic kernel: PyTorch then warns and names it.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.cuda.set_device(device)  # otherwise every process would take some memory of the first device
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See `Kind`."""
        if tensor.device == CPU and PINNED[0] < tensor.nbytes <= PINNED[1]:
            tensor = tensor.pin_memory()  # only from there can the copy go on while the host does something else
        return tensor.to(device, non_blocking=True)

    def random_state(self) -> Any:
        """See `Kind`."""
        return torch.cuda.get_rng_state_all()

    def set_random_state(self, state: Any) -> None:
        """See `Kind`."""
        torch.cuda.set_rng_state_all(state)

    def seed(self, number: int) -> None:
        """See `Kind`."""
        torch.cuda.manual_seed_all(number)


class Mps(Kind):
    """Apple's GPUs."""

    dtypes = ("float32",)
    _used = False

    def count(self) -> int:
        """See `Kind`."""
        return int(torch.backends.mps.is_available())

    def in_use(self) -> bool:
        """See `Kind`."""
        return self._used  # PyTorch does not tell

    def can_fork(self) -> bool:
        """See `Kind`."""
        return False  # Metal does not survive it

    def memory(self, device: torch.device) -> tuple[int, int] | None:
        """See `Kind`."""
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total

    def prepare(self, device: torch.device, precision: str) -> None:
        """See `Kind`."""
        self._used = True
        torch.use_deterministic_algorithms(True, warn_only=True)

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """See `Kind`."""
        return tensor.to(device)  # memory is shared, and a copy that is not waited for may read freed memory

    def random_state(self) -> Any:
        """See `Kind`."""
        return torch.mps.get_rng_state()

    def set_random_state(self, state: Any) -> None:
        """See `Kind`."""
        torch.mps.set_rng_state(state)

    def seed(self, number: int) -> None:
        """See `Kind`."""
        torch.mps.manual_seed(number)


KINDS: dict[str, Kind] = {"cpu": Host(), "cuda": Cuda(), "mps": Mps()}


def kind_of(device: torch.device) -> Kind:
    """What is known about this kind of device."""
    return KINDS[device.type]


def present() -> list[torch.device]:
    """The devices of this machine."""
    return [_device(name, index) for name, kind in KINDS.items() for index in range(kind.count())]


def accelerated() -> bool:
    """Whether this machine has a device besides the CPU."""
    return len(present()) > 1


def resolve(text: str) -> tuple[torch.device, ...]:
    """The devices that `Experiment.device` names.

    Args:
        text: "auto", or devices such as "cpu", "cuda", "cuda:1", separated by commas.

    Raises:
        InputError: A device is unknown or absent, or they are of different kinds.
    """
    here = present()
    if text == "auto":
        return (next(device for kind in AUTO for device in here if device.type == kind),)
    named = []
    for name in text.split(","):
        kind, _, index = name.strip().partition(":")
        device = _device(kind, int(index or 0)) if kind in KINDS and (index or "0").isdigit() else None
        if device not in here:
            there = ", ".join(map(str, here))
            raise InputError(f"device={text!r}: there is no {name.strip()!r} here; this machine has: {there}")
        named.append(device)
    found = tuple(dict.fromkeys(device for device in named if device is not None))
    if len({device.type for device in found}) > 1:
        raise InputError(f"device={text!r} mixes kinds of devices, whose bits differ: name devices of one kind")
    return found


def resolve_one(text: str) -> torch.device:
    """The one device that `text` names; see `resolve`."""
    device, *others = resolve(text)
    if others:
        raise InputError(f"device={text!r}: an analysis computes on one device; name one of them")
    return device


def home_of(device: torch.device) -> torch.device:
    """Where an analysis of a model on this device computes: there, or on the CPU if it has no double precision."""
    kind = KINDS.get(device.type)
    return device if kind is not None and "float64" in kind.dtypes else CPU


@contextmanager
def prepared(device: torch.device) -> Iterator[None]:
    """A block that computes on a device, the same bits every time, in a process that is the user's own."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = cudnn.benchmark, cuda.allow_tf32, cudnn.allow_tf32
    kind_of(device).prepare(device, "float32")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        cudnn.benchmark, cuda.allow_tf32, cudnn.allow_tf32 = before


def _device(kind: str, index: int) -> torch.device:
    return torch.device(kind, index) if kind != "cpu" else CPU


def check(devices: Sequence[torch.device], *, precision: str, dtype: str, compile: str = "none") -> None:
    """Refuse a precision, a type or a way to compile that the devices do not have."""
    kind, name = kind_of(devices[0]), devices[0].type
    asked = (
        ("precision", precision, kind.precisions),
        ("dtype", dtype, kind.dtypes),
        ("compile", compile, kind.compiles),
    )
    for field, value, known in asked:
        if value not in known:
            raise InputError(f"device={name!r} has no {field}={value!r}; it has: {', '.join(known)}")


class UsedGenerators:
    """The global generators of all devices that this process uses; see `core.streams.Generators`."""

    def state(self) -> dict[str, Any]:
        """Their state."""
        return {name: kind.random_state() for name, kind in KINDS.items() if kind.in_use()}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        for name, own in state.items():
            KINDS[name].set_random_state(own)

    def seed(self, number: int) -> None:
        """Seed all of them."""
        for kind in KINDS.values():
            if kind.in_use():
                kind.seed(number)


streams.ELSEWHERE.append(UsedGenerators())


def hosted(tensor: Tensor) -> Tensor:
    """The tensor on the CPU: itself, or a copy for which the host waits."""
    return tensor if tensor.device == CPU else tensor.to(CPU)


def numbers(scalars: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one number each; the host waits for a device once."""
    if len(scalars) > 1 and not all(scalar.is_cpu for scalar in scalars):
        scalars = torch.stack([scalar.to(scalars[0]) for scalar in scalars]).to(CPU).unbind()
    return [scalar.item() for scalar in scalars]


def on(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device: itself, or a copy for which the host does not wait unless it is the host's."""
    if tensor.device == device:
        return tensor
    return hosted(tensor) if device == CPU else kind_of(device).copied(tensor, device)


def moved(states: Mapping[str, Mapping[str, Tensor]], device: torch.device) -> dict[str, dict[str, Tensor]]:
    """{part: {name: tensor}} on a device; tensors that are there already are not copied."""
    return {part: {name: on(tensor, device) for name, tensor in state.items()} for part, state in states.items()}
