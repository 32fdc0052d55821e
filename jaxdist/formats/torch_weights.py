"""The weights of a model in a file of torch.save's."""

from pathlib import Path
from typing import Any

from jaxdist.formats.leaves import Leaf, Reader, ToLeaf
from jaxdist.formats.refusals import no_model
from jaxdist.formats.torch_files import state_dict


def weights_of(path: Path, tree: Any, leaf: ToLeaf) -> dict[str, Leaf]:
    """Weights in the tree of the file `path`, under its names. Raises ConfigError where there are none."""
    tensors = {name: leaf(path, name, tensor) for name, tensor in state_dict(tree).items()}
    if not tensors:
        raise no_model(path)
    return tensors


def weights_in(path: Path, reader: Reader) -> dict[str, Leaf]:
    """Weights of the file `path`. Raises ConfigError."""
    return weights_of(path, reader.load(path), reader.leaf)
