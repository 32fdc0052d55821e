"""Messages on tensors with invalid values: NaN, infinity, or a square below zero."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxdist.config.errors import ConfigError
from jaxdist.config.optimizer import means_of_squares
from jaxdist.formats.described import source_of

RANGES = ("float16", "bfloat16", "float32", "float64")  # by their largest number


@dataclass(frozen=True)
class BadValues:
    """Number of invalid values among a tensor's `size` values, and the first of them with its index."""

    count: int
    size: int
    value: float
    index: tuple[int, ...]

    def __str__(self) -> str:
        what = (
            "are below zero, which a mean of squares cannot be" if math.isfinite(self.value) else "are NaN or infinite"
        )
        at = ", ".join(map(str, self.index))
        return f"{self.count:,} of {self.size:,} values that {what}, the first {self.value} at [{at}]"


def optimizer_tensor_name(name: str, kind: str) -> str:
    """Name of the optimizer's tensor of that `kind` for the parameter `name`."""
    return f"{name} ({kind})"


def is_second_moment(name: str) -> bool:
    """Whether the optimizer keeps a tensor of this name (`optimizer_tensor_name`) as a mean of squares."""
    return name.endswith(tuple(optimizer_tensor_name("", kind) for kind in means_of_squares()))


def is_square(name: str) -> bool:
    """Whether a tensor of this name, of a model or by `optimizer_tensor_name`, is a mean of squares, in any naming."""
    return name.endswith(".running_var") or is_second_moment(name)


def refused(source: object, found: Mapping[str, BadValues], fix: str) -> ConfigError:
    """The error of a source with such tensors, by name: each side finds them in an order of its own."""
    name, *others = sorted(found)
    more = f"; so have {', '.join(others[:3])}" + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return ConfigError(f"{source}: tensor {name} has {found[name]}{more if others else ''}. {fix}")


def nonfinite_weights_error(path: Path, found: Mapping[str, BadValues], here: str, there: str | None) -> ConfigError:
    """The error of starting weights of `path` that are not finite in the dtype `here` of training. `there`: their dtype
    in a checkpoint that was read at once in that of training; None where they were finite as they were read."""
    may_be_cast = there is None or RANGES.index(here) < RANGES.index(there)
    if not may_be_cast or any(math.isnan(bad.value) for bad in found.values()):
        return refused(path, found, start_fix(path))
    name, *others = sorted(found)
    more = f"; so have {len(others)} more tensors" if others else ""
    bad = found[name]
    return ConfigError(
        f"{path}: tensor {name} has {bad.count:,} of {bad.size:,} values that are infinite in precision.parameters = "
        f"{here}, the first at [{', '.join(map(str, bad.index))}]{more}. Choose a wider one, as --precision "
        + ("bf16" if here == "float16" else "fp64")
    )


def start_fix(path: Path) -> str:
    """The fix for starting weights that are not finite."""
    model = "" if source_of(path) else " --model CONFIG"
    return (
        "Training cannot begin with them. Give weights without them, or a copy with zeros in their place, which "
        f"`python -m jaxdist.convert {path} COPY --to hf --nonfinite zero{model}` writes"
    )


def resume_fix(path: Path, weights: bool) -> str:
    """The fix for a resumed state that is not finite, in its weights or only in its optimizer state."""
    if weights:
        return (
            f"No later step repairs a weight, even with train.nonfinite = skip. Move {path} away, to resume from the "
            "checkpoint before it"
        )
    return (
        "No later step repairs it, even with train.nonfinite = skip. Start again from the weights, which are finite: "
        f"--init {path} with another --output; or move {path} away, to resume from the checkpoint before it"
    )


def check_counts(path: Path, step: int, updates: float, scale: float | None, good: float | None) -> None:
    """Raises ConfigError where what the checkpoint `path` of `step` counted, or its loss scale, cannot be."""
    wrong = []
    if not 0 <= updates <= step:
        wrong.append(f"{updates:g} updates after {step} steps")
    if scale is not None and not 0 < scale < math.inf:
        wrong.append(f"a loss scale of {scale:g}")
    if good is not None and not good >= 0:
        wrong.append(f"{good:g} steps in a row without an overflow")
    if wrong:
        raise ConfigError(f"checkpoint {path} has {' and '.join(wrong)}. {resume_fix(path, weights=False)}")
