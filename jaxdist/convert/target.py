"""What a conversion writes: whole or not at all."""

import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdist.config import ConfigError, TrainingError, check_writable
from jaxdist.config.checkpoints import synchronize
from jaxdist.config.display import megabytes, say


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
    place = next(folder for folder in target.absolute().parents if folder.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise ConfigError(
            f"TARGET {target}: {megabytes(needed)} are needed and {megabytes(free)} free; make room, or give another"
        )


@contextmanager
def whole_or_nothing(target: Path, force: bool = False) -> Iterator[Path]:
    """A path beside `target` to write to; it becomes `target` when all went well, else it is removed.

    Raises ConfigError when `target` cannot be made, or exists and is not to be replaced by `force`.
    """
    try:
        path = target.resolve()
        partial, old = (path.parent / f".{path.name}.{part}" for part in ("partial", "old"))
        if old.exists() and not path.exists():  # a kill came between the two names
            old.rename(path)
            say(f"TARGET {target} was being replaced when an earlier conversion was killed; it is back")
        if path.exists() and not force:
            raise ConfigError(f"TARGET {target} exists; give another, or --force to replace it")
        check_writable(path.parent, f"TARGET {target}")
        remove(partial)
        remove(old)
    except OSError as error:
        raise ConfigError(f"TARGET {target}: {error.strerror}; give another") from None
    try:
        yield partial
        if partial.exists():
            with writing(target):
                for part in (partial, *partial.rglob("*")):
                    synchronize(part)
                if path.exists():
                    path.rename(old)
                partial.rename(path)
                synchronize(path.parent)
            remove(old)
    finally:
        remove(partial)


def remove(path: Path) -> None:
    """A file or a folder that may not be there."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
