"""Weights of a user's own model by a key mapping: an Orbax checkpoint of a pytree <-> safetensors of torch's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdist.checkpoint import reading
from jaxdist.config import ConfigError
from jaxdist.config.foreign import INDEX, SINGLE
from jaxdist.convert import buffers, safetensors_writer
from jaxdist.convert.mapping import KeyMapping
from jaxdist.convert.safetensors_files import Tensor, Tensors
from jaxdist.convert.trees import flatten, shapes, unflatten

METADATA = "_METADATA"
Cast = Callable[[str, np.ndarray], np.ndarray]


def holds_tensors(path: Path) -> bool:
    """Whether `path` is a safetensors file, or a folder with model.safetensors or its index."""
    return path.is_file() or any((path / name).is_file() for name in (SINGLE, INDEX))


def locate(path: Path) -> Path:
    """The pytree at `path`: itself, its item `params`, or the only item that holds one. Raises ConfigError."""
    found = [folder.parent for folder in (path / METADATA, *sorted(path.glob(f"*/{METADATA}"))) if folder.is_file()]
    chosen = [folder for folder in found if folder in (path, path / "params")] or found
    if len(chosen) != 1:
        what = "several items, " + ", ".join(folder.name for folder in found) if found else "neither"
        raise ConfigError(
            f"{path}: {what}; give a folder that ocp.StandardCheckpointer wrote, a .safetensors file, or a folder with "
            f"{SINGLE}"
        )
    return chosen[0]


def read_tree(path: Path) -> Any:
    """A pytree of numpy arrays from an Orbax checkpoint. Raises ConfigError."""
    found = locate(path).resolve()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader, reading(found):
        tree = reader.metadata(found).item_metadata.tree
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return reader.restore(found, args=ocp.args.PyTreeRestore(restore_args=to_host))


def to_theirs(source: Path, target: Path, mapping: KeyMapping, cast: Cast, single: bool) -> int:
    """An Orbax checkpoint -> safetensors: a `single` file or a folder. Returns its bytes. Raises ConfigError."""
    parameters = {name: np.asarray(leaf) for name, leaf in flatten(read_tree(source)).items()}
    ours = {name: array.shape for name, array in parameters.items()}
    mapping.check(ours, mapping.their_shapes(ours) | dict.fromkeys(mapping.theirs_only, ()))
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: cast(name, tensor) for name, tensor in mapping.to_theirs(parameters).items()}
    described = {name: Tensor(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if single:
        places = safetensors_writer.lay_out_file(target, described)
    else:
        target.mkdir()
        places = safetensors_writer.lay_out(target, described)
    for name, tensor in tensors.items():
        buffers.write(*places[name], tensor)
    return sum(tensor.nbytes for tensor in tensors.values())


def to_ours(source: Path, target: Path, mapping: KeyMapping, like: Path, cast: Cast) -> int:
    """Safetensors -> an Orbax checkpoint with the tree and shapes of `like`. Returns its bytes. Raises ConfigError.

    Parameters in `ours_only` keep the values that `like` has.
    """
    tree = read_tree(like)
    tensors = Tensors(source)
    mapping.check(shapes(tree), {name: tensor.shape for name, tensor in tensors.described.items()})
    read = {name: tensors.read(name) for name in tensors.described if name not in mapping.theirs_only}
    parameters = flatten(tree) | mapping.to_ours(read, shapes(tree))
    parameters = {name: cast(name, np.asarray(array)) for name, array in parameters.items()}
    with ocp.StandardCheckpointer() as writer:
        writer.save(target.resolve(), unflatten(tree, parameters))
    return sum(array.nbytes for array in parameters.values())
