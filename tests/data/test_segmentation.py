"""Segmentation: FedDrive's lists, lazy decoding, masks that follow their images, BiSeNetV2, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fedflat
from fedflat.core import streams
from fedflat.data.image_files import Cache
from fedflat.data.joint import JointPreprocess
from fedflat.data.segmentation import CITYSCAPES, IDDA, IDDA_RAW, read_lists, table_of
from fedflat.errors import DataError, InputError
from fedflat.models import build_model

Image = pytest.importorskip("PIL.Image")
SMALL = "bisenetv2(width=0.25, head=8, aux_head=8, aux={})"


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def tree(root: Path, clients: int = 3, images: int = 2) -> Path:
    """A tiny CamVid: the left half of every image is sky and bright, the right half is road and dark."""
    home, rng = root / "CamVid", np.random.default_rng(0)
    lists: dict[str, dict[str, dict[str, list[str]]]] = {"train": {}, "test": {}}
    users = [
        *((f"c{i}", "train") for i in range(clients)),
        ("test_user_diff_domain", "test"),
        ("test_user_same_domain", "test"),
    ]
    for user, split in users:
        held = lists[split].setdefault(user, {"x": [], "y": []})
        for number in range(images):
            mask = np.zeros((45, 60), np.uint8)
            mask[:, 30:], mask[:5] = 3, 11
            pixels = np.where(mask[..., None] == 0, 200, 40) + rng.integers(0, 20, (45, 60, 3))
            name = f"{user}_{number}.png"
            write(home / split / name, pixels.astype(np.uint8))
            write(home / f"{split}annot" / name, mask)
            held["x"].append(f"{split}/{name}")
            held["y"].append(f"{split}annot/{name}")
    for split, held_by in lists.items():
        path = home / "clients" / "dusk" / "heterogeneous" / split / "clients.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"users": list(held_by), "num_samples": [], "user_data": held_by}))
    return home


def small(**fields: object) -> fedflat.Experiment:
    usual: dict[str, object] = {
        "data": "camvid(height=32, width=64)",
        "model": SMALL.format(True),
        "rounds": 2,
        "lr": 0.05,
    }
    usual |= {"batch_size": 2, "local_epochs": 1, "momentum": 0.9, "participation": "all", "backend": "serial"}
    return fedflat.Experiment(**usual | fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("batchnorm", ["average", "silobn", "silobn_by_domain"])
def test_a_run_measures_seen_and_unseen_domains_apart(tmp_path: Path, batchnorm: str) -> None:
    tree(tmp_path)
    e = small(batchnorm=batchnorm, loss="ohem(share=0.5)", lr_schedule="poly(power=0.9)", method="fedavg+sam")
    run = fedflat.run(e, root=tmp_path, out=tmp_path / "run")
    last = run.metrics[-1]
    assert run.task["lead"] == "miou" and run.task["tests"] == ["unseen"] and 0 <= last["miou"] <= 1
    assert {"unseen_miou", "unseen_accuracy", "iou_sky", "iou_road", "unseen_iou_road"} <= set(last)
    assert last["iou_car"] is None  # it does not occur
    page = run.report(tmp_path / "page.html").read_text()
    assert "mIoU on the unseen test set" in page


@pytest.mark.parametrize("batchnorm", ["average", "recompute", "silobn_by_domain"])
def test_a_damaged_image_leaves_its_client_out_and_names_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batchnorm: str
) -> None:
    home = tree(tmp_path, clients=4)
    broken = home / "train" / "c3_1.png"
    broken.write_bytes(broken.read_bytes()[:200])
    run = fedflat.run(small(rounds=1, batchnorm=batchnorm), root=tmp_path)
    assert run.metrics[-1]["clients"] == 3 and run.metrics[-1]["left_out"] == 1
    assert "c3_1.png cannot be decoded" in caplog.text and run.metrics[-1]["miou"] >= 0


def test_lists_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no list of clients"):
        fedflat.load_federation("camvid", root=tmp_path)
    home = tree(tmp_path)
    write(home / "trainannot" / "c0_0.png", np.zeros((9, 9), np.uint8))
    with pytest.raises(DataError, match="9×9, but its image is 60×45"):
        fedflat.load_federation("camvid", root=tmp_path).samples(0).batch(torch.tensor([0]))
    (home / "train" / "c2_0.png").unlink()
    with pytest.raises(DataError, match=r"1 of 20 files of the lists are missing, first .*c2_0.png"):
        fedflat.load_federation("camvid", root=tmp_path)


def test_values_of_masks_become_classes() -> None:
    idda = table_of(IDDA_RAW)
    assert (idda[0], idda[1], idda[6], idda[20], idda[21], idda[255]) == (-100, 2, 0, 10, -100, -100)
    assert len(IDDA) == 16 and len(CITYSCAPES) == 19 and IDDA[15] == "bicycle"


def test_masks_follow_their_images() -> None:
    """A mask that is the image itself stays the image, whatever is drawn; what comes from outside is ignored."""
    y = torch.zeros(64, 24, 32, dtype=torch.int64)
    y[:, 6:18, 4:12] = 100
    x = y[:, None].expand(-1, 3, -1, -1).to(torch.uint8)
    for scales in ((1.0, 1.0), (0.5, 2.0)):
        joint = JointPreprocess(flip=0.5, scales=scales)
        changed, labels = joint.pair(x, y, streams.stream(0, "test"))
        inside = labels != -100
        sharp = (changed[:, 0] == 0) | (changed[:, 0] == 100)  # not on the edges, which are interpolated
        assert torch.equal(changed[:, 0].long()[inside & sharp], labels[inside & sharp])
        assert len({labels[i].numpy().tobytes() for i in range(64)}) > (1 if scales[0] == 1.0 else 50)
        assert bool(inside.all()) == (scales[0] == 1.0)
    still = JointPreprocess(jitter=0.3).pair(x, y, streams.stream(0, "test"))
    assert torch.equal(still[1], y) and not torch.equal(still[0], x)


def test_a_crop_of_an_image_twice_as_large() -> None:
    """At scale 0.5 the crop shows all of the image: a pixel is the mean of four. At scale 2: a sixteenth."""
    x = torch.randint(256, (5, 3, 12, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = x[:, 0].long()
    small, labels = JointPreprocess(scales=(0.5, 0.5), times=2).pair(x, y, streams.stream(0, "test"))
    assert (small.float() - torch.nn.functional.avg_pool2d(x.float(), 2)).abs().max() <= 0.5
    quarters = y.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3)
    assert labels.shape == (5, 6, 8) and (quarters == labels[..., None]).any(dim=3).all()
    across = torch.arange(128).expand(1, 96, 128)
    _, shown = JointPreprocess(scales=(2.0, 2.0), times=2).pair(
        across[:, None].to(torch.uint8), across, streams.stream(1, "test")
    )
    assert shown.shape == (1, 48, 64) and int(shown.max() - shown.min()) in (31, 32)


@pytest.mark.parametrize(
    ("data", "scales", "jitter", "size"),
    [("cityscapes", (0.5, 1.5), 0.4, (1024, 2048)), ("idda", (0.5, 2.0), 0.0, (1024, 1856))],
)
def test_feddrives_augmentation_is_the_default(
    tmp_path: Path, data: str, scales: tuple[float, float], jitter: float, size: tuple[int, int]
) -> None:
    kinds = {"cityscapes": ("cityscapes/leftImg8bit", "cityscapes/gtFine", ""), "idda": ("IDDA", "IDDA", "country")}
    images, masks, setting = kinds[data]
    pixels = np.random.default_rng(0).integers(0, 34, (45, 80), dtype=np.uint8)
    for split, user in (("train", "a"), ("test", "test_user")):
        held = {"x": [f"city/{user}.png"], "y": [f"city/{user}_mask.png"]}
        write(tmp_path / images / held["x"][0], np.stack([pixels] * 3, 2))
        write(tmp_path / masks / held["y"][0], pixels)
        folder = tmp_path / "FedDrive" / "data" / data / "data" / "heterogeneous" / setting / split
        folder.mkdir(parents=True)
        (folder / "all.json").write_text(json.dumps({"users": [user], "num_samples": [1], "user_data": {user: held}}))
    fed = fedflat.load_federation(data, root=tmp_path)
    change = fed.preprocess
    assert isinstance(change, JointPreprocess) and (change.scales, change.jitter, change.flip) == (scales, jitter, 0.5)
    assert fed.input_shape == (3, *size)
    x, y = change.pair(*fed.samples(0).batch(torch.arange(1)), streams.stream(0, "test"))
    assert x.shape[2:] == y.shape[1:] == (size[0] // 2, size[1] // 2)
    other = fedflat.load_federation(f"{data}(scales=(1.0, 1.2), jitter=0.1, height=32, width=64)", root=tmp_path)
    assert other.preprocess.scales == (1.0, 1.2) and other.preprocess.jitter == 0.1  # type: ignore[attr-defined]
    for wrong in ("scales=(2.0, 1.0)", "scales=(1.0,)", "scales=(0.0, 1.0)", "jitter=1.5"):
        with pytest.raises(InputError, match=wrong.partition("=")[0]):
            fedflat.load_federation(f"{data}({wrong})", root=tmp_path)


def test_decoded_images_are_kept_up_to_a_limit() -> None:
    cache, reads = Cache(limit=2500), list[int]()

    def read(key: int) -> np.ndarray:
        reads.append(key)
        return np.zeros(1000, np.uint8)

    for key in (1, 2, 1, 3, 1, 2):  # 3 pushes 2 out, which was asked for longest ago
        cache.get(key, lambda key=key: read(key))  # type: ignore[misc]
        assert cache.bytes <= 2500
    assert reads == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("options", "classes", "parameters"),
    [
        ("", 19, 8_196_416),
        ("aux=False", 19, 4_585_552),
        ("", 16, 7_473_296),
        ("aux=False", 16, 4_388_752),
        ("", 11, 6_268_096),
        ("width=0.5, head=128, aux_head=32", 11, 1_247_352),
        ("width=0.5, head=128, aux=False", 11, 718_856),
        ("width=0.25, head=64, aux_head=16", 11, 473_268),
    ],
)
def test_parameters_of_bisenetv2(options: str, classes: int, parameters: int) -> None:
    model = build_model(f"bisenetv2({options})", (3, 64, 64), classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_auxiliary_heads_serve_training_only() -> None:
    model, x = build_model(SMALL.format(True), (3, 32, 64), 5), torch.randn(2, 3, 32, 64)
    assert [tuple(out.shape) for out in model(x)] == [(2, 5, 32, 64)] * 5
    assert model.eval()(x).shape == (2, 5, 32, 64)
    with pytest.raises(InputError, match="multiples of 32"):
        build_model("bisenetv2", (3, 33, 64), 5)


def test_curvature_of_a_segmentation_network() -> None:
    model = build_model("bisenetv2(width=0.05, head=4, aux=False)", (3, 32, 32), 3).eval()
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (2, 32, 32), generator=draw)
    y[0, :8] = -100
    found = fedflat.analysis.curvature(model, (torch.randn(2, 3, 32, 32, generator=draw), y), k=1, trace=False)
    assert np.isfinite(found.eigenvalues[0])


def test_landscape_of_a_segmentation_network() -> None:
    """The centre is the loss itself: the mean over the pixels that have a label."""
    model = build_model("bisenetv2(width=0.05, head=4, aux=False)", (3, 32, 32), 3).eval()
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 32, 32, generator=draw), torch.randint(3, (2, 32, 32), generator=draw)
    y[0, :8] = -100
    found = fedflat.analysis.landscape_1d(model, (x, y), points=3, radius=0.1)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x), y).item()
    assert np.asarray(found.loss)[1] == pytest.approx(loss, rel=1e-4) and np.isfinite(np.asarray(found.loss)).all()


def test_files_of_a_folder_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 0):
        held = {f"u{number}": {"x": ["a"] * (number + 1), "y": ["b"] * (number + 1)}}
        content = {"users": list(held), "num_samples": [99], "user_data": held}
        (tmp_path / f"all_data_{number}.json").write_text(json.dumps(content))
    assert [(user, len(x)) for user, (x, _) in read_lists(tmp_path).items()] == [("u0", 1), ("u2", 3), ("u10", 11)]
