"""Pickles that others wrote, gone through with care: a few bytes of one can ask for all memory, or for hours.

A tuple of a tuple twice, of that twice, ... is short as a pickle, and to hash it goes through what it is written out.
What is held once can be copied by each of many calls. So both are counted before they are done.
"""

import pickle
from collections.abc import Callable, Iterable, Sized
from typing import Any, ClassVar

MOST = 1000  # values that a key, or what a call is given, is written out
WIDEST = 64  # bits of a number that is a key, which is hashed each time
COPIES = 4  # limit on bytes copied by calls, in multiples of the file's size
OPERATIONS = 50_000_000  # of a pickle, each of which may make a small object: those of a million tensors
# Operations that no checkpoint needs: a bytearray allocates any length, and the others hash or call in special ways.
_ABSENT = ("BYTEARRAY8", "DICT", "ADDITEMS", "FROZENSET", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
_absent = {getattr(pickle, name)[0]: name for name in _ABSENT}
# In Python: C's takes as much memory as a few bytes of a hostile pickle may name.
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


def _counted(code: int, name: str) -> Callable[[Any], None]:
    """The method that performs the operation of that code."""
    absent = _absent.get(code)

    def done(unpickler: Any) -> None:
        unpickler.operations -= 1
        if unpickler.operations < 0:
            raise ValueError(f"it has more than {OPERATIONS:,} operations")
        if absent:
            raise ValueError(f"it has the operation {absent}, which no checkpoint has")
        getattr(unpickler, name)()

    return done


class Careful(_Unpickler):  # type: ignore[misc]
    """Unpickles what lies in a file of `size` bytes. Raises ValueError, and whatever else a damaged one leads to."""

    dispatch: ClassVar = {code: _counted(code, done.__name__) for code, done in _Unpickler.dispatch.items()}

    def __init__(self, file: Any, size: int) -> None:
        super().__init__(file, encoding="latin-1")
        self.left, self.operations = COPIES * size, OPERATIONS

    def inside(self, value: Any) -> Iterable[Any]:
        """Values that are hashed with a value."""
        return value if isinstance(value, tuple) else ()

    def written_out(self, value: Any) -> list[Any]:
        """A value and all that is inside, each as often as it comes. Raises ValueError where they are more than MOST,
        as those of what holds itself."""
        found = [value]
        for node in found:  # which grows meanwhile
            found.extend(self.inside(node))
            if len(found) > MOST:
                raise ValueError(f"it has a key, or what a call is given, of more than {MOST:,} values")
        return found

    def hashes(self, key: Any) -> None:
        """Raises ValueError for a key that takes long to hash."""
        for value in self.written_out(key):
            if isinstance(value, int) and value.bit_length() > WIDEST:
                raise ValueError(f"it has a key of a number of {value.bit_length():,} bits")

    def charge(self, arguments: Any) -> None:
        """Raises ValueError where calls, with what this one is given, copy far more than there is."""
        for value in self.written_out(arguments):
            self.left -= 1 + (len(value) if isinstance(value, Sized) and not isinstance(value, tuple) else 0)
        if self.left < 0:
            raise ValueError("its calls copy more than the file has")

    def load_setitem(self) -> None:
        self.hashes(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            self.hashes(key)
        super().load_setitems()

    def load_reduce(self) -> None:
        self.charge(self.stack[-1])
        super().load_reduce()

    def load_newobj(self) -> None:
        self.charge(self.stack[-1])
        super().load_newobj()

    def load_build(self) -> None:
        self.charge(self.stack[-1])
        super().load_build()

    def load_binpersid(self) -> None:
        self.hashes(self.stack[-1])
        super().load_binpersid()
