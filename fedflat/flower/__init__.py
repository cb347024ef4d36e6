"""The same experiment on Flower: a `ServerApp` that runs the round loop, and `ClientApp`s that train on their own data.

What clients keep from round to round stays on their disks, and their data never leave them.
"""

from __future__ import annotations

from fedflat.extras import needed

needed("flwr", "Flower", "flower")

from fedflat.flower.admission import Admission  # noqa: E402
from fedflat.flower.client_app import client_app, named_data  # noqa: E402
from fedflat.flower.server_app import server_app  # noqa: E402

__all__ = ["Admission", "client_app", "named_data", "server_app"]
