"""A run folder that others write too, or that a kill or a loss of power left."""

import errno
import os
import re
from pathlib import Path

import pytest

from jaxdist.config import ConfigError, Experiment, RunFolder, TrainingError, read_metrics
from jaxdist.config.checkpoints import Saves


def every(steps: int) -> Experiment:
    return Experiment.parse({"checkpoint": {"every": steps}}, source="test")


def logged(path: Path, experiment: Experiment, *steps: int, resume: bool = False) -> None:
    """A run that logged these steps and ended."""
    with RunFolder(path, experiment, resume) as folder:
        folder.create(experiment)
        for step in steps:
            folder.log({"step": step, "loss": 1.0})


def test_lines_that_were_lost_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path, Experiment(), 1, 4)
    RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=4)
    assert "lacks 2 of the 4 steps that are done" in capsys.readouterr().out


def test_a_file_of_metrics_that_is_gone_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be removed where it is damaged. One that a conversion left empty lacks nothing."""
    logged(tmp_path, Experiment())
    RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=4)
    assert not capsys.readouterr().out
    (tmp_path / "metrics.jsonl").unlink()
    RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=4)
    assert "lacks 4 of the 4 steps that are done" in capsys.readouterr().out


@pytest.mark.parametrize("resume", [False, True])
def test_a_kill_before_anything_was_written(resume: bool, tmp_path: Path) -> None:
    """Of a run that was writing its config: the folder is as good as empty."""
    (tmp_path / ".lock").touch()
    (tmp_path / "config.toml.tmp").touch()
    assert RunFolder(tmp_path, Experiment(), resume).resume_from(marker="parameters") is None
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds files that are no run"):
        RunFolder(tmp_path, Experiment(), resume)


def test_another_interval_of_checkpoints(tmp_path: Path) -> None:
    """What is there was logged under the interval that the run had, not under that of the one that goes on."""
    logged(tmp_path, every(1000), *range(1, 101))
    assert RunFolder(tmp_path, every(10), resume=True).resume_from(marker="parameters") is None


@pytest.mark.parametrize("failure", ["stop", "go on"])
def test_a_disk_that_is_full_when_what_was_logged_reaches_it(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As network file systems and quotas tell it: not before they are asked to keep it."""
    logged(tmp_path, Experiment(), 1)
    folder = RunFolder(tmp_path, Experiment.parse({"checkpoint": {"failure": failure}}, source="test"), resume=True)

    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    said = f"--output {tmp_path}: metrics.jsonl could not be written: {os.strerror(errno.EDQUOT)}; "
    if failure == "stop":
        with pytest.raises(TrainingError, match=f"^{re.escape(said)}make room, and go on by --resume$"):
            folder.synchronize()
    else:
        folder.synchronize()
        folder.synchronize()
        assert capsys.readouterr().out == f"{said}training goes on without it\n"  # once
        with pytest.raises(TrainingError, match=f"not all of metrics.jsonl .{os.strerror(errno.EDQUOT)}"):
            folder.check_kept(Saves(folder.checkpoints, folder.experiment.checkpoint))
        monkeypatch.undo()
        folder.synchronize()
        folder.check_kept(Saves(folder.checkpoints, folder.experiment.checkpoint))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_came_between(resume: bool, tmp_path: Path) -> None:
    """From where the folder was looked at until it is written: nothing of the other's is taken for old."""
    if resume:
        logged(tmp_path, Experiment())
    late = RunFolder(tmp_path, Experiment(), resume)
    logged(tmp_path, Experiment(), 1, resume=resume)
    with pytest.raises(ConfigError, match="was written by another run just now; look, and start again"):
        late.create(Experiment())
    assert [record["step"] for record in read_metrics(tmp_path)] == [1]


def test_a_conversion_does_not_replace_a_run_that_goes_on(tmp_path: Path) -> None:
    from jaxdist.convert.__main__ import main

    source, run = tmp_path / "a.pt", tmp_path / "run"
    source.touch()
    with RunFolder(run, Experiment()) as folder:
        folder.create(Experiment())
        with pytest.raises(ConfigError, match="is being written by a run; wait until it ends"):
            main([str(source), str(run), "--to", "orbax", "--force"])
    assert (run / "config.toml").exists()
