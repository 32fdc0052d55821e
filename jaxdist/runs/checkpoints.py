"""The checkpoints of a run, the same for both backends: what makes one complete, which is the newest, which stay.

A checkpoint is written under another name. When all its files are there, `manifest.json` gets size and checksum of
each, and the folder takes its name, the step. So a folder named by a step was complete once, and the manifest shows
whether it still is: the libraries that write the files restore flipped bits as weights.
"""

import hashlib
import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import xxhash

from jaxdist.config.bounded import file_within, read_json
from jaxdist.config.errors import REMEDIES, ConfigError, TrainingError, remedy
from jaxdist.config.experiment import Checkpoint, Verify
from jaxdist.runs.display import say

FOLDER = "checkpoints"  # of a run folder
MANIFEST = "manifest.json"
UNFINISHED, DAMAGED = ".unfinished", ".damaged"
EMPTY: Mapping[str, str] = MappingProxyType({})
# Name of a checksum in a manifest -> its function. The first is written: it finds damage as the other does, in a
# seventh of the time.
CHECKSUMS: Mapping[str, Callable[..., Any]] = {"xxh128": xxhash.xxh3_128, "sha256": hashlib.sha256}
WRITTEN = next(iter(CHECKSUMS))
BLOCK = 1 << 22  # bytes read at a time: other threads want the interpreter in between
SMALL = 1_000_000  # bytes: such a file says what a checkpoint is, larger ones hold its numbers
LINGER = 1.0  # seconds: TensorStore's threads and other ranks end the file they are at, which takes much less


class Damaged(ConfigError):
    """A checkpoint, the first argument, is not what its manifest says, for a reason in words, the second."""

    def __str__(self) -> str:
        checkpoint, reason = self.args
        return f"checkpoint {checkpoint} is damaged: {reason}; use another, or a copy of it"


def unfinished(checkpoints: Path, step: int) -> Path:
    """Path at which the checkpoint of `step` is written, until `publish`."""
    return checkpoints / f"{step}{UNFINISHED}"


class Saves:
    """The saves of one run. A failed save is reported as soon as it is known; it ends the run unless
    `checkpoint.failure` is "go on"."""

    def __init__(self, checkpoints: Path, config: Checkpoint, first: bool = True) -> None:
        """Only the `first` of several processes cleans up and prints."""
        self.checkpoints, self.config, self.first = checkpoints, config, first
        self.latest: int | None = None  # the last step that was to be saved
        self.failed: dict[int, str] = {}  # step -> why its checkpoint is missing
        self.there: set[int] = set()  # steps whose checkpoints were there after the last save

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """Around the writing of the checkpoint of `step`. Raises TrainingError for whatever it raises, or prints it."""
        self.latest = step
        self.look()
        try:
            yield
            self.failed.pop(step, None)
            self.look({*surplus(sorted({*self.there, step}), self.config)})
            self.there = {*steps_in(self.checkpoints)}
        except TrainingError:
            raise
        except Exception as error:  # many types: Orbax, TensorStore and torch raise their own
            reason = cause(error)
            if reason not in REMEDIES and not self.checkpoints.is_dir():
                reason = NO_FOLDER  # the libraries name a file that they miss in it
            self.failed[step] = reason
            if self.first:
                settle(self.checkpoints)
            message = f"the checkpoint of step {step} could not be written to {self.checkpoints}: {reason}"
            if self.config.failure == "stop":
                raise TrainingError(f"{message}; {self._rest(reason)}") from None
            if self.first:
                say(f"{message}; training continues without it")

    def look(self, thinned: Set[int] = frozenset()) -> None:
        """Says which checkpoints were removed since the last save, other than those that the run itself has `thinned`;
        they count as missing."""
        gone = sorted(self.there.difference(steps_in(self.checkpoints), thinned))
        self.there.difference_update(gone)
        self.failed |= dict.fromkeys(gone, REMOVED)
        if gone and self.first:
            say(f"checkpoints in {self.checkpoints} were removed during the run: {', '.join(map(str, gone))}")

    def missing(self, step: int) -> bool:
        """Whether the checkpoint of `step` was not written, nor tried in vain."""
        return step not in self.failed and newest(self.checkpoints) != step

    def summary(self) -> dict[str, Any]:
        """Entries of summary.json: the step of the newest complete checkpoint, and why others are missing, by step."""
        self.look()
        last = last_complete(self.checkpoints)
        return {"newest": int(last.name) if last else None, "failed": {str(s): why for s, why in self.failed.items()}}

    def check_latest(self) -> None:
        """Raises TrainingError where the last checkpoint that was due is missing."""
        if self.latest in self.failed:
            reason = self.failed[self.latest]
            raise TrainingError(f"the weights of step {self.latest} are not saved: {reason}; {self._rest(reason)}")

    def _rest(self, reason: str) -> str:
        if last := last_complete(self.checkpoints):
            return f"the newest checkpoint is that of step {last.name}: {_helps(reason)}, and continue by --resume"
        return f"there is no checkpoint: {_helps(reason)}, and start again by --resume"


NO_FOLDER, REMOVED = "it is not a folder", "it was removed during the run"


def _helps(reason: str) -> str:
    return "keep the run's folder in its place" if reason in (NO_FOLDER, REMOVED) else remedy(reason)


def cause(error: Exception) -> str:
    """Why something could not be written: the system's reason if the message has one, else the message, shortened.
    Libraries wrap the system's in several hundred characters."""
    message = str(error)
    return next((reason for reason in REMEDIES if reason in message), textwrap.shorten(message, 200))


def publish(checkpoints: Path, step: int, known: Mapping[str, str] = EMPTY) -> None:
    """All files of the checkpoint of `step` are written: seal it, and give it its name in place of one that had it."""
    folder, final = unfinished(checkpoints, step), checkpoints / str(step)
    seal(folder, known, step=step)
    replaced = set_aside(checkpoints, step) if final.exists() else None
    folder.rename(final)
    synchronize(checkpoints)
    if replaced:
        shutil.rmtree(replaced, ignore_errors=True)


def seal(folder: Path, known: Mapping[str, str] = EMPTY, **facts: Any) -> None:
    """Write the manifest of all files below `folder`, with what else it is to say, when they have reached the disk.

    `known`: checksums of files by name, taken while they were in memory.
    """
    found = sorted(folder.rglob("*"))
    files = [path for path in found if path.is_file() and path != folder / MANIFEST]
    names = [file.relative_to(folder).as_posix() for file in files]

    def checked(name: str) -> str:
        synchronize(folder / name)
        return known.get(name) or checksum(folder / name)

    for path in (folder, *filter(Path.is_dir, found)):
        synchronize(path)
    with ThreadPoolExecutor() as pool:
        sums = pool.map(checked, names)
        entries = {
            name: {"bytes": file.stat().st_size, WRITTEN: found}
            for name, file, found in zip(names, files, sums, strict=True)
        }
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(facts | {"files": entries}, indent=1) + "\n", encoding="utf-8")
    synchronize(temporary)
    temporary.rename(folder / MANIFEST)
    synchronize(folder)


def synchronize(path: Path) -> None:
    """fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def never() -> bool:
    """Default stop predicate: never stop."""
    return False


def checksum(file: Path, kind: str = WRITTEN, ended: Callable[[], bool] = never) -> str:
    """Checksum of the file; incomplete if it is `ended` early."""
    found = CHECKSUMS[kind]()
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        block = memoryview(bytearray(min(BLOCK, os.fstat(stream.fileno()).st_size)))
        while not ended() and (read := stream.readinto(block)):
            found.update(block[:read])
    return str(found.hexdigest())


class Entry(NamedTuple):
    """A manifest's entry for a file."""

    file: Path
    bytes: int
    kind: str  # of the checksum
    checksum: str


Looked = Verify | Literal["small"]
"""Verification level: sizes of all files and checksums of small ones, or checksums of all."""


def damage(
    folder: Path,
    verify: Looked = "checksums",
    ended: Callable[[], bool] = never,
    threads: int | None = None,
) -> str | None:
    """The first thing in which a checkpoint is not what its manifest says, in words; None where it is complete.

    Reads no further when it is `ended`. `threads`: those that read, where they are not to have all cores.
    """
    try:
        entry = read_json(folder / MANIFEST)
        entries, step = _entries(folder, entry["files"]), entry.get("step")
        if type(step) not in (int, type(None)):
            raise ValueError("its step is not a whole number")
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {MANIFEST} cannot be read"

    if step is not None and folder.name.isdecimal() and step != int(folder.name):
        return f"it is that of step {step}"

    def first(found: Iterable[str | None]) -> str | None:
        return next((f"its file {name} {what}" for name, what in zip(entries, found, strict=True) if what), None)

    if (reason := first(map(_other_size, entries.values()))) or verify == "sizes":
        return reason

    def other_content(entry: Entry) -> str | None:
        try:
            if ended() or (verify == "small" and entry.bytes > SMALL):
                return None
            same = checksum(entry.file, entry.kind, ended) == entry.checksum
            return None if same or ended() else "has changed since it was written"
        except OSError as error:
            return f"cannot be read: {error.strerror}"

    with ThreadPoolExecutor(threads) as pool:
        return first(pool.map(other_content, entries.values()))


def _entries(folder: Path, files: Any) -> dict[str, Entry]:
    """Files by name. Raises what JSON of another form raises."""
    entries = {}
    for name, entry in files.items():
        (kind,) = CHECKSUMS.keys() & entry.keys()
        entries[name] = Entry(file_within(folder, name), entry["bytes"], kind, entry[kind])
    if not entries or not all(type(e.bytes) is int and type(e.checksum) is str for e in entries.values()):
        raise ValueError("it lists no file, or a size is not a whole number, or a checksum no text")
    return entries


def listed(folder: Path) -> set[str]:
    """Names of the files that its manifest lists, and of itself; none where it cannot be read."""
    try:
        return {MANIFEST, *_entries(folder, read_json(folder / MANIFEST)["files"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _other_size(entry: Entry) -> str | None:
    try:
        if not entry.file.is_file():
            return "is missing"
        found = entry.file.stat().st_size
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if found == entry.bytes else f"has {found:,} bytes instead of {entry.bytes:,}"


def steps_in(checkpoints: Path) -> list[int]:
    """The steps of which there are checkpoints, the newest last."""
    return sorted(int(entry.name) for entry in checkpoints.glob("*") if entry.is_dir() and entry.name.isdecimal())


def newest(checkpoints: Path) -> int | None:
    """The newest step, complete or not; None when there is none."""
    return max(steps_in(checkpoints), default=None)


def last_complete(checkpoints: Path) -> Path | None:
    """The newest checkpoint of which every file is there in its size: what a message may name."""
    folders = (checkpoints / str(step) for step in reversed(steps_in(checkpoints)))
    return next((folder for folder in folders if damage(folder, "sizes") is None), None)


def newest_complete(checkpoints: Path, verify: Looked = "checksums") -> int | None:
    """The newest step whose checkpoint is complete; says what is wrong with newer ones. None where there are none.

    Raises ConfigError where there are some and none is complete.
    """
    wrong: list[str] = []
    for step in reversed(steps_in(checkpoints)):
        if (reason := damage(checkpoints / str(step), verify)) is None:
            for line in wrong:
                say(f"{line}; going back to step {step}")
            return step
        wrong.append(f"checkpoint {checkpoints / str(step)} is damaged: {reason}")
    if wrong:
        raise ConfigError(f"{wrong[0]}; no other is complete: use a copy of it, or begin a new run")
    return None


def checkpoint_in(path: Path) -> Path:
    """A run folder stands for its newest checkpoint, of those that have all files where any has; any other path for
    itself. Looks at names and sizes alone."""
    step = newest(path / FOLDER)
    return path if step is None else last_complete(path / FOLDER) or path / FOLDER / str(step)


def canonical(checkpoint: Path) -> Path:
    """The absolute path of a checkpoint, in its run and by its step where the path or its symbolic links say so (as
    `latest` does, or all of `checkpoints` may)."""
    named = checkpoint.absolute()
    while not named.name.isdecimal() and named.is_symlink() and named.exists():  # else it may be a circle
        named = named.parent / named.readlink()
    return named if named.name.isdecimal() and named.parent.name == FOLDER else checkpoint.resolve()


def run_of(checkpoint: Path) -> Path | None:
    """The run folder whose checkpoint it is; None of one that lies elsewhere, as a copy does."""
    folder = canonical(checkpoint).parent
    return folder.parent if folder.name == FOLDER else None


def complete_checkpoint(path: Path, verify: Looked = "checksums") -> Path:
    """A run folder stands for its newest complete checkpoint; a checkpoint for itself, if it is complete.

    What has no manifest and is in no run folder was written by another program, and passes. Raises ConfigError.
    """
    step = newest_complete(path / FOLDER, verify)
    if step is not None:
        return path / FOLDER / str(step)
    run = run_of(path)
    of_a_run = run is not None and (run / "config.toml").exists()
    if of_a_run or (path / MANIFEST).exists():
        check_complete(path, verify)
    return path


def check_complete(checkpoint: Path, verify: Looked = "checksums", **how: Any) -> None:
    """Raises Damaged where a checkpoint is not what its manifest says. `how`: as `damage` takes it."""
    if reason := damage(checkpoint, verify, **how):
        raise Damaged(checkpoint, reason)


def sealed(checkpoint: Path) -> Path | None:
    """The checkpoint, if it has a manifest."""
    return checkpoint if (checkpoint / MANIFEST).exists() else None


def clean(checkpoints: Path, step: int) -> None:
    """Before a run continues from `step`: drop what interrupted saves left, and rename checkpoints of later steps."""
    sweep(checkpoints)
    for later in steps_in(checkpoints):
        if later > step:
            set_aside(checkpoints, later)


def set_aside(checkpoints: Path, step: int) -> Path:
    """Take its name from the checkpoint of `step`, beside those that were set aside before. Returns where it is."""
    names = chain([f"{step}{DAMAGED}"], (f"{step}{DAMAGED}-{number}" for number in count(2)))
    aside = next(path for path in map(checkpoints.joinpath, names) if not os.path.lexists(path))
    return (checkpoints / str(step)).rename(aside)


def sweep(checkpoints: Path) -> None:
    """Drop what interrupted saves left."""
    for entry in checkpoints.glob(f"*{UNFINISHED}*"):
        shutil.rmtree(entry, ignore_errors=True)


def settle(checkpoints: Path) -> None:
    """Drop what a save that failed leaves; the writers of its other files are not waited for, and make folders anew."""
    until = time.monotonic() + LINGER
    while time.monotonic() < until:
        sweep(checkpoints)
        time.sleep(LINGER / 20)


def surplus(steps: Sequence[int], config: Checkpoint) -> list[int]:
    """Steps, in order, that neither `checkpoint.keep` nor `checkpoint.keep_every` keeps."""
    older = steps[: -config.keep] if config.keep else []
    return [step for step in older if not config.keep_every or step % config.keep_every]


def thin(checkpoints: Path, config: Checkpoint) -> None:
    """Remove the surplus."""
    for step in surplus(steps_in(checkpoints), config):
        folder = checkpoints / str(step)
        try:
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
        except OSError as error:  # it is not worth a run
            say(f"checkpoint {folder} stays, though there are more than checkpoint.keep: {error.strerror}")
