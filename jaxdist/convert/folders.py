"""Folders that common torch trainers write, recognized by their files, and the files that are only a part of one."""

import re
from pathlib import Path
from typing import NamedTuple

BIN, BIN_INDEX, CONFIG = "pytorch_model.bin", "pytorch_model.bin.index.json", "config.json"


def is_bin_folder(path: Path) -> bool:
    """Whether `path` is a folder with config.json and weights as pytorch_model.bin, whole or in shards."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (BIN, BIN_INDEX))


class PartFile(NamedTuple):
    """A file that holds a part of a checkpoint: the pattern of its name, what it is, and what its folder must have."""

    name: re.Pattern[str]
    title: str
    needs: str


_SHARD = "one of several shards of a model's weights"
PART_FILES = (
    PartFile(re.compile(r"pytorch_model-\d+-of-\d+\.bin"), _SHARD, f"config.json, {BIN_INDEX} and all shards"),
    PartFile(
        re.compile(r"model-\d+-of-\d+\.safetensors"), _SHARD, "config.json, model.safetensors.index.json and all shards"
    ),
    PartFile(
        re.compile(r".*\.(bin|safetensors)\.index\.json"),
        "the index of a model's shards, without weights",
        "config.json and all shards",
    ),
)


def part_of(path: Path) -> PartFile | None:
    """What the file `path` is a part of, by its name; None where it stands for itself."""
    return next((part for part in PART_FILES if part.name.fullmatch(path.name)), None) if path.is_file() else None
