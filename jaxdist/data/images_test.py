import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.data import Dataset, dataset, dataset_of, microbatch_order

MODEL = {"family": "resnet", "channels": 1, "image": 5, "classes": 4}
RANDOM = np.random.default_rng(0)


def opened(path: Path | str, model: dict[str, Any] = MODEL, **data: Any) -> Dataset:
    return dataset_of(Experiment.parse({"model": model, "data": {"path": str(path), **data}}, source="test"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Twenty images, each filled with its number, in the order of their classes."""
    images = np.broadcast_to(np.arange(20, dtype=np.uint8)[:, None, None], (20, 5, 5))
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(20) // 5)
    return tmp_path / "images.npz"


def test_images_are_split_and_visited_once(file: Path) -> None:
    found = opened(file, validation=0.2)
    assert (found.sequences("train"), found.sequences("validation")) == (16, 4)
    numbers = {}
    for split, steps in (("train", 4), ("validation", 1)):
        batches = [found.batch(step, 4, 0, split=split) for step in range(1, steps + 1)]  # type: ignore[arg-type]
        images = np.concatenate([batch.images for batch in batches])
        numbers[split] = np.rint(images[:, 0, 0, 0] * 255).astype(int)
        assert images.shape == (4 * steps, 5, 5, 1) and images.dtype == np.float32
        assert np.array_equal(np.concatenate([batch.targets for batch in batches]), numbers[split] // 5)
    assert sorted([*numbers["train"], *numbers["validation"]]) == list(range(20))
    assert len({*(numbers["validation"] // 5)}) > 1, "files are in the order of classes, and a tail would have one"
    rows = np.array([3, 1])
    assert np.array_equal(found.batch(2, 4, 0, rows=rows).images, found.batch(2, 4, 0).images[rows])


def test_pixels_are_normalized(tmp_path: Path) -> None:
    images = RANDOM.integers(0, 256, (3, 5, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(3, int))
    found = opened(tmp_path / "a.npz", MODEL | {"channels": 3}, validation=0, shuffle=False, pixel_mean="0.1,0.2,0.3")
    order = found.batch(1, 3, 0).images + np.array([0.1, 0.2, 0.3], np.float32)
    assert np.allclose(sorted(order.sum((1, 2, 3))), sorted(images.sum((1, 2, 3)) / 255))


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for label, (name, size) in enumerate({"cat": (10, 8), "dog": (8, 8)}.items()):
        (tmp_path / name).mkdir()
        image.new("L", size, 100 + label).save(tmp_path / name / "1.png")
    found = opened(tmp_path, validation=0, shuffle=False).batch(1, 2, 0)
    assert found.images.shape == (2, 5, 5, 1)
    assert np.allclose(found.images[:, 2, 2, 0] * 255, 100 + found.targets)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((3, 6, 6)), "labels": np.zeros(3, int)}, r"images are \[6, 6, 1\], where model.image = 5"),
        (
            {"images": np.zeros((3, 5, 5)), "labels": np.full(3, 7)},
            "labels from 7 to 7, where model.classes = 4; set model.classes = 8",
        ),
        (
            {"images": np.zeros((3, 5, 5)), "labels": np.array([0, -1, 1])},
            "labels from -1 to 1, where model.classes = 4; number the classes from 0",
        ),
        (
            {"images": np.zeros((3, 5, 6)), "labels": np.zeros(3, int)},
            r"images are \[5, 6, 1\], .*; give square images",
        ),
        (
            {"images": np.zeros((3, 5, 5)), "labels": np.zeros(2, int)},
            r"labels int64 \[2\]; give images \[N, Y, X, C\]",
        ),
        ({"images": np.zeros((3, 5, 5))}, "labels is not a file in the archive'; write it with numpy.savez"),
    ],
)
def test_wrong_images(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "a.npz")


def test_fields_that_a_message_sets_are_right(tmp_path: Path) -> None:
    """Followed literally, one after another."""
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 6, 6, 3), np.uint8), labels=np.array([7, 0, 3, 2]))
    model = dict(MODEL)
    for _ in range(2):
        with pytest.raises(ConfigError) as raised:
            opened(tmp_path / "a.npz", model)
        model |= {
            name: int(value) for name, value in re.findall(r"model\.(\w+) = (\d+)", str(raised.value).split("; ")[1])
        }
    assert opened(tmp_path / "a.npz", model).sequences("train") == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pixels_that_are_not_finite_are_named(tmp_path: Path, value: float) -> None:
    images = RANDOM.random((6, 5, 5, 1), dtype=np.float32)
    images[4, 2, 3, 0] = images[5, 0, 0, 0] = value
    np.savez(tmp_path / "a.npz", images=images, labels=np.zeros(6, int))
    message = rf"a\.npz': images\[4\] is {value} at \[2, 3, 0\], as are 2 of 6 images not finite somewhere; correct"
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", images=images[:4], labels=np.zeros(4, int))
    assert opened(tmp_path / "a.npz").sequences("train") == 3, "those left out"


def both(found: Dataset) -> list[tuple[list[int], list[int]]]:
    """Middle pixels and classes of each split, in the order of the pixels."""
    result = []
    for split in ("train", "validation"):
        batch = found.batch(1, found.sequences(split), 0, split=split)  # type: ignore[arg-type]
        pixels = np.rint(batch.images[:, 2, 2, 0] * 255).astype(int)
        order = np.argsort(pixels)
        result.append((pixels[order].tolist(), batch.targets[order].tolist()))
    return result


def test_splits_of_arrays(tmp_path: Path) -> None:
    for first, name in ((0, "train.npz"), (10, "val.npz"), (20, "test.npz")):
        images = np.broadcast_to(np.arange(first, first + 8, dtype=np.uint8)[:, None, None], (8, 5, 5))
        np.savez(tmp_path / name, images=images, labels=np.arange(8) // 2)
    wanted = [([*range(8)], [0, 0, 1, 1, 2, 2, 3, 3]), ([*range(10, 18)], [0, 0, 1, 1, 2, 2, 3, 3])]
    for path in (tmp_path / "train.npz", tmp_path):
        assert both(opened(path)) == wanted
    assert "train.npz, val.npz" in opened(tmp_path).rows["images"]
    assert opened(tmp_path / "train.npz", split="share", validation=0.25).sequences("train") == 6
    assert opened(tmp_path / "val.npz", validation=0).sequences("train") == 8
    np.savez(tmp_path / "val.npz", images=np.zeros((8, 5, 5)), labels=np.zeros(8, int))
    with pytest.raises(ConfigError, match=r"train\.npz, val\.npz differ \(uint8 \[8, 5, 5\], float64 \[8, 5, 5\]\)"):
        opened(tmp_path)


def test_splits_of_folders(tmp_path: Path) -> None:
    """ImageNet's layout: two folders of classes are not taken for two classes."""
    image = pytest.importorskip("PIL.Image")
    number = 0
    for split, classes in (("train", ("ant", "bee", "cat")), ("val", ("ant", "cat"))):
        for name in classes:
            for count in range(2):
                number += 10
                (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
                image.new("L", (5, 5), number).save(tmp_path / split / name / f"{count}.png")
    (tmp_path / "train" / ".ipynb_checkpoints").mkdir()
    found = opened(tmp_path)
    assert both(found) == [([10, 20, 30, 40, 50, 60], [0, 0, 1, 1, 2, 2]), ([70, 80, 90, 100], [0, 0, 2, 2])]
    assert "training 6, validation 4" in found.rows["splits"]
    assert opened(tmp_path / "train", validation=0).sequences("train") == 6
    (tmp_path / "val" / "dog").mkdir()
    with pytest.raises(ConfigError, match=r"val': classes dog are not among those of train; add their pictures there"):
        opened(tmp_path)
    (tmp_path / "extra").mkdir()
    with pytest.raises(
        ConfigError, match=r"train and val are splits, and extra next to them are not; .* data\.split = share"
    ):
        opened(tmp_path)
    assert opened(tmp_path, split="share", validation=0).sequences("train") == 10, "three classes"


@pytest.mark.long
def test_images_are_identified_by_their_content(tmp_path: Path) -> None:
    """Two pixels or two labels swapped, with the size unchanged; an earlier version's fingerprint is accepted."""
    images, labels = RANDOM.integers(0, 256, (8, 5, 5), dtype=np.uint8), np.arange(8) // 2
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    before, size = opened(tmp_path / "a.npz").fingerprint, (tmp_path / "a.npz").stat().st_size
    recorded = hashlib.blake2b(json.dumps(("a.npz", size)).encode(), digest_size=16)
    assert opened(tmp_path / "a.npz", fingerprint=recorded.hexdigest()).fingerprint == before
    for other, others in ((images[::-1], labels), (images, labels[::-1])):
        np.savez(tmp_path / "a.npz", images=other, labels=others)
        assert (tmp_path / "a.npz").stat().st_size == size
        with pytest.raises(ConfigError, match=rf"'{before}': the data at .* are others"):
            opened(tmp_path / "a.npz", fingerprint=before)
    digits = opened("", {"family": "resnet", "channels": 1, "image": 8, "classes": 10}).rows["images"]
    assert digits == "1,797 of 8×8×1, float32 from 0 to 1, unscaled; scikit-learn's digits"


def test_data_of_the_other_kind(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("tokens")
    with pytest.raises(ConfigError, match=r"text.txt': model.family = resnet takes images; give .npz"):
        opened(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match=r".npz holds images, and this model.family takes tokens; give text"):
        opened(file, {"family": "llama"})


def test_a_microbatch_has_the_same_rows_on_any_mesh() -> None:
    for ways in (1, 2, 4):
        held = microbatch_order(24, ways, 3).reshape(ways, 3, -1)
        assert [sorted(held[:, i].ravel()) for i in range(3)] == [list(range(8 * i, 8 * i + 8)) for i in range(3)]


def test_counting_images_makes_no_order(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image counts, so a resume after many epochs starts as fast as the run."""
    found = opened(file, validation=0.2)
    monkeypatch.setattr(dataset, "permute", lambda *_: pytest.fail("an order is made"))
    assert found.target_tokens(0, 10**6, 4, 0) == 4 * 10**6
    assert found.target_tokens(3, 5, 4, 0) == 8
