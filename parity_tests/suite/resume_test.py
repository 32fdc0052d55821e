"""`--resume DIR` alone, and with another accumulation of the same batch, continues the run unchanged."""

import shutil
from pathlib import Path

import pytest

from jaxdist.conftest import often
from jaxdist.runs.folder import read_metrics
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import SIDES, command
from parity_tests.suite.kill_test import TINY

pytestmark = pytest.mark.long


@pytest.mark.parametrize("side", often(SIDES, ["jaxdist"]))
def test_a_run_goes_on_by_its_own_config(side: str, tmp_path: Path) -> None:
    straight, again = tmp_path / "straight", tmp_path / "again"
    fields = ["--precision", "fp64", "--checkpoint.every", "2", "--steps", "4", "--optimizer.learning_rate", "0.02"]
    assert command(TRAIN[side], *TINY, *fields, "--output", str(straight)).returncode == 0
    shutil.copytree(straight, again)
    shutil.rmtree(again / "checkpoints" / "4")
    done = command(TRAIN[side], "--resume", str(again), "--train.accumulation", "4", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    losses = [[record["loss"] for record in read_metrics(path)] for path in (straight, again)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert (again / "checkpoints" / "4").is_dir()
