"""The output of a conversion, written completely or not at all."""

import errno
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jaxdist.config import ConfigError, TrainingError
from jaxdist.formats.sources import sibling
from jaxdist.runs.checkpoints import run_of, synchronize
from jaxdist.runs.display import megabytes, say
from jaxdist.runs.folder import LOCK, check_writable
from jaxdist.runs.lock import Taken, alone

Check = Callable[[Path], object]  # raises ConfigError where what lies at a path is not to be replaced
TRIES = 100  # to remove a folder, 50 ms apart


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Raises TrainingError for any error of the writing of a file."""
    try:
        yield
    except (OSError, MemoryError, ValueError, RuntimeError) as error:  # of torch and TensorStore where a disk is full
        reason = textwrap.shorten(str(error), 200)
        raise TrainingError(f"TARGET {target} could not be written: {reason}; nothing is left of it") from None


def check_room(target: Path, needed: int) -> None:
    """Raises ConfigError where the disk has less room than is needed."""
    place = next(folder for folder in target.resolve().parents if folder.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise ConfigError(
            f"TARGET {target}: {megabytes(needed)} are needed and {megabytes(free)} free; make room, or give another"
        )


def check_target(target: Path, replaceable: Check | None = None) -> None:
    """Raises ConfigError as `atomic_target` does when it begins, and touches nothing."""
    there = path = target.resolve()
    with refusing(target):
        check_writable(path.parent, f"TARGET {target}")
        if (lock := sibling(path, "lock")).exists():
            with alone(lock, create=False):
                pass
        if (old := sibling(path, "old")).exists() and not path.exists():
            say(f"TARGET {target} was being replaced when an earlier conversion was killed; the next puts it back")
            there = old
        _check_there(target, there, replaceable)


def _check_there(target: Path, there: Path, replaceable: Check | None) -> None:
    if there.exists() and not replaceable:
        raise ConfigError(f"TARGET {target} exists; give another, or --force to replace it")
    if there.exists() and replaceable:
        replaceable(there)


@contextmanager
def refusing(target: Path) -> Iterator[None]:
    """Turn errors that keep a conversion from starting into ConfigErrors."""
    try:
        yield
    except Taken:
        raise ConfigError(f"TARGET {target} is being written by another conversion; wait, or give another") from None
    except OSError as error:
        raise ConfigError(f"TARGET {target}: {error.strerror}; give another") from None


@contextmanager
def atomic_target(target: Path, replaceable: Check | None = None) -> Iterator[Path]:
    """A path beside `target` to write to; it becomes `target` when all went well, else it is removed, and so are the
    folders that were made for it.

    Raises ConfigError when `target` cannot be made, is being made, or exists and is not `replaceable`.
    """
    path = target.resolve()
    partial, old = sibling(path, "partial"), sibling(path, "old")
    with ExitStack() as stack:
        with refusing(target):
            check_writable(path.parent, f"TARGET {target}")
            stack.callback(remove_empty, [folder for folder in path.parents if not folder.exists()])
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(sibling(path, "lock")))
            remove(partial)
            if old.exists() and not old.is_symlink() and not path.exists():  # a kill came between the two names
                old.rename(path)
                say(f"TARGET {target} was being replaced when an earlier conversion was killed; it is back")
            _check_there(target, path, replaceable)
            remove(old)
            if left := next(filter(os.path.lexists, (partial, old)), None):
                raise OSError(errno.EEXIST, f"{left} cannot be removed; remove it")
        stack.callback(remove, partial)
        yield partial
        if partial.exists():
            with writing(target):
                for part in (partial, *partial.rglob("*")):
                    synchronize(part)
                _check_there(target, path, replaceable)  # it may have come, or have grown, meanwhile
                try:
                    if path.exists() and not (path.is_file() and partial.is_file()):  # a file gives way at once
                        with no_run_in(path):
                            path.rename(old)
                    partial.rename(path)
                except BaseException:  # a signal too
                    if old.exists() and not path.exists():
                        old.rename(path)
                    raise
                synchronize(path.parent)
            remove(old)


@contextmanager
def no_run_in(target: Path) -> Iterator[None]:
    """Within, no run writes to the folder, or has it as a checkpoint. Raises ConfigError where one does."""
    with ExitStack() as stack:
        for lock in (folder / LOCK for folder in (target, run_of(target)) if folder and (folder / LOCK).exists()):
            try:
                stack.enter_context(alone(lock, create=False))
            except Taken:
                raise ConfigError(
                    f"TARGET {target} is being written by a run; wait until it ends, or give another"
                ) from None
            except OSError as error:
                raise ConfigError(
                    f"TARGET {target}: its lock {lock}: {error.strerror}; remove it, or give another"
                ) from None
        yield


def remove_empty(folders: Iterable[Path]) -> None:
    """Empty folders, the innermost first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def remove(path: Path) -> None:
    """A file, a link or a folder that may not be there; again where a thread of Orbax's still writes into it."""
    if path.is_file() or path.is_symlink():
        path.unlink()
    for _ in range(TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)
