"""The errors that end a process with one message instead of a traceback, and its exit code."""

import difflib
import errno
import math
import os
import reprlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any


class ConfigError(Exception):
    """Bad arguments or config. The message names the field, its value and the fix; the process ends with 2."""


class OtherShapes(ConfigError):
    """Weights have other names or shapes than the tensors of the model that they are read for."""


class TrainingError(Exception):
    """The run cannot continue. The message says where it stopped and what to try; the process ends with 1."""


class DoesNotFit(Exception):
    """A plan needs more memory than its devices have. The message says how much; the process ends with 3."""


class Interrupted(Exception):
    """A signal ended the run between two steps; the process ends with 75, and --resume continues."""


CODES: dict[type[BaseException], int] = {
    ConfigError: 2, TrainingError: 1, DoesNotFit: 3, Interrupted: 75, KeyboardInterrupt: 130,
}  # fmt: skip


# Why the system refuses to write -> what helps, by the system's own words, which libraries wrap in messages of theirs.
REMEDIES: Mapping[str, str] = MappingProxyType({
    os.strerror(number): remedy
    for number, remedy in {
        errno.ENOSPC: "make room",
        errno.EDQUOT: "make room within the quota, or have it raised",
        errno.EFBIG: "raise the largest size of a file (ulimit -f)",
        errno.EMFILE: "raise the number of open files (ulimit -n)",
        errno.ENFILE: "close files of other programs: the system has no more",
        errno.EROFS: "mount the file system for writing",
        errno.EACCES: "allow writing there (chmod)",
        errno.EPERM: "allow writing there (chmod, chattr)",
        errno.EIO: "have the disk or the network looked at (dmesg)",
        errno.ESTALE: "mount the network's file system again",
        errno.ETIMEDOUT: "see that the network's file system answers",
    }.items()
})  # fmt: skip


def remedy(reason: str) -> str:
    """The fix for a system error `reason`, for a message that ends with it."""
    return next((helps for words, helps in REMEDIES.items() if words in reason), "fix that")


@contextmanager
def writes_to(target: str) -> Iterator[None]:
    """Context manager for code that writes files to `target`, as named to the user.

    Raises TrainingError where the system refuses, as a full disk does.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TrainingError(f"{error}; {remedy(str(error))}, or give another {target}") from None


LESS = (
    "more devices, more microbatches (--train.accumulation), --memory.remat full, --memory.loss_chunks 8 or "
    "--memory.offload"
)


@contextmanager
def in_device_memory(full: type[Exception], helps: str, says: str = "") -> Iterator[None]:
    """Context manager for computations.

    Raises TrainingError, with the fix `helps`, where a device has no memory left: the framework raises `full` with a
    message that `says` so.
    """
    try:
        yield
    except full as error:
        if says not in str(error):
            raise
        reason = textwrap.shorten(str(error).partition("\n")[0], 200)
        raise TrainingError(f"a device is out of memory: {reason}; use {helps}") from None


SHOWN = reprlib.Repr()
SHOWN.maxstring = SHOWN.maxlong = SHOWN.maxother = 80


def shown(value: Any) -> str:
    """The `repr` of a value for a message, shortened: a value may be as long and as deep as its file."""
    return SHOWN.repr(value)


def printable(text: str, but: str = "") -> str:
    """Escape control characters and line breaks of untrusted text, except those in `but`."""
    return "".join(c if c.isprintable() or c in but else repr(c)[1:-1] for c in text)


def code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends."""
    return next((code for kind, code in CODES.items() if isinstance(error, kind)), 1)


def check_finite(step: int, whose: str = "", /, **values: float | None) -> None:
    """Raises TrainingError naming the first of `values` that is NaN or infinite; None, not measured, passes. `whose`
    run it is, a message begins with."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise TrainingError(
                f"{whose}step {step}: {name} = {value}; the run stops, with the steps before this one logged. "
                "Lower optimizer.learning_rate, lengthen optimizer.warmup, or set optimizer.clip"
            )


def check_validation(step: int, loss: float | None, last: Path | None) -> None:
    """Raises TrainingError where the weights after the last `step` give no finite loss."""
    if loss is not None and not math.isfinite(loss):
        kept = f"saved as {last}" if last and last.name == str(step) else f"not saved, {_saved(last)}"
        raise TrainingError(
            f"step {step}: validation_loss = {loss} after it. It is logged and {kept}. Lower "
            "optimizer.learning_rate, or lengthen optimizer.warmup"
        )


def diverged(step: int, loss: float, grad_norm: float, tensor: str | None, last: Path | None) -> TrainingError:
    """The error that ends a run before the update of a step that is not finite. `tensor`: the first tensor that is not
    finite."""
    name, value = ("loss", loss) if not math.isfinite(loss) else ("grad_norm", grad_norm)
    where = f"the first tensor that is not finite is {tensor}" if tensor else "no single tensor shows it"
    return TrainingError(
        f"step {step}: {name} = {value}; {where}. The update was not made, the steps before this one are logged, "
        f"{_saved(last)}. Lower optimizer.learning_rate, lengthen optimizer.warmup, set optimizer.clip, or pass over "
        "such steps by --train.nonfinite skip"
    )


def overflown(step: int, weight: str, last: Path | None) -> TrainingError:
    """The error that ends a run whose update made a weight that is not finite, which no later step can mend."""
    return TrainingError(
        f"step {step}: its update made {weight} not finite. The step is logged and not saved, {_saved(last)}. Lower "
        "optimizer.learning_rate, or lengthen optimizer.warmup"
    )


def _saved(last: Path | None) -> str:
    return f"the last checkpoint is {last}" if last else "there is no checkpoint"


SHORT = 5  # letters of a name that shares half of them with names of another meaning by chance
LIKENESS = 0.7  # least difflib ratio of such a name to the one that is meant
LIKENESS_OF_LONGER = 0.6
BEGINNING = 3  # least letters of a name that is cut short


def closest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name of which `name` is a misspelling or the beginning; None where all mean something else."""
    valid = list(valid)
    begun = [other for other in valid if len(name) >= BEGINNING and other.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    cutoff = LIKENESS if len(name) <= SHORT else LIKENESS_OF_LONGER
    close = difflib.get_close_matches(name, valid, n=1, cutoff=cutoff)
    return close[0] if close else None


def nearest(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?` when a valid name is close to `name`, else the list of valid names."""
    close = closest(name, valid := sorted(valid))
    return f"did you mean {close!r}?" if close else f"choose one of {', '.join(valid)}"
