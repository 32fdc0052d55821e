"""Tables of named rows that packages add to: what a family is, to every room that asks.

A row refers to what computes by "package.module:name", which is imported where it is first needed: registering a row
imports no framework.
"""

import re
import reprlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from types import FrameType, UnionType
from typing import Any, Generic, Protocol, TypeVar, Union, get_args, get_origin

from jaxdist.config.errors import ConfigError
from jaxdist.config.model import Model


class Named(Protocol):
    """Protocol of a registry row: anything with a `name`."""

    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)
Reference = str | Any  # "package.module:name", or the object itself


@dataclass(frozen=True, eq=False)
class Owner:
    """One import of a plugin or module, which registers rows."""

    name: str
    """Name by which it is imported."""

    def same_package(self, other: "Owner") -> bool:
        """Whether one is the other, or a module within it."""
        return in_package(self.name, other.name) or in_package(other.name, self.name)


def in_package(module: str, package: str) -> bool:
    """Whether a module is the package or lies within it, by their names."""
    return f"{module}.".startswith(f"{package}.")


def is_dotted(name: str) -> bool:
    """Whether a text may be the name of a package or module: identifiers with dots between."""
    return all(map(str.isidentifier, name.split(".")))


def check_types(label: str, row: Any) -> None:
    """Raises ConfigError for a field of a dataclass whose value is not of its annotated type; `label` says whose."""
    for declared in fields(row):
        if not _is_of(value := getattr(row, declared.name), declared.type):
            wanted = declared.type.__name__ if isinstance(declared.type, type) else str(declared.type)
            wanted = re.sub(r"\b(typing|collections\.abc)\.", "", wanted)
            raise ConfigError(f"{label} {declared.name} = {reprlib.repr(value)}; give a value of the type {wanted}")


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type, as far as its outermost containers and their texts tell."""
    if kind is Any:
        return True
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is_of(value, part) for part in inner)
    if origin is None or not isinstance(value, origin):
        return isinstance(value, origin or kind)
    return inner[:1] != (str,) or all(isinstance(part, str) for part in value)


BUILT_IN = Owner("jaxdist")
SCRIPTS = ("__main__", "__mp_main__")  # the program's own script, which nothing imports by name
loading: list[Owner] = []  # plugins that are being imported
loaded: dict[str, None] = {}  # names of plugins and modules that have been imported and may own rows, in this order


class Registry(Mapping[str, Row], Generic[Row]):
    """Rows of one kind by name, in the order in which they were registered; ours come first.

    `kind` names the rows in messages, `row` is their class. `builtin` is the module that registers ours, imported
    before the first use.
    """

    def __init__(self, kind: str, row: type[Row], builtin: str = "") -> None:
        self.kind, self._row, self._builtin = kind, row, builtin
        self._rows: dict[str, Row] = {}
        self._owners: dict[str, Owner] = {}

    def register(self, row: Row, owner: Owner) -> None:
        """Add a row. One that the same package registered in an earlier import is replaced.

        Raises ConfigError unless it is a row, and if another package, or this import, has taken its name.
        """
        self._load()
        if not isinstance(row, self._row):
            actual, wanted = (f"{kind.__module__}.{kind.__qualname__}" for kind in (type(row), self._row))
            raise ConfigError(
                f"{owner.name} registers as {self.kind} {reprlib.repr(row)}, a {actual}; give an instance of {wanted}"
            )
        if not isinstance(row.name, str) or not row.name:
            raise ConfigError(f"{owner.name} registers a {self.kind} with name = {row.name!r}; give it a text as name")
        if owner is not BUILT_IN:
            check_types(f"{owner.name} registers the {self.kind} {row.name!r} with", row)
        before = self._owners.get(name := row.name)
        if before is owner:
            raise ConfigError(f"{owner.name} registers the {self.kind} {name!r} twice; register it once")
        if before and not before.same_package(owner):
            raise ConfigError(
                f"{owner.name} registers the {self.kind} {name!r}, a name that {before.name} has taken; give it "
                "another name"
            )
        self._rows[name], self._owners[name] = row, owner

    def owner(self, name: str) -> str:
        """The plugin or module that registered a row."""
        self._load()
        return self._owners[name].name

    def built_in(self, name: str) -> bool:
        """Whether a row is one of jaxdist's own."""
        self._load()
        return self._owners[name] is BUILT_IN

    def _load(self) -> None:
        module, self._builtin = self._builtin, ""
        if module:
            import_module(module)

    def __getitem__(self, name: str) -> Row:
        self._load()
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._rows)

    def __len__(self) -> int:
        self._load()
        return len(self._rows)


def registrant() -> Owner:
    """Owner of the row that the caller registers: the plugin that is being loaded, else the module that calls the
    caller, be it through wrappers of Python's library."""
    if loading:
        return loading[-1]
    modules = [frame.f_globals["__name__"] for frame in _outward(sys._getframe(1))]
    outside = (name for name in modules if name != modules[0] and name.partition(".")[0] not in sys.stdlib_module_names)
    module: str = next(outside, SCRIPTS[0])
    if module not in SCRIPTS:
        loaded[module] = None
    return Owner(module)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it, the nearest first."""
    while frame:
        yield frame
        frame = frame.f_back


def resolve(reference: Reference) -> Any:
    """The object that a reference names; any other object itself. Raises ConfigError where there is none."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        if not is_dotted(module):
            raise ImportError(f"{module!r} is not the name of a module")
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{reference!r}: {error}; refer to an object that can be imported, as 'package.module:name'"
        ) from error


@dataclass(frozen=True)
class Family:
    """A family of models as jaxdist knows it. `torch_ref.Family` is the row of its twin."""

    name: str
    """Value of `model.family`."""
    config: type[Model]
    """The model section: a class with `family: Literal[name]`. Imports no framework."""
    model: Reference
    """The class of its flax module, which is built from a config."""
    tables: Reference = field(default_factory=dict)
    """Naming, as `huggingface` -> `formats.tables.Table` of its tensors; the first is written. Empty: there is none."""
    huggingface: Reference | None = None
    """`formats.hf_decisions.HuggingFace`, the reader and writer of its config.json; None: there is none."""
    accounting: Reference | None = None
    """Closed forms of its traffic, memory and FLOPs; None: unknown."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Its names in other programs, with spaces between -> what else to set for these, as `with model.window = 9`."""
    zero_gradients: tuple[str, ...] = ()
    """Endings of the names of parameters whose true gradient is zero: runs that agree differ there by their rounding
    errors, and a proof compares these parameters by absolute differences."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a config that is no class of model sections, or whose `family` is another, and for
        other pieces of the wrong kind."""
        if not (isinstance(self.config, type) and issubclass(self.config, Model)):
            raise ConfigError(
                f"family {self.name!r}: config = {reprlib.repr(self.config)} is no class of model sections; derive one "
                "from jaxdist.config.Model, as jaxdist.config.Decoder"
            )
        declared = self.config.model_fields.get("family")
        if declared is None or self.name not in get_args(declared.annotation):
            raise ConfigError(
                f"family {self.name!r}: its config {self.config.__module__}.{self.config.__qualname__} has no such "
                f"family; declare there family: Literal[{self.name!r}]"
            )
        pieces = {
            "aliases": (self.aliases, Mapping, "a mapping of names in other programs to what else to set for these"),
            "zero_gradients": (self.zero_gradients, tuple, "a tuple of endings of the names of parameters"),
        }
        for piece, (value, kind, wanted) in pieces.items():
            if not (isinstance(value, kind) and all(isinstance(text, str) for text in value)):
                raise ConfigError(f"family {self.name!r}: {piece} = {reprlib.repr(value)}; give {wanted}")


FAMILIES: Registry[Family] = Registry("family", Family, "jaxdist.families.rows")


def register_family(row: Family) -> None:
    """Make a family known to jaxdist. Raises ConfigError for a name that is taken."""
    FAMILIES.register(row, registrant())


def families_of(input_kind: str) -> str:
    """The families that are trained on `tokens` or on `images`, as a message gives them."""
    return " or ".join(name for name, row in FAMILIES.items() if row.config.input_kind == input_kind)


def families_with(field: str) -> str:
    """The families whose model sections have a field or property, as a message gives them."""
    sections = {name: row.config for name, row in FAMILIES.items()}
    return " or ".join(name for name, c in sections.items() if field in c.model_fields or hasattr(c, field))


def described_families() -> str:
    """Names of the families, each with the first sentence of its model section's docstring, for help."""
    names: dict[type[Model], list[str]] = {}
    for name, row in FAMILIES.items():
        names.setdefault(row.config, []).append(name)
    about = {config: re.split(r"\.\s", " ".join((vars(config).get("__doc__") or "").split()))[0] for config in names}
    return "; ".join(f"{', '.join(families)}: {about[config]}".rstrip(".: ") for config, families in names.items())


def default_family() -> str:
    """The family of a config that names none: the first row."""
    return next(iter(FAMILIES))
