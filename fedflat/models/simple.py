"""Networks without convolutions, for inputs of any shape."""

from __future__ import annotations

from torch import nn

from fedflat.models.checks import flat_size, whole
from fedflat.models.cnn import fully_connected


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression (one linear layer); images are flattened. Its loss is convex."""
    return fully_connected((flat_size("logistic", shape), classes))


def mlp(shape: tuple[int, ...], classes: int, hidden: int | tuple[int, ...] = (64,)) -> nn.Module:
    """A multi-layer perceptron with ReLU; images are flattened.

    hidden: number of units of each hidden layer, first to last.
    """
    sizes = hidden if isinstance(hidden, tuple | list) else (hidden,)
    units = tuple(whole("mlp", "hidden", size) for size in sizes)
    return fully_connected((flat_size("mlp", shape), *units, classes))
