"""Hugging Face folders: config.json, safetensors files, and the tokenizer that goes along."""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError, Experiment, Model
from jaxdist.config.bounded import parse, read_json
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Origin, agreed, in_memory
from jaxdist.convert.kinds import safetensors_writer
from jaxdist.convert.stream import Conversion
from jaxdist.convert.vocabulary import exported
from jaxdist.formats import buffers
from jaxdist.formats.companions import CONFIG, files_of
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.hf import experiment_for, from_settings, read_model, to_settings
from jaxdist.formats.naming import carried, recognized
from jaxdist.formats.plan import embedding
from jaxdist.formats.safetensors_files import Tensors, leaves
from jaxdist.formats.tables import HUGGINGFACE, OWN, naming_for


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor, under the files' names. Raises ConfigError."""
    return leaves(Tensors(path))


def read_content(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a Hugging Face folder. Raises ConfigError, for each tensor that does not fit with both shapes."""
    read_model(path)  # a model that jaxdist does not compute is refused before missing weights are
    tensors = Tensors(path)
    left = [f"the metadata {key!r}, in which its files differ" for key in sorted(tensors.differing)]
    origin = Origin("hf", metadata=tensors.metadata, index=_index(path), left=left)
    return folder_content(path, leaves(tensors), tensors.files, origin, wanted)


def folder_content(
    path: Path, there: Mapping[str, Leaf], read: Collection[str], origin: Origin, wanted: Experiment | None = None
) -> Content:
    """The weights `there` of a folder with config.json, which were `read` from those files. Raises ConfigError."""
    experiment = agreed(str(path), experiment_for(read_model(path).model_dump(), source=str(path)), wanted)
    naming, names = recognized(str(path), there, experiment.model)
    groups = {PARAMETERS: {full: there[name] for full, name in names.items()}}
    first = groups[PARAMETERS].get(embedding(naming, experiment.model))
    files, left = files_of(path, read)
    origin = replace(
        origin,
        naming=naming,
        names=carried(names, naming, experiment.model),
        files=files,
        dtype=str(first.dtype) if first else "",
        left=[*origin.left, *left],
    )
    return Content(experiment, naming, groups, origin=origin).checked(path)


def _index(path: Path) -> dict[str, Any]:
    """The index's metadata on the folder."""
    indexed = (path / INDEX).exists() and not (path / SINGLE).exists()
    metadata = read_json(path / INDEX).get("metadata") if indexed else None
    return metadata if isinstance(metadata, dict) else {}


def check(conversion: Conversion) -> bytes:
    """The config.json to be written. Raises ConfigError if no architecture of transformers can express the model."""
    content, described = conversion.content, conversion.groups[PARAMETERS]
    model = content.experiment.model
    first = described[embedding(conversion.naming, model)]
    return _config(model, str(first.dtype), content.origin.files.get(CONFIG), content.origin.dtype)


def write(path: Path, conversion: Conversion) -> None:
    """Write a Hugging Face folder `path`: weights alone, in files that transformers reads.

    A config.json and names that came with the weights are written again. Raises ConfigError before anything is
    written if no architecture of transformers can express the model.
    """
    content, described = conversion.content, conversion.groups[PARAMETERS]
    origin = content.origin
    config, names, tied = check(conversion), origin.names_in("hf"), conversion.tied_copies("hf")
    besides = {**origin.buffers_in("hf"), **{twin: described[name] for name, twin in tied.items()}}
    described = {names.get(name, name): leaf for name, leaf in described.items()} | besides

    path.mkdir(parents=True, exist_ok=True)
    metadata = origin.metadata if origin.kind == "hf" else safetensors_writer.FRAMEWORK
    index = origin.index if origin.kind == "hf" else {}
    places = safetensors_writer.lay_out(path, described, metadata, index)

    def put(_: str, name: str, array: np.ndarray) -> None:
        for there in (names.get(name, name), tied.get(name)):
            if there:
                buffers.write(*places[there], array)

    conversion.each(put, PARAMETERS)
    for name, leaf in origin.buffers_in("hf").items():
        buffers.write(*places[name], leaf.contiguous())
    for name, file in {**origin.files, CONFIG: config}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(file)


def _config(model: Model, dtype: str, before: bytes | None, was: str) -> bytes:
    """The config.json that came with the weights, updated by changed fields of the model and by the dtype; a new one,
    if it describes another model."""
    with suppress(ConfigError, ValueError):  # it may be that of something else: a training script's own
        settings = parse(before or b"null")
        if isinstance(settings, dict):
            now = _updated(settings, model)
            now |= {key: dtype for key in ("dtype", "torch_dtype") if dtype != was and settings.get(key)}
            return before if before and now == settings else _json(now)
    return _json(to_settings(model, dtype))


def _updated(settings: dict[str, Any], model: Model) -> dict[str, Any]:
    """A config.json whose model has changed in some fields, such as a larger vocabulary, with the keys of these alone.

    Raises ConfigError where its architecture cannot say them.
    """
    described = model_of(settings)
    if described == model:
        return dict(settings)
    here, there = to_settings(model, ""), to_settings(described, "")
    now = settings | {key: value for key, value in here.items() if there.get(key) != value}
    if to_settings(model_of(now), "") != here:
        raise ConfigError("another architecture is needed")
    return now


def model_of(settings: dict[str, Any]) -> Model:
    """The model of a config.json's settings. Raises ConfigError."""
    return experiment_for(from_settings(settings), CONFIG).model


def _json(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2) + "\n").encode()


def read_hf(path: Path) -> tuple[Model, dict[str, np.ndarray]]:
    """The model of a Hugging Face folder and our parameters, in the files' dtype. Raises ConfigError."""
    content = read_content(path)
    return content.experiment.model, {name: array for _, name, array in Conversion(content, OWN).stream(PARAMETERS)}


def write_hf(path: Path, model: Model, parameters: Mapping[str, np.ndarray]) -> None:
    """Write parameters of ours, in their own dtype, as a Hugging Face folder `path`. Raises ConfigError."""
    content = in_memory(experiment_for(model.model_dump(), "write_hf"), parameters)
    write(path, Conversion(exported(content), naming_for(HUGGINGFACE, model)))
