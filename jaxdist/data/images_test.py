from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.data import Dataset, dataset_of, dealt

MODEL = {"family": "resnet", "channels": 1, "image": 5, "classes": 4}
RANDOM = np.random.default_rng(0)


def opened(path: Path, model: dict[str, Any] = MODEL, **data: Any) -> Dataset:
    return dataset_of(Experiment.parse({"model": model, "data": {"path": str(path), **data}}, source="test"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Twenty images, each of its own number, in the order of their classes."""
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
    ("arrays", "told"),
    [
        ({"images": np.zeros((3, 6, 6)), "labels": np.zeros(3, int)}, r"images are \[6, 6, 1\], where model.image = 5"),
        (
            {"images": np.zeros((3, 5, 5)), "labels": np.full(3, 7)},
            "labels from 7 to 7, where model.classes = 4; give 8",
        ),
        (
            {"images": np.zeros((3, 5, 5)), "labels": np.zeros(2, int)},
            r"labels int64 \[2\]; give images \[N, Y, X, C\]",
        ),
        ({"images": np.zeros((3, 5, 5))}, "labels is not a file in the archive'; write it with numpy.savez"),
    ],
)
def test_wrong_images(tmp_path: Path, arrays: dict[str, np.ndarray], told: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=told):
        opened(tmp_path / "a.npz")


def test_data_of_the_other_kind(file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("tokens")
    with pytest.raises(ConfigError, match=r"text.txt': model.family = resnet takes images; give .npz"):
        opened(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match=r".npz holds images, and this model.family takes tokens; give text"):
        opened(file, {"family": "llama"})


def test_a_microbatch_has_the_same_rows_on_any_mesh() -> None:
    for ways in (1, 2, 4):
        held = dealt(24, ways, 3).reshape(ways, 3, -1)
        assert [sorted(held[:, i].ravel()) for i in range(3)] == [list(range(8 * i, 8 * i + 8)) for i in range(3)]
