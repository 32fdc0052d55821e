"""Folders with config.json and pytorch_model.bin, or its shards and their index, as transformers wrote before
safetensors and DeepSpeed's zero_to_fp32.py writes still. No pickle is executed."""

from pathlib import Path

from jaxdist.config import Experiment
from jaxdist.convert.content import Content, Leaf, Origin
from jaxdist.convert.kinds.hf import folder_content
from jaxdist.convert.kinds.reader import READER
from jaxdist.formats import bins


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the folder, under the names of its files. Raises ConfigError."""
    return bins.read(path, READER)[0]


def read_content(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a folder: weights, with its config.json and tokenizer. Raises ConfigError."""
    there, files = bins.read(path, READER)
    return folder_content(path, there, files, Origin("hf"), wanted)
