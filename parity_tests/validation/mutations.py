"""Mutations of a file's content, drawn from a seed: of a tree of Python values, and of bytes.

`parity_tests.validation.fuzz` searches longer, with hypothesis; these are few and reproducible.
"""

import copy
import dataclasses
import math
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

ABSURD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, math.nan, math.inf),
    *("", "x", "\0", "../../x", "9" * 5000, [], {}, [[]], {"": None}, [-1], [2**62, 2**62], b"", (), {1: 2}),
)


class Place(NamedTuple):
    """A member of a tree: its holder, and its key, index or field."""

    holder: Any
    key: Any

    @property
    def value(self) -> Any:
        return getattr(self.holder, self.key) if dataclasses.is_dataclass(self.holder) else self.holder[self.key]

    def put(self, value: Any) -> None:
        if dataclasses.is_dataclass(self.holder):
            object.__setattr__(self.holder, self.key, value)  # works on frozen ones too
        else:
            self.holder[self.key] = value

    def drop(self) -> None:
        if dataclasses.is_dataclass(self.holder):
            self.put(None)  # an instance without the attribute could not be saved
        else:
            del self.holder[self.key]


def places(tree: Any) -> Iterator[Place]:
    """Members of dicts, lists and dataclasses in `tree`, at any depth."""
    keys = (
        list(tree) if isinstance(tree, dict)
        else range(len(tree)) if isinstance(tree, list)
        else [field.name for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree)
        else []
    )  # fmt: skip
    for key in keys:
        place = Place(tree, key)
        yield place
        yield from places(place.value)


def mutated(tree: Any, random: Random) -> Any:
    """A copy with one to three members absent, of another type, absurd, swapped or duplicated."""
    changed = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 3))):
        if found := list(places(changed)):
            random.choice(EDITS)(random.choice(found), random.choice(found), random)
    return changed


def replaced(place: Place, other: Place, random: Random) -> None:
    place.put(copy.deepcopy(random.choice(ABSURD)))


def dropped(place: Place, other: Place, random: Random) -> None:
    place.drop()


def exchanged(place: Place, other: Place, random: Random) -> None:
    place.put(copy.deepcopy(other.value))


def renamed(place: Place, other: Place, random: Random) -> None:
    if isinstance(place.holder, dict):
        place.holder[random.choice(("", "x", 0, None, "../x", "\0", str(other.key)))] = place.holder.pop(place.key)
    elif isinstance(place.holder, list):
        place.holder.append(place.value)


EDITS: tuple[Callable[[Place, Place, Random], None], ...] = (replaced, replaced, dropped, exchanged, renamed)


def damaged(content: bytes, random: Random, within: int | None = None) -> bytes:
    """Bytes flipped, truncated, removed, zeroed, repeated or replaced, within the first `within` of them."""
    size = min(len(content), within or len(content))
    at, count = random.randrange(size), random.choice((1, 4, 64))
    kept, rest = content[:at], content[at + count :]
    return random.choice(
        (
            kept + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :],
            kept + bytes([random.randrange(256)]) + content[at + 1 :],
            kept,
            kept + rest,
            kept + bytes(count) + rest,
            kept + content[at : at + count] + content[at:],
            kept + b"\xff" * count + rest,
            kept + struct.pack("<q", random.choice((-1, 2**31 - 1, 2**62))) + content[at + 8 :],
        )
    )
