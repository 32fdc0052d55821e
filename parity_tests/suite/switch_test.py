"""A run that switches its backend twice, through the converter, equals the run that never did."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxdist.convert.kinds import dcp_files, orbax_files
from jaxdist.convert.stream import Conversion
from jaxdist.formats.tables import LAYERS
from jaxdist.runs.folder import read_metrics
from parity_tests.runs.compare import relative
from parity_tests.runs.run import Run, command

pytestmark = pytest.mark.long

MODEL = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "4", "--model.head_dim", "8",
    "--model.hidden", "48", "--model.positions", "64", "--data.sequence", "32", "--train.batch", "8",
    "--train.validation_batches", "0", "--optimizer.warmup", "3", "--optimizer.decay_steps", "12",
    "--precision", "fp64", "--device", "cpu",
]  # fmt: skip
BOUND = 1e-12


def train(side: str, folder: Path, steps: int, *arguments: str) -> None:
    done = command(f"{side}.train", *MODEL, *arguments, "--steps", str(steps), "--output", str(folder))
    assert done.returncode == 0, done.stderr


def convert(source: Path, target: Path, kind: str) -> None:
    done = command("jaxdist.convert", str(source), str(target), "--to", kind)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve uninterrupted steps of torch under FSDP; keeps the checkpoint after four."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train("torch_ref", folder, 12, "--mesh", "2x1", "--checkpoint.every", "4", "--checkpoint.keep", "0")
    return folder


def apart(folder: Path, straight: Path) -> float:
    """Largest relative difference of a loss from the straight run's; every step must occur once."""
    ours, right = (read_metrics(path) for path in (folder, straight))
    assert [record["step"] for record in ours] == [record["step"] for record in right] == list(range(1, 13))
    return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(ours, right, strict=True))


def switched(straight: Path, folder: Path) -> Path:
    """Steps 1 to 4 in torch under FSDP, 5 to 8 in JAX on 2x4, 9 to 12 in torch under DDP."""
    convert(straight / "checkpoints" / "4", folder / "jax", "orbax")
    train("jaxdist", folder / "jax", 8, "--mesh", "2x4", "--resume")
    convert(folder / "jax", folder / "torch", "dcp")
    train("torch_ref", folder / "torch", 12, "--mesh", "2x1", "--strategy", "ddp", "--resume")
    return folder / "torch"


@pytest.mark.slow
def test_a_run_that_switches_twice_is_the_run_that_never_did(straight: Path, tmp_path: Path) -> None:
    folder = switched(straight, tmp_path)
    assert apart(folder, straight) < BOUND
    ours, right = (Run("torch_ref", path).states for path in (folder, straight))
    assert ours.keys() == right.keys()
    assert max(relative(ours[name], right[name]) for name in ours) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["moments", "count"])
def test_state_lost_on_the_way_is_found(lost: str, straight: Path, tmp_path: Path) -> None:
    content = dcp_files.read_content(straight / "checkpoints" / "4")
    nothing = {
        name: replace(leaf, read=partial(np.zeros, leaf.shape, leaf.dtype))
        for name, leaf in content.groups["exp_avg"].items()
    }
    if lost == "count":
        content = replace(content, updates=0)
    else:
        content = replace(content, groups={**content.groups, "exp_avg": nothing})
    orbax_files.write(tmp_path / "jax", Conversion(content, LAYERS))
    train("jaxdist", tmp_path / "jax", 12, "--mesh", "2x4", "--resume")
    assert apart(tmp_path / "jax", straight) > 1e-6
