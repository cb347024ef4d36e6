"""UCI's heart disease data: four hospitals as clients, prepared as FLamby does."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from fedflat.data.federation import Federation
from fedflat.errors import DataError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
KEPT, CATEGORIES = 10, {2: 4, 6: 3}  # columns that are used; columns of categories, and how many they have
FIRST = {2: 1, 6: 0}  # the lowest category of such a column


def heart(root: Path | None) -> Federation:
    """Heart disease in four hospitals: 740 patients, 13 features, ill or not (UCI, CC BY 4.0); embedded.

    Prepared as in FLamby (Ogier du Terrail et al., 2022): the columns slope, ca and thal are left out, then rows with a
    missing value; chest pain and ECG are one-hot without their first level; each hospital standardises with the mean
    and deviation of its own 66 % training rows. The task is `multi_label` with one label, the network of the paper is
    `logistic`. See fedflat/data/heart_disease/README.md for the source.
    """
    home = resources.files("fedflat.data").joinpath("heart_disease")
    chosen = json.loads(home.joinpath("split.json").read_text())
    train, tests = [], []
    for hospital in HOSPITALS:
        x, y = features(home.joinpath(f"processed.{hospital}.data").read_text(), hospital)
        mask = np.zeros(len(y), dtype=bool)
        mask[chosen[hospital]] = True
        mean, std = x[mask].mean(axis=0), x[mask].std(axis=0, ddof=1)
        scaled = torch.from_numpy((x - mean) / (std + 1e-9)).float()
        target = torch.from_numpy(y)[:, None].float()
        train.append((scaled[mask], target[mask]))
        tests.append((scaled[~mask], target[~mask]))
    pooled = torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests])
    return Federation(train, pooled, tests, name="heart", partition="natural", task="multi_label", classes=1)


def features(text: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, 13) and targets (n,) of a file's complete rows."""
    rows = [line.split(",") for line in text.splitlines() if line.strip()]
    if any(len(row) != 14 for row in rows):
        raise DataError(f"heart, {where}: expected 14 columns")
    used = [row[:KEPT] + row[13:] for row in rows]
    table = np.array([[float(v) for v in row] for row in used if "?" not in row])
    plain = [column for column in range(KEPT) if column not in CATEGORIES]
    hot = [table[:, [c]] == np.arange(FIRST[c] + 1, FIRST[c] + n) for c, n in CATEGORIES.items()]
    return np.concatenate([table[:, plain], *hot], axis=1), (table[:, -1] > 0).astype(np.float64)
