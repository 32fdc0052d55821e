"""Packages of others that add families, optimizers, strategies, data sources and kinds of checkpoints.

Importing a plugin registers its rows, by `jaxdist.register_*` and, for torch's side, `torch_ref.register_*`.
"""

import importlib
import os
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from jaxdist.config import registry
from jaxdist.config.errors import ConfigError, TrainingError, shown
from jaxdist.config.registry import SCRIPTS, Owner, Registry, in_package, is_dotted, resolve
from jaxdist.config.section import listed

Found = TypeVar("Found")
OURS = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("jaxdist", "torch_ref"))  # folders of our code
SHOWN = 4  # lines of a plugin's code on the way to an error
GROUP = "jaxdist.plugins"  # entry points of installed packages, loaded by every command


def load_plugins(names: Iterable[str]) -> None:
    """Import plugins, each once, after those that installed packages declare. Raises ConfigError naming the plugin."""
    for package, declared in _declared().items():
        _load(package, f"plugin {package!r}, which the installed {declared} declares", f"uninstall {declared}")
    for package in names:
        _load(package, f"plugin {shown(package)}", "leave it out of --plugins and of the config's plugins")


def plugins_of(values: Mapping[str, Any]) -> Sequence[str]:
    """The plugins that a config names; none where they are not a list of texts, which validation says."""
    found = listed(values.get("plugins"))
    return found if isinstance(found, list | tuple) and all(isinstance(name, str) for name in found) else ()


@cache
def _declared() -> dict[str, str]:
    """Module of each entry point in GROUP -> the distribution that declares it. Raises ConfigError for one without."""
    found = {}
    for point in entry_points(group=GROUP):
        declared = point.dist.name if point.dist else point.name
        try:
            found[point.module] = declared
        except AttributeError:  # a value without the form "package.module:name"
            raise ConfigError(
                f"the installed {declared} declares {point.value!r} in the entry points {GROUP}, which is not the name "
                f"of a package; uninstall {declared}, or correct its {point.name}"
            ) from None
    return found


def _load(package: str, named: str, otherwise: str) -> None:
    if not is_dotted(package):
        raise ConfigError(f"{named}: not the name of a package; give one as Python's import does, as my_package")
    registry.loading.append(Owner(package))
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise _failed(error, named, "its import fails", otherwise) from None
        raise ConfigError(
            f"{named}: there is no such package on Python's path; install it, run in the folder that holds it, or "
            f"{otherwise}"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{named}: {error}") from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _failed(error, named, "its import fails", otherwise) from None
    finally:
        registry.loading.pop()
    registry.loaded[package] = None


def _failed(error: BaseException, named: str, fails: str, otherwise: str, owner: str = "") -> ConfigError:
    """The error of an import or a call that failed, with the line that raised it: where there are lines of the plugin
    `owner`, the last of those."""
    passed = ("<frozen", __file__, importlib.__file__)  # what imports and calls it
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(passed)]
    own = [frame for frame in frames if _of_plugin(frame.filename, owner)]
    others = [frame for frame in frames if not frame.filename.startswith(OURS)]
    shown = own[-SHOWN:] or others[-1:] or frames[-1:]
    places, message = [(frame.filename, frame.lineno) for frame in shown], " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        places, message = [(error.filename, error.lineno)] if error.filename else places, error.msg
    lines = ", then ".join(f"{file}, line {line}" for file, line in places)
    where = f" ({lines})" if lines else ""
    said = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return ConfigError(f"{named}: {fails}, {said}{where}; correct it, or {otherwise}")


def failure(error: BaseException) -> ConfigError | None:
    """The ConfigError of an error of a plugin's code, or of what that code called; None where none of it is on the way
    to the error."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    owner = next((name for file in reversed(files) for name in registry.loaded if _of_plugin(file, name)), None)
    if owner is None:
        return None
    return _failed(error, f"plugin {owner!r}", "its code fails", "use none of its rows", owner)


def _of_plugin(file: str, owner: str) -> bool:
    """Whether a file is the module `owner`, or lies in the package of that name."""
    origin = getattr(sys.modules.get(owner), "__file__", None)
    if origin is None:
        return False
    return file == origin or (Path(origin).name == "__init__.py" and Path(file).is_relative_to(Path(origin).parent))


def used(owners: Iterable[str]) -> tuple[str, ...]:
    """The plugins among these owners of rows, in the order in which they were loaded."""
    wanted = {*owners}
    return tuple(name for name in registry.loaded if name in wanted)


def piece(rows: Registry[Any], name: str, field: str, needed: str) -> Any:
    """The object that a row's `field` refers to, which is `needed` for something. Raises ConfigError as `optional`,
    and where there is none."""
    if (found := optional(rows, name, field)) is None:
        raise ConfigError(
            f"{named(rows, name)} has no {field}, which {needed} needs; register it with one, or use another"
        )
    return found


def optional(rows: Registry[Any], name: str, field: str, kind: type = object) -> Any:
    """The object that a row's `field` refers to, an instance of `kind`, or None. Raises ConfigError, naming the plugin,
    the row and the field, where it is another or cannot be imported."""
    try:
        found = resolve(getattr(rows[name], field))
    except ConfigError as error:
        raise ConfigError(f"{named(rows, name)}: {field} = {error}") from None
    except (Exception, SystemExit) as error:
        raise unimportable(rows, name, field, error) from None
    return None if found is None else checked(found, kind, f"{named(rows, name)}: {field} =")


def checked(found: Any, kind: type, source: str) -> Any:
    """An object of a plugin's that is to be an instance of `kind`. Raises ConfigError for another, which `source` says
    where it comes from."""
    if not isinstance(found, kind):
        wanted = f"{kind.__module__}.{kind.__qualname__}"
        raise ConfigError(f"{source} {reprlib.repr(found)}; give an instance of {wanted}")
    return found


def function(rows: Registry[Any], name: str, field: str, needed: str, kind: type = object) -> Callable[..., Any]:
    """The function or class that a row's `field` refers to, as `piece`, with ConfigErrors for what a plugin's code
    raises and for a result that is not an instance of `kind`."""
    found = piece(rows, name, field, needed)

    def guarded(*arguments: Any) -> Any:
        with running(rows, name, field):
            returned = found(*arguments)
        return checked(returned, kind, f"{named(rows, name)}: {field} returns")

    return guarded


def read_each(rows: Iterable[str], read: Callable[[str], Found]) -> tuple[dict[str, Found], dict[str, ConfigError]]:
    """Row -> what `read` finds for it, and row -> the error where that fails: a broken row leaves the others usable."""
    found, errors = dict[str, Found](), dict[str, ConfigError]()
    for name in rows:
        try:
            found[name] = read(name)
        except ConfigError as error:
            errors[name] = error
    return found, errors


@contextmanager
def running(
    rows: Registry[Any], name: str, field: str, passes: Callable[[BaseException], bool] = lambda _: False
) -> Iterator[None]:
    """Context manager for calls into the code of a row's `field`.

    What a plugin's code raises becomes a ConfigError that names the plugin, the row, the field and the line; errors for
    which `passes` is true go through unchanged.
    """
    try:
        yield
    except (ConfigError, TrainingError):
        raise
    except (Exception, SystemExit) as error:
        if rows.built_in(name) or passes(error):
            raise
        raise _failed(error, named(rows, name), f"its {field} fails", "use another", rows.owner(name)) from None


def unimportable(rows: Registry[Any], name: str, field: str, error: BaseException) -> ConfigError:
    """The error where the module that a row's `field` refers to cannot be imported."""
    reference = f"{named(rows, name)}: {field} = {getattr(rows[name], field)!r}"
    return _failed(error, reference, "its import fails", "use another")


def named(rows: Registry[Any], name: str) -> str:
    """A row and who registered it, in words."""
    if rows.built_in(name):
        return f"the built-in {rows.kind} {name!r}"
    owner = rows.owner(name)
    return f"the {rows.kind} {name!r} of {'the script that runs' if owner in SCRIPTS else f'plugin {owner!r}'}"


def twin(ours: Registry[Any], theirs: Mapping[str, Any], name: str, register: str) -> Any:
    """The row of torch's side of one that jaxdist has. Raises ConfigError where a plugin lacks it, which `register`
    would add."""
    if name not in theirs:
        raise ConfigError(
            f"{named(ours, name)} has no row on torch's side; add it by torch_ref.{register}, or train in JAX alone"
        )
    return theirs[name]


def _checked(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Raises ValueError for plugins that are not loaded: files that are no configs name them without loading them."""
    if missing := [name for name in names or () if not any(in_package(module, name) for module in registry.loaded)]:
        listing = f"{','.join(missing):.500}"
        raise ValueError(
            f"plugins = {listing}: not loaded, since only configs and the command line load plugins; add --plugins "
            f"{listing} if you trust their code"
        )
    return tuple(dict.fromkeys(names)) if names else None


Plugins = Annotated[tuple[str, ...] | None, pydantic.BeforeValidator(listed), pydantic.AfterValidator(_checked)]
