"""Check on the devices that weights and optimizer state read from files are valid."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from jaxdist.formats.finite import (
    BadValues,
    check_counts,
    nonfinite_weights_error,
    optimizer_tensor_name,
    refused,
    resume_fix,
)
from jaxdist.formats.tables import Shape, piece_name, stack_depth
from jaxdist.runtime.processes import on_host
from jaxdist.training.optim import kept_of, updates_of
from jaxdist.training.program import Program
from jaxdist.training.step import TrainState

Arrays = Mapping[str, jax.Array]


def check_start(program: Program, path: Path, weights: Arrays, there: str | None) -> None:
    """Raises ConfigError if starting weights read from `path` are invalid; `there` as in
    `nonfinite_weights_error`."""
    if found := bad_values(program, weights):
        raise nonfinite_weights_error(path, found, program.experiment.precision.parameters, there)


def check_resumed(program: Program, path: Path, step: int, state: TrainState) -> None:
    """Raises ConfigError if the state of the checkpoint `path` of `step` is invalid, also under train.nonfinite = skip,
    which skips steps alone."""
    weights = bad_values(program, state.parameters)
    found = dict(weights)
    for kind, arrays in kept_of(state.optimizer).items():
        found |= bad_values(program, arrays, kind)
    if found:
        raise refused(f"checkpoint {path}", found, resume_fix(path, bool(weights)))
    scale, good = map(float, state.scaling) if state.scaling else (None, None)
    for updates in updates_of(state.optimizer):
        check_counts(path, step, int(updates), scale, good)


def bad_values(program: Program, arrays: Arrays, kind: str = "") -> dict[str, BadValues]:
    """Invalid values, by the names of layers' pieces; `kind`: the kind of optimizer state."""

    def label(name: str) -> str:
        return optimizer_tensor_name(name, kind) if kind else name

    valid = program.all_valid({label(name): array for name, array in arrays.items()})
    return {
        label(piece_name(name, place)): found
        for name, array in arrays.items()
        if not valid[label(name)]
        for place, found in _by_layer(on_host(array), min(stack_depth(name), array.ndim))
    }


def _by_layer(array: np.ndarray, depth: int) -> Iterator[tuple[Shape, BadValues]]:
    """Pieces along the first `depth` axes that have invalid values."""
    infinite = ~np.isfinite(array)
    wrong = infinite if infinite.any() else array < 0
    for place in np.ndindex(array.shape[:depth]):
        if (bad := wrong[place]).any():
            index = np.unravel_index(int(bad.argmax()), bad.shape)
            yield place, BadValues(int(bad.sum()), bad.size, float(array[place][index]), tuple(map(int, index)))
