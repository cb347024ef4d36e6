"""What holds for every test."""

import signal
from collections.abc import Iterator

import pytest

from fedflat.core import registry

# Started from a script in the background, Python is told to ignore Ctrl-C, and so would be the commands under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """A part that a test registers is gone after it: its module may be, too."""
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)
