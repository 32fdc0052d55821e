"""The tensors of each naming as JAX's side takes them apart and puts them together, and those of an optimizer."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from jaxdist.config import ConfigError, Model, Optimizer
from jaxdist.config.optimizer import REDUCED_DIMS
from jaxdist.convert.mappings.atoms import Entry, by_views, full_entry, put_rows, split_rows
from jaxdist.families import models
from jaxdist.formats.tables import (
    EXPERTS,
    LAYERS,
    OWN,
    TURNED,
    Atom,
    Shape,
    Stored,
    piece_name,
    stack_depth,
    stored,
    table_of,
)
from jaxdist.parallel.sharding import ParamSpec


def entries(naming: str, model: Model, shapes: Mapping[str, Shape] | None = None) -> dict[str, Entry]:
    """Every tensor that a model has under a naming, by name; a layer's together, in the order of its modules.

    `shapes`: those of some of our parameters, or of what is kept of them, where it is not all as they are.
    """
    shapes = shapes_of(model) if shapes is None else shapes
    if naming == OWN:
        return {name: _own(name, shape) for name, shape in shapes.items()}
    if naming == LAYERS:
        pieces = (piece for name in shapes for piece in layer_atoms(name, shapes[name]))
        return {part: full_entry(part, atom, shape) for part, atom, shape in pieces}
    return {name: _entry(tensor, model) for name, tensor in stored(naming, model, shapes).items()}


def trainable(naming: str, model: Model) -> dict[str, Entry]:
    """Parameters with optimizer state: all except running statistics."""
    return trained(entries(naming, model), model)


def trained(found: Mapping[str, Entry], model: Model) -> dict[str, Entry]:
    """Entries of the model's tensors."""
    param_specs = param_specs_of(model)
    return {
        name: entry for name, entry in found.items() if not any(param_specs[ours].statistic for ours, _ in entry.atoms)
    }


def shapes_kept(model: Model, o: Optimizer, kind: str) -> dict[str, Shape]:
    """The global shape of what an optimizer keeps as `kind`, by parameter of ours."""
    trained = (spec for spec in param_specs_of(model).values() if not spec.statistic)
    return {spec.name: spec.state_shape(kind) for spec in trained if o.states[kind](spec.role)}


def kept(naming: str, model: Model, o: Optimizer, kind: str) -> dict[str, Entry]:
    """Every tensor that an optimizer keeps as `kind` under a naming, by name of the parameter. Raises ConfigError where
    a matrix is not ours or ours turned, whose rows and columns are others."""
    shapes = shapes_kept(model, o, kind)
    if kind in REDUCED_DIMS and naming not in (OWN, LAYERS):
        for row in table_of(naming, model).rows_of(shapes):
            if len(row.ours) > 1 or row.transpose != row.ours[0].endswith(".kernel"):
                raise ConfigError(
                    f"{kind} of {row.theirs}: the rows and columns of this matrix are others in jaxdist; take the "
                    "weights alone (--to hf), or convert between jaxdist and torch_ref (--to orbax, --to dcp)"
                )
    return entries(naming, model, shapes)


def layer_atoms(name: str, shape: Shape) -> list[tuple[str, Atom, Shape]]:
    """The atoms of a parameter of ours: their names under LAYERS, and their shapes."""
    stack, rest = cut(name, shape)
    return [(piece_name(name, place), (name, number), rest) for number, place in enumerate(np.ndindex(*stack))]


def cut(name: str, shape: Shape) -> tuple[Shape, Shape]:
    """The axes of a parameter of ours along which it is stacked, layers and experts, and the others."""
    depth = stack_depth(name)
    return shape[:depth], shape[depth:]


def _own(name: str, shape: Shape) -> Entry:
    atoms, (stack, _) = [atom for _, atom, _ in layer_atoms(name, shape)], cut(name, shape)
    if not stack:
        return full_entry(name, atoms[0], shape)
    return by_views(name, atoms, shape, lambda tensor, number: tensor[np.unravel_index(number, stack)])


def _entry(tensor: Stored, model: Model) -> Entry:
    """Layout of the atoms in one of their tensors."""
    row, size = tensor.row, len(tensor.row.ours)
    if EXPERTS in row.ours[0]:
        experts = len(tensor.atoms) // size
        return by_views(
            tensor.name,
            tensor.atoms,
            tensor.shape,
            lambda array, i: _of_expert(array if row.by_expert else array[i % experts], tensor, i // experts),
            row.transpose,
        )
    if model.input_kind == "images":
        return by_views(tensor.name, tensor.atoms, tensor.shape, lambda array, _: turned(array, tensor), row.transpose)
    head_dim = model.head_dim if row.interleaved else 0
    return Entry(
        *tensor[:3],
        lambda array: split_rows(row, array, head_dim),
        lambda array, part, atom: put_rows(row, array, part, atom, head_dim),
        (row.transpose, row.interleaved),
    )


def turned(array: np.ndarray, tensor: Stored) -> np.ndarray:
    """A matrix or kernel of theirs with its axes in our order, a view."""
    return array.transpose(TURNED[array.ndim]) if tensor.row.transpose else array


def _of_expert(matrix: np.ndarray, tensor: Stored, part: int) -> np.ndarray:
    """One of the projections that one expert's matrix holds, a view."""
    return np.split(turned(matrix, tensor), len(tensor.row.ours), axis=-1)[part]


def shapes_of(model: Model) -> dict[str, Shape]:
    """The global shape of every parameter that the model declares."""
    return {name: spec.shape for name, spec in param_specs_of(model).items()}


@lru_cache(maxsize=4)
def param_specs_of(model: Model) -> Mapping[str, ParamSpec]:
    """Every parameter that the model declares. A ResNet's takes long: its blocks are built one by one."""
    return MappingProxyType(models.param_specs(models.build(model)))
