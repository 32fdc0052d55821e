"""Keys of a Hugging Face config.json: how their values are checked and read, all that is wrong in one message."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxdist.config.decoder import MOST_LAYERS
from jaxdist.config.errors import ConfigError, shown
from jaxdist.families.resnet.config import MOST_BLOCKS

Settings = dict[str, Any]
REQUIRED = object()


class Kind(NamedTuple):
    """The kind of a value. JSON keeps numbers, text and truth apart; Python would take one for another."""

    title: str
    holds: Callable[[Any], bool]


COUNT = Kind("a whole number from 1", lambda value: type(value) is int and 0 < value < 2**31)
COUNT_OR_ZERO = Kind("a whole number from 0", lambda value: type(value) is int and 0 <= value < 2**31)
LAYERS = Kind(f"a whole number from 1 to {MOST_LAYERS:,}", lambda value: COUNT.holds(value) and value <= MOST_LAYERS)
COUNTS = Kind(
    f"a list of 1 to {MOST_BLOCKS:,} whole numbers from 1",
    lambda value: isinstance(value, list) and 0 < len(value) <= MOST_BLOCKS and all(map(COUNT.holds, value)),
)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TABLE = Kind("a table of settings", lambda value: isinstance(value, dict))


class Key(NamedTuple):
    """A key of config.json, the kind of its value, and its default; REQUIRED where it must be present."""

    name: str
    kind: Kind
    default: Any = REQUIRED


def value(settings: Settings, name: str, kind: Kind, default: Any = REQUIRED) -> Any:
    """The value of a key; null means the same as absent. Raises ConfigError where it is missing or of another kind."""
    found = settings.get(name)
    if found is None and default is REQUIRED:
        raise ConfigError(f"{name} is missing; give a complete config.json")
    if found is None:
        return default
    if not kind.holds(found):
        raise ConfigError(f"{name} = {shown(found)}; give {kind.title}")
    return found


def values(settings: Settings, keys: Mapping[str, Key]) -> Settings:
    """Field -> value of its key. Raises ConfigError naming all keys that are missing or of another kind."""
    return dict(zip(keys, together(*(partial(value, settings, *key) for key in keys.values())), strict=True))


def together(*readers: Callable[[], Any]) -> list[Any]:
    """The results of all readers. Raises one ConfigError with the lines of all that fail."""
    found, wrong = [], []
    for read in readers:
        try:
            found.append(read())
        except ConfigError as error:
            wrong += str(error).splitlines()
    if wrong:
        raise ConfigError("\n".join(dict.fromkeys(wrong)))
    return found
