"""Runs on a full or unwritable disk: a small tmpfs, where this process may mount one."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxdist.conftest import often, slow
from jaxdist.runs.checkpoints import UNFINISHED, damage, steps_in
from jaxdist.runs.folder import read_metrics
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import SIDES, Run, command
from parity_tests.suite.kill_test import TINY

pytestmark = pytest.mark.long

STEPS = 20
FIELDS = [*TINY, "--checkpoint.every", "2", "--checkpoint.keep", "0", "--steps", str(STEPS)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB: room for a few checkpoints of FIELDS."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no tmpfs can be mounted here: a full disk is not tried")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def train(side: str, path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return command(TRAIN[side], *FIELDS, "--output", str(path), *arguments)


def assert_complete(path: Path) -> list[int]:
    """Steps of a run's checkpoints; asserts that none is damaged and that nothing is unfinished."""
    steps = steps_in(path / "checkpoints")
    assert [damage(path / "checkpoints" / str(step)) for step in steps] == [None] * len(steps)
    assert not any(UNFINISHED in entry.name for entry in (path / "checkpoints").iterdir())
    return steps


@pytest.mark.parametrize("side", slow(SIDES))
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_room(side: str, disk: Path, tmp_path: Path) -> None:
    path, straight = disk / "run", tmp_path / "straight"
    done = train(side, path)
    (message,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert message.startswith("error: the checkpoint of step") and "could not be written to" in message
    steps = assert_complete(path)
    assert (
        steps and f"the newest checkpoint is that of step {steps[-1]}: make room, and continue by --resume" in message
    )
    remount(disk, "size=60m")
    assert train(side, path, "--resume").returncode == 0
    assert train(side, straight).returncode == 0
    for name, array in Run(side, straight).states.items():
        np.testing.assert_array_equal(Run(side, path).states[name], array, err_msg=name)
    assert [record["step"] for record in read_metrics(path)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("side", often(SIDES, ["torch_ref"]))
def test_a_run_may_go_on_without_its_checkpoints(side: str, disk: Path) -> None:
    go_on = ["--checkpoint.failure", "go on"]
    done = train(side, disk / "run", *go_on)
    steps = assert_complete(disk / "run")
    assert steps[0] == 2 and steps[-1] < STEPS
    missing = [step for step in range(2, STEPS + 1, 2) if step not in steps]
    reason = os.strerror(errno.ENOSPC)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"error: the weights of step {STEPS} are not saved: {reason}; the newest checkpoint is that of step "
        f"{steps[-1]}: make room, and continue by --resume"
    ]
    for step in missing:
        assert done.stdout.count(f"the checkpoint of step {step} could not be written") == 1
    assert f"saved in {disk}/run up to step {steps[-1]} only" in done.stdout
    summary = json.loads((disk / "run" / "summary.json").read_text())
    assert summary["checkpoints"] == {"newest": steps[-1], "failed": {str(step): reason for step in missing}}
    assert [record["step"] for record in read_metrics(disk / "run")] == list(range(1, STEPS + 1))
    remount(disk, "size=60m")
    again = train(side, disk / "run", *go_on, "--resume")
    assert again.returncode == 0 and f"saved in {disk}/run\n" in again.stdout, again.stderr
    assert assert_complete(disk / "run")[-1] == STEPS
    assert json.loads((disk / "run" / "summary.json").read_text())["checkpoints"] == {"newest": STEPS, "failed": {}}


@pytest.mark.parametrize("side", SIDES)
def test_a_disk_that_takes_no_writes(side: str, disk: Path) -> None:
    remount(disk, "ro")
    done = train(side, disk / "run")
    assert done.returncode == 2 and done.stderr.startswith("error: --output"), done.stderr
    assert "cannot be written to" in done.stderr
