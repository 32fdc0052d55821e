"""Differences between two runs, from their files alone. numpy only: neither side's code can hide a mistake here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Records = Sequence[Mapping[str, Any]]  # of metrics.jsonl, one per step

# Bounds of the contract in float64, relative: none of `cases.MISTAKES` hides below them.
LOSS, GRAD_NORM, STATE = 1e-12, 1e-10, 1e-10
FLOOR = {"loss": LOSS, "grad_norm": GRAD_NORM, "learning_rate": LOSS}  # by field of metrics.jsonl
PERTURBATION = 64 * 2.0**-53  # of the starting weights, to see what becomes of rounding: a sum of 4096 terms
K = 4  # a run may leave the other's by k times what both lose against their own float64 runs


def rounding(dtype: str) -> float:
    """Half of what lies between 1 and the next number of a floating-point dtype: 2^-24 of "float32"."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


def comparable(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shapes agree and all is finite: a NaN is equal to nothing."""
    return a.shape == b.shape and bool(np.isfinite(a).all() and np.isfinite(b).all())


def absolute(a: np.ndarray, b: np.ndarray) -> float:
    """max |a - b|, infinite where the two cannot be compared."""
    return float(np.abs(a - b).max()) if comparable(a, b) else float("inf")


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """||a - b|| / ||b||, infinite where the two cannot be compared."""
    if not comparable(a, b):
        return float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    _, exponent = np.frexp(max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0)))
    a, b = np.ldexp(a, -exponent), np.ldexp(b, -exponent)  # or squares of what is beyond 1e154 would be infinite
    distance, size = np.linalg.norm(a - b), np.linalg.norm(b)
    return float(distance / size) if size else float("inf" if distance else 0.0)


def curve(a: Records, b: Records, field: str) -> np.ndarray:
    """|a - b| / |b| of one field of metrics.jsonl, per step; infinite when the runs have unequal steps or a NaN."""
    if [record["step"] for record in a] != [record["step"] for record in b]:
        return np.array([np.inf])
    x, y = (np.array([record[field] for record in records], np.float64) for records in (a, b))
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.where((x == y) & np.isfinite(x), 0, np.abs(x - y) / np.abs(y))
    return np.where(np.isfinite(difference), difference, np.inf)


def derived_bound(a: Records, a64: Records, b: Records, b64: Records, field: str = "loss") -> np.ndarray:
    """Bound on the difference of a and b at each step: K times the sum of their largest errors so far against a64 and
    b64.

    NaN, which no difference satisfies, from the first step at which a run can't be compared with its float64 run.
    """
    lost = curve(a, a64, field), curve(b, b64, field)
    if len(lost[0]) != len(lost[1]):
        return np.array([np.nan])
    bound = np.maximum(K * np.maximum.accumulate(lost[0] + lost[1]), FLOOR[field])
    return np.where(np.isfinite(bound), bound, np.nan)


def amplified(errors: Mapping[str, float]) -> dict[str, float]:
    """Bound on each tensor's difference in float64, for tensors of one kind: K times the effect of a rounding change on
    it.

    Or on the median tensor, since a tensor may agree by chance; not on the largest, since a tensor of rounding errors
    alone would excuse all others. At least STATE; a tensor of zeros, whose error has no scale, has the median's bound.
    """
    known = [error for error in errors.values() if error < np.inf]
    least = max(STATE, K * float(np.median(known))) if known else STATE
    return {name: max(least, K * error) if error < np.inf else least for name, error in errors.items()}


def rms(values: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(values**2)))


def furthest(values: np.ndarray, bounds: np.ndarray) -> tuple[float, float]:
    """The value that is the largest multiple of its bound, with the bound; infinite where they cannot be compared."""
    if values.shape != bounds.shape or not np.isfinite(bounds).all():
        return float("inf"), float("nan")
    place = int(np.argmax(values / bounds))
    return float(values[place]), float(bounds[place])


def states(
    a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray], zero_gradients: Sequence[str] = ()
) -> dict[str, float]:
    """Relative difference of each tensor by name; infinite for one that is missing on a side.

    The difference of parameters whose names end in one of `zero_gradients`, and of their moments, is absolute: either
    side computes rounding errors there, of which Adam makes steps of at most lr·|g|/eps.
    """
    differences = {}
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            differences[name] = float("inf")
        else:
            measure = absolute if name.endswith(tuple(zero_gradients)) else relative
            differences[name] = measure(a[name], b[name])
    return differences


def joint_error(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Relative difference of all tensors as one vector; infinite where names differ."""
    if a.keys() != b.keys():
        return float("inf")
    return relative(*(np.concatenate([x[name].ravel().astype(np.float64) for name in a]) for x in (a, b)))


def length(tensors: Iterable[np.ndarray]) -> float:
    """The norm of all tensors as one vector."""
    return float(np.sqrt(sum(float(np.sum(np.square(w, dtype=np.float64))) for w in tensors)))


def worst(differences: Mapping[str, float]) -> tuple[str, float]:
    """The name and size of the largest difference; what is not a number is larger than any."""
    name = max(differences, key=lambda key: (np.isnan(differences[key]), differences[key]))
    return name, differences[name]


def closest(differences: Mapping[str, float], bounds: Mapping[str, float]) -> tuple[str, float, float]:
    """Name, size and bound of the difference that is the largest multiple of its bound, which is STATE if not given."""
    name, _ = worst({name: error / bounds.get(name, STATE) for name, error in differences.items()})
    return name, differences[name], bounds.get(name, STATE)


def billed(axis: str) -> str:
    """The mesh axis in whose least bytes the traffic over `axis`, as data+fsdp, is counted: the first of several."""
    return axis.partition("+")[0]
