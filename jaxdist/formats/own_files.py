"""Files that jaxdist keeps in its own torch files, as tensors of bytes: config.json, tokenizer."""

from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.formats.companions import MOST_BYTES, is_companion
from jaxdist.formats.leaves import ToLeaf
from jaxdist.formats.torch_files import is_own, is_tensor, part

FILES = "files"


def bytes_of(path: Path, name: str, value: Any, most: int, leaf: ToLeaf) -> bytes:
    """Raises ValueError unless it is a tensor of at most `most` bytes, and ConfigError."""
    if not is_tensor(value) or str(value.dtype) != "torch.uint8" or value.numel() > most:
        raise ValueError(f"it is not a tensor of at most {most:,} bytes")
    return leaf(path, name, value).read().tobytes()


def files_of(path: Path, tree: Any, leaf: ToLeaf) -> dict[str, bytes]:
    """Companions of the weights. Raises ConfigError."""
    found = dict[str, bytes]()
    for name, file in part(tree, (FILES,)).items() if is_own(tree) else ():
        try:
            if not is_companion(name):
                raise ValueError("it is not copied with weights")
            found[name] = bytes_of(path, name, file, MOST_BYTES, leaf)
        except ValueError as error:
            raise ConfigError(f"{path}: its {FILES} have {name!r}: {error}; leave it out") from None
    return found
