"""Runs killed at random moments, half of them while a checkpoint is written, and resumed each time."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxdist.conftest import often
from jaxdist.runs.checkpoints import UNFINISHED
from jaxdist.runs.folder import read_metrics
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import SIDES, Run, environment

pytestmark = pytest.mark.long

TINY = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "2", "--model.head_dim", "8",
    "--model.hidden", "48", "--data.sequence", "16", "--train.batch", "8", "--train.validation_batches", "0",
    "--optimizer.warmup", "2", "--optimizer.decay_steps", "200", "--device", "cpu", "--mesh", "2x1",
    "--checkpoint.every", "7", "--checkpoint.keep", "2",
]  # fmt: skip
ENDLESS = 10**6
# Event before a kill -> how often, of ten, and at most how many seconds later. The first step takes 5 to 10.
MOMENTS = {"save": (5, 0.02), "step": (3, 0.4), "start": (2, 10.0)}


def process(side: str, path: Path, steps: int) -> "subprocess.Popen[str]":
    """Start a run of `steps`, in a process group of its own; it starts or resumes."""
    line = [sys.executable, "-m", TRAIN[side], *TINY, "--steps", str(steps), "--output", str(path), "--resume"]
    return subprocess.Popen(
        line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment()
    )


def finished(side: str, path: Path, steps: int) -> Run:
    running = process(side, path, steps)
    _, output = running.communicate(timeout=300)
    assert running.returncode == 0, output
    return Run(side, path)


def logged(path: Path) -> int:
    """Last step in metrics.jsonl."""
    records = read_metrics(path)
    return records[-1]["step"] if records else 0


def moments(seed: int) -> Iterator[tuple[str, float]]:
    """Endless pairs: an event to wait for, and seconds to wait after it."""
    chance = random.Random(seed)
    while True:
        (moment,) = chance.choices(list(MOMENTS), [often for often, _ in MOMENTS.values()])
        yield moment, chance.uniform(0, MOMENTS[moment][1])


def wait_for(moment: str, running: "subprocess.Popen[str]", path: Path) -> None:
    """Return once the run made a new step, and is writing a checkpoint unless `moment` is a step."""
    before, deadline = None, time.monotonic() + 120
    while True:
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline
        writing = any(UNFINISHED in entry.name for entry in (path / "checkpoints").glob("*"))
        step = logged(path) if (path / "config.toml").exists() else 0
        before = step if before is None else min(before, step)  # a resume first goes back to the last checkpoint
        if step > before and (writing or moment == "step"):
            return
        time.sleep(0.001)


def survive(tmp_path: Path, side: str, kills: int) -> None:
    """No more than the steps since the last checkpoint is lost; weights, moments and metrics end equal to the bit."""
    path = tmp_path / "killed"
    for _, (moment, seconds) in zip(range(kills), moments(kills), strict=False):
        running = process(side, path, ENDLESS)
        if moment != "start":
            wait_for(moment, running, path)
        time.sleep(seconds)
        assert running.poll() is None, running.communicate()[1]
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    last = logged(path) + 10
    killed, straight = finished(side, path, last), finished(side, tmp_path / "straight", last)
    for name, array in straight.states.items():
        np.testing.assert_array_equal(killed.states[name], array, err_msg=name)
    timeless = [[{k: v for k, v in r.items() if "second" not in k} for r in run.metrics] for run in (killed, straight)]
    assert timeless[0] == timeless[1] and [record["step"] for record in timeless[0]] == list(range(1, last + 1))
    assert not any(UNFINISHED in entry.name for entry in (path / "checkpoints").iterdir())


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_survives_being_killed_often(tmp_path: Path, side: str) -> None:
    survive(tmp_path, side, kills=50)


@pytest.mark.parametrize("side", often(SIDES, ["jaxdist"]))
def test_a_run_survives_being_killed(tmp_path: Path, side: str) -> None:
    survive(tmp_path, side, kills=1)
