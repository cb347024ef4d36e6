"""LEAF's JSON layout, which FedDrive and others use as well: `users`, and `user_data[user] = {"x": …, "y": …}`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedflat.errors import DataError


def read_json(path: Path) -> dict[str, dict[str, Any]]:
    """{user: {"x": …, "y": …}} of one file, in the order of its users."""
    try:
        stored = json.loads(path.read_text())
        users = stored["user_data"] if "user_data" in stored else stored["users_data"]
        return {str(user): users[str(user)] for user in stored["users"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not in LEAF's layout ({type(error).__name__}: {error})") from None
