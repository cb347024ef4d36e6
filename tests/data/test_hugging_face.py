"""Data sets of Hugging Face and flwr-datasets as clients: by a column, by a partition, by a partitioner, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import fedflat
from fedflat import Federation
from fedflat.errors import DataError, InputError, UnknownNameError


def table(rows: int = 24) -> Any:
    """Pictures whose shade is their number, of three classes by two writers."""
    datasets, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
    features["writer"] = datasets.Value("string")
    content = {
        "image": [image.fromarray(np.full((4, 4, 3), i, dtype=np.uint8)) for i in range(rows)],
        "label": [i % 3 for i in range(rows)],
        "writer": [f"w{i % 2}" for i in range(rows)],
    }
    return datasets.Dataset.from_dict(content, features=datasets.Features(features))


def shades(fed: Federation, client: int) -> list[int]:
    x, y = fed.samples(client).batch(torch.arange(fed.size(client)))
    assert [int(shade) % 3 for shade in x[:, 0, 0, 0]] == y.tolist()  # inputs and targets belong together
    return [int(shade) for shade in x[:, 0, 0, 0]]


def test_values_of_a_column_are_the_clients() -> None:
    data = table()
    fed = Federation.from_huggingface({"train": data, "test": data.select(range(6))}, by="writer")
    assert fed.names == ["w0", "w1"] and fed.partition == "natural" and fed.class_names == ("a", "b", "c")
    assert shades(fed, 0) == list(range(0, 24, 2)) and shades(fed, 1) == list(range(1, 24, 2))
    assert len(fed.test or ()) == 6 and fed.counts().tolist() == [[4, 4, 4], [4, 4, 4]]
    with pytest.raises(UnknownNameError, match="did you mean 'writer'"):
        Federation.from_huggingface(data, by="writr", columns=("image", "label"))
    with pytest.raises(InputError, match="say who holds what"):
        Federation.from_huggingface(data)
    with pytest.raises(InputError, match="say which columns are input and target"):
        Federation.from_huggingface(data, partition="iid")


def test_a_partition_divides_a_table_without_copying_it() -> None:
    data = table()
    fed = Federation.from_huggingface(data, partition="iid", clients=4, columns=("image", "label"), test=data)
    assert sorted(shade for client in range(4) for shade in shades(fed, client)) == list(range(24))
    e = fedflat.Experiment(model="mlp(hidden=8)", rounds=1, local_epochs=1, participation="all", backend="serial")
    assert fedflat.run(e, federation=fed).metrics[-1]["clients"] == 4


def test_a_partitioner_of_flwr_datasets_deals_out_the_clients() -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    natural = partitioners.NaturalIdPartitioner(partition_by="writer")
    fed = Federation.from_huggingface(table(), partition=natural, columns=("image", "label"))
    assert len(fed) == 2 and {tuple(shades(fed, i)) for i in (0, 1)} == {tuple(range(i, 24, 2)) for i in (0, 1)}
    ready = partitioners.IidPartitioner(num_partitions=3)
    ready.dataset = table()
    fed = Federation.from_huggingface(ready, columns=("image", "label"))
    assert fed.sizes.tolist() == [8, 8, 8] and fed.partition == "IidPartitioner" and fed.classes == 3


def test_a_folder_on_disk_is_data_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = table()
    datasets.DatasetDict({"train": data, "test": data.select(range(6))}).save_to_disk(str(tmp_path / "set"))
    text = f"hf(path={str(tmp_path / 'set')!r}, inputs='image', target='label')"
    e = fedflat.Experiment(data=text, partition="dirichlet_per_class(alpha=1.0)", clients=2, model="mlp(hidden=8)")
    run = fedflat.run(e.replace(rounds=2, local_epochs=1, batch_size=4, backend="serial", participation="all"))
    assert run.metrics[-1]["accuracy"] is not None
    by = fedflat.load_federation(text.replace(")", ", by='writer')"))
    assert by.names == ["w0", "w1"]
    with pytest.raises(DataError, match="cannot be read"):
        fedflat.load_federation(f"hf(path={str(tmp_path / 'nothing')!r})")


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'fedflat\[huggingface\]'"):
        fedflat.load_federation("hf(path='some/set')")


def test_one_client_per_data_set() -> None:
    sets = {"Oslo": TensorDataset(torch.zeros(5, 2), torch.zeros(5).long()), "Rome": (torch.ones(3, 2), torch.ones(3))}
    fed = Federation.from_datasets({"Oslo": sets["Oslo"]}, test=sets["Oslo"])
    assert fed.names == ["Oslo"] and fed.sizes.tolist() == [5]
    two = Federation.from_datasets([sets["Oslo"], sets["Oslo"]])
    assert len(two) == 2 and two.samples(1).batch(torch.tensor([0]))[0].shape == (1, 2)
    data = table()
    named = Federation.from_datasets([data.select(range(4)).remove_columns("writer"), data.select([5])])
    assert shades(named, 0) == [0, 1, 2, 3] and shades(named, 1) == [5]
