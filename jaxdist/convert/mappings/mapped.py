"""Weights of a user's own model by a key mapping: an Orbax checkpoint of a pytree <-> safetensors of torch's names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxdist.config import ConfigError
from jaxdist.convert.content import PARAMETERS, Leaf, Leaves
from jaxdist.convert.kinds import orbax_files, safetensors_writer, tensorstore_files
from jaxdist.convert.kinds.orbax_files import Coming, Streaming
from jaxdist.convert.mappings.atoms import Entry, full_entry
from jaxdist.convert.mappings.mapping import KeyMapping
from jaxdist.convert.mappings.trees import flatten, unflatten
from jaxdist.convert.stream import Resharder
from jaxdist.formats import buffers
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.safetensors_files import Tensors, leaves
from jaxdist.runs.checkpoints import sealed
from jaxdist.training.orbax_io import checkpointer

METADATA = "_METADATA"


@dataclass(frozen=True)
class Remapping(Resharder):
    """Weights of one side of a key mapping, seen as those of the other."""

    leaves: Leaves
    cuts: tuple[Mapping[str, Entry], Mapping[str, Entry]]  # as they are, and as they will be
    undecided: Sequence[str] = ()  # parameters of ours that fit by another axis or transform, too

    @property
    def source_groups(self) -> dict[str, Leaves]:
        return {PARAMETERS: self.leaves}

    def sources(self, group: str) -> Mapping[str, Entry]:
        return self.cuts[0]

    def targets(self, group: str) -> Mapping[str, Entry]:
        return self.cuts[1]


def holds_tensors(path: Path) -> bool:
    """Whether `path` is a safetensors file, or a folder with model.safetensors or its index."""
    return path.is_file() or any((path / name).is_file() for name in (SINGLE, INDEX))


def is_tree(path: Path) -> bool:
    """Whether `path` is what a conversion by mapping writes: safetensors, or a pytree of Orbax."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return holds_tensors(path) or any((path / item / METADATA).is_file() for item in (".", "params")) or is_bare(path)


def is_bare(path: Path) -> bool:
    """Whether `path` is a tree of TensorStore's arrays that Orbax did not write."""
    by_orbax = (path / METADATA).is_file() or any(path.glob(f"*/{METADATA}"))
    return path.is_dir() and not by_orbax and tensorstore_files.holds_arrays(path)


def locate(path: Path) -> Path:
    """The pytree at `path`: itself, its item `params`, or the only item that holds one. Raises ConfigError."""
    found = [folder.parent for folder in (path / METADATA, *sorted(path.glob(f"*/{METADATA}"))) if folder.is_file()]
    chosen = [folder for folder in found if folder in (path, path / "params")] or found
    if len(chosen) != 1:
        what = "several items, " + ", ".join(folder.name for folder in found) if found else "neither"
        raise ConfigError(
            f"{path}: {what}; give a folder that ocp.StandardCheckpointer or TensorStore wrote, a .safetensors file, "
            f"or a folder with {SINGLE}"
        )
    return chosen[0].resolve()


def manifest_of(path: Path) -> Path | None:
    """The checkpoint with a manifest whose pytree is at `path`, or that itself is one; None where there is none. Raises
    ConfigError."""
    if is_bare(path):
        return None
    found = locate(path)
    return sealed(found) or sealed(found.parent)


class Pytree:
    """A checkpoint of a pytree by Orbax, or bare TensorStore: its tree, and its arrays by their dotted names, none of
    them read yet."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError."""
        bare = is_bare(path)
        found = path if bare else locate(path)
        self.tree: Any = tensorstore_files.arrays(path) if bare else orbax_files.stores(found)
        self.leaves: dict[str, Leaf] = {
            name: orbax_files.leaf(found, store) for name, store in flatten(self.tree).items()
        }
        self.shapes = {name: leaf.shape for name, leaf in self.leaves.items()}


def to_theirs(source: Path, mapping: KeyMapping, dtype: str | None, like: Path | None) -> tuple[Remapping, list[str]]:
    """An Orbax checkpoint, to be written as torch's tensors, those of `like` where it is given; and what of the tree
    lies outside of the mapping's prefix and stays behind. Raises ConfigError."""
    tree = Pytree(source)
    mapping = mapping.under(prefix := mapping.below(tree.shapes))
    shapes = {name: shape for name, shape in tree.shapes.items() if name.startswith(prefix)}
    if like:
        mapping.check(shapes, {name: leaf.shape for name, leaf in read_theirs(like).items()})
    else:
        mapping.check(shapes, mapping.their_shapes(shapes) | dict.fromkeys(mapping.theirs_only, ()))
    _check_scaled(mapping, tree.leaves)
    left = Counter(name.partition(".")[0] for name in tree.shapes.keys() - shapes.keys())
    leaves = {name: tree.leaves[name] for name in shapes}
    conversion = Remapping(leaves, mapping.cuts(shapes), dtype=dtype, undecided=mapping.undecided(shapes))
    return conversion, [f"{top} ({n})" for top, n in sorted(left.items())]


def to_ours(source: Path, mapping: KeyMapping, dtype: str | None, like: Pytree) -> Remapping:
    """Safetensors, to be written as arrays of `like`; those in `ours_only`, or outside of the mapping's prefix, keep
    its values. Raises ConfigError."""
    leaves, shapes = read_theirs(source), like.shapes
    mapping = mapping.under(prefix := mapping.below(shapes))
    outside = tuple(name for name in shapes if not name.startswith(prefix))
    replace(mapping, ours_only=(*mapping.ours_only, *outside)).check(
        shapes, {name: leaf.shape for name, leaf in leaves.items()}
    )
    _check_scaled(mapping, like.leaves)
    ours, theirs = mapping.cuts(shapes)
    kept = {name: f"{name} of --like" for name in shapes if name not in ours}  # no name of theirs
    ours |= {name: full_entry(name, (name, 0), shapes[name]) for name in kept}
    theirs |= {there: full_entry(there, (name, 0), shapes[name]) for name, there in kept.items()}
    leaves |= {there: like.leaves[name] for name, there in kept.items()}
    cuts = theirs, {name: ours[name] for name in shapes}
    return Remapping(leaves, cuts, dtype=dtype, undecided=mapping.undecided(shapes))


def _check_scaled(mapping: KeyMapping, leaves: Leaves) -> None:
    """Raises ConfigError where a row multiplies whole numbers."""
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    for pair in mapping.pairs(shapes):
        if pair.row.scale and (dtype := leaves[pair.ours].dtype).kind in "iub":
            raise ConfigError(
                f"{mapping.source}: ours = {pair.ours!r} is {dtype}, which scale = {pair.row.scale!r} would round; "
                "leave scale out"
            )


def check_theirs(conversion: Remapping) -> None:
    """Raises ConfigError where safetensors has no such dtype."""
    for name, leaf in conversion.groups[PARAMETERS].items():
        if leaf.dtype not in safetensors_writer.NAMES:
            known = ", ".join(map(str, safetensors_writer.NAMES))
            raise ConfigError(f"{name} is {leaf.dtype}, which safetensors files cannot hold; give one of {known}")


def write_theirs(path: Path, conversion: Remapping, single: bool, companions: Mapping[str, bytes]) -> None:
    """Write safetensors: a `single` file, or a folder with these `companions`, such as config.json."""
    leaves = conversion.groups[PARAMETERS]
    if single:
        path.parent.mkdir(parents=True, exist_ok=True)
        places = safetensors_writer.lay_out_file(path, leaves)
    else:
        path.mkdir(parents=True)
        places = safetensors_writer.lay_out(path, leaves)
        for name, content in companions.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(content)
    conversion.each(lambda _, name, array: buffers.write(*places[name], array), PARAMETERS)


def write_ours(path: Path, conversion: Remapping, tree: Any) -> None:
    """Write an Orbax checkpoint of a pytree like `tree`."""
    coming = {
        name: Coming(PARAMETERS, leaf.shape, leaf.dtype, {name: ()})
        for name, leaf in conversion.groups[PARAMETERS].items()
    }
    streaming = Streaming(conversion)
    with checkpointer(streaming.handler()) as writer:
        streaming.save(writer, path.resolve(), ocp.args.PyTreeSave(unflatten(tree, coming)))


def read_theirs(path: Path) -> dict[str, Leaf]:
    """Safetensors, in a file or a folder. Raises ConfigError."""
    return leaves(Tensors(path))
