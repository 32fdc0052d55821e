"""Weights from any source, laid out for a program."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.config import Experiment, same_model
from jaxdist.convert.content import PARAMETERS, Content
from jaxdist.convert.kinds.found import content_of
from jaxdist.convert.kinds.reader import READER
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.stream import Conversion
from jaxdist.convert.vocabulary import resized
from jaxdist.formats.finite import start_fix
from jaxdist.formats.opening import companions_by, described_by, opened
from jaxdist.formats.orbax import is_checkpoint, read_experiment
from jaxdist.formats.sources import kind_of
from jaxdist.formats.tables import OWN
from jaxdist.training import orbax_io
from jaxdist.training.finite import check_start
from jaxdist.training.program import Program


def source_experiment(path: Path) -> Experiment:
    """The experiment of a checkpoint; where it has none, the defaults around its model. Raises ConfigError."""
    kind = kind_of(path)
    if kind == "torch":
        from jaxdist.convert.kinds.torch_files import experiment_in  # torch, where there is one

        return experiment_in(path)
    if kind == "orbax":
        return read_experiment(path)
    return KINDS[kind].format.read_content(path, training=False).experiment


described = partial(described_by, READER)
lies_beside = partial(companions_by, READER)


def starting_content(path: Path, wanted: Experiment, ema: bool = False) -> Content:
    """The weights of a source, or with `ema` their moving average; none of them is read yet. Raises ConfigError."""
    if not (ema or is_checkpoint(path)):
        return content_of(opened(path, READER), wanted)
    content = KINDS[kind_of(path)].format.read_content(path, wanted, training=ema)
    return content.averaged(path) if ema else content


def load_weights(program: Program, path: Path, ema: bool = False) -> dict[str, jax.Array]:
    """The weights of a `located` checkpoint of any kind, laid out for the program, one at a time where it is not ours;
    with `ema` their moving average.

    Raises ConfigError, also where the model of the source differs in what shapes cannot show, such as a window, and
    where a weight is not finite.
    """
    abstract, model = program.abstract.parameters, program.experiment.model
    found = read_experiment(path) if is_checkpoint(path) else None
    if found and not ema and found.model.vocabulary == model.vocabulary:
        same_model(model, found.model, str(path))
        weights = orbax_io.restore(path, parameters=abstract).parameters
        check_start(program, path, weights, found.precision.parameters)
        return program.placement.to_device_order(weights)

    def put(a: Any, array: Any) -> jax.Array:
        def part(index: Any) -> Any:
            with np.errstate(over="ignore"):  # it is looked at below
                return array[index].astype(a.dtype)

        return jax.make_array_from_callback(a.shape, a.sharding, part)

    content = resized(starting_content(path, program.experiment, ema), model)
    conversion = Conversion(content, OWN, widen=True, nonfinite="refuse")
    weights = {name: put(abstract[name], array) for _, name, array in conversion.stream(PARAMETERS)}
    conversion.refuse(path, start_fix(path))
    check_start(program, path, weights, None)
    return program.placement.to_device_order(weights)
