"""Tables from tensors of a file to parameters, one per naming and family, read in both directions by both sides.

Parameters of jaxdist are stacked: all layers along the first axis, L, experts along the second, E. All namings
share the *atoms*: one layer of one parameter, and of experts one of them. A tensor of a naming holds one atom or
several, and two namings meet in their atoms. Names and shapes only: how a tensor is cut is each side's own.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from jaxdist.config import ConfigError, Model
from jaxdist.config.plugins import optional
from jaxdist.config.registry import FAMILIES

Shape = tuple[int, ...]
Atom = tuple[str, int]  # a parameter and its layer, or the number of another piece; 0 for one without pieces
STACKED = "layers."  # how the names of our stacked parameters begin
EXPERTS = ".experts."  # what those have in their names that are stacked by experts too, [L, E, ...]


def stack_depth(name: str) -> int:
    """Number of leading axes of a parameter of ours that are stacks: of layers, then of experts."""
    return 2 if EXPERTS in name else int(name.startswith(STACKED))


def piece_name(name: str, place: Shape) -> str:
    """The name of one layer, or expert, of a parameter of ours: `layers.mlp.up_proj.kernel[1]`."""
    return f"{name}[{','.join(map(str, place))}]" if place else name


# Permutations of the axes of torch's Linear (out, in) and Conv2d (out, in, Y, X) to our kernels', and back.
TURNED, RETURNED = {2: (1, 0), 4: (2, 3, 1, 0)}, {2: (1, 0), 4: (3, 2, 0, 1)}


class TensorRow(NamedTuple):
    """One kind of tensor. `{layer}` in `theirs` is the layer's number, our leading axis L; `{expert}` the expert's, E.
    `{stage}` and `{block}` in both are numbers in our names too, where blocks are not stacked; `{number}` is stage + 1.

    Several parameters of ours are one tensor of theirs: equal parts of its last axis, the outputs. `interleaved` are
    queries and keys in whose heads the two numbers that a rotation turns are neighbours; in ours they are half a head
    apart.

    Not the `Row` of users' key mappings (`jaxdist/convert/mappings/rows.py`): that pairs one parameter of each side, or
    a part, chunk or scale of it, by any transform of a file; here both sides know the few that a family needs.
    """

    ours: tuple[str, ...]
    theirs: str
    transpose: bool = False
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.theirs

    @property
    def by_expert(self) -> bool:
        """Whether theirs are a tensor for each expert, where ours stacks them."""
        return "{expert}" in self.theirs

    def numbered(self, shapes: Mapping[str, Shape], blocks: Iterable[tuple[int, int]]) -> Iterator["TensorRow"]:
        """The row, or one for each (stage, block) of a model with these parameters; none where the model lacks them."""
        ours, *_ = self.ours
        if "{stage}" not in ours:
            yield from [self] if ours in shapes else []
            return
        for stage, block in blocks:
            there: dict[str, Any] = {"stage": stage, "block": block, "number": stage + 1}
            if ours.format(**there) in shapes:
                yield self._replace(ours=(ours.format(**there),), theirs=self.theirs.format(**there))

    def names(self, layers: int, experts: int = 1) -> list[str]:
        """Names of their tensors, by layer, and within one by expert."""
        each = range(experts if self.by_expert else 1)
        return [self.theirs.format(layer=i, expert=e) for i in range(layers if self.stacked else 1) for e in each]

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of one of their tensors, given the shapes of our parameters."""
        shape = shapes[self.ours[0]]
        stack, layer_shape = self.stack(shape), shape[1:] if self.stacked else shape
        matrix = [*layer_shape[len(stack) :]]
        if len(self.ours) > 1:
            matrix[-1] = sum(shapes[name][-1] for name in self.ours)
        if self.transpose:
            matrix = [matrix[axis] for axis in RETURNED[len(matrix)]]
        return (*(() if self.by_expert else stack), *matrix)

    def stack(self, shape: Shape) -> Shape:
        """(E,) where one layer of a parameter of ours with this shape holds all experts, else ()."""
        return shape[1:2] if EXPERTS in self.ours[0] else ()

    def tensors(self, layer: int, shapes: Mapping[str, Shape]) -> Iterator["Stored"]:
        """Tensors of theirs of one layer."""
        shape, experts = self.shape(shapes), self.stack(shapes[self.ours[0]])
        if not experts:
            yield Stored(self.theirs.format(layer=layer), tuple((name, layer) for name in self.ours), shape, self)
            return
        numbers = range(layer * experts[0], (layer + 1) * experts[0])
        if self.by_expert:
            for e, number in enumerate(numbers):
                yield Stored(self.theirs.format(layer=layer, expert=e), ((self.ours[0], number),), shape, self)
            return
        atoms = tuple((name, number) for name in self.ours for number in numbers)
        yield Stored(self.theirs.format(layer=layer), atoms, shape, self)


class Stored(NamedTuple):
    """One tensor of a naming and the atoms that it holds: those of a parameter together, experts in their order."""

    name: str
    atoms: tuple[Atom, ...]
    shape: Shape
    row: TensorRow


def linear(ours: str, theirs: str, interleaved: bool = False) -> list[TensorRow]:
    """torch.nn.Linear: its weight is (out, in), our kernel (in, out)."""
    return [
        TensorRow((f"{ours}.kernel",), f"{theirs}.weight", transpose=True, interleaved=interleaved),
        TensorRow((f"{ours}.bias",), f"{theirs}.bias", interleaved=interleaved),
    ]


def norm(ours: str, theirs: str) -> list[TensorRow]:
    """torch.nn.LayerNorm and RMSNorm."""
    return [TensorRow((f"{ours}.scale",), f"{theirs}.weight"), TensorRow((f"{ours}.bias",), f"{theirs}.bias")]


def embedding(ours: str, theirs: str) -> list[TensorRow]:
    """torch.nn.Embedding."""
    return [TensorRow((f"{ours}.embedding",), f"{theirs}.weight")]


class Table(NamedTuple):
    """A family's rows under one naming, in the order of its modules: a decoder's embedding first. Rows whose parameters
    a model lacks are left out.

    `head`: the output head, which a file may hold beside the embedding that it is tied to. `prefix` is missing in files
    of a model without its head; names matching `ignored` hold no weights.
    """

    rows: list[TensorRow]
    head: str
    prefix: str = ""
    ignored: re.Pattern[str] = re.compile(r"(?!)")

    def rows_of(self, shapes: Mapping[str, Shape]) -> list[TensorRow]:
        """The rows of a model with these parameters."""
        places = [re.match(r"stages\.(\d+)\.(\d+)\.", name) for name in shapes]
        blocks = sorted({(int(place[1]), int(place[2])) for place in places if place})
        return [found for row in self.rows for found in row.numbered(shapes, blocks)]

    def full_name(self, name: str) -> str:
        """`name` with the family's prefix."""
        return name if name.startswith((self.prefix, self.head)) else self.prefix + name

    def renamed(self, pattern: str, now: str) -> "Table":
        """The table with `now` in place of the matches of a pattern in names."""
        rows = [row._replace(theirs=re.sub(pattern, now, row.theirs)) for row in self.rows]
        return self._replace(rows=rows, head=re.sub(pattern, now, self.head))


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
SAME = ("bias", *STATISTICS)  # last parts of our names that torch_ref has too
OWN, LAYERS = "jaxdist", "jaxdist by layers"  # need no table, see `entries`: our arrays, and one layer at a time
HUGGINGFACE, IN_MEMORY, TORCH_REF = "huggingface", "transformers in memory", "torch_ref"


def _in_torch_ref(ours: str) -> TensorRow:
    """`torch_ref` has our modules, a layer each, as plain torch ones."""
    module, _, kind = ours.rpartition(".")
    name = module.replace("layers.", "layers.{layer}.", 1) if module.startswith(STACKED) else module
    return TensorRow((ours,), f"{name}.{kind if kind in SAME else 'weight'}", transpose=kind == "kernel")


def tables_of(family: str) -> dict[str, Table]:
    """Naming -> table of a registered family: those of its row and torch_ref's. The first is the one of its files.

    Raises ConfigError where the row has none.
    """
    found = optional(FAMILIES, family, "tables")
    if not isinstance(found, Mapping) or not all(isinstance(table, Table) for table in found.values()):
        raise unusable(family, "tables", found, "a mapping of namings to jaxdist.formats.tables.Table")
    if not found:
        raise lacking(family, "tables", "its tensors have no names in other formats")
    first, *others = found.items()
    rows = [_in_torch_ref(name) for row in first[1].rows for name in row.ours]
    return dict([first, (TORCH_REF, Table(rows, head="lm_head.weight")), *others])


def table_of(naming: str, model: Model) -> Table:
    """The table of a model's family under a naming. Raises ConfigError where it has none."""
    tables = tables_of(model.family)
    if naming not in tables:
        raise lacking(model.family, f"tables[{naming!r}]", f"its tensors have no names of {naming}")
    return tables[naming]


def table_of_files(family: str) -> Table:
    """The table of the names in a family's own files. Raises ConfigError where it has none."""
    return next(iter(tables_of(family).values()))


def naming_for(naming: str, model: Model) -> str:
    """The naming in which files are written that ask for this one: HUGGINGFACE stands for the first of a family's own.
    Raises ConfigError where it has none."""
    return next(iter(tables_of(model.family))) if naming == HUGGINGFACE else naming


def unusable(family: str, piece: str, found: object, kind: str) -> ConfigError:
    """The error where a piece of a family's row is of another kind."""
    return ConfigError(
        f"model.family = {family}: {FAMILIES.owner(family)} registers it with {piece} = {reprlib.repr(found)}; give "
        f"{kind}"
    )


def lacking(family: str, piece: str, so: str) -> ConfigError:
    """The error where the row of a family lacks a piece that a command needs."""
    return ConfigError(
        f"model.family = {family}: {FAMILIES.owner(family)} registers it without {piece}, so {so}; add {piece} to its "
        "row, or keep its weights as an Orbax checkpoint"
    )


def stored(naming: str, model: Model, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
    """Every tensor that a model has under a naming of its family, by name; those of a layer together, in the order of
    its modules.

    `shapes`: those of the parameters of jaxdist, all of them or some.
    """
    found: dict[str, Stored] = {}
    for stacked, rows in groupby(table_of(naming, model).rows_of(shapes), lambda row: row.stacked):
        block = list(rows)
        for layer in range(model.layers if stacked else 1):
            found |= {tensor.name: tensor for row in block for tensor in row.tensors(layer, shapes)}
    return found
