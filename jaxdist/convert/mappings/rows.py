"""A row of a key mapping, and how it is read from a file and written. numpy only."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.config import ConfigError
from jaxdist.config.errors import nearest
from jaxdist.convert.mappings.atoms import Shape
from jaxdist.convert.mappings.transforms import RESHAPE, SAME, TRANSFORMS

LAYER = "{layer}"
MOST_AXES = 32  # numpy's arrays have no more
# By what a row's parameter of ours, of a shape, is multiplied to be theirs.
SCALES: Mapping[str, Callable[[Shape], float]] = {"": lambda shape: 1, "sqrt_last": lambda shape: shape[-1] ** 0.5}


class Row(NamedTuple):
    """One parameter of each side, or with `{layer}` one for every number, or of either side a piece of it.

    A `TensorRow` of `jaxdist/formats/tables.py` joins several parameters in one tensor, and is no part of a file."""

    ours: str
    theirs: str
    transform: str = SAME
    shape: Shape = ()
    part: int | None = None
    chunk: tuple[int, int] | None = None
    axis: int = 0
    scale: str = ""
    optional: bool = False

    @property
    def stacked(self) -> bool:
        return LAYER in self.theirs and LAYER not in self.ours

    def layer_shape(self, shape: Shape) -> Shape:
        """The shape of one layer of a parameter of ours; that of the parameter itself where it is not stacked."""
        return (*shape[: self.axis], *shape[self.axis + 1 :]) if self.stacked else shape


def read_row(place: str, values: Any) -> Row:
    """A row of the file. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{place}: {values!r}; give a table with ours, theirs and transform")
    only_keys(place, values, Row._fields)
    for name in ("ours", "theirs", "transform"):
        if not isinstance(values.get(name), str):
            raise ConfigError(f"{place}: {name} = {values.get(name)!r}; give a text")
    shape = values.get("shape", [])
    if not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        raise ConfigError(f"{place}: shape = {shape!r}; give a list of sizes")
    part, chunk = values.get("part"), values.get("chunk")
    if part is not None and type(part) is not int:
        raise ConfigError(f"{place}: part = {part!r}; give a whole number from 0")
    if chunk is not None and not (isinstance(chunk, list) and len(chunk) == 2 and {*map(type, chunk)} == {int}):
        raise ConfigError(f"{place}: chunk = {chunk!r}; give [which, of how many], as [0, 3]")
    axis, scale = values.get("axis", 0), values.get("scale", "")
    if type(axis) is not int or not 0 <= axis < MOST_AXES:
        raise ConfigError(f"{place}: axis = {axis!r}; give the axis of ours along which layers are stacked, from 0")
    if not isinstance(scale, str) or scale not in SCALES:
        raise ConfigError(f"{place}: scale = {scale!r}; give 'sqrt_last', or leave it out")
    if type(optional := values.get("optional", False)) is not bool:
        raise ConfigError(f"{place}: optional = {optional!r}; give true or false")
    which = None if chunk is None else (chunk[0], chunk[1])
    row = Row(values["ours"], values["theirs"], values["transform"], tuple(shape), part, which, axis, scale, optional)
    check_row(place, row)
    if (row.transform == RESHAPE) != ("shape" in values):
        raise ConfigError(
            f"{place}: shape belongs to transform = {RESHAPE!r} alone, which needs it: the shape of theirs"
        )
    return row


def check_row(place: str, row: Row) -> None:
    """Check a row without the models. Raises ConfigError."""
    if row.transform not in TRANSFORMS:
        raise ConfigError(f"{place}: transform = {row.transform!r}: unknown; {nearest(row.transform, TRANSFORMS)}")
    if row.part is not None and row.part < 0:
        raise ConfigError(f"{place}: part = {row.part}; give a whole number from 0")
    if row.chunk and not 0 <= row.chunk[0] < row.chunk[1]:
        which, count = row.chunk
        raise ConfigError(f"{place}: chunk = {[which, count]}: of {count} they are 0 to {count - 1}")
    for name in ("ours", "theirs"):
        text = getattr(row, name)
        if text.count(LAYER) > 1:
            raise ConfigError(f"{place}: {name} = {text!r} has {LAYER} twice; write the rows out one by one")
    if row.axis and not row.stacked:
        raise ConfigError(f"{place}: axis = {row.axis} belongs to rows with {LAYER} in theirs alone; leave it out")
    if LAYER in row.ours and LAYER not in row.theirs:
        raise ConfigError(f"{place}: {LAYER} in ours alone; theirs needs it too, or write the rows out one by one")


def only_keys(place: str, values: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(f"{place}: {name}: no such field; {nearest(name, known)}")


def toml(value: Any) -> str:
    """A text or a list as TOML, whose texts are JSON's."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def listed(names: Sequence[str]) -> str:
    """The first five names."""
    return ", ".join([*names[:5], *(["..."] if names[5:] else [])])


def missing_layers(before: str, numbers: Collection[int]) -> list[int]:
    """Numbers of layers that are missing up to the last; `before` is the text before them in names. A list counts
    from 0, as `layers.0`; a name that ends in its number may count from 1, as `layer1`."""
    first = 0 if before.endswith(".") or not before else min(1, *numbers)
    return sorted({*range(first, max(numbers))} - {*numbers})
