"""Mistakes as real ports make them, planted at run time in either side, to measure what the proof detects.

A row of the table is a function that replaces attributes of modules and classes, in the process of its side and before
its `main`; no source is changed. Its decorator states the configuration of the benchmark (`detection.py`) in which it
acts, the level of the proof that must catch it, and the culprits of which one must be named.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import Parameter, isfunction, signature
from types import SimpleNamespace
from typing import Any

# By side, so that a process of torch_ref never imports jax.
TABLES = {
    "jaxdist": ("jax_model", "jax_training", "jax_mesh", "jax_experts", "jax_pipeline", "jax_images"),
    "torch_ref": (
        "torch_model",
        "torch_training",
        "torch_mesh",
        "torch_experts",
        "torch_pipeline",
        "torch_images",
        "torch_folder",
    ),
}
PLAIN = "llama"  # the configuration without any changes
FOLDER = "run folder"  # the configuration of `--against RUN_DIR`
NONE_IN_FLOAT32 = {"torch_ref.softmax_in_float32", "torch_ref.norms_in_float32"}
KNOWN: dict[str, "Mistake"] = {}  # filled by `mistake` as the tables are imported


@dataclass(frozen=True)
class Mistake:
    """One planted mistake.

    A culprit is a pattern on `Divergence.tensor`: the tensor at which the planted code first acts, or the first
    recorded one after it. A mistake that changes no tensor is named by its check, as `traffic/jaxdist, data: ...`.
    """

    name: str
    side: str
    configuration: str
    level: str
    culprits: tuple[str, ...]
    what: str
    plant: Callable[[], None]


# No mistake, planted like one: any detection is a false alarm.
NOTHING = {
    side: Mistake(f"{side}.nothing", side, PLAIN, "", (), "The code is left as it is.", lambda: None) for side in TABLES
}


def mistake(side: str, configuration: str, level: str, *culprits: str) -> Callable[[Callable[[], None]], Any]:
    """Enter the decorated function into the table, under its side and own name."""

    def enter(plant: Callable[[], None]) -> Callable[[], None]:
        name = f"{side}.{plant.__name__}"
        if name in KNOWN:
            raise ValueError(f"two mistakes are called {name}")
        what = " ".join((plant.__doc__ or "").split())
        KNOWN[name] = Mistake(name, side, configuration, level, culprits, what, plant)
        return plant

    return enter


def table(*sides: str) -> dict[str, Mistake]:
    """Mistakes of these sides (default: both); imports the modules that they change."""
    for side in sides or TABLES:
        for part in TABLES[side]:
            import_module(f"parity_tests.validation.mistakes.{part}")
    rows = [row for row in KNOWN.values() if row.side in (sides or TABLES)]
    return {row.name: row for row in (*rows, *in_a_folder(rows))}


def in_a_folder(rows: Iterable[Mistake]) -> Iterator[Mistake]:
    """Plant torch's one-device mistakes again in a float32 run that is all there is of the other side, so that the
    float64 levels have nothing to compare."""
    for row in rows:
        on_one_device = (row.side, row.configuration, row.level) == ("torch_ref", PLAIN, "mathematics")
        if on_one_device and row.name not in NONE_IN_FLOAT32:
            yield replace(row, name=f"{row.name}_in_a_run_folder", configuration=FOLDER, level="precision")


# ---- tools to plant with


def everywhere(old: Any, new: Any) -> None:
    """Replace `old` by `new` under every name in either package, as if its source had changed."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("jaxdist", "torch_ref")):
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)


def altered(module: Any, **changes: Any) -> Any:
    """A copy of a module's namespace with some names changed, for one user of the module."""
    return SimpleNamespace(**(vars(module) | changes))


def plant(owner: Any, name: str, value: Any) -> None:
    """Set the existing attribute `name` to `value`. Raises AttributeError if there is none, and TypeError where a
    function cannot be called as the one that it replaces."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name}")
    old, new = getattr(owner, name), getattr(value, "__func__", value)  # of a class method or a static one
    if callable(old) != callable(new):
        raise TypeError(f"{owner}.{name} = {old!r}: {value!r} is of another type")
    if isfunction(old) and not (taken_by(new, required(old)) or taken_by(new, arguments(old))):
        raise TypeError(f"{owner}.{name}{signature(old)} cannot be replaced by a function of {signature(new)}")
    setattr(owner, name, value)


def arguments(function: Callable[..., Any]) -> list[Parameter]:
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p for p in signature(function).parameters.values() if p.kind not in variable]


def required(function: Callable[..., Any]) -> list[Parameter]:
    return [p for p in arguments(function) if p.default is p.empty]


def taken_by(function: Callable[..., Any], given: list[Parameter]) -> bool:
    """Whether a function can be called with these arguments."""
    by_name = {p.name: p for p in given if p.kind is Parameter.KEYWORD_ONLY}
    try:
        signature(function).bind(*(p for p in given if p.name not in by_name), **by_name)
    except TypeError:
        return False
    return True
