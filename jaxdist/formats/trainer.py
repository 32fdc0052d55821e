"""The weights of a folder of transformers' Trainer or of Accelerate, plain or of FSDP."""

from collections.abc import Mapping
from pathlib import Path

from jaxdist.formats import bins, safetensors_files
from jaxdist.formats.folders import BIN, BIN_INDEX, FSDP_FILE, FSDP_WEIGHTS
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.leaves import Leaf, Reader
from jaxdist.formats.torch_weights import weights_in


def read(path: Path, reader: Reader) -> tuple[Mapping[str, Leaf], set[str]]:
    """The tensors of the model, and the names of what holds them. Raises ConfigError."""
    if (path / FSDP_WEIGHTS).is_dir():
        return reader.distributed(path / FSDP_WEIGHTS), {FSDP_WEIGHTS}
    if any((path / name).exists() for name in (SINGLE, INDEX)):
        return safetensors_files.read(path)
    if any((path / name).exists() for name in (BIN, BIN_INDEX)):
        return bins.read(path, reader)
    return weights_in(path / FSDP_FILE, reader), {FSDP_FILE}
