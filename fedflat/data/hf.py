"""Data sets of Hugging Face by name: `hf(path="…")`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedflat.data.arrays import Pool, Targets
from fedflat.data.federation import Federation
from fedflat.data.sources import user_path
from fedflat.data.tables import columns_of, pooled, split_of
from fedflat.errors import DataError, InputError
from fedflat.extras import needed


def hf(
    root: Path | None, path: str, inputs: str = "", target: str = "", by: str = "", test: str = "", name: str = ""
) -> Pool | Federation:
    """A data set of Hugging Face's package datasets (extra huggingface), read row by row when needed.

    path: a folder that `save_to_disk` wrote, or what `load_dataset` takes, such as "ylecun/mnist". inputs, target:
    names of the columns; empty for the only ones possible. by: a column whose values are the clients; empty for data
    that the partition divides. test: the split to test on; empty for "test" or "validation". name: the configuration.
    """
    dataset, given = _loaded(root, path, name), (inputs, target) if inputs and target else None
    if by:
        found = Federation.from_huggingface(dataset, by=by, columns=given, test=test or None)
        found.name = "hf"
        return found
    train, tests = split_of(dataset, test or None)
    if tests is None:
        raise DataError(f"hf: {path} has no split to test on; name one with test=…")
    columns = columns_of(train, given)
    x, test_x = pooled(train, columns, path), pooled(tests, columns, path)
    if x.labels is None or test_x.labels is None:
        raise InputError(f"hf: the column {columns[1]!r} holds no class labels, so no partition can divide the data")
    feature = train.features[columns[1]]
    classes = getattr(feature, "num_classes", None) or 1 + int(max(x.labels.max(), test_x.labels.max()))
    return Pool(x, x.labels, test_x, test_x.labels, Targets(x.labels.numpy(), classes))


def _loaded(root: Path | None, path: str, name: str) -> Any:
    datasets = needed("datasets", "the package datasets of Hugging Face", "huggingface")
    own = user_path(path)
    folder = own if root is None or own.exists() else root / own
    try:
        if any((folder / file).exists() for file in ("dataset_dict.json", "dataset_info.json")):
            return datasets.load_from_disk(str(folder))
        return datasets.load_dataset(str(folder) if folder.is_dir() else path, *([name] if name else []))
    except Exception as error:  # anything from a missing folder to a hub that is out of reach
        raise DataError(f"hf: {path} cannot be read: {str(error).splitlines()[0]}") from None
