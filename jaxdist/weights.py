"""Weights from any source, laid out for a program."""

from pathlib import Path
from typing import Any

import jax

from jaxdist import checkpoint
from jaxdist.config import Experiment, same_model
from jaxdist.config.experiment import Verify
from jaxdist.config.hf import experiment_for, read_model
from jaxdist.convert.hf import read_hf
from jaxdist.convert.kinds import kind_of
from jaxdist.program import Program


def located(path: Path, verify: Verify = "checksums") -> Path:
    """The verified checkpoint that a run folder or checkpoint stands for; a Hugging Face folder. Raises ConfigError."""
    return checkpoint.locate(path, verify) if kind_of(path) == "orbax" else path


def source_experiment(path: Path) -> Experiment:
    """The experiment of a checkpoint; for a Hugging Face folder, the defaults around its model. Raises ConfigError."""
    if kind_of(path) == "orbax":
        return checkpoint.read_experiment(path)
    return experiment_for(read_model(path).model_dump(), str(path))


def load_weights(program: Program, path: Path) -> dict[str, jax.Array]:
    """The weights of a `located` checkpoint or Hugging Face folder, laid out for the program.

    Raises ConfigError, also where the model of the source differs in what shapes cannot show, such as a window.
    """
    same_model(program.experiment.model, source_experiment(path).model, str(path))
    abstract = placed(program, program.abstract.parameters, program.specs.parameters)
    if checkpoint.is_checkpoint(path):
        return checkpoint.restore(path, parameters=abstract).parameters
    _, arrays = read_hf(path)

    def put(a: Any, array: Any) -> jax.Array:
        return jax.make_array_from_callback(a.shape, a.sharding, lambda index: array[index].astype(a.dtype))

    return {name: put(a, arrays[name]) for name, a in abstract.items()}


def placed(program: Program, abstract: Any, specs: Any) -> Any:
    """Shapes and dtypes with their shardings: what a restore aims at."""
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, program.shardings(specs)
    )
