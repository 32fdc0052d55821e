"""Run folders that others write too, or that a kill or power loss left behind."""

import errno
import os
import re
import shutil
from contextlib import nullcontext as nothing
from pathlib import Path
from typing import Any

import pytest

from jaxdist.command_line.arguments import Arguments, parse
from jaxdist.config import ConfigError, Experiment, TrainingError
from jaxdist.runs import lock
from jaxdist.runs.checkpoints import Saves, publish, unfinished
from jaxdist.runs.folder import LOCK, RunFolder, read_metrics


def experiment(*argv: str) -> Experiment:
    return parse(argv, "jaxdist.train", "").experiment


def every(steps: int) -> Experiment:
    return Experiment.parse({"checkpoint": {"every": steps}}, source="test")


def logged(path: Path, experiment: Experiment, *steps: int, resume: bool = False) -> None:
    """A run that logged these steps and ended."""
    with RunFolder(path, experiment, resume) as folder:
        folder.create(experiment)
        for step in steps:
            folder.log({"step": step, "loss": 1.0})


def test_lines_that_were_lost_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged(tmp_path, Experiment(), 1, 4)
    RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=4)
    assert "lacks 2 of the 4 steps that are done" in capsys.readouterr().out


def test_missing_metrics_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be deleted if damaged. A converted run's empty file lacks nothing."""
    logged(tmp_path, Experiment())
    RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=4)
    assert not capsys.readouterr().out
    (tmp_path / "metrics.jsonl").unlink()
    RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=4)
    assert "lacks 4 of the 4 steps that are done" in capsys.readouterr().out


@pytest.mark.parametrize("resume", [False, True])
def test_a_kill_before_anything_was_written(resume: bool, tmp_path: Path) -> None:
    """The folder counts as empty while only the config was being written."""
    (tmp_path / ".lock").touch()
    (tmp_path / "config.toml.tmp").touch()
    assert RunFolder(tmp_path, Experiment(), resume).resume_from(marker="parameters") is None
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds files that are not a run"):
        RunFolder(tmp_path, Experiment(), resume)


def test_another_interval_of_checkpoints(tmp_path: Path) -> None:
    """Existing steps were logged under the run's interval, not under that of its continuation."""
    logged(tmp_path, every(1000), *range(1, 101))
    assert RunFolder(tmp_path, every(10), resume=True).resume_from(marker="parameters") is None


@pytest.mark.parametrize("failure", ["stop", "go on"])
def test_a_folder_that_is_removed_in_the_middle_of_a_run(
    failure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    experiment = Experiment.parse({"checkpoint": {"failure": failure}}, source="test")
    with RunFolder(run, experiment) as folder:
        folder.create(experiment)
        folder.log({"step": 1})
        shutil.rmtree(run)
        if failure == "stop":
            with pytest.raises(
                TrainingError, match=r"No such file or directory; the folder was removed .*begin a new run"
            ):
                folder.log({"step": 2})
            folder.unwritten = ""
            return
        folder.log({"step": 2})
        folder.synchronize()
        folder.log({"step": 3})
        with pytest.raises(TrainingError, match="was removed during the run: the last checkpoint is there"):
            folder.check_kept(Saves(folder.checkpoints, experiment.checkpoint))
    assert capsys.readouterr().out.replace("\n", "").count("was removed during the run: config.toml is") == 1
    assert [record["step"] for record in read_metrics(run)] == [2, 3]
    assert RunFolder(run, experiment, resume=True).begun == experiment  # later checkpoints can be resumed


@pytest.mark.parametrize("failure", ["stop", "go on"])
def test_a_disk_that_is_full_when_the_log_is_flushed(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Network file systems and quotas report it only when data are flushed."""
    logged(tmp_path, Experiment(), 1)
    folder = RunFolder(tmp_path, Experiment.parse({"checkpoint": {"failure": failure}}, source="test"), resume=True)

    def full(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", full)
    message = f"--output {tmp_path}: metrics.jsonl could not be written: {os.strerror(errno.EDQUOT)}; "
    if failure == "stop":
        with pytest.raises(
            TrainingError, match=f"^{re.escape(message)}make room within the quota, or .*, and continue by --resume$"
        ):
            folder.synchronize()
    else:
        folder.synchronize()
        folder.synchronize()
        assert capsys.readouterr().out == f"{message}training continues without it\n"  # once
        with pytest.raises(TrainingError, match=f"not all of metrics.jsonl .{os.strerror(errno.EDQUOT)}"):
            folder.check_kept(Saves(folder.checkpoints, folder.experiment.checkpoint))
        monkeypatch.undo()
        folder.synchronize()
        folder.check_kept(Saves(folder.checkpoints, folder.experiment.checkpoint))


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_came_between(resume: bool, tmp_path: Path) -> None:
    """Files that another run writes between the check of the folder and the first write are not taken for old ones."""
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
    """A run with its own mesh and precision that has read data."""
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


def test_refused_resumes(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it is not a run, .*; there is one within it: give --resume .*run$"):
        parsed("--resume", str(tmp_path))
    parsed("--resume", str(run))  # as in the message
    with pytest.raises(ConfigError, match="a run continues in its own folder; give one of them"):
        parsed("--resume", str(run), "--output", str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="--resume needs the folder of the run to continue with; give --resume DIR"):
        parsed("--resume")
    arguments = parsed("--config", "default", "--output", str(run), "--resume", "--data.shuffle", "false")
    with pytest.raises(ConfigError) as error:  # a given config takes effect
        RunFolder(run, arguments.experiment, resume=True)
    message = str(error.value)
    assert "data.shuffle = True, not False and" in message and "model.layers = 2, not 4" in message
    flags = message.partition("resume it with ")[2].partition(", or give")[0].split()
    again = parsed("--config", "default", "--output", str(run), "--resume", *flags)  # as in the message
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
    """Accepted if the gradient is a mean over all of the batch's tokens for any microbatches."""
    fields, accepted = FIXED[name]
    begun = parsed(*fields).experiment.on_data("a" * 32)
    logged(tmp_path, begun, 1)
    other = parsed("--resume", str(tmp_path), "--train.accumulation", "4").experiment
    if accepted:
        assert RunFolder(tmp_path, other, resume=True).experiment.train.accumulation == 4
        return
    with pytest.raises(ConfigError, match=r"computed within a microbatch; resume it with --train.accumulation 1, or"):
        RunFolder(tmp_path, other, resume=True)
    followed = parsed("--resume", str(tmp_path), "--train.accumulation", "1").experiment
    RunFolder(tmp_path, followed, resume=True)


def test_a_converted_run_chooses_its_batches(tmp_path: Path) -> None:
    """It has seen no data; model and optimizer are fixed."""
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


class TestRunFolder:
    """A run folder never mixes runs."""

    def test_occupied(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="not a run"):
            RunFolder(tmp_path, Experiment())
        for path in ("notes.txt", "notes.txt/run", "notes.txt/a/b"):
            with pytest.raises(ConfigError, match=r"notes.txt is a file; give a folder"):
                RunFolder(tmp_path / path, Experiment())
        with pytest.raises(ConfigError, match=r"--output .*: File name too long; give another folder"):
            RunFolder(tmp_path / ("a" * 300), Experiment())

    def test_closed_to_us(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.access", lambda *_: False)  # as for a folder of mode 555, except to root
        with pytest.raises(ConfigError, match=rf"--output .*: {tmp_path} cannot be written to"):
            RunFolder(tmp_path / "new", Experiment())

    def test_nothing_to_resume_yet(self, tmp_path: Path) -> None:
        """A command with a constant --resume, as of restarted jobs, starts the run if there is none."""
        for path in (tmp_path, tmp_path / "absent"):
            assert RunFolder(path, Experiment(), resume=True).resume_from(marker="parameters") is None
        assert not (tmp_path / "absent").exists()

    def test_tensorboard_is_closed(self, tmp_path: Path) -> None:
        """The last events are on disk when the run ends, even while the folder is referenced."""
        pytest.importorskip("tensorboardX")
        wanted = experiment("--metrics.tensorboard", "true")
        with RunFolder(tmp_path, wanted) as folder:
            folder.create(wanted)
            folder.log({"step": 1, "loss": 1.0})
            events = next(tmp_path.glob("events.out.tfevents.*"))
            before = events.stat().st_size
        assert events.stat().st_size > before

    def test_the_data_may_move_and_a_constant_rate_has_no_end(self, tmp_path: Path) -> None:
        begun = experiment("--optimizer.decay", "constant").on_data("0" * 32)
        RunFolder(tmp_path, begun).create(begun)
        moved = experiment("--optimizer.decay", "constant", "--steps", "900", "--data.path", "elsewhere")
        assert RunFolder(tmp_path, moved, resume=True).experiment.data.fingerprint == "0" * 32

    def test_fields_that_say_how_data_are_read_are_known_by_the_fingerprint(self, tmp_path: Path) -> None:
        """An earlier version wrote data.bin_dtype = uint16 into every run, for any data."""
        begun = experiment("--data.bin_dtype", "uint16").on_data("0" * 32)
        RunFolder(tmp_path, begun).create(begun)
        for more in ((), ("--data.split", "share"), ("--data.end_of_text", "</s>"), ("--data.bin_dtype", "int64")):
            assert RunFolder(tmp_path, experiment(*more), resume=True).experiment.data.fingerprint == "0" * 32

    def test_a_longer_run_names_the_flags_that_keep_its_schedule(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, Experiment()).create(Experiment().on_data("0" * 32))
        with pytest.raises(ConfigError, match=r"train.steps is where the decay ends .* --optimizer.decay_steps 300"):
            RunFolder(tmp_path, experiment("--steps", "900"), resume=True)

    def test_damage_is_named(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, Experiment()).create(Experiment())
        stored = (tmp_path / "config.toml").read_text()
        for damaged in ('{"step": 1}\n{"st\n', '{"step": 1}\n{"stop": 2}\n', "1\n"):
            (tmp_path / "metrics.jsonl").write_text(damaged)
            with pytest.raises(ConfigError, match=r"metrics.jsonl is damaged"):
                RunFolder(tmp_path, Experiment(), resume=True).create(experiment("--steps", "9"), from_step=1)
        assert (tmp_path / "config.toml").read_text() == stored
        for text, message in (
            ("[model", "--output .*config.toml: "),
            ("[model]\nlayrs = 2", "config.toml: model.layrs"),
        ):
            (tmp_path / "config.toml").write_text(text)
            with pytest.raises(ConfigError, match=message):
                RunFolder(tmp_path, Experiment(), resume=True)

    def test_the_data_of_a_run_are_remembered(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, Experiment()).create(Experiment().on_data("a" * 32))
        again = RunFolder(tmp_path, Experiment(), resume=True)
        assert again.experiment.data.fingerprint == "a" * 32
        with pytest.raises(ConfigError, match=r"data.fingerprint = 'a+', not 'b+'"):
            RunFolder(tmp_path, Experiment().on_data("b" * 32), resume=True)

    def test_the_other_backends_checkpoint(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, Experiment()).create(Experiment())
        assert RunFolder(tmp_path, Experiment(), resume=True).resume_from(marker="parameters") is None
        (unfinished(tmp_path / "checkpoints", 3) / "parameters").mkdir(parents=True)
        (unfinished(tmp_path / "checkpoints", 3) / "parameters" / "weights").touch()
        publish(tmp_path / "checkpoints", 3)
        folder = RunFolder(tmp_path, Experiment(), resume=True)
        assert folder.resume_from(marker="parameters") == 3
        with pytest.raises(ConfigError, match=r"checkpoints/3 is not a checkpoint of this backend, it lacks .metadata"):
            folder.resume_from(marker=".metadata")

    def test_one_run_at_a_time(self, tmp_path: Path) -> None:
        """The second of two is refused before it writes; any end of the first releases the folder."""
        with RunFolder(tmp_path, Experiment()) as folder:
            folder.create(Experiment())
            folder.log({"step": 1, "loss": 1.0})
            other = RunFolder(tmp_path, Experiment(), resume=True)
            with pytest.raises(ConfigError, match=r"is being written by another run; wait until it ends"):
                other.create(Experiment())
            assert len(read_metrics(tmp_path)) == 1
        assert sorted(file.name for file in tmp_path.iterdir()) == ["config.toml", "metrics.jsonl"]
        (tmp_path / LOCK).touch()  # as left by a kill
        with other:
            other.create(Experiment())

    def test_a_lock_alone_is_no_run(self, tmp_path: Path) -> None:
        (tmp_path / LOCK).touch()
        RunFolder(tmp_path, Experiment())

    def test_a_file_system_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def none(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(lock.fcntl, "flock", none)
        with RunFolder(tmp_path, Experiment()) as folder:
            folder.create(Experiment())

    @pytest.mark.parametrize(
        ("logged", "fields", "refused"),
        [(21, {}, True), (20, {}, False), (21, {"failure": "go on"}, False), (21, {"every": 0}, False)],
    )
    def test_a_run_without_its_checkpoints(
        self, logged: int, fields: dict[str, Any], refused: bool, tmp_path: Path
    ) -> None:
        """A run that saved does not overwrite its log; one killed in its first save starts over."""
        begun = Experiment.parse({"checkpoint": {"every": 10} | fields}, source="test")
        with RunFolder(tmp_path, begun) as folder:
            folder.create(begun)
            for step in range(1, logged + 1):
                folder.log({"step": step, "loss": 1.0})
        again = RunFolder(tmp_path, begun, resume=True)
        refuses = pytest.raises(ConfigError, match=r"21 steps are logged, and .* holds no checkpoint")
        with refuses if refused else nothing():
            assert again.resume_from(marker="parameters") is None

    def test_an_emptied_config(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, Experiment()).create(Experiment())
        (tmp_path / "config.toml").write_text("")
        with pytest.raises(ConfigError, match=r"config.toml is empty; put a copy of it back"):
            RunFolder(tmp_path, Experiment(), resume=True)

    def test_another_run(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, Experiment()).create(Experiment().on_data("0" * 32))
        with pytest.raises(ConfigError, match="already holds a run"):
            RunFolder(tmp_path, Experiment())
        RunFolder(tmp_path, Experiment(), resume=True)
        RunFolder(tmp_path, experiment("--mesh", "2x4"), resume=True)
        for argv, field in ((["--seed", "1"], "train.seed"), (["--model.layers", "2"], "model.layers")):
            with pytest.raises(ConfigError, match=field):
                RunFolder(tmp_path, experiment(*argv), resume=True)

    def test_a_longer_run_keeps_its_schedule(self, tmp_path: Path) -> None:
        short = experiment("--steps", "10").on_data("0" * 32)
        RunFolder(tmp_path, short).create(short)
        with pytest.raises(ConfigError, match="decay_steps"):
            RunFolder(tmp_path, experiment("--steps", "20"), resume=True)
        RunFolder(tmp_path, experiment("--steps", "20", "--optimizer.decay_steps", "10"), resume=True)

    def test_metrics_are_cut_at_the_checkpoint(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path, Experiment()) as folder:
            folder.create(Experiment())
            for step in range(1, 6):
                folder.log({"step": step, "loss": 1.0})
            with folder.metrics.open("a") as file:
                file.write('{"step": 6, "lo')  # a kill
        assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
        RunFolder(tmp_path, Experiment(), resume=True).create(Experiment(), from_step=3)
        assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
