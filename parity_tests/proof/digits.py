"""Numbers of a run in a narrower dtype than its config says: known by the array's dtype, or by all of their digits."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxdist.config import state_kinds
from jaxdist.config.precision import Precision
from parity_tests.runs import compare
from parity_tests.runs.run import Run

Tensors = Mapping[str, np.ndarray]

ROUNDING = {dtype: compare.rounding(dtype) for dtype in ("float64", "float32", "float16", "bfloat16")}
CURVES = ("loss", "grad_norm")
FEWEST = 4  # numbers of a curve that are judged: a norm after the clip may be the same at every step
RECORDED = ("start", "gradient", "clipped")


class Narrow(NamedTuple):
    """Tensors of a group in a narrower dtype than `dtype`: dtype -> kinds or single tensors."""

    group: str
    dtype: str
    kinds: Mapping[str, list[str]]

    @property
    def moments_only(self) -> bool:
        """Whether it is of what an optimizer keeps alone, which no first step begins with."""
        return all(what.partition(" ")[0] in state_kinds() for kinds in self.kinds.values() for what in kinds)

    def __str__(self) -> str:
        return "; ".join(f"{', '.join(kinds)} in {dtype}" for dtype, kinds in self.kinds.items())


def narrow(run: Run, run64: Run, precision: Precision) -> Iterator[Narrow]:
    """Narrow final states, recorded gradients and curves, each against the dtype in the config."""
    yield states(run, run64, precision.parameters)
    dtypes = (precision.parameters, precision.compute, precision.reduce)
    yield grouped("gradients", max(dtypes, key=ROUNDING.__getitem__), by_step(run), by_step(run64))
    if ROUNDING[precision.compute] <= ROUNDING["float32"]:
        yield grouped("curves", precision.compute, curves(run), curves(run64))


def states(run: Run, run64: Run, parameters: str) -> Narrow:
    """Narrow final weights and moments."""
    kept = ({kind: r.kept_states(kind) for kind in r.state_kinds} for r in (run, run64))
    return grouped("states", parameters, *kept)


def grouped(group: str, dtype: str, kinds: Mapping[str, Tensors], exact: Mapping[str, Tensors]) -> Narrow:
    found: dict[str, list[str]] = {}
    for kind, tensors in kinds.items():
        for other, what in narrower(kind, tensors, exact.get(kind, {}), dtype):
            found.setdefault(other, []).append(what)
    return Narrow(group, dtype, found)


def narrower(kind: str, tensors: Tensors, exact: Tensors, dtype: str) -> Iterator[tuple[str, str]]:
    """(dtype, the kind or those of its tensors) of what is in less than `dtype`, where the float64 run's is not."""
    compared = {name for name in tensors.keys() & exact.keys() if judgeable(tensors[name], dtype)}
    compared = {name for name in compared if narrowest(exact[name].astype(dtype), dtype) == dtype}
    fits = {name.partition("/")[2]: narrowest(w, dtype) for name, w in tensors.items() if name in compared}
    for other in dict.fromkeys(fits.values()):
        if other != dtype:
            names = [name for name, fitting in fits.items() if fitting == other]
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            yield other, kind if len(names) == len(fits) else f"{kind} of {names[0]}{rest}"


def judgeable(tensor: np.ndarray, dtype: str) -> bool:
    """Whether digits determine a dtype: a norm's weights may be too large to move at all in fewer bits than float64."""
    return tensor.ndim >= 2 or dtype == "float64" or ROUNDING.get(tensor.dtype.name, 0) > ROUNDING[dtype]


def narrowest(tensor: np.ndarray, dtype: str) -> str:
    """The dtype of fewest bits that holds all of these numbers; `dtype` where none holds them that is narrower."""
    with np.errstate(over="ignore"):
        fitting = (d for d in reversed(ROUNDING) if np.array_equal(tensor, tensor.astype(d)))
        other = next(fitting, dtype)
    return other if ROUNDING[other] > ROUNDING[dtype] else dtype


def by_step(run: Run) -> dict[str, Tensors]:
    """Recorded tensors of single steps, by kind and step."""
    found = {f"{kind} of step {step}": run.kept(kind, step) for step in run.gradient_steps for kind in RECORDED}
    return {what: tensors for what, tensors in found.items() if tensors}


def curves(run: Run) -> dict[str, Tensors]:
    """Loss and gradient norm, each as a matrix of one row."""
    rows = {name: np.array([[record[name] for record in run.metrics]], np.float64) for name in CURVES}
    return {name: {f"{name}/": row} for name, row in rows.items() if len(np.unique(row)) >= FEWEST}
