"""The forms in which users bring their clients' data: lazy datasets, tables, names, samples of different lengths."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import pytest
import torch
from helpers import blobs, network, plain
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import fedflat
from fedflat import Federation
from fedflat.data import DatasetSamples
from fedflat.errors import InputError


class Counted(Dataset[Any]):
    """Pairs that count how often one is read."""

    reads = 0

    def __init__(self, x: Tensor, y: Tensor, seconds: float = 0.0) -> None:
        self.x, self.y, self.seconds = x, y, seconds

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        Counted.reads += 1
        time.sleep(self.seconds)
        return self.x[i], self.y[i]


def test_before_the_first_round_only_a_few_samples_of_a_few_lazy_clients_are_read() -> None:
    Counted.reads = 0
    fed = Federation([Counted(*blobs(300, seed=i)) for i in range(50)], test=Counted(*blobs(300)), classes=3)
    fed.check(3)
    assert fed.classes == 3 and Counted.reads <= 20
    with pytest.raises(InputError, match=r"client 0 has label 2, but the model has 2 outputs"):
        fed.check(2)


def test_reading_that_takes_longer_than_a_second_is_told(caplog: pytest.LogCaptureFixture) -> None:
    fed = Federation([Counted(*blobs(9, seed=i), seconds=0.08) for i in range(3)])
    with caplog.at_level(logging.WARNING, "fedflat"):
        assert fed.classes == 3
    assert "reading labels" in caplog.text and "of 3 clients" in caplog.text


def test_reading_ahead_gives_the_same_bits_sooner() -> None:
    exp, weights, seconds = plain(local_epochs=3, batch_size=2), [], []
    for prefetch in (False, True):
        fed = Federation([Counted(*blobs(8), seconds=0.004)], classes=3, prefetch=prefetch)
        run = fedflat.run(exp, federation=fed, model=Slow().double())
        weights.append(run.weights)
        seconds.append(run.metrics[0]["seconds"])
    assert weights[0].equal(weights[1])


class Slow(nn.Linear):
    """Takes as long as its data."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.008 if self.training else 0)
        return super().forward(x)


def test_samples_of_different_lengths_are_collated_by_the_user() -> None:
    texts = [[(torch.arange(1 + i % 3), i % 2) for i in range(6)] for _ in range(2)]

    def padded(rows: list[Any]) -> tuple[Tensor, Tensor]:
        x = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True, padding_value=9)
        return nn.functional.pad(x, (0, 3 - x.shape[1]), value=9), torch.tensor([y for _, y in rows])

    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
    run = fedflat.run(
        plain(dtype="float32", batch_size=2), federation=Federation(texts, texts[0], collate=padded), model=model
    )
    assert run.metrics[-1]["accuracy"] is not None
    with pytest.raises(InputError, match=r"give Federation\(collate=…\)"):
        DatasetSamples(texts[0]).batch(torch.arange(2))
    with pytest.raises(InputError, match=r"collate= must return a pair"):
        DatasetSamples(texts[0], lambda rows: torch.zeros(2)).batch(torch.arange(2))


def test_clients_have_names() -> None:
    named = {"Oslo": blobs(6), "Bergen": blobs(9, seed=1)}
    fed = Federation(named, client_tests={"Bergen": blobs(5)}, name="hospitals")
    assert fed.names == ["Oslo", "Bergen"] and fed.client_test(0) is None and fed.client_test(1) is not None
    assert fedflat.run(plain(), federation=fed, model=network()).details["names"] == ["Oslo", "Bergen"]
    with pytest.raises(InputError, match=r"client_tests names 'Rome', which is no client"):
        Federation(named, client_tests={"Rome": blobs(5)})
    with pytest.raises(InputError, match=r"client Bergen has no training samples"):
        Federation({"Oslo": blobs(6), "Bergen": blobs(0)}).check()


def test_pandas_frames_and_numpy_pairs_are_the_same_data() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = (part.numpy() for part in blobs(8))
    frame = pandas.DataFrame({f"x{i}": x[:, i].astype(np.float32) for i in range(4)} | {"kind": y})
    table = Federation([frame], columns=(["x0", "x1", "x2", "x3"], "kind"))
    arrays = Federation([(x.astype(np.float32), y)])
    some = torch.tensor([5, 0])
    for one, other in zip(table.samples(0).batch(some), arrays.samples(0).batch(some), strict=True):
        assert one.equal(other)
    with pytest.raises(InputError, match=r"client 0 is a table: .*it has x0, x1, x2, x3, kind"):
        Federation([frame]).samples(0)
    with pytest.raises(InputError, match=r"client 0 has no column 'label'"):
        Federation([frame], columns=("x0", "label")).samples(0)


def test_a_column_of_words_is_refused_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"age": [3.0, 4.0], "city": ["Oslo", "Bergen"], "ill": [0, 1]})
    fed = Federation([frame], columns=(["age", "city"], "ill"))
    with pytest.raises(InputError, match=r"column 'city' holds 'Oslo', and a model needs numbers"):
        fedflat.run(plain(dtype="float32"), federation=fed, model=nn.Linear(2, 2))


def test_whole_numbers_that_a_model_does_not_take_are_told() -> None:
    """Integers reach the model as they are, since they may be tokens; a linear layer needs floating point."""
    fed = Federation({"Oslo": (torch.arange(12).reshape(6, 2), torch.arange(6) % 2)})
    with pytest.raises(InputError, match=r"data of client Oslo: .*inputs are int64: make them uint8 or floating"):
        fedflat.run(plain(dtype="float32"), federation=fed, model=nn.Linear(2, 2))


def test_datasets_of_hugging_face_are_trained_on() -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4, 4, 3), 9 * i, dtype=np.uint8)) for i in range(8)]
    data = datasets.Dataset.from_dict(
        {"image": pictures, "label": [i % 2 for i in range(8)]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}),
    )
    parts = [data.shard(2, i) for i in range(2)]
    fed = Federation(parts, test=data, columns=("image", "label"))
    x, y = fed.samples(0).batch(torch.tensor([1]))
    assert x.shape == (1, 3, 4, 4) and x.dtype == torch.uint8 and y.dtype == torch.int64
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 2))
    run = fedflat.run(plain(dtype="float32", batch_size=2), federation=fed, model=model)
    assert run.metrics[-1]["accuracy"] is not None


def test_tensor_datasets_stay_what_they_were() -> None:
    fed = Federation([TensorDataset(*blobs(6))])
    assert isinstance(fed.samples(0), DatasetSamples) and fed.called(0) == "client 0"
