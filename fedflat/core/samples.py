"""The interface of data, as the loops and the parts use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedflat.core.streams import Stream

IGNORED = -100
"""The target that PyTorch's cross-entropy leaves out."""


@runtime_checkable
class Samples(Protocol):
    """Training or test data of one client."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Any, Tensor]:
        """Raw inputs and targets at these positions (an int64 tensor of values 0 … len−1)."""
        ...


class ClientData(Protocol):
    """The data of all clients; `fedflat.Federation` implements it.

    Attributes:
        test: The common test set, if there is one.
        tests: Further common test sets by name.
        preprocess: Makes model inputs from raw ones: `(x, stream or None, dtype)`; with a stream it augments.
    """

    test: Samples | None
    tests: dict[str, Samples]

    def __len__(self) -> int: ...

    @property
    def preprocess(self) -> Callable[[Any, Stream | None, torch.dtype], Any]: ...

    @property
    def has_client_tests(self) -> bool: ...

    @property
    def classes(self) -> int: ...

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def sizes(self) -> np.ndarray: ...

    def size(self, client: int) -> int: ...

    def samples(self, client: int) -> Samples: ...

    def client_test(self, client: int) -> Samples | None: ...
