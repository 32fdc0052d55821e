"""The run folder: config.toml, metrics.jsonl, summary.json and checkpoints/<step>/, the same from either backend."""

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from jaxdist.config.bounded import read_bytes
from jaxdist.config.errors import ConfigError, TrainingError, remedy
from jaxdist.config.experiment import Experiment, as_argument, read_toml
from jaxdist.config.plugins import load_plugins, plugins_of
from jaxdist.config.record import write_record
from jaxdist.runs.checkpoints import FOLDER, Saves, clean, last_complete, newest_complete, steps_in, synchronize
from jaxdist.runs.display import say
from jaxdist.runs.lock import Taken, alone

# Fields that may differ between a run and its continuation: mesh, memory and saving, never the training itself. The
# location of the data and the choice of splits may differ too: `data.fingerprint` identifies the data.
RESUMABLE_FIELDS = (
    "parallel.", "memory.", "checkpoint.", "metrics.", "record.", "train.steps", "train.validation_batches",
    "train.compile", "train.nonfinite", "train.skip", "data.path", "data.tokenizer",
    "data.bin_dtype", "data.split", "data.end_of_text",
)  # fmt: skip

# Why a field that differs is another run, where that is not plain.
WHY = {
    "optimizer.decay_steps": "train.steps is where the decay ends unless that is given",
    "train.accumulation": "batch norms, and the balance and capacity of experts, are computed within a microbatch",
}

# Further free fields for a converted checkpoint that no step was trained from: the batches, and the learning rates of
# the steps to come, which such a checkpoint may lack.
CONVERTED = (
    "data.", "train.", "optimizer.learning_rate", "optimizer.warmup", "optimizer.decay", "optimizer.final",
)  # fmt: skip

LOCK = ".lock"  # held by the run that writes the folder
MOST_BYTES = 2_000_000_000  # of metrics.jsonl: some ten million steps
BESIDE = ".tmp"  # ends the name of a file until it is complete
# Names of all that a run folder has.
PARTS = ("config.toml", "metrics.jsonl", "summary.json", FOLDER, "record", "origin", "events.out.*", LOCK, f"*{BESIDE}")


class RunFolder:
    """Opening only looks; `create` is the first to write. `experiment` knows the data that the run began with."""

    def __init__(self, path: Path, experiment: Experiment, resume: bool = False) -> None:
        """Raises ConfigError when `path` cannot be written, or holds a run that this one is not to continue."""
        self.path, self.experiment, self.resume = path, experiment, resume
        self.begun = experiment  # the one that the folder holds so far
        self.unwritten = ""  # lines of metrics.jsonl for which there was no room
        self.failed: dict[str, str] = {}  # file -> why it could not be written
        self.removed = False  # whether the folder was, during the run
        check_writable(path, f"--output {path}")
        self._held = ExitStack()
        self._found = self._there()
        begun = (LOCK, f"config.toml{BESIDE}")  # left by a run that was killed before it wrote anything
        occupied = path.is_dir() and any(entry.name not in begun for entry in path.iterdir())
        if occupied and not (path / "config.toml").exists():
            raise ConfigError(f"--output {path} holds files that are not a run; give a new or an empty folder")
        if occupied and not resume:
            raise ConfigError(f"--output {path} already holds a run; continue it by --resume, or give another folder")
        if occupied:
            self._same_run()
        if experiment.metrics.tensorboard and find_spec("tensorboardX") is None:
            raise ConfigError(
                "metrics.tensorboard = true needs a package that is missing; pip install 'jaxdist[tensorboard]'"
            )

    @cached_property
    def _events(self) -> Any:
        from tensorboardX import SummaryWriter

        return SummaryWriter(str(self.path))

    def _same_run(self) -> None:
        file = self.path / "config.toml"
        if not (values := read_toml(file, "--output")):
            raise ConfigError(f"--output: {file} is empty; put a copy of it back, or begin a new run elsewhere")
        load_plugins(plugins_of(values))
        begun = self.begun = Experiment.parse(values, source=str(file))
        if not self.experiment.data.fingerprint:
            self.experiment = self.experiment.on_data(begun.data.fingerprint)
        pinned = (field for field in _flat(begun.model_dump()) if not field.startswith(RESUMABLE_FIELDS))
        self.experiment = self.experiment.pinning(field for field in pinned if not _may_change(begun, field))
        found = [one for one in differences(begun, self.experiment) if not _may_change(begun, one[0])]
        if found:
            shown = " and ".join(f"{field} = {before!r}, not {now!r}" for field, before, now in found)
            why = "".join(f"; {WHY[field]}" for field, *_ in found if field in WHY)
            flags = " ".join(f"--{field} {as_argument(before)}" for field, before, _ in found if before is not None)
            raise ConfigError(
                f"--output {self.path} holds a run with {shown}{why}; resume it with {flags}, or give another folder"
            )

    @property
    def checkpoints(self) -> Path:
        return self.path / FOLDER

    def resume_from(self, marker: str) -> int | None:
        """The step to continue from; None for a start, also where a run was killed before its first checkpoint.

        It is that of the newest complete checkpoint. `marker` is what each one of the caller's backend holds.
        Raises ConfigError when the run is past `train.steps` already, or was saved by the other backend, or none of
        its checkpoints is complete, or there is none where there should be.
        """
        e = self.experiment
        if self.resume and not steps_in(self.checkpoints):
            self._never_saved()
        step, steps = newest_complete(self.checkpoints, e.checkpoint.verify) if self.resume else None, e.train.steps
        if step is not None and step > steps:
            raise ConfigError(f"train.steps = {steps}: the run is at step {step} already; ask for more")
        if step is not None and not (self.checkpoints / str(step) / marker).exists():
            raise ConfigError(
                f"--resume: {self.checkpoints / str(step)} is not a checkpoint of this backend, it lacks {marker}; "
                "continue with the command that began the run, or give another --output"
            )
        return step

    def _never_saved(self) -> None:
        """Raises ConfigError where a run was saved: its first checkpoint is complete before the second begins."""
        logged, config = len(read_metrics(self.path)), self.begun.checkpoint
        if config.every and config.failure == "stop" and logged > 2 * config.every:
            raise ConfigError(
                f"--resume: {logged} steps are logged, and {self.checkpoints} holds no checkpoint; put a copy of one "
                "there, or begin a new run in another folder"
            )

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint, by the sizes of its files."""
        return last_complete(self.checkpoints)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def create(self, experiment: Experiment, from_step: int = 0) -> None:
        """Write the config; drop metrics and set aside checkpoints after `from_step`, whose steps come once more.

        From here on the folder is this run's alone, until the run ends. Raises ConfigError where it is another's.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._held.close()
            self._held.enter_context(alone(self.path / LOCK))
            if self._there() != self._found:
                raise ConfigError(f"--output {self.path} was written by another run just now; look, and start again")
            kept = self._kept(from_step)
            clean(self.checkpoints, from_step)
            replace(self.path / "config.toml", experiment.to_toml())
            replace(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        except Taken:
            raise ConfigError(
                f"--output {self.path} is being written by another run; wait until it ends, or give another folder"
            ) from None
        except OSError as error:
            why = str(error.strerror)
            raise ConfigError(f"--output {self.path}: {why}; {remedy(why)}, or give another folder") from None

    def _there(self) -> tuple[bool, list[int], int]:
        """State of the folder that changes if another run writes to it: config, checkpoints, length of the log."""
        logged = self.metrics.stat().st_size if self.metrics.exists() else 0
        return (self.path / "config.toml").exists(), steps_in(self.checkpoints), logged

    def _kept(self, step: int) -> list[dict[str, Any]]:
        """Records logged up to `step`; prints a note if lines were lost, as in a power failure, or the file is gone."""
        begun = self.metrics.exists()
        kept = [record for record in read_metrics(self.path) if record["step"] <= step] if step else []
        # A converted checkpoint has an empty one if its source had none.
        if (kept or not begun) and (lost := step - len(kept)):
            say(f"{self.metrics} lacks {lost} of the {step} steps that are done")
        return kept

    def synchronize(self) -> None:
        """fsync the log before the checkpoint that follows it.

        Puts back the config of a folder that was removed, without which the checkpoint could not be resumed from.
        """
        if not (self.path / "config.toml").exists():
            say(f"--output {self.path} was removed during the run: config.toml is written again")
            self.removed = True
            with self.writing("config.toml"):
                self.path.mkdir(parents=True, exist_ok=True)
                replace(self.path / "config.toml", self.experiment.to_toml())
        # Network file systems and quotas may report here the errors of earlier writes.
        with self.writing("metrics.jsonl"):
            if self.metrics.exists():
                synchronize(self.metrics)

    def log(self, record: dict[str, Any]) -> None:
        """Append one step's record; JSON has no NaN and no infinity: they are null."""
        finite = {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in record.items()}
        self.unwritten += json.dumps(finite, allow_nan=False) + "\n"
        self._flush()
        if self.experiment.metrics.tensorboard:
            for name, value in record.items():
                self._events.add_scalar(name, value, record["step"])

    def _flush(self) -> None:
        with self.writing("metrics.jsonl"):
            append(self.metrics, self.unwritten)
            self.unwritten = ""

    def record(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Keep tensors of a step."""
        with self.writing(f"record/{step}.safetensors"):
            write_record(self.path, step, arrays)

    @contextmanager
    def writing(self, file: str) -> Iterator[None]:
        """Around what writes `file`. Raises TrainingError where it cannot be written, or prints it once where training
        is to continue."""
        try:
            yield
            self.failed.pop(file, None)
        except (OSError, SafetensorError) as error:
            reason = str(getattr(error, "strerror", error))
            message = f"--output {self.path}: {file} could not be written: {reason}"
            if self.experiment.checkpoint.failure == "stop":
                raise TrainingError(f"{message}; {self._helps(reason)}") from None
            if file not in self.failed:
                say(f"{message}; training continues without it")
            self.failed[file] = reason

    def _helps(self, reason: str) -> str:
        """The fix for a file that could not be written for this `reason`."""
        if not self.path.is_dir():
            return "the folder was removed during the run: put it back and continue by --resume, or begin a new run"
        return f"{remedy(reason)}, and continue by --resume"

    def check_kept(self, saves: Saves) -> None:
        """Raises TrainingError where a run that continued without what it could not write has lost its last checkpoint,
        or files beside it."""
        saves.check_latest()
        if self.removed:
            raise TrainingError(
                f"--output {self.path} was removed during the run: the last checkpoint is there, and what was "
                "written before is not; keep the folder in its place"
            )
        if self.failed:
            files = ", ".join(f"{file} ({reason})" for file, reason in self.failed.items())
            raise TrainingError(f"--output {self.path}: the checkpoints are there, but not all of {files}")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self.unwritten:
            self._flush()
        if "_events" in self.__dict__:
            self._events.close()
        self._held.close()

    @property
    def summarized(self) -> bool:
        """Whether a run has ended here, and what it measured is kept."""
        return (self.path / "summary.json").exists()

    def summarize(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        with self.writing("summary.json"):
            replace(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def append(file: Path, text: str) -> None:
    """Add to `file` all of `text` or nothing of it. Raises OSError."""
    content = text.encode()
    with file.open("ab", buffering=0) as stream:
        size = stream.tell()
        try:
            while content:  # what a full disk takes in part fails at the rest, with the reason
                content = content[stream.write(content) :]
        except OSError:
            stream.truncate(size)
            raise


def replace(file: Path, text: str) -> None:
    """Write `file` atomically: a kill, or a loss of power, leaves what was there before."""
    temporary = file.with_name(f"{file.name}{BESIDE}")
    temporary.write_text(text, encoding="utf-8")
    synchronize(temporary)
    temporary.replace(file)
    synchronize(file.parent)


def check_writable(path: Path, what: str) -> None:
    """Raises ConfigError when no folder can be made at `path`, which `what` asked for."""
    try:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:  # a name too long, or below a folder that is closed to us
        raise ConfigError(f"{what}: {error.strerror}; give another folder") from None
    if not existing.is_dir():
        raise ConfigError(f"{what}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{what}: {existing} cannot be written to; give another folder")


def check_new(path: Path, what: str) -> None:
    """Raises ConfigError when `path`, which `what` asked for, cannot be made a folder or holds something already."""
    check_writable(path, what)
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{what} is not empty; give another folder")


def make_new(path: Path, what: str) -> None:
    """Make the folder `path`, or take an empty one. Raises ConfigError as `check_new` and `make`."""
    check_new(path, what)
    make(path, what)


def make(path: Path, what: str) -> None:
    """Make the folder `path`, which `what` asked for, or take the one that is there. Raises ConfigError where it cannot
    be made or written to."""
    check_writable(path, what)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what}: {error.strerror}; give another folder") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a run folder's metrics.jsonl; a last line cut short by a kill is left out. Raises ConfigError."""
    return list(each_metrics(path))


def each_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Records of metrics one by one: all of a long run take ten times the memory of its log. Raises ConfigError."""
    file = path / "metrics.jsonl"
    try:
        yield from parse_metrics(read_bytes(file, MOST_BYTES)) if file.exists() else ()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}; repair or remove it") from None


def parse_metrics(log: bytes) -> Iterator[dict[str, Any]]:
    """The records of lines of JSON, as `each_metrics` has them. Raises ValueError."""
    for line in io.BytesIO(log):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line.decode())
        except RecursionError:
            raise ValueError("a line is nested too deeply") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError("a line has no step")
        yield record


def _may_change(begun: Experiment, field: str) -> bool:
    """Whether a run that `begun` describes continues as the same one where `field` differs.

    A run folder that was converted has seen no data, so no fingerprint. Gradients are means over the tokens of the
    global batch, however many microbatches it is cut into.
    """
    if not begun.data.fingerprint and field.startswith(CONVERTED):
        return True
    return field == "train.accumulation" and not begun.model.mixes_rows


def differences(a: Experiment, b: Experiment) -> Iterator[tuple[str, Any, Any]]:
    """(field, a's value, b's) of fields by which two experiments train differently, RESUMABLE_FIELDS left out."""
    before, now = (_flat(e.model_dump(exclude_none=True)) for e in (a, b))
    # The decay ends at train.steps by default, so a longer continuation would change the schedule.
    for config in (before, now):
        config["optimizer.decay_steps"] = config["optimizer.decay_steps"] or config["train.steps"]
        if config["optimizer.decay"] == "constant":
            del config["optimizer.decay_steps"]
    for field in sorted(before.keys() | now.keys()):
        if not field.startswith(RESUMABLE_FIELDS) and before.get(field) != now.get(field):
            yield field, before.get(field), now.get(field)


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    tables = {section: table for section, table in values.items() if isinstance(table, dict)}
    return {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
