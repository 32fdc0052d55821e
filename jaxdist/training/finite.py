"""Weights and optimizer state are looked at for values that cannot be when they are read, on the devices."""

from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from jaxdist.formats.finite import BadValues, check_counts, of_kind, of_resume, of_weights, refused
from jaxdist.runtime.processes import on_host
from jaxdist.training.optim import kept_of, updates_of
from jaxdist.training.program import Program
from jaxdist.training.step import TrainState

Arrays = Mapping[str, jax.Array]


def check_start(program: Program, path: Path, weights: Arrays, there: str | None) -> None:
    """Raises ConfigError where starting weights, read from `path`, cannot be; `there` as `of_weights` takes it."""
    if found := bad_values(program, weights):
        raise of_weights(path, found, program.experiment.precision.parameters, there)


def check_resumed(program: Program, path: Path, step: int, state: TrainState) -> None:
    """Raises ConfigError where the state of the checkpoint `path` of `step` cannot be, also under train.nonfinite =
    skip, as that passes over steps alone."""
    weights = bad_values(program, state.parameters)
    found = dict(weights)
    for kind, arrays in kept_of(state.optimizer).items():
        found |= bad_values(program, {of_kind(name, kind): array for name, array in arrays.items()})
    if found:
        raise refused(f"checkpoint {path}", found, of_resume(path, bool(weights)))
    scale, good = map(float, state.scaling) if state.scaling else (None, None)
    for updates in updates_of(state.optimizer):
        check_counts(path, step, int(updates), scale, good)


def bad_values(program: Program, arrays: Arrays) -> dict[str, BadValues]:
    """Those that cannot be, by name."""
    sound = program.sound(dict(arrays))
    return {name: _described(arrays[name]) for name in arrays if not sound[name]}


def _described(array: jax.Array) -> BadValues:
    whole = on_host(array)
    wrong = ~np.isfinite(whole)
    wrong = wrong if wrong.any() else whole < 0
    index = np.unravel_index(int(wrong.argmax()), whole.shape)
    return BadValues(int(wrong.sum()), whole.size, float(whole[index]), tuple(map(int, index)))
