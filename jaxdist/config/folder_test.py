"""A run folder that others write too, or that a kill or a loss of power left."""

import errno
import os
import re
from pathlib import Path

import pytest

from jaxdist.config import Arguments, ConfigError, Experiment, RunFolder, TrainingError, parse, read_metrics
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


def parsed(*argv: str) -> Arguments:
    return parse(argv, "jaxdist.train", "")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on a mesh and in a precision of its own, that has read data."""
    path = tmp_path / "run"
    fields = [
        "--model.layers",
        "2",
        "--precision",
        "bf16",
        "--mesh",
        "2x1",
        "--steps",
        "6",
        "--train.accumulation",
        "2",
    ]
    begun = parsed(*fields, "--output", str(path)).experiment.on_data("a" * 32)
    logged(path, begun, 1)
    return path


@pytest.mark.parametrize(
    "line", [["--resume", "RUN"], ["--output", "RUN", "--resume"], ["--resume", "--output", "RUN"]]
)
def test_a_resume_takes_the_config_of_the_run(line: list[str], run: Path) -> None:
    own = [str(run) if text == "RUN" else text for text in line]
    found = parsed(*own)
    assert (found.output, found.resume) == (run, True)
    assert found.experiment == RunFolder(run, found.experiment, found.resume).begun
    more = parsed(*own, "--mesh", "4x1", "--steps", "9", "--optimizer.decay_steps", "6").experiment
    assert (more.parallel.mesh, more.train.steps, more.model.layers) == ("4x1", 9, 2)
    RunFolder(run, more, resume=True)


def test_what_a_resume_is_refused_for(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run is there, .*; there is one within it: give --resume .*run$"):
        parsed("--resume", str(tmp_path))
    parsed("--resume", str(run))  # as the message says
    with pytest.raises(ConfigError, match="a run goes on in its own folder; give one of them"):
        parsed("--resume", str(run), "--output", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="--resume needs the folder of the run to go on with; give --resume DIR"):
        parsed("--resume")
    given = parsed("--config", "default", "--output", str(run), "--resume", "--data.shuffle", "false")
    with pytest.raises(ConfigError) as error:  # a config that is given is the one that counts
        RunFolder(run, given.experiment, resume=True)
    told = str(error.value)
    assert "data.shuffle = True, not False and" in told and "model.layers = 2, not 4" in told
    flags = told.partition("resume it with ")[2].partition(", or give")[0].split()
    again = parsed("--config", "default", "--output", str(run), "--resume", *flags)  # as the message says
    RunFolder(run, again.experiment, resume=True)


MIXTRAL = ["--model.family", "mixtral"]
FIXED = {
    "decoder": ([], True),
    "a mixture with a balance": (MIXTRAL, False),
    "a mixture with room for some": ([*MIXTRAL, "--model.balance", "0", "--model.capacity", "2"], False),
    "a mixture without either": ([*MIXTRAL, "--model.balance", "0"], True),
    "batch norms": (["--config", "resnet-digits"], False),
}


@pytest.mark.parametrize("name", FIXED)
def test_another_accumulation_of_the_same_batch(name: str, tmp_path: Path) -> None:
    """Accepted where the gradient is a mean over all of the batch's tokens, whatever the microbatches."""
    fields, accepted = FIXED[name]
    begun = parsed(*fields).experiment.on_data("a" * 32)
    logged(tmp_path, begun, 1)
    other = parsed("--resume", str(tmp_path), "--train.accumulation", "4").experiment
    if accepted:
        assert RunFolder(tmp_path, other, resume=True).experiment.train.accumulation == 4
        return
    with pytest.raises(ConfigError, match=r"computed within a microbatch; resume it with --train.accumulation 1, or"):
        RunFolder(tmp_path, other, resume=True)
    as_told = parsed("--resume", str(tmp_path), "--train.accumulation", "1").experiment
    RunFolder(tmp_path, as_told, resume=True)


def test_what_was_converted_chooses_its_batches(tmp_path: Path) -> None:
    """It has seen no data; its model and optimizer are its own."""
    logged(tmp_path, Experiment())
    line = ["--resume", str(tmp_path), "--data.path", "a.txt", "--data.sequence", "64", "--train.batch", "4"]
    chosen = parsed(*line, "--seed", "7", "--steps", "50").experiment
    RunFolder(tmp_path, chosen, resume=True).create(chosen.on_data("b" * 32))
    with pytest.raises(ConfigError, match=r"data.sequence = 64, not 32; resume it with --data.sequence 64"):
        RunFolder(tmp_path, parsed("--resume", str(tmp_path), "--data.sequence", "32").experiment, resume=True)
    other = tmp_path / "other"
    logged(other, Experiment())
    for field, value in ("model.dim", "64"), ("optimizer.beta1", "0.5"):
        with pytest.raises(ConfigError, match=f"holds a run with {field}"):
            RunFolder(other, parsed("--resume", str(other), f"--{field}", value).experiment, resume=True)
