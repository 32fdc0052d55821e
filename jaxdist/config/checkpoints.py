"""The checkpoints of a run, the same for both backends: what makes one whole, which is the newest, which stay.

A checkpoint is written under another name. When all its files are there, `manifest.json` gets the size and SHA-256 of
each, and the folder takes its name, the step. So a folder named by a step was whole once, and the manifest shows
whether it still is: the libraries that write the files restore flipped bits as weights.
"""

import hashlib
import json
import os
import shutil
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jaxdist.config.display import say
from jaxdist.config.errors import ConfigError, TrainingError
from jaxdist.config.experiment import Checkpoint, Verify

MANIFEST = "manifest.json"
UNFINISHED, DAMAGED = ".unfinished", ".damaged"


def unfinished(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, until `publish`."""
    return checkpoints / f"{step}{UNFINISHED}"


@contextmanager
def written(checkpoints: Path, step: int, config: Checkpoint, first: bool = True) -> Iterator[None]:
    """Whatever the writing of a checkpoint raises becomes a TrainingError, or a line where training is to go on.

    Of several processes the `first` cleans up and speaks.
    """
    try:
        yield
    except Exception as error:  # of Orbax, TensorStore and torch, many kinds
        for left in checkpoints.glob(f"{unfinished(checkpoints, step).name}*") if first else ():
            shutil.rmtree(left, ignore_errors=True)
        reason = textwrap.shorten(str(error), 200)
        message = f"the checkpoint of step {step} could not be written to {checkpoints}: {reason}"
        if config.failure == "stop":
            last = newest(checkpoints)
            rest = "there is no earlier one" if last is None else f"that of step {last} is there: go on by --resume"
            raise TrainingError(f"{message}; {rest}, when there is room and permission again") from None
        if first:
            say(f"{message}; training goes on without it")


def publish(checkpoints: Path, step: int) -> None:
    """All files of the checkpoint of `step` are written: seal it, and give it its name in place of one that had it."""
    folder, final = unfinished(checkpoints, step), checkpoints / str(step)
    seal(folder)
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)
    synchronize(checkpoints)


def seal(folder: Path) -> None:
    """Write the manifest of all files below `folder`, when they and it have reached the disk."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / MANIFEST]
    for path in (folder, *folder.rglob("*")):
        synchronize(path)
    with ThreadPoolExecutor() as pool:
        sums = dict(zip(files, pool.map(sha256, files), strict=True))
    entries = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in sums.items()
    }
    beside = folder / f"{MANIFEST}.tmp"
    beside.write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")
    synchronize(beside)
    beside.rename(folder / MANIFEST)
    synchronize(folder)


def synchronize(path: Path) -> None:
    """Wait until a file, or the names in a folder, would outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def damage(folder: Path, verify: Verify = "checksums") -> str | None:
    """The first thing in which a checkpoint is not what its manifest says, in words; None where it is whole."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        expected = {within(folder, name): (int(e["bytes"]), str(e["sha256"])) for name, e in entries.items()}
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    for file, (size, _) in expected.items():
        name = file.relative_to(folder)
        if not file.is_file():
            return f"its file {name} is missing"
        if file.stat().st_size != size:
            return f"its file {name} has {file.stat().st_size:,} bytes instead of {size:,}"
    if verify == "sizes":
        return None
    try:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(sha256, expected))
    except OSError as error:
        return f"its file {Path(error.filename).relative_to(folder)} cannot be read: {error.strerror}"
    for (file, (_, digest)), now in zip(expected.items(), found, strict=True):
        if now != digest:
            return f"its file {file.relative_to(folder)} has changed since it was written (SHA-256)"
    return None


def within(folder: Path, name: str) -> Path:
    """The file that an index in `folder` calls `name`. Raises ValueError for one that lies outside, also by a link."""
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{name!r} is outside of {folder}")
    return file


def steps_in(checkpoints: Path) -> list[int]:
    """The steps of which there are checkpoints, the newest last."""
    return sorted(int(entry.name) for entry in checkpoints.glob("*") if entry.is_dir() and entry.name.isdecimal())


def newest(checkpoints: Path) -> int | None:
    """The newest step, whole or not; None when there is none."""
    return max(steps_in(checkpoints), default=None)


def newest_whole(checkpoints: Path, verify: Verify = "checksums") -> int | None:
    """The newest step whose checkpoint is whole; says what is wrong with newer ones. None where there are none.

    Raises ConfigError where there are some and none is whole.
    """
    wrong: list[str] = []
    for step in reversed(steps_in(checkpoints)):
        if (reason := damage(checkpoints / str(step), verify)) is None:
            for line in wrong:
                say(f"{line}; going back to step {step}")
            return step
        wrong.append(f"checkpoint {checkpoints / str(step)} is damaged: {reason}")
    if wrong:
        raise ConfigError(f"{wrong[0]}; no other is whole: use a copy of it, or begin a new run")
    return None


def checkpoint_in(path: Path) -> Path:
    """A run folder stands for its newest checkpoint, whole or not; any other path for itself. Only looks at names."""
    step = newest(path / "checkpoints")
    return path if step is None else path / "checkpoints" / str(step)


def whole(path: Path, verify: Verify = "checksums") -> Path:
    """A run folder stands for its newest whole checkpoint; a checkpoint for itself, if it is whole.

    What has no manifest and is in no run folder was written by another program, and passes. Raises ConfigError.
    """
    step = newest_whole(path / "checkpoints", verify)
    if step is not None:
        return path / "checkpoints" / str(step)
    if (path / MANIFEST).exists() and (reason := damage(path, verify)):
        raise ConfigError(f"checkpoint {path} is damaged: {reason}; use another, or a copy of it")
    return path


def clean(checkpoints: Path, step: int) -> None:
    """Before a run goes on from `step`: drop what interrupted saves left, and rename checkpoints of later steps."""
    for entry in checkpoints.glob(f"*{UNFINISHED}*"):
        shutil.rmtree(entry)
    for later in steps_in(checkpoints):
        if later > step:
            aside = checkpoints / f"{later}{DAMAGED}"
            shutil.rmtree(aside, ignore_errors=True)
            (checkpoints / str(later)).rename(aside)


def thin(checkpoints: Path, config: Checkpoint) -> None:
    """Remove what neither `checkpoint.keep` nor `checkpoint.keep_every` keeps."""
    steps = steps_in(checkpoints)
    for step in steps[: -config.keep] if config.keep else []:
        if not config.keep_every or step % config.keep_every:
            shutil.rmtree(checkpoints / str(step))
