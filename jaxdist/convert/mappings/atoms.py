"""Atoms, the smallest pieces that two namings of a model share, and the assembly of tensors from them. numpy only."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.formats.tables import Atom, Shape, TensorRow

BLOCK = 256  # bytes of a row of a block, which has as many rows as numbers in one


class Entry(NamedTuple):
    """One tensor of a naming: the atoms that it holds, how it is taken apart into them, and how one is put into it."""

    name: str
    atoms: tuple[Atom, ...]
    shape: Shape
    split: Callable[[np.ndarray], Sequence[np.ndarray]]
    put: Callable[[np.ndarray, int, np.ndarray], None]
    order: tuple[bool, bool] = False, False  # transposed, interleaved

    def same(self, other: "Entry") -> bool:
        """Whether both tensors are the same numbers in the same order."""
        return (self.atoms, self.shape, self.order) == (other.atoms, other.shape, other.order)


def by_views(
    name: str, atoms: Sequence[Atom], shape: Shape, view: Callable[[np.ndarray, int], np.ndarray], turned: bool = False
) -> Entry:
    """An entry of which `view(tensor, i)` shows atom i as ours has it; `turned` where its numbers are transposed."""
    return Entry(
        name,
        tuple(atoms),
        shape,
        lambda tensor: [view(tensor, i) for i in range(len(atoms))],
        lambda out, i, atom: copy(view(out, i), atom),
        (turned, False),
    )


def full_entry(name: str, atom: Atom, shape: Shape) -> Entry:
    """An entry that is one atom."""
    return by_views(name, [atom], shape, lambda tensor, _: tensor)


def recut(
    tensors: Mapping[str, np.ndarray], sources: Mapping[str, Entry], targets: Mapping[str, Entry]
) -> dict[str, np.ndarray]:
    """The tensors of one naming from those of another, the same bits; where dtypes meet, in what numpy takes for both.

    Raises ConfigError where the pieces are not all of a tensor.
    """
    held = {atom: tensors[source.name].dtype for source in sources.values() for atom in source.atoms}
    arrays: dict[str, np.ndarray] = {}
    for name, target in targets.items():
        arrays[name] = np.zeros(target.shape, np.result_type(*(held[atom] for atom in target.atoms)))
        if sum(piece.size for piece in target.split(arrays[name])) != arrays[name].size:
            raise ConfigError(f"{name} {target.shape}: the mapping has not all pieces of it; add rows for the others")
    fill(arrays, targets.values(), sources.values(), lambda source: tensors[source.name])
    return arrays


def fill(
    arrays: Mapping[str, np.ndarray],
    targets: Iterable[Entry],
    sources: Iterable[Entry],
    read: Callable[[Entry], np.ndarray],
) -> None:
    """Put the atoms of the sources, which are read one at a time, into the targets' tensors, which hold the same."""
    places = {atom: (target, i) for target in targets for i, atom in enumerate(target.atoms)}
    for source in sources:
        tensor = read(source)
        for atom, piece in zip(source.atoms, source.split(tensor), strict=True):
            target, i = places[atom]
            target.put(arrays[target.name], i, piece.astype(arrays[target.name].dtype, copy=False))


def split_rows(row: TensorRow, tensor: np.ndarray, head_dim: int = 0) -> list[np.ndarray]:
    """One of their tensors -> that layer of each of the row's parameters. Views, unless interleaved."""
    if row.interleaved:
        tensor = tensor.reshape(-1, head_dim // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return np.split(tensor.T if row.transpose else tensor, len(row.ours), axis=-1)


def put_rows(row: TensorRow, tensor: np.ndarray, part: int, atom: np.ndarray, head_dim: int = 0) -> None:
    """Write that layer of the row's parameter `part` into their tensor."""
    if row.interleaved:
        rows = atom.T if row.transpose else atom
        turned = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2)
        tensor.reshape(turned.shape)[...] = turned
    else:
        copy(split_rows(row, tensor)[part], atom)


def copy(to: np.ndarray, source: np.ndarray) -> None:
    """Copy one array into another of its shape and dtype.

    A matrix that is turned on the way goes in blocks that stay in the cache: else each number costs a line of it.
    """
    if to.itemsize <= 8:
        bits = f"u{to.itemsize}"  # numpy is slow with dtypes that are not its own
        to, source = to.view(bits), source.view(bits)
    if to.ndim != 2 or (to.strides[0] < to.strides[1]) == (source.strides[0] < source.strides[1]):
        to[...] = source
        return
    if to.strides[0] < to.strides[1]:
        to, source = to.T, source.T
    numbers = max(1, BLOCK // to.itemsize)
    for row, column in product(*(range(0, size, numbers) for size in to.shape)):
        block = slice(row, row + numbers), slice(column, column + numbers)
        to[block] = np.ascontiguousarray(source[block].T).T
