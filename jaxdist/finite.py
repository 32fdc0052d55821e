"""Weights and optimizer state are looked at for NaN and infinity when they are read, on the devices."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxdist.config.finite import NotFinite, of_resume, of_start, refused
from jaxdist.optim import kept_of
from jaxdist.processes import on_host
from jaxdist.program import Program
from jaxdist.step import TrainState

Arrays = Mapping[str, jax.Array]


def check_start(program: Program, path: Path, weights: Arrays) -> None:
    """Raises ConfigError where starting weights, read from `path`, are not finite."""
    if found := not_finite(program, weights):
        raise refused(path, found, of_start(path))


def check_resumed(program: Program, path: Path, state: TrainState) -> None:
    """Raises ConfigError where the state of the checkpoint `path` is not finite, also under train.nonfinite = skip, as
    that passes over steps alone."""
    weights = not_finite(program, state.parameters)
    found = dict(weights)
    for kind, arrays in kept_of(state.optimizer).items():
        found |= {f"{name} ({kind})": what for name, what in not_finite(program, arrays).items()}
    if found:
        raise refused(f"checkpoint {path}", found, of_resume(path, bool(weights)))


def not_finite(program: Program, arrays: Arrays) -> dict[str, NotFinite]:
    """Those that are not, by name."""
    finite = program.finite(dict(arrays))
    return {name: _described(arrays[name]) for name in arrays if not finite[name]}


def _described(array: jax.Array) -> NotFinite:
    whole = on_host(array)
    wrong = ~np.isfinite(whole)
    index = np.unravel_index(int(wrong.argmax()), whole.shape)
    return NotFinite(int(wrong.sum()), whole.size, float(whole[index]), tuple(map(int, index)))
