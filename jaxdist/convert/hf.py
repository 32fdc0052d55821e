"""Hugging Face folders: config.json, safetensors files, and the tokenizer that goes along."""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxdist.config import ConfigError, Experiment, Family
from jaxdist.config.display import say
from jaxdist.config.foreign import INDEX, SINGLE, parse, read_bytes, read_json, within
from jaxdist.config.hf import experiment_for, from_settings, read_model, to_settings
from jaxdist.convert import buffers, safetensors_writer
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Origin, agreed, in_memory
from jaxdist.convert.safetensors_files import Tensors
from jaxdist.convert.stream import Conversion
from jaxdist.convert.vocabulary import exported
from jaxdist.formats.naming import carried, recognized
from jaxdist.formats.plan import embedding
from jaxdist.formats.tables import OWN

CONFIG = "config.json"
# Files of a Hugging Face folder that say nothing of the weights, and go along.
COMPANIONS = (
    CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
MOST_BYTES = 200_000_000  # of all of them, which are in memory; the largest tokenizers have 40 MB
# Other files beside weights, as a model card, a license or code, go along too, each up to so many bytes, unless they
# are weights of another format, or an index of some.
MOST_EACH = 100_000_000
FOLDERS = {PurePosixPath(pattern).parts[0] for pattern in COMPANIONS if "/" in pattern}
LONGEST = 255  # bytes of a name
OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|pkl|pickle|npz|npy|msgpack|h5|onnx|onnx_data|gguf|ggml|ot|tflite|index\.json)",
    re.IGNORECASE,
)


def is_hf(path: Path) -> bool:
    """Whether `path` is a folder with config.json and safetensors weights."""
    return (path / CONFIG).is_file() and any(path.glob("*.safetensors"))


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor, under the files' names. Raises ConfigError."""
    return leaves(Tensors(path))


def leaves(tensors: Tensors) -> dict[str, Leaf]:
    """All of them, to be read."""
    return {name: Leaf(t.shape, t.dtype, partial(tensors.read, name)) for name, t in tensors.described.items()}


def opened(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a Hugging Face folder. Raises ConfigError, for each tensor that does not fit with both shapes."""
    read_model(path)  # a model that jaxdist does not compute is said before missing weights are
    tensors = Tensors(path)
    left = [f"the metadata {key!r}, in which its files differ" for key in sorted(tensors.differing)]
    origin = Origin("hf", metadata=tensors.metadata, index=_index(path), left=left)
    return of_folder(path, leaves(tensors), tensors.files, origin, wanted)


def of_folder(
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
    """What the index of a folder that has been opened says of the whole of it."""
    indexed = (path / INDEX).exists() and not (path / SINGLE).exists()
    said = read_json(path / INDEX).get("metadata") if indexed else None
    return said if isinstance(said, dict) else {}


def is_companion(name: object) -> bool:
    """Whether a file of this name goes along with weights."""
    if not isinstance(name, str) or "/".join(parts := PurePosixPath(name).parts) != name or ".." in parts:
        return False
    writable = name.isprintable() and all(len(os.fsencode(part)) <= LONGEST for part in parts)
    return writable and (is_listed(name) or (len(parts) == 1 and _goes_along(name)))


def is_listed(name: str) -> bool:
    """Whether it is one of COMPANIONS, in the folder or in one within."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in COMPANIONS)


def _goes_along(name: str) -> bool:
    """Whether a file that we do not know goes along; what is hidden is of a program."""
    hidden = name.startswith(".") and name != ".gitattributes"
    return not hidden and name not in FOLDERS and not OTHER_WEIGHTS.fullmatch(name)


def files_of(folder: Path, read: Collection[str] = ()) -> tuple[dict[str, bytes], list[str]]:
    """All that goes along from a Hugging Face folder whose weights were `read` from files, and names of what stays
    behind. Raises ConfigError as `companions` does."""
    found, left = companions(folder), []
    taken, room = {*read, *(PurePosixPath(name).parts[0] for name in found)}, MOST_BYTES - sum(map(len, found.values()))
    for name in sorted(entry.name for entry in folder.iterdir() if entry.name not in taken):
        try:
            if not is_companion(name):
                raise ValueError("it is of something else")
            found[name] = read_bytes(within(folder, name), min(MOST_EACH, room))
            room -= len(found[name])
        except (OSError, ValueError):
            left.append(name)
    return found, left


def companions(folder: Path) -> dict[str, bytes]:
    """config.json and the tokenizer's files. Raises ConfigError for links that lead outside, and for absurd sizes."""
    found = {file for pattern in COMPANIONS for file in folder.glob(pattern) if file.is_file()}
    names = sorted(filter(is_companion, (file.relative_to(folder).as_posix() for file in found)))
    try:
        if (size := sum((folder / name).stat().st_size for name in names)) > MOST_BYTES:
            raise ValueError(f"its config.json and tokenizer have {size:,} bytes, more than {MOST_BYTES:,}")
        return {name: within(folder, name).read_bytes() for name in names}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}; give a folder with its files in it") from None


def neighbours(file: Path) -> dict[str, bytes]:
    """The companions in the folder of a file; they may be of something else, and what is wrong with them is told."""
    try:
        return companions(file.parent)
    except ConfigError as error:
        say(f"what lies beside {file} stays behind: {error}")
        return {}


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
    config, names, twins = check(conversion), origin.names_in("hf"), conversion.twins("hf")
    besides = {**origin.buffers_in("hf"), **{twin: described[name] for name, twin in twins.items()}}
    described = {names.get(name, name): leaf for name, leaf in described.items()} | besides

    path.mkdir(parents=True, exist_ok=True)
    metadata = origin.metadata if origin.kind == "hf" else safetensors_writer.FRAMEWORK
    index = origin.index if origin.kind == "hf" else {}
    places = safetensors_writer.lay_out(path, described, metadata, index)

    def put(_: str, name: str, array: np.ndarray) -> None:
        for there in (names.get(name, name), twins.get(name)):
            if there:
                buffers.write(*places[there], array)

    conversion.each(put, PARAMETERS)
    for name, leaf in origin.buffers_in("hf").items():
        buffers.write(*places[name], leaf.contiguous())
    for name, file in {**origin.files, CONFIG: config}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(file)


def _config(model: Family, dtype: str, before: bytes | None, was: str) -> bytes:
    """The config.json that came with the weights, where it is that of the model still; else ours. Its dtype changes
    where that of the weights has, which it need not have told."""
    with suppress(ConfigError, ValueError):  # it may be that of something else: a training script's own
        settings = parse(before or b"null")
        if isinstance(settings, dict) and experiment_for(from_settings(settings), CONFIG).model == model:
            changed = dtype != was
            now = settings | {key: dtype for key in ("dtype", "torch_dtype") if changed and settings.get(key)}
            return before if before and now == settings else _json(now)
    return _json(to_settings(model, dtype))


def _json(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2) + "\n").encode()


def read_hf(path: Path) -> tuple[Family, dict[str, np.ndarray]]:
    """The model of a Hugging Face folder and our parameters, in the files' dtype. Raises ConfigError."""
    content = opened(path)
    return content.experiment.model, {name: array for _, name, array in Conversion(content, OWN).stream(PARAMETERS)}


def write_hf(path: Path, model: Family, parameters: Mapping[str, np.ndarray]) -> None:
    """Write parameters of ours, in their own dtype, as a Hugging Face folder `path`. Raises ConfigError."""
    content = in_memory(experiment_for(model.model_dump(), "write_hf"), parameters)
    write(path, Conversion(exported(content), "huggingface"))
