"""A Hugging Face folder <-> a model and its parameters, by the family's table."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxdist import models
from jaxdist.config import GPT2, ConfigError, Llama, check_shapes
from jaxdist.config.hf import read_model, to_settings
from jaxdist.convert import safetensors_files
from jaxdist.convert.safetensors_files import Tensor, Tensors
from jaxdist.convert.tables import EMBEDDING, HEAD, TABLES

WEIGHTS = ("float64", "float32", "float16", "bfloat16")
Shapes = dict[str, tuple[int, ...]]


def is_hf(path: Path) -> bool:
    """Whether `path` is a folder with config.json and safetensors weights."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def shapes_of(model: Llama | GPT2) -> Shapes:
    """The global shape of every parameter that the model declares."""
    return {name: layout.shape for name, layout in models.layouts(models.build(model)).items()}


def read_hf(path: Path) -> tuple[Llama | GPT2, dict[str, np.ndarray]]:
    """The model of a Hugging Face folder and its parameters in the files' dtype. Raises ConfigError.

    Each missing, unexpected or wrongly shaped tensor is named, with both shapes.
    """
    model = read_model(path)
    shapes, table = shapes_of(model), TABLES[model.family]
    rows = table.rows_of(shapes)
    with Tensors(path) as tensors:
        theirs: dict[str, str] = {}  # name with prefix -> name in the file
        for name in tensors.described:
            if table.ignored.search(name):
                continue
            if tensors.described[name].dtype.name not in WEIGHTS:
                raise ConfigError(
                    f"{path}: tensor {name} is {tensors.described[name].dtype}; give {', '.join(WEIGHTS)}"
                )
            if (full := table.full_name(name)) in theirs:
                raise ConfigError(f"{path}: tensors {theirs[full]} and {name} are the same parameter; give each once")
            theirs[full] = name
        found = {full: tensors.described[name].shape for full, name in theirs.items()}
        wanted = {name: row.shape(shapes) for row in rows for name in row.names(model.layers)}
        if model.tied and HEAD in found:
            wanted[HEAD] = shapes[EMBEDDING]
        check_shapes(str(path), found, wanted)
        parameters: dict[str, np.ndarray] = {}
        for row in rows:
            parameters |= row.to_ours([tensors.read(theirs[name]) for name in row.names(model.layers)], shapes)
        if model.tied and HEAD in found and not np.array_equal(tensors.read(theirs[HEAD]), parameters[EMBEDDING]):
            raise ConfigError(
                f"{path}: tie_word_embeddings is true, but {HEAD} differs from the embedding; set it to false"
            )
    return model, parameters


def write_hf(path: Path, model: Llama | GPT2, parameters: Mapping[str, np.ndarray]) -> None:
    """Write config.json and safetensors files, in the parameters' own dtype, into the existing folder `path`.

    Raises ConfigError before anything is written if no architecture of transformers can express the model.
    """
    settings = to_settings(model, dtype=str(parameters[EMBEDDING].dtype))
    shapes = {name: array.shape for name, array in parameters.items()}
    rows = TABLES[model.family].rows_of(shapes)
    places = {name: (row, layer) for row in rows for layer, name in enumerate(row.names(model.layers))}
    described = {n: Tensor(row.shape(shapes), parameters[row.ours[0]].dtype) for n, (row, _) in places.items()}

    def read(name: str) -> np.ndarray:
        row, layer = places[name]
        return row.to_theirs(parameters, layer)

    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    safetensors_files.write(path, described, read)
