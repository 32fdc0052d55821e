"""ResNet: JAX against torch on each mesh, and both against one device, in float64: batch norms see the same images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from parity_tests.conftest import FIGURES, STEPS, run
from parity_tests.proof import bisect
from parity_tests.runs.cases import IMAGES, write_images
from parity_tests.runs.run import JAX, Run
from parity_tests.suite.parity_test import Record, measured
from parity_tests.validation.seeded import misplaced, worst

pytestmark = pytest.mark.long

SIDES = ("jaxdist", "torch_ref")
ACCUMULATION = {"train.accumulation": 2}
RECORD = {"record.steps": "1,3", "record.tensors": "all"}
QUICK: dict[str, Any] = {"mesh": "2x1", **ACCUMULATION, **RECORD}
SLOW: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": "4x1", "strategy": "ddp"},
    "ddp, accumulation": {"mesh": "4x1", "strategy": "ddp", **ACCUMULATION},
    "zero1": {"mesh": "4x1", "strategy": "zero1"},
    "zero1, accumulation": {"mesh": "2x1", "strategy": "zero1", **ACCUMULATION},
    "zero2, accumulation": {"mesh": "4x1", "strategy": "zero2", **ACCUMULATION},
    "fsdp": {"mesh": "4x1"},
    "fsdp, accumulation": {"mesh": "4x1", **ACCUMULATION},
    "fsdp, kept": {"mesh": "4x1", "parallel.reshard_after_forward": False, **ACCUMULATION},
    "fsdp, reduced once": {"mesh": "4x1", "parallel.reduce": "step", **ACCUMULATION},
    "hybrid, basic": {"mesh": "data=2,fsdp=2", "model.block": "basic", "optimizer.name": "sgd"},
    "skipped": {"mesh": "2x1", "train.skip": "3,4,9"},
}
Imaged = Callable[..., Run]


@pytest.fixture(scope="module")
def imaged(tmp_path_factory: pytest.TempPathFactory) -> Imaged:
    """imaged(side, settings) -> Run of 20 steps from a common start, made once per settings."""
    from jaxdist.convert.__main__ import main as convert

    folder, known = tmp_path_factory.mktemp("images"), dict[Any, Run]()
    write_images(folder / "images.npz")
    values = {
        "model": IMAGES,
        "data": {"path": str(folder / "images.npz"), "pixel_mean": [0.1, 0.2, 0.3]},
        "train": {"steps": STEPS, "batch": 16, "validation_batches": 0},
        "optimizer": {"learning_rate": 0.01, "warmup": 3, "clip": 0.5},
        "precision": {"policy": "fp64"},
    }
    (folder / "resnet.toml").write_text(tomli_w.dumps(values), encoding="utf-8")

    def start(block: str) -> Path:
        path = folder / f"start-{block}"
        if not path.exists():
            settings = {"steps": 0, "precision": "fp32", "model.block": block}
            seed = run(JAX, folder / f"seed-{block}", folder / "resnet.toml", settings)
            convert([str(seed.path), str(path), "--to", "hf"])
        return path

    def get(side: str, settings: dict[str, Any]) -> Run:
        key = (side, *sorted(settings.items()))
        if key not in known:
            init = str(start(settings.get("model.block", "bottleneck")))
            path = folder / f"{len(known)}"
            known[key] = run(side, path, folder / "resnet.toml", settings, "--init", init)
        return known[key]

    return get


def alone(settings: dict[str, Any]) -> dict[str, Any]:
    """The same on one device."""
    of_meshes = ("strategy", "parallel.reshard_after_forward", "parallel.reduce")
    return {name: value for name, value in settings.items() if name not in of_meshes} | {"mesh": "1x1"}


def check(imaged: Imaged, record: Record, name: str, settings: dict[str, Any]) -> None:
    jax, torch = (imaged(side, settings) for side in SIDES)
    one = imaged("torch_ref", alone(settings))
    assert len(jax.metrics) == STEPS and any(tensor.endswith("running_var") for tensor in jax.states)
    if "optimizer.name" not in settings:
        record(FIGURES, {"model": "resnet", "mesh": name, "variant": "", **measured(jax, torch)})
    assert worst(jax, torch) <= 1 and worst(jax, one) <= 1 and worst(torch, one) <= 1
    for made in (jax, torch):
        assert misplaced(made) == []


def test_float64(imaged: Imaged, record_property: Record) -> None:
    jax, torch = (imaged(side, QUICK) for side in SIDES)
    record_property(FIGURES, {"model": "resnet", "mesh": "2x1, accumulation", "variant": "", **measured(jax, torch)})
    assert worst(jax, torch) <= 1 and misplaced(jax) == misplaced(torch) == []
    for step in (1, 3):  # including the statistics of each microbatch
        errors = bisect.errors(jax, torch, step)
        assert any(name.startswith("activation_gradient/") for name in errors) and max(errors.values()) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_float64_grid(imaged: Imaged, record_property: Record, name: str) -> None:
    check(imaged, record_property, name, SLOW[name])


@pytest.mark.slow
def test_statistics_of_each_replica(imaged: Imaged) -> None:
    """Differs from global statistics, like DDP without SyncBatchNorm, and is the same on both sides."""
    settings = {"mesh": "2x1", "strategy": "ddp", "parallel.batch_norm": "replica", **ACCUMULATION}
    jax, torch = (imaged(side, settings) for side in SIDES)
    assert worst(jax, torch) <= 1
    assert worst(jax, imaged("jaxdist", settings | {"parallel.batch_norm": "global"})) > 1e6
