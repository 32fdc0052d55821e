"""The tensors of a folder with pytorch_model.bin, or its shards and their index."""

from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.formats.folders import BIN_INDEX, bin_files
from jaxdist.formats.foreign import check_index
from jaxdist.formats.leaves import Leaf, Reader
from jaxdist.formats.torch_weights import weights_in


def read(path: Path, reader: Reader) -> tuple[dict[str, Leaf], set[str]]:
    """The tensors and the names of the files that hold them.

    Raises ConfigError, also where the index does not belong to the shards.
    """
    files, index = bin_files(path)
    found: dict[str, Leaf] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, leaf in weights_in(file, reader).items():
            if name in found:
                raise ConfigError(f"{file}: tensor {name} is in {places[name].name} too; give each tensor once")
            found[name], places[name] = leaf, file
    check_index(path, index, places, BIN_INDEX)
    return found, {*(file.name for file in files), *([BIN_INDEX] if index else [])}
