"""The kinds of checkpoint that can be read, written and listed: one row each."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist import checkpoint
from jaxdist.config import ConfigError, Experiment
from jaxdist.config.hf import experiment_for, read_model
from jaxdist.convert.hf import is_hf, read_hf, write_hf
from jaxdist.convert.safetensors_files import Tensor, Tensors

Parameters = dict[str, np.ndarray]


class Kind(NamedTuple):
    """How one kind is recognized, read, written into a new folder, and listed without reading."""

    title: str
    holds: Callable[[Path], bool]
    read: Callable[[Path], tuple[Experiment, Parameters]]
    write: Callable[[Path, Experiment, Mapping[str, np.ndarray]], None]
    inspect: Callable[[Path], tuple[str, dict[str, Tensor]]]


def _read_hf(path: Path) -> tuple[Experiment, Parameters]:
    model, parameters = read_hf(path)
    return experiment_for(model.model_dump(), source=str(path)), parameters


def _write_hf(path: Path, experiment: Experiment, parameters: Mapping[str, np.ndarray]) -> None:
    path.mkdir(parents=True)
    write_hf(path, experiment.model, parameters)


def _inspect_hf(path: Path) -> tuple[str, dict[str, Tensor]]:
    with Tensors(path) as tensors:
        return read_model(path).family, tensors.described


def _read_orbax(path: Path) -> tuple[Experiment, Parameters]:
    saved = checkpoint.read(path)
    return saved.experiment, saved.parameters


def _inspect_orbax(path: Path) -> tuple[str, dict[str, Tensor]]:
    found = checkpoint.locate(path)
    described = checkpoint.described(found)
    tensors = {name: Tensor(tuple(array.shape), np.dtype(array.dtype)) for name, array in described.items()}
    return checkpoint.read_experiment(found).model.family, tensors


KINDS = {
    "hf": Kind("Hugging Face folder", is_hf, _read_hf, _write_hf, _inspect_hf),
    "orbax": Kind("Orbax checkpoint", checkpoint.is_checkpoint, _read_orbax, checkpoint.write, _inspect_orbax),
}


def kind_of(path: Path) -> str:
    """The kind of checkpoint at `path`, recognized by its files. Raises ConfigError."""
    found = next((name for name, kind in KINDS.items() if kind.holds(path)), None)
    if found is None:
        missing = "no such file or folder" if not path.exists() else "no checkpoint of a known kind"
        raise ConfigError(
            f"{path}: {missing}; give a run folder, its checkpoints/<step>, or a folder with "
            "config.json and *.safetensors"
        )
    return found
