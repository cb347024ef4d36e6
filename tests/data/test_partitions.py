"""What each division promises: disjoint, of the stated sizes, as mixed as its parameter says, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_helpers import over_dispersion, write_mnist
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.data import DATASETS, PARTITIONS, Samples, load_federation
from fedflat.data.arrays import Targets
from fedflat.data.dirichlet import log_dirichlet, softmax
from fedflat.data.indices import IndexSets
from fedflat.data.partition import divide
from fedflat.errors import InputError, PartitionError, UnknownNameError


def _targets(per_class: int = 5000, classes: int = 10, **more: np.ndarray) -> Targets:
    return Targets(np.tile(np.arange(classes), per_class), classes, **more)


CIFAR10 = _targets()
CIFAR100 = _targets(500, 100, coarse=np.arange(100) // 5)


def _counts(targets: Targets, sets: IndexSets) -> np.ndarray:
    return np.stack([np.bincount(targets.labels[sets.indices(i)], minlength=targets.classes) for i in range(len(sets))])


def _used_once(sets: IndexSets, total: int) -> np.ndarray:
    every = np.concatenate([sets.indices(i) for i in range(len(sets))])
    assert len(np.unique(every)) == len(every)
    assert every.min() >= 0 and every.max() < total
    return every


DISJOINT = [
    "iid",
    "iid_stratified",
    "dirichlet_equal(delta=0.3)",
    "dirichlet_equal(delta=0.3, sigma=0.3)",
    "lda_hsu(alpha=0.05)",
    "lda_hsu(alpha=0)",
    "dirichlet_per_class(alpha=0.5)",
    "dirichlet_over_clients(alpha=0.5)",
    "dirichlet_over_clients(alpha=0.5, compat='fedtorch')",
    "pathological(labels=3)",
]


@pytest.mark.parametrize("partition", DISJOINT)
def test_each_sample_once_and_the_seed_decides(partition: str) -> None:
    a, b, c = (divide(CIFAR10, partition, 100, seed) for seed in (0, 0, 1))
    every = _used_once(a, 50_000)
    assert len(every) == a.sizes.sum()
    assert np.array_equal(every, _used_once(b, 50_000))
    assert not np.array_equal(every, _used_once(c, 50_000))


@pytest.mark.parametrize(
    "partition", [p for p in DISJOINT if "over" not in p and "per_class" not in p and "sigma" not in p]
)
def test_equal_sizes(partition: str) -> None:
    sizes = divide(CIFAR10, partition, 100, 0).sizes
    assert (np.abs(sizes - 500) <= (3 if "pathological" in partition else 0)).all()  # shards of 166 or 167


def test_nothing_is_left_over_where_the_docstring_says_so() -> None:
    for partition in (
        "iid",
        "dirichlet_equal(0.3, sigma=0.5)",
        "dirichlet_per_class",
        "dirichlet_over_clients",
        "pathological",
    ):
        assert divide(CIFAR10, partition, 100, 3).sizes.sum() == 50_000, partition


@pytest.mark.parametrize("alpha", [0.05, 0.5, 10.0])
def test_lda_hsu_is_as_spread_as_its_total_concentration(alpha: float) -> None:
    found = np.mean([over_dispersion(_counts(CIFAR10, divide(CIFAR10, f"lda_hsu({alpha})", 100, s))) for s in range(5)])
    assert alpha / 2 < found < 2 * alpha


@pytest.mark.parametrize("delta", [0.3, 0.6])
def test_dirichlet_equal_is_as_spread_as_its_concentration_a_class(delta: float) -> None:
    found = np.mean(
        [over_dispersion(_counts(CIFAR10, divide(CIFAR10, f"dirichlet_equal({delta})", 100, s))) for s in range(3)]
    )
    assert 10 * delta / 2 < found < 2 * 10 * delta


def test_lda_hsu_serves_clients_in_order_so_that_the_last_get_the_leftovers() -> None:
    held = np.mean(
        [(_counts(CIFAR10, divide(CIFAR10, "lda_hsu(100.0)", 100, s)) > 0).sum(axis=1) for s in range(5)], axis=0
    )
    assert held[:50].min() == 10
    assert held[-2:].mean() < 9.5


def test_alpha_zero_gives_one_class_each_and_serves_all_equally() -> None:
    counts = _counts(CIFAR10, divide(CIFAR10, "lda_hsu(alpha=0)", 100, 0))
    assert ((counts > 0).sum(axis=1) == 1).all()
    assert ((counts > 0).sum(axis=0) == 10).all()
    with pytest.raises(PartitionError, match="multiple of the 10 classes"):
        divide(CIFAR10, "lda_hsu(alpha=0)", 95, 0)


def test_iid_stratified_gives_everyone_the_same_of_each_class() -> None:
    assert (_counts(CIFAR100, divide(CIFAR100, "iid_stratified", 100, 0)) == 5).all()
    with pytest.raises(PartitionError, match="class 0 has 500 samples"):
        divide(CIFAR100, "iid_stratified", 99, 0)


@pytest.mark.parametrize(
    "targets,clients,labels,shard",
    [(CIFAR10, 100, 3, (166, 167)), (CIFAR100, 100, 10, (50, 50)), (_targets(500, 200), 20, 30, (166, 167))],
)
def test_pathological_clients_hold_so_many_labels(
    targets: Targets, clients: int, labels: int, shard: tuple[int, int]
) -> None:
    for seed in range(5):
        counts = _counts(targets, divide(targets, f"pathological(labels={labels})", clients, seed))
        assert ((counts > 0).sum(axis=1) == labels).all()
        assert shard[0] <= counts[counts > 0].min() <= counts.max() <= shard[1]


def test_pathological_refuses_what_cannot_be_cut() -> None:
    with pytest.raises(PartitionError, match=r"clients · labels = 99 .*clients=10 always works"):
        divide(CIFAR10, "pathological(labels=3)", 33, 0)
    with pytest.raises(PartitionError, match="labels=11"):
        divide(CIFAR10, "pathological(labels=11)", 100, 0)


def test_pam_follows_the_coarse_labels() -> None:
    sets = divide(CIFAR100, "pam", 500, 0)
    counts = _counts(CIFAR100, sets)
    assert (sets.sizes == 100).all()
    assert len(_used_once(sets, 50_000)) == 50_000
    coarse = counts.reshape(500, 20, 5).sum(axis=2)
    # alpha = 0.1: mostly a coarse label or three; beta = 10: all five of its classes.
    assert np.median((coarse >= 10).sum(axis=1)) <= 3
    early = counts.reshape(500, 20, 5)[:100]
    full = early[early.sum(axis=2) >= 40]
    assert (full > 0).mean() > 0.95
    assert 1 < over_dispersion(coarse[:200]) < 4  # 20 · 0.1 = 2
    with pytest.raises(PartitionError, match="no coarse labels"):
        divide(CIFAR10, "pam", 500, 0)
    with pytest.raises(PartitionError, match="lower clients or size"):
        divide(CIFAR100, "pam", 501, 0)


def test_dirichlet_per_class_keeps_clients_near_the_mean_and_above_the_minimum() -> None:
    capped = divide(CIFAR10, "dirichlet_per_class(alpha=0.5)", 20, 0).sizes
    free = divide(CIFAR10, "dirichlet_over_clients(alpha=0.5)", 20, 0).sizes
    assert capped.std() < free.std()
    assert min(capped.min(), free.min()) >= 10


def test_a_class_without_samples_comes_after_everybody_is_full() -> None:
    targets = Targets(np.repeat([0, 1], 40), 3)
    assert divide(targets, "dirichlet_per_class(alpha=1e6, minimum=1)", 2, 0).sizes.sum() == 80


def test_fedtorch_shares_are_whole_percents_and_leftovers_are_dropped() -> None:
    counts = _counts(CIFAR10, divide(CIFAR10, "dirichlet_over_clients(alpha=0.5, compat='fedtorch')", 20, 0))
    whole = counts % 50 == 0  # 1 % of 5000; only the client at which a class ends may get another number
    assert (~whole).sum() <= 10
    assert counts.sum() <= 50_000


@pytest.mark.parametrize(
    "partition,clients,advice",
    [
        ("dirichlet_over_clients(alpha=0.01)", 100, "raise alpha"),
        ("dirichlet_per_class(alpha=0.5, minimum=501)", 100, "at most 500"),
        ("dirichlet_over_clients(compat='fedtorc')", 10, "fedtorch"),
        ("dirichlet_equal(delta=-1)", 10, "positive"),
        ("dirichlet_equal(sigma=-1)", 10, "sigma"),
        ("lda_hsu(alpha=-0.5)", 10, "positive"),
        ("iid", 50_001, "resample"),
        ("iid", 0, "at least one"),
        ("central", 5, "clients=1"),
        ("natural", 5, "mnist_writers"),
        ("resample(size=0)", 5, "size=0"),
    ],
)
def test_what_cannot_be_made_is_explained_instead_of_tried_for_ever(partition: str, clients: int, advice: str) -> None:
    with pytest.raises(PartitionError, match=advice):
        divide(CIFAR10, partition, clients, 0)


def test_unknown_options_offer_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="'delta'"):
        divide(CIFAR10, "dirichlet_equal(delt=0.3)", 10, 0)


def test_central_is_one_client_with_everything() -> None:
    assert divide(CIFAR10, "central", 1, 0).sizes.tolist() == [50_000]


def test_natural_takes_the_writers_with_most_samples(tmp_path: Path) -> None:
    write_mnist(tmp_path, writers=True)
    targets = DATASETS["mnist"](tmp_path).targets
    assert targets.writers is not None
    sets = divide(targets, "natural", 4, 0)
    assert sorted(sets.sizes) == [5, 10, 15, 30]
    for client in range(4):
        assert len(np.unique(targets.writers[sets.indices(client)])) == 1
    assert sorted(divide(targets, "natural", 2, 0).sizes) == [15, 30]
    with pytest.raises(PartitionError, match="there are 4 writers"):
        divide(targets, "natural", 5, 0)


def test_resampling_clients_hold_no_sample_twice() -> None:
    sets = divide(CIFAR10, "resample(size=50)", 1_000_000, 0)
    for client in (0, 1, 999_999):
        assert len(np.unique(sets.indices(client))) == 50


def test_tiny_concentrations_neither_fail_nor_hang() -> None:
    rng = np.random.default_rng(0)
    q = softmax(log_dirichlet(rng, np.full((1000, 10), 1e-6)))
    assert np.allclose(q.sum(axis=1), 1)
    assert (q.max(axis=1) > 0.999).mean() > 0.99  # one class each
    assert np.abs(np.bincount(q.argmax(axis=1), minlength=10) - 100).max() < 45  # and any class
    for partition in ("dirichlet_equal(delta=1e-5)", "lda_hsu(alpha=1e-6)"):
        assert (divide(CIFAR10, partition, 100, 0).sizes == 500).all()


def test_dirichlet_moments() -> None:
    concentration = np.array([0.2, 1.0, 3.0])
    q = softmax(log_dirichlet(np.random.default_rng(0), np.tile(concentration, (40_000, 1))))
    mean = concentration / 4.2
    assert np.allclose(q.mean(axis=0), mean, atol=0.01)
    assert np.allclose(q.var(axis=0), mean * (1 - mean) / 5.2, atol=0.005)


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=12, max_size=120),
    clients=st.integers(1, 12),
    seed=st.integers(0, 1000),
    partition=st.sampled_from(
        [
            "iid",
            "dirichlet_equal(0.1)",
            "dirichlet_equal(1.0, sigma=1.0)",
            "lda_hsu(0.05)",
            "lda_hsu(2.0)",
            "dirichlet_per_class(1.0, minimum=1)",
            "dirichlet_over_clients(1.0, minimum=0)",
            "pathological(2)",
        ]
    ),
)
def test_any_labels_are_divided_or_refused(labels: list[int], clients: int, seed: int, partition: str) -> None:
    """Missing classes, lopsided ones, more clients than classes: disjoint sets of the right sizes, or a refusal."""
    targets = Targets(np.array(labels), 5)
    try:
        sets = divide(targets, partition, clients, seed)
    except PartitionError:
        assert "minimum" in partition or "pathological" in partition
        return
    assert len(sets) == clients
    _used_once(sets, len(labels))
    if partition in ("dirichlet_equal(0.1)", "lda_hsu(0.05)", "lda_hsu(2.0)"):
        assert (sets.sizes == len(labels) // clients).all()
    else:
        assert sets.sizes.sum() == len(labels)


def test_every_partition_has_a_docstring_for_the_list() -> None:
    assert all((maker.__doc__ or "").strip() for maker in [*PARTITIONS.values(), *DATASETS.values()])


def test_a_picture_of_the_counts(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    from fedflat.data.picture import partition_figure

    counts = load_federation("digits", "dirichlet_equal(delta=0.3)", clients=20).counts()
    path = partition_figure(counts, tmp_path / "who.png", "digits")
    assert np.asarray(image.open(path)).std() > 5  # something is drawn
    with pytest.raises(InputError, match="two axes"):
        partition_figure(np.zeros(3), tmp_path / "no.png")


# ---- a share of a data set ----


def test_a_share_has_so_many_of_each_class_drawn_by_the_seed_and_judges_by_samples_it_does_not_train_on() -> None:
    whole, fifth = load_federation("digits", clients=4), load_federation("digits(share=0.2)", clients=4)
    assert (fifth.counts().sum(0) == (0.2 * whole.counts().sum(0)).round()).all()
    assert fifth.test is not None and whole.test is not None and len(fifth.test) == len(whole.test)
    other = load_federation("digits(share=0.2)", clients=4, seed=1)
    assert fifth.fingerprint() != other.fingerprint()
    assert fifth.fingerprint() == load_federation("digits(share=0.2)", clients=4).fingerprint()
    judged = load_federation("digits(share=0.2, judge='rest')", clients=4)
    assert judged.counts().tolist() == fifth.counts().tolist()

    def images(samples: Samples) -> set[bytes]:
        return {bytes(image.numpy()) for image in samples.batch(torch.arange(len(samples)))[0]}

    assert judged.test is not None and not images(judged.test) & images(fifth.test)
    assert not images(judged.test) & set().union(*(images(judged.samples(i)) for i in range(4)))


@pytest.mark.parametrize("text", ["share=0", "share=1.5", "share=True", "judge='rest'", "share=0.5, judge='both'"])
def test_a_share_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"share|judge"):
        load_federation(f"digits({text})", clients=4)
