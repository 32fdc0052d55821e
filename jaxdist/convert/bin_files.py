"""Folders with config.json and pytorch_model.bin, or its shards and their index, as transformers wrote before
safetensors and DeepSpeed's zero_to_fp32.py writes still. No pickle is executed."""

from pathlib import Path

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.foreign import check_index
from jaxdist.convert import torch_files
from jaxdist.convert.content import Content, Leaf, Origin
from jaxdist.convert.hf import of_folder
from jaxdist.formats.folders import BIN_INDEX, bin_files


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the folder, under the names of its files. Raises ConfigError."""
    return read(path)[0]


def opened(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a folder: weights, with its config.json and tokenizer. Raises ConfigError."""
    there, files = read(path)
    return of_folder(path, there, files, Origin("hf"), wanted)


def read(path: Path) -> tuple[dict[str, Leaf], set[str]]:
    """The tensors and the names of the files that hold them.

    Raises ConfigError, also where the index does not belong to the shards.
    """
    files, index = bin_files(path)
    found: dict[str, Leaf] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, leaf in torch_files.described(file).items():
            if name in found:
                raise ConfigError(f"{file}: tensor {name} is in {places[name].name} too; give each tensor once")
            found[name], places[name] = leaf, file
    check_index(path, index, places, BIN_INDEX)
    return found, {*(file.name for file in files), *([BIN_INDEX] if index else [])}
