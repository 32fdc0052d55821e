"""What a conversion writes: whole or not at all."""

import shutil
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jaxdist.config import ConfigError, TrainingError, check_writable
from jaxdist.config.checkpoints import run_of, synchronize
from jaxdist.config.display import megabytes, say
from jaxdist.config.folder import LOCK
from jaxdist.config.lock import Taken, alone

TRIES = 100  # to remove a folder, 50 ms apart


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Whatever the writing of a file raises becomes a TrainingError."""
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


@contextmanager
def whole_or_nothing(target: Path, force: bool = False) -> Iterator[Path]:
    """A path beside `target` to write to; it becomes `target` when all went well, else it is removed, and so are the
    folders that were made for it.

    Raises ConfigError when `target` cannot be made, is being made, or exists and is not to be replaced by `force`.
    """
    path = target.resolve()
    partial, old = (path.parent / f".{path.name}.{part}" for part in ("partial", "old"))
    with ExitStack() as stack:
        try:
            check_writable(path.parent, f"TARGET {target}")
            stack.callback(remove_empty, [folder for folder in path.parents if not folder.exists()])
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone(path.parent / f".{path.name}.lock"))
            if old.exists() and not path.exists():  # a kill came between the two names
                old.rename(path)
                say(f"TARGET {target} was being replaced when an earlier conversion was killed; it is back")
            if path.exists() and not force:
                raise ConfigError(f"TARGET {target} exists; give another, or --force to replace it")
            remove(partial)
            remove(old)
        except Taken:
            raise ConfigError(
                f"TARGET {target} is being written by another conversion; wait, or give another"
            ) from None
        except OSError as error:
            raise ConfigError(f"TARGET {target}: {error.strerror}; give another") from None
        stack.callback(remove, partial)
        yield partial
        if partial.exists():
            with writing(target):
                for part in (partial, *partial.rglob("*")):
                    synchronize(part)
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
                stack.enter_context(alone(lock))
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
    """Those that hold nothing, the innermost first."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def remove(path: Path) -> None:
    """A file or a folder that may not be there; again where a thread of Orbax's still writes into it."""
    if path.is_file():
        path.unlink()
    for _ in range(TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(0.05)
