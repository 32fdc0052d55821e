"""A key mapping: which parameter of a user's JAX model is which tensor of their torch module. numpy only.

Names are dotted, "ours" of the pytree and "theirs" of the state dict. It lives in a TOML file, to be edited by hand:

    rows = [
      { ours = "blocks_{layer}.attn.query.kernel", theirs = "layers.{layer}.attn.q.weight", transform = "heads_out" },
    ]
    ours_only = []
    theirs_only = ["pooler.weight"]

`{layer}` stands for a number, the same on both sides. A row with it in `theirs` alone maps parameters that are
stacked along their first axis, as a scan over layers wants them. `reshape` needs `shape`, which is theirs.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.config.errors import nearest
from jaxdist.config.experiment import read_toml
from jaxdist.convert.transforms import RESHAPE, TRANSFORMS, Shape, fitting, result, to_ours, to_theirs

LAYER = "{layer}"
Shapes = Mapping[str, Shape]


class Row(NamedTuple):
    """One parameter of each side, or with `{layer}` one for every number."""

    ours: str
    theirs: str
    transform: str = "same"
    shape: Shape = ()

    @property
    def stacked(self) -> bool:
        return LAYER in self.theirs and LAYER not in self.ours


class Pair(NamedTuple):
    """A parameter of ours, or the part `layer` of its first axis, and the tensor of theirs that holds it."""

    ours: str
    theirs: str
    row: Row
    layer: int | None = None


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

    @classmethod
    def load(cls, path: Path) -> "KeyMapping":
        """Read a file. Raises ConfigError naming the row and the fix."""
        values = read_toml(path, "mapping")
        _only_keys(str(path), values, ("rows", "ours_only", "theirs_only"))
        lists = {name: values.get(name, []) for name in ("ours_only", "theirs_only")}
        for name, given in lists.items():
            if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
                raise ConfigError(f"{path}: {name} = {given!r}; give a list of names")
        rows = values.get("rows", [])
        if not isinstance(rows, list):
            raise ConfigError(f"{path}: rows = {rows!r}; give a list of tables with ours, theirs and transform")
        read = tuple(_row(f"{path}: row {i}", row) for i, row in enumerate(rows, 1))
        return cls(read, tuple(lists["ours_only"]), tuple(lists["theirs_only"]), str(path))

    def save(self, path: Path, notes: Mapping[Row, str] | None = None, head: Iterable[str] = ()) -> None:
        """Write a file that `load` reads; `notes` and `head` become comments, of a row and of the file."""
        notes = notes or {}
        lines = [f"# {line}" for line in (f"transforms: {', '.join(TRANSFORMS)}", *head)]
        lines.append("rows = [")
        for row in self.rows:
            lines += [f"  # unsure: {notes[row]}"] if row in notes else []
            fields = {name: value for name, value in row._asdict().items() if name != "shape" or row.shape}
            lines.append("  { " + ", ".join(f"{name} = {_toml(value)}" for name, value in fields.items()) + " },")
        lines += ["]", f"ours_only = {_toml(self.ours_only)}", f"theirs_only = {_toml(self.theirs_only)}"]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pairs(self, ours: Shapes) -> list[Pair]:
        """One pair for every tensor of theirs. Raises ConfigError for a row that no parameter of ours has."""
        return [pair for i, row in enumerate(self.rows, 1) for pair in self._pairs_of(i, row, ours)]

    def _pairs_of(self, number: int, row: Row, ours: Shapes) -> Iterator[Pair]:
        found = _numbered(row.ours, ours) if LAYER in row.ours else {0: row.ours} if row.ours in ours else {}
        if not found or (row.stacked and not ours[row.ours]):
            what = "cannot be stacked, it has no axes" if found else f"no such parameter; {nearest(row.ours, ours)}"
            raise ConfigError(f"{self.source}: row {number}: ours = {row.ours!r}: {what}")
        if row.stacked:
            for i in range(ours[row.ours][0]):
                yield Pair(row.ours, row.theirs.replace(LAYER, str(i)), row, i)
        else:
            for i, name in found.items():
                yield Pair(name, row.theirs.replace(LAYER, str(i)), row)

    def check(self, ours: Shapes, theirs: Shapes) -> None:
        """Raises ConfigError unless every name of both sides is mapped once, or listed as only there, and all fits."""
        seen: dict[str, dict[str, int]] = {"ours": {}, "theirs": {}}
        for number, row in enumerate(self.rows, 1):
            place = f"{self.source}: row {number}"
            for pair in self._pairs_of(number, row, ours):
                if pair.theirs not in theirs:
                    raise ConfigError(
                        f"{place}: theirs = {pair.theirs!r}: no such tensor; {nearest(pair.theirs, theirs)}"
                    )
                for side, name in (("ours", pair.ours), ("theirs", pair.theirs)):
                    if (other := seen[side].setdefault(name, number)) != number:
                        raise ConfigError(f"{place}: {side} = {name!r} is in row {other} too; give it once")
                _check_fit(place, pair, ours, theirs[pair.theirs])
        self._check_complete("ours", set(seen["ours"]), set(self.ours_only), set(ours))
        self._check_complete("theirs", set(seen["theirs"]), set(self.theirs_only), set(theirs))

    def _check_complete(self, side: str, mapped: set[str], only: set[str], known: set[str]) -> None:
        for name in sorted(only - known):
            raise ConfigError(f"{self.source}: {side}_only: {name!r}: no such name; {nearest(name, known)}")
        for name in sorted(only & mapped):
            raise ConfigError(f"{self.source}: {side}_only: {name!r} is in a row too; leave it out of one of them")
        if missing := sorted(known - mapped - only):
            raise ConfigError(
                f"{self.source}: {side}: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''} "
                f"({len(missing)} in all) in no row; add rows, or list them in {side}_only"
            )

    def to_theirs(self, parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Their tensors from our parameters, the same bits. Names in `ours_only` are left out. Raises ConfigError."""
        shapes = {name: array.shape for name, array in parameters.items()}
        tensors = {}
        for ours, theirs, row, layer in self.pairs(shapes):
            part = parameters[ours] if layer is None else parameters[ours][layer]
            tensors[theirs] = to_theirs(row.transform, part, row.shape)
        return tensors

    def to_ours(self, tensors: Mapping[str, np.ndarray], shapes: Shapes) -> dict[str, np.ndarray]:
        """Our parameters, of these shapes, from their tensors, the same bits. Raises ConfigError."""
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        stacked = set()
        for ours, theirs, row, layer in self.pairs(shapes):
            if theirs not in tensors:
                raise ConfigError(f"{self.source}: theirs = {theirs!r}: no such tensor; {nearest(theirs, tensors)}")
            if layer is not None:
                stacked.add(ours)
            shape = shapes[ours] if layer is None else shapes[ours][1:]
            parts[ours].append(to_ours(row.transform, tensors[theirs], shape))
        return {name: np.stack(p) if name in stacked else p[0] for name, p in parts.items()}

    def their_shapes(self, ours: Shapes) -> dict[str, Shape]:
        """Their tensors' shapes from our parameters'. Raises ConfigError where a transform cannot be applied."""
        found = {}
        for pair in self.pairs(ours):
            shape = ours[pair.ours] if pair.layer is None else ours[pair.ours][1:]
            there = pair.row.shape if pair.row.transform == RESHAPE else result(pair.row.transform, shape)
            if there is None:
                raise ConfigError(
                    f"{self.source}: {pair.ours} {shape} has {len(shape)} axes, which transform = "
                    f"{pair.row.transform!r} is not for; give another"
                )
            found[pair.theirs] = there
        return found

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


def _numbered(template: str, names: Iterable[str]) -> dict[int, str]:
    """The names that a template with `{layer}` stands for, by number."""
    pattern = re.compile(r"(\d+)".join(map(re.escape, template.split(LAYER))))
    matches = ((pattern.fullmatch(name), name) for name in names)
    return dict(sorted((int(match[1]), name) for match, name in matches if match))


def _check_fit(place: str, pair: Pair, ours: Shapes, theirs: Shape) -> None:
    shape = ours[pair.ours] if pair.layer is None else ours[pair.ours][1:]
    if pair.row.transform == RESHAPE:
        fits = pair.row.shape == theirs and np.prod(shape) == np.prod(theirs)
    else:
        fits = result(pair.row.transform, shape) == theirs
    if not fits:
        others = fitting(shape, theirs)
        advice = f"transform = {' or '.join(map(repr, others))} fits" if others else "map it to another tensor"
        turned = f"{pair.ours} {shape} by transform = {pair.row.transform!r}"
        raise ConfigError(f"{place}: {turned} is not {pair.theirs} {theirs}; {advice}")


def _row(place: str, values: Any) -> Row:
    """A row of the file. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: {values!r}; give a table with ours, theirs and transform")
    _only_keys(place, values, Row._fields)
    for name in ("ours", "theirs", "transform"):
        if not isinstance(values.get(name), str):
            raise ConfigError(f"{place}: {name} = {values.get(name)!r}; give a text")
    shape = values.get("shape", [])
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        raise ConfigError(f"{place}: shape = {shape!r}; give a list of sizes")
    row = Row(values["ours"], values["theirs"], values["transform"], tuple(shape))
    if row.transform not in TRANSFORMS:
        raise ConfigError(f"{place}: transform = {row.transform!r}: unknown; {nearest(row.transform, TRANSFORMS)}")
    if (row.transform == RESHAPE) != ("shape" in values):
        raise ConfigError(
            f"{place}: shape belongs to transform = {RESHAPE!r} alone, which needs it: the shape of theirs"
        )
    for name in ("ours", "theirs"):
        if values[name].count(LAYER) > 1:
            raise ConfigError(f"{place}: {name} = {values[name]!r} has {LAYER} twice; write the rows out one by one")
    if LAYER in row.ours and LAYER not in row.theirs:
        raise ConfigError(f"{place}: {LAYER} in ours alone; theirs needs it too, or write the rows out one by one")
    return row


def _only_keys(place: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(f"{place}: {name}: no such field; {nearest(name, known)}")


def _toml(value: Any) -> str:
    """A text or a list as TOML, whose texts are JSON's."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
