"""A key mapping: which parameter of a user's JAX model is which tensor of their torch module. numpy only.

Names are dotted, "ours" of the pytree and "theirs" of the state dict. It lives in a TOML file, to be edited by hand:

    rows = [
      { ours = "blocks_{layer}.attn.query.kernel", theirs = "layers.{layer}.attn.q.weight", transform = "heads_out" },
    ]
    ours_only = []
    theirs_only = ["pooler.weight"]

`{layer}` stands for a number, the same on both sides. A row with it in `theirs` alone maps a parameter that holds all
layers, stacked along its first axis, or along `axis = 1` or another (MaxText's param_scan_axis). Rows whose layers have
the same name in `theirs` must agree on their number. `reshape` needs `shape`, which is theirs. `scale = "sqrt_last"`:
theirs is ours times the square root of the size of our last axis, as MaxText divides queries by sqrt(head_dim). That is
computed in float32 at least and rounded once to the dtype: exact where the root is a power of two, else within 2^-23 of
a float32 number (root and product are rounded), or half a unit in the last place of bfloat16 and float16.

A row with `optional = true` is left out where ours has no such parameter, as a head that is the embedding.

`ours` may lie deeper in the tree, as below `params.params.` of a training state: all rows below the same prefix.
Entries outside of it stay behind.

Where one side keeps in one array what the other keeps in several, each has a row: `part = 0` is the first entry of our
array's first axis (the layers not counted), `chunk = [0, 3]` the first of three equal pieces of theirs:

    { ours = "attn.kv_einsum.w", part = 0, theirs = "attn.k_proj.weight", transform = "heads_first" },
    { ours = "attn.query.kernel", theirs = "attn.in_proj_weight", chunk = [0, 3], transform = "heads_out" },
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.config.errors import nearest
from jaxdist.config.experiment import read_toml
from jaxdist.convert.mappings.atoms import Entry, Shape, by_views, recut
from jaxdist.convert.mappings.rows import (
    LAYER,
    SCALES,
    Row,
    check_row,
    listed,
    missing_layers,
    only_keys,
    read_row,
    toml,
)
from jaxdist.convert.mappings.transforms import RESHAPE, SAME, TRANSFORMS, as_ours, fitting, result

MAPPINGS = {file.stem: file for file in Path(__file__).parent.glob("*.toml")}  # shipped, by name
FULL_MODEL = f"Give the complete model; or, if it has no such layers, write the rows out one by one, without {LAYER}"
# Parts of names that moments and averages have, which are called as the weights and may lie less deep.
BESIDES = {"opt_state", "optimizer", "optimizer_state", "mu", "nu", "ema", "ema_params"}
Shapes = Mapping[str, Shape]
View = Callable[["Pair", np.ndarray], np.ndarray]


class Pair(NamedTuple):
    """A parameter of ours, or its entry `layer`, and the tensor of theirs that holds it; of either the row's piece."""

    ours: str
    theirs: str
    row: Row
    layer: int | None = None

    def piece(self, shape: Shape) -> Shape:
        """The shape of the piece of ours."""
        return self.row.layer_shape(shape)[self.row.part is not None :]

    def our_piece(self, array: np.ndarray) -> np.ndarray:
        """The piece of ours, a view."""
        if self.layer is not None:
            array = np.moveaxis(array, self.row.axis, 0)[self.layer, ...]
        array = array if self.row.part is None else array[self.row.part, ...]
        return array.reshape(TRANSFORMS[self.row.transform].seen(array.shape))

    def their_piece(self, tensor: np.ndarray, shape: Shape) -> np.ndarray:
        """The piece of theirs as ours has it, a view; `shape` is that of ours."""
        chunk = self.row.chunk
        return as_ours(self.row.transform, np.split(tensor, chunk[1])[chunk[0]] if chunk else tensor, self.piece(shape))

    def factor(self, shape: Shape) -> float:
        """Factor by which ours, of this shape, is multiplied to become theirs."""
        return SCALES[self.row.scale](self.row.layer_shape(shape))

    def full_shape(self, shape: Shape) -> Shape:
        """The shape of theirs, of which a chunk has this one."""
        return (shape[0] * self.row.chunk[1], *shape[1:]) if self.row.chunk else shape


class Module(NamedTuple):
    """A module of theirs. `output` is how ours lays out its output (`Transform.output`).

    With `stacked`, `theirs` keeps its `{layer}`: outputs of ours are those of all layers along the first axis.
    """

    theirs: str
    output: str
    stacked: bool


@dataclass(frozen=True)
class KeyMapping:
    """The rows, and the names that are on one side only. `source` is the file, for messages."""

    rows: tuple[Row, ...]
    ours_only: tuple[str, ...] = ()
    theirs_only: tuple[str, ...] = ()
    source: str = "mapping"

    def __post_init__(self) -> None:
        for i, row in enumerate(self.rows, 1):
            check_row(f"{self.source}: row {i}", row)

    @classmethod
    def load(cls, path: Path | str) -> "KeyMapping":
        """Read a file. Raises ConfigError naming the row and the fix."""
        path = Path(path)
        values = read_toml(path, "mapping")
        only_keys(str(path), values, ("rows", "ours_only", "theirs_only"))
        lists = {name: values.get(name, []) for name in ("ours_only", "theirs_only")}
        for name, names in lists.items():
            if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
                raise ConfigError(f"{path}: {name} = {names!r}; give a list of names")
        rows = values.get("rows", [])
        if not isinstance(rows, list):
            raise ConfigError(f"{path}: rows = {rows!r}; give a list of tables with ours, theirs and transform")
        read = tuple(read_row(f"{path}: row {i}", row) for i, row in enumerate(rows, 1))
        return cls(read, tuple(lists["ours_only"]), tuple(lists["theirs_only"]), str(path))

    def save(self, path: Path | str, notes: Mapping[Row, str] | None = None, head: Iterable[str] = ()) -> None:
        """Write a file that `load` reads; `notes` and `head` become comments, of a row and of the file."""
        notes = notes or {}
        lines = [f"# {line}" for line in (f"transforms: {', '.join(TRANSFORMS)}", *head)]
        lines.append("rows = [")
        for row in self.rows:
            lines += [f"  # unsure: {notes[row]}"] if row in notes else []
            defaults = Row._field_defaults | {"transform": None}  # which a file always says
            fields = {name: value for name, value in row._asdict().items() if value != defaults.get(name)}
            lines.append("  { " + ", ".join(f"{name} = {toml(value)}" for name, value in fields.items()) + " },")
        lines += ["]", f"ours_only = {toml(self.ours_only)}", f"theirs_only = {toml(self.theirs_only)}"]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def below(self, names: Collection[str]) -> str:
        """The prefix, such as `params.params.`, under which names of ours have most rows, and the shortest of several;
        one of an optimizer or of averages only where no other has a row. Empty where none has a row."""
        prefixes: dict[str, set[str]] = defaultdict(set)  # the end of a name -> its beginnings
        for name in names:
            parts = name.split(".")
            for start in range(len(parts)):
                end = ".".join(parts[start:])
                prefixes[end].add(name.removesuffix(end))
        ends = ([*_numbered(row.ours, prefixes).values()] for row in self.rows if not row.optional)
        rows = Counter(prefix for found in ends for prefix in set().union(*(prefixes[end] for end in found)))

        def preference(prefix: str) -> tuple[bool, int, int, str]:
            return not BESIDES.isdisjoint(prefix.split(".")), -rows[prefix], prefix.count("."), prefix

        return min(rows, key=preference, default="")

    def under(self, prefix: str) -> "KeyMapping":
        """The mapping of names of ours that begin with `prefix`."""
        rows = tuple(row._replace(ours=prefix + row.ours) for row in self.rows)
        return replace(self, rows=rows, ours_only=tuple(prefix + name for name in self.ours_only))

    def pairs(self, ours: Shapes) -> list[Pair]:
        """One pair for every tensor of theirs. Raises ConfigError for a row that no parameter of ours has, and for rows
        that disagree on the number of layers."""
        found = [pair for i, row in enumerate(self.rows, 1) for pair in self._pairs_of(i, row, ours)]
        self._check_layers(ours)
        return found

    def _check_layers(self, ours: Shapes) -> None:
        """Raises ConfigError where rows of the same layers, those with one name before `{layer}` in theirs, lack one
        between the first and the last, or have different numbers of them: then some are stacked along another axis than
        the row says."""
        alike: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))  # layers -> count -> rows
        there: dict[str, set[int]] = defaultdict(set)  # layers -> their numbers
        for number, row in enumerate(self.rows, 1):
            if LAYER in row.theirs and (found := _numbered(row.ours, ours)):
                count = ours[row.ours][row.axis] if row.stacked else len(found)
                layers = row.theirs.partition(LAYER)[0]
                alike[layers][count].append(number)
                there[layers] |= {*range(count)} if row.stacked else found.keys()
        for layers, numbers in there.items():
            if numbers and (missing := missing_layers(layers, numbers)):
                lacking = listed([f"{layers}{number}" for number in missing])
                raise ConfigError(
                    f"{self.source}: ours has layers up to {layers}{max(numbers)}, but no {lacking}. {FULL_MODEL}"
                )
        for layers, counts in alike.items():
            if len(counts) > 1:
                shown = "; ".join(f"{n} in row {', '.join(map(str, rows))}" for n, rows in sorted(counts.items()))
                raise ConfigError(
                    f"{self.source}: rows disagree on the number of layers {layers}{LAYER}: {shown}. "
                    f"{self._advice({number for rows in counts.values() for number in rows}, ours)}"
                )

    def _advice(self, numbers: Collection[int], ours: Shapes) -> str:
        """A sentence on the names that layers lack; or on the axis of stacked rows that has one size in all of them."""
        rows = [self.rows[number - 1] for number in sorted(numbers)]
        shapes = [ours[row.ours] for row in rows if row.stacked]
        found = {row.ours: _numbered(row.ours, ours) for row in rows if not row.stacked}
        if not shapes:
            layers = sorted(set().union(*found.values()))
            lacking = [name.replace(LAYER, str(i)) for name, there in found.items() for i in layers if i not in there]
            return f"Ours has no {listed(lacking)}. {FULL_MODEL}"
        numbered = {len(there) for there in found.values()}
        for axis in range(min(map(len, shapes))):
            sizes = {shape[axis] for shape in shapes} | numbered
            if len(sizes) == 1:
                return f"Set axis = {axis} in each of them: that axis has size {sizes.pop()} in all"
        return "Give each row the axis that its layers are stacked along"

    def _pairs_of(self, number: int, row: Row, ours: Shapes) -> Iterator[Pair]:
        found = _numbered(row.ours, ours)
        if not found and row.optional:
            return
        if not found:
            rows = [(n, other.optional, _numbered(other.ours, ours)) for n, other in enumerate(self.rows, 1)]
            taken = {name for _, _, names in rows for name in names.values()}
            others = [f"row {n}" for n, optional, names in rows if not (names or optional or n == number)]
            raise ConfigError(
                f"{self.source}: row {number}: ours = {row.ours!r}: no such parameter"
                f"{f', nor that of {listed(others)}' if others else ''}; "
                f"{_untaken(row.ours, set(ours) - taken - set(self.ours_only))}"
            )
        if row.stacked and len(shape := ours[row.ours]) <= row.axis:
            raise ConfigError(
                f"{self.source}: row {number}: ours = {row.ours!r} {shape} has no axis = {row.axis} that layers could "
                "be stacked along; give another, or remove {layer} from theirs"
            )
        if row.scale and any(not row.layer_shape(ours[name]) for name in found.values()):
            raise ConfigError(
                f"{self.source}: row {number}: ours = {row.ours!r} is a single number without a last axis for "
                f"scale = {row.scale!r}; leave scale out"
            )
        if row.stacked:
            for i in range(ours[row.ours][row.axis]):
                yield Pair(row.ours, row.theirs.replace(LAYER, str(i)), row, i)
        else:
            for i, name in found.items():
                yield Pair(name, row.theirs.replace(LAYER, str(i)), row)

    def check(self, ours: Shapes, theirs: Shapes) -> None:
        """Raises ConfigError unless every name of both sides is mapped once, or listed as only there, and all fits."""
        seen: dict[str, dict[str, dict[Any, int]]] = {"ours": {}, "theirs": {}}  # side -> name -> piece -> row
        for number, row in enumerate(self.rows, 1):
            place = f"{self.source}: row {number}"
            for pair in self._pairs_of(number, row, ours):
                if pair.theirs not in theirs:
                    taken = {pair.theirs for pair in self.pairs(ours)}
                    raise ConfigError(
                        f"{place}: theirs = {pair.theirs!r}: no such tensor; "
                        f"{_untaken(pair.theirs, set(theirs) - taken - set(self.theirs_only))}"
                    )
                pieces = {"ours": (pair.ours, row.part), "theirs": (pair.theirs, row.chunk)}
                for side, (name, piece) in pieces.items():
                    others = seen[side].setdefault(name, {})
                    undivided = piece is None or None in others  # of which there can be no other piece
                    other = next((n for p, n in others.items() if n != number and (undivided or p == piece)), number)
                    if other != number:
                        raise ConfigError(f"{place}: {side} = {name!r} is in row {other} too; give it once")
                    others[piece] = number
                counts = {chunk[1] for chunk in seen["theirs"][pair.theirs] if chunk}
                if len(counts) > 1:
                    raise ConfigError(f"{place}: theirs = {pair.theirs!r} is cut into {counts} chunks; give one number")
                _check_fit(place, pair, ours, theirs[pair.theirs])
        for pair in self.pairs(ours):
            self._check_pieces(pair, ours[pair.ours], seen)
        self._check_complete("ours", set(seen["ours"]), set(self.ours_only), set(ours))
        self._check_complete("theirs", set(seen["theirs"]), set(self.theirs_only), set(theirs))

    def _check_pieces(self, pair: Pair, shape: Shape, seen: Mapping[str, Mapping[str, Mapping[Any, int]]]) -> None:
        parts = range(pair.row.layer_shape(shape)[0]) if pair.row.part is not None else ()
        chunks = [(i, pair.row.chunk[1]) for i in range(pair.row.chunk[1])] if pair.row.chunk else ()
        for side, name, field, pieces in (("ours", pair.ours, "part", parts), ("theirs", pair.theirs, "chunk", chunks)):
            if missing := [piece for piece in pieces if piece not in seen[side][name]]:
                raise ConfigError(
                    f"{self.source}: {side} = {name!r}: {field} = {toml(missing[0])} is in no row; give all of them"
                )

    def _check_complete(self, side: str, mapped: set[str], only: set[str], known: set[str]) -> None:
        for name in sorted(only - known):
            raise ConfigError(f"{self.source}: {side}_only: {name!r}: no such name; {nearest(name, known)}")
        for name in sorted(only & mapped):
            raise ConfigError(f"{self.source}: {side}_only: {name!r} is in a row too; leave it out of one of them")
        if missing := sorted(known - mapped - only):
            raise ConfigError(
                f"{self.source}: {side}: {listed(missing)} ({len(missing)} in all) in no row; add rows, or list them "
                f"in {side}_only"
            )

    def cuts(self, shapes: Shapes) -> tuple[dict[str, Entry], dict[str, Entry]]:
        """Parameters of ours, of these shapes, and tensors of theirs, cut into the same pieces. Raises ConfigError."""
        there = self.their_shapes(shapes)
        ours: dict[str, list[Pair]] = defaultdict(list)
        theirs: dict[str, list[Pair]] = defaultdict(list)
        for pair in self.pairs(shapes):
            ours[pair.ours].append(pair)
            theirs[pair.theirs].append(pair)
        atoms = {pair: (name, i) for name, pairs in ours.items() for i, pair in enumerate(pairs)}

        def entry(name: str, pairs: Sequence[Pair], shape: Shape, view: View, turned: bool = False) -> Entry:
            held = [atoms[pair] for pair in pairs]
            return by_views(name, held, shape, lambda tensor, i: view(pairs[i], tensor), turned)

        def their_piece(pair: Pair, tensor: np.ndarray) -> np.ndarray:
            return pair.their_piece(tensor, shapes[pair.ours])

        def turned(pairs: Sequence[Pair]) -> bool:
            return any(pair.row.transform not in (SAME, RESHAPE) or pair.row.chunk for pair in pairs)

        def scaled(entry: Entry, pairs: Sequence[Pair]) -> Entry:
            factors = [pair.factor(shapes[pair.ours]) for pair in pairs]
            if set(factors) == {1}:
                return entry
            return entry._replace(
                split=lambda tensor: [
                    times(piece, 1 / f) for piece, f in zip(entry.split(tensor), factors, strict=True)
                ],
                put=lambda out, i, atom: entry.put(out, i, times(atom, factors[i]).astype(out.dtype)),
                order=(True, True),  # other numbers than any entry of ours
            )

        return (
            {
                name: entry(name, pairs, shapes[name], Pair.our_piece, any(pair.row.axis for pair in pairs))
                for name, pairs in ours.items()
            },
            {
                name: scaled(entry(name, pairs, there[name], their_piece, turned(pairs)), pairs)
                for name, pairs in theirs.items()
            },
        )

    def to_theirs(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Tensors of theirs from our parameters, the same bits, without those of `ours_only`. Raises ConfigError."""
        return recut(parameters, *self.cuts({name: array.shape for name, array in parameters.items()}))

    def to_ours(self, tensors: Mapping[str, np.ndarray], shapes: Shapes) -> dict[str, np.ndarray]:
        """Our parameters, of these shapes, from their tensors, the same bits. Raises ConfigError."""
        ours, theirs = self.cuts(shapes)
        for name in theirs:
            if name not in tensors:
                raise ConfigError(f"{self.source}: theirs = {name!r}: no such tensor; {nearest(name, tensors)}")
        return recut(tensors, theirs, ours)

    def their_shapes(self, ours: Shapes) -> dict[str, Shape]:
        """Shapes of their tensors from those of our parameters. Raises ConfigError where a transform does not apply."""
        found = {}
        for pair in self.pairs(ours):
            shape = pair.piece(ours[pair.ours])
            there = pair.row.shape if pair.row.transform == RESHAPE else result(pair.row.transform, shape)
            if there is None:
                raise ConfigError(
                    f"{self.source}: {pair.ours} {shape} has {len(shape)} axes, which transform = "
                    f"{pair.row.transform!r} is not for; give another"
                )
            if pair.row.chunk and not there:
                raise ConfigError(f"{self.source}: {pair.theirs} is a single number, which has no chunks")
            found[pair.theirs] = pair.full_shape(there)
        return found

    def undecided(self, ours: Shapes) -> list[str]:
        """The parameters of ours whose rows other rows fit as well by all shapes: with another axis of layers, or with
        another transform, as those of square matrices."""
        there = self.their_shapes(ours)

        def other_fits(pair: Pair) -> bool:
            shape, row = ours[pair.ours], pair.row
            axes = row.stacked and shape.count(shape[row.axis]) > 1
            return axes or (not row.chunk and len(fitting(pair.piece(shape), there[pair.theirs])) > 1)

        return [*dict.fromkeys(pair.ours for pair in self.pairs(ours) if other_fits(pair))]

    def modules(self, shapes: Shapes) -> dict[str, Module]:
        """Modules of ours by path, and their counterpart: the module that holds exactly the same parameters.

        Where several nested ones do, the innermost are paired first, since those own the parameters.
        """
        pairs = self.pairs(shapes)
        paths = dict.fromkeys((p.ours, p.row.theirs if p.row.stacked else p.theirs, p.row) for p in pairs)
        held: tuple[dict[str, set[Any]], dict[str, set[Any]]] = (defaultdict(set), defaultdict(set))
        kernels: dict[str, str] = {}
        for ours, theirs, row in paths:
            for prefixes, name in zip(held, (ours, theirs), strict=True):
                parts = name.split(".")[:-1]
                for depth in range(1, len(parts) + 1):
                    prefixes[".".join(parts[:depth])].add((ours, theirs))
            if (output := TRANSFORMS[row.transform].output) != "same":
                kernels[ours.rpartition(".")[0]] = output
        by_content: dict[frozenset[Any], list[str]] = defaultdict(list)
        for path, names in sorted(held[1].items(), key=lambda item: -item[0].count(".")):
            by_content[frozenset(names)].append(path)
        found = {}
        for path, names in sorted(held[0].items(), key=lambda item: -item[0].count(".")):
            if candidates := by_content[frozenset(names)]:
                theirs = candidates.pop(0)
                found[path] = Module(theirs, kernels.get(path, "same"), LAYER in theirs)
        return found


def times(array: np.ndarray, factor: float) -> np.ndarray:
    """The product in float32, or in the dtype itself where that has more bits, rounded to the dtype."""
    wide = np.result_type(array.dtype, np.float32) if array.dtype.itemsize > 2 else np.dtype(np.float32)
    return (array.astype(wide) * wide.type(factor)).astype(array.dtype)


def find_mapping(name: Path) -> Path:
    """A file, or the shipped mapping of that name. Raises ConfigError."""
    if name.is_file() or name.suffix == ".toml":
        return name
    if name.name not in MAPPINGS:
        raise ConfigError(f"--mapping {name}: neither a file nor a shipped mapping; {nearest(name.name, MAPPINGS)}")
    return MAPPINGS[name.name]


def _pattern(template: str) -> re.Pattern[str]:
    """The names that a template with `{layer}` stands for."""
    return re.compile(r"(\d+)".join(map(re.escape, template.split(LAYER))))


def _numbered(template: str, names: Collection[str]) -> dict[int, str]:
    """The names that a template stands for, by number; without `{layer}` it stands for itself."""
    if LAYER not in template:
        return {0: template} if template in names else {}
    pattern = _pattern(template)
    matches = ((pattern.fullmatch(name), name) for name in names)
    return dict(sorted((int(match[1]), name) for match, name in matches if match))


def _untaken(name: str, free: Collection[str]) -> str:
    """Advice on a name that is not there: the nearest of the names in no row; without these, another checkpoint."""
    return nearest(name, free) if free else "all that are there are in other rows: give a checkpoint that has it"


def _check_fit(place: str, pair: Pair, ours: Shapes, theirs: Shape) -> None:
    full, row = ours[pair.ours], pair.row
    if row.part is not None and row.part >= (*row.layer_shape(full), 0)[0]:
        raise ConfigError(f"{place}: {pair.ours} {full} has no part = {row.part}; its parts are one axis of ours")
    if row.chunk:
        if not theirs or theirs[0] % row.chunk[1]:
            raise ConfigError(f"{place}: {pair.theirs} {theirs} is not {row.chunk[1]} equal chunks; give another")
        theirs = (theirs[0] // row.chunk[1], *theirs[1:])
    shape = pair.piece(full)
    if row.transform == RESHAPE:
        fits = row.shape == theirs and np.prod(shape) == np.prod(theirs)
    else:
        fits = result(row.transform, shape) == theirs
    if not fits:
        others = fitting(shape, theirs)
        advice = f"transform = {' or '.join(map(repr, others))} fits" if others else "map it to another tensor"
        turned = f"{pair.ours} {shape} by transform = {pair.row.transform!r}"
        raise ConfigError(f"{place}: {turned} is not {pair.theirs} {theirs}; {advice}")
