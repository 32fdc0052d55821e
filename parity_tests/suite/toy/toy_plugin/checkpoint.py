"""The plugin's kind of checkpoint: an .npz file with the experiment and each tensor, read on demand."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import Experiment
from jaxdist.formats.leaves import Leaf, Reader
from jaxdist.formats.sources import Found

EXPERIMENT = "experiment"


def is_toy(path: Path) -> bool:
    return path.suffix == ".toy"


def write(path: Path, experiment: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    with path.open("wb") as file:
        arrays: dict[str, Any] = {**tensors, EXPERIMENT: np.array(json.dumps(experiment))}
        np.savez(file, **arrays)


def read(path: Path, name: str) -> np.ndarray:
    with np.load(path) as arrays:
        return arrays[name]


def find(path: Path, reader: Reader) -> Found:
    """Weights of a file. Raises ConfigError."""
    with np.load(path) as arrays:
        experiment = Experiment.parse(json.loads(str(arrays[EXPERIMENT])), source=str(path))
        shapes = {name: (arrays[name].shape, arrays[name].dtype) for name in arrays.files if name != EXPERIMENT}
    return Found(path, {name: Leaf(*like, partial(read, path, name)) for name, like in shapes.items()}, experiment)
