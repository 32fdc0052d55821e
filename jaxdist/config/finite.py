"""What is said of a tensor that was read and holds NaN or infinite values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxdist.config.errors import ConfigError
from jaxdist.config.sources import source_of


@dataclass(frozen=True)
class NotFinite:
    """How many of a tensor's `size` values are NaN or infinite, and the first of them with its index."""

    count: int
    size: int
    value: float
    index: tuple[int, ...]

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        return f"{self.count:,} of {self.size:,} values that are NaN or infinite, the first {self.value} at [{at}]"


def refused(source: object, found: Mapping[str, NotFinite], fix: str) -> ConfigError:
    """The error of a source with such tensors, by name: each side finds them in an order of its own."""
    name, *others = sorted(found)
    more = f"; so have {', '.join(others[:3])}" + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return ConfigError(f"{source}: tensor {name} has {found[name]}{more if others else ''}. {fix}")


def of_start(path: Path) -> str:
    """What helps where starting weights are not finite."""
    model = "" if source_of(path) else " --model CONFIG"
    return (
        "Training would end at the first checkpoint. Give finite weights, or a copy with zeros in their place, which "
        f"`python -m jaxdist.convert {path} COPY --to hf --nonfinite zero{model}` writes"
    )


def of_resume(path: Path, weights: bool) -> str:
    """What helps where the state to go on from is not finite, in its weights or only in what the optimizer keeps."""
    if weights:
        return (
            f"No later step mends a weight, also not with train.nonfinite = skip. Move {path} away, to resume from the "
            "checkpoint before it"
        )
    return (
        "No later step mends it, also not with train.nonfinite = skip. Begin anew from the weights, which are finite: "
        f"--init {path} with another --output; or move {path} away, to resume from the checkpoint before it"
    )
