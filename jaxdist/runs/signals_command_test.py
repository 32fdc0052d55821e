"""Signals that save and end a run, and runs without a final checkpoint, by the command line."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import TrainingError
from jaxdist.config.errors import Interrupted
from jaxdist.conftest import SHORT_RUN, often
from jaxdist.data import Batch, Dataset
from jaxdist.runs import checkpoints
from jaxdist.runs.checkpoints import steps_in
from jaxdist.runs.folder import RunFolder, read_metrics
from jaxdist.train import main
from jaxdist.train_test import assert_same, command, outside
from jaxdist.training import checkpoint, metrics

pytestmark = pytest.mark.long


def test_signals_save_and_end_a_run(tmp_path: Path) -> None:
    """SIGUSR1 saves and continues, SIGTERM saves and exits with 75. The resumed run equals an uninterrupted one."""
    straight, path = tmp_path / "straight", tmp_path / "run"
    line = [*SHORT_RUN, "--mesh", "2x2", "--steps", "9999", "--output", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxdist.train", *line],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=outside(),
    )

    def wait(until: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not until():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    wait(lambda: (path / "metrics.jsonl").exists() and len(read_metrics(path)) >= 3)
    process.send_signal(signal.SIGUSR1)
    wait(lambda: steps_in(path / "checkpoints"))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 75, stderr
    first, last = steps_in(path / "checkpoints")
    assert first < last == len(read_metrics(path)) < 9999
    assert f"ended by SIGTERM after step {last}; step {last} is saved" in stderr
    assert not (path / "summary.json").exists()
    end = str(last + 5)
    for output, more in ((path, ["--resume"]), (straight, [])):
        done = command(*SHORT_RUN, "--mesh", "2x2", "--steps", end, "--output", str(output), *more)
        assert done.returncode == 0, done.stderr
    assert_same(straight, path)


def test_a_signal_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step is taken and saved if the signal comes while it is compiled."""
    memory = metrics.memory

    def signalled(*inputs: Any) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return memory(*inputs)

    monkeypatch.setattr(metrics, "memory", signalled)
    with pytest.raises(Interrupted, match="ended by SIGTERM after step 1; step 1 is saved"):
        main([*SHORT_RUN, "--mesh", "2x2", "--output", str(tmp_path / "run")])
    assert steps_in(tmp_path / "run" / "checkpoints") == [1]
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("final", often(["true", "false"], ["false"]))
def test_a_signal_while_validating(final: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the validation after the last step is skipped, and the step is saved even if it would not be."""
    fetch, asked = Dataset.batch, list[str]()

    def signalled(self: Dataset, *inputs: Any, **named: Any) -> Batch:
        if named.get("split") == "validation":
            asked.append(named["split"])
            os.kill(os.getpid(), signal.SIGTERM)
        return fetch(self, *inputs, **named)

    monkeypatch.setattr(Dataset, "batch", signalled)
    line = [
        *SHORT_RUN,
        "--mesh",
        "2x2",
        "--steps",
        "2",
        "--train.validation_batches",
        "8",
        "--checkpoint.final",
        final,
        "--output",
        str(tmp_path / "run"),
    ]
    with pytest.raises(Interrupted, match="ended by SIGTERM after step 2; step 2 is saved: continue by --resume"):
        main(line)
    assert asked == ["validation"] and steps_in(tmp_path / "run" / "checkpoints") == [2]
    assert not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.undo()
    main([*line, "--resume"])
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_save_that_fails_in_its_thread_ends_the_run_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving every 5 steps; the run ends one step after the failure is known."""
    log, failed = RunFolder.log, threading.Event()

    def full(*_: Any) -> None:
        failed.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def log_when_it_has_failed(self: RunFolder, record: dict[str, Any]) -> None:
        log(self, record)
        if record["step"] == 7:
            assert failed.wait(60)
            time.sleep(0.2)  # until the thread ends

    monkeypatch.setattr(checkpoint, "publish", full)
    monkeypatch.setattr(checkpoints, "LINGER", 0.0)
    monkeypatch.setattr(RunFolder, "log", log_when_it_has_failed)
    run = tmp_path / "run"
    line = ["--mesh", "1x1", "--steps", "10", "--checkpoint.every", "5", "--train.validation_batches", "0"]
    with pytest.raises(TrainingError, match=r"step 5 could not be written to .*: No space left on device; there is"):
        main([*SHORT_RUN, *line, "--output", str(run)])
    assert len(read_metrics(run)) in (7, 8)


def test_a_run_without_a_final_checkpoint(tmp_path: Path) -> None:
    """Requested saves are made, but not that of the last step."""
    for every, saved in ("0", []), ("2", [2]):
        path = tmp_path / every
        line = ["--mesh", "1x1", "--steps", "3", "--checkpoint.every", every, "--checkpoint.final", "false"]
        main([*SHORT_RUN, *line, "--output", str(path)])
        assert steps_in(path / "checkpoints") == saved and (path / "summary.json").exists()
