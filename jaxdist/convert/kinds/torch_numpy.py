"""Classes that torch lets a file of `torch.save` name, besides its own: those of `jaxdist.formats.stand_ins`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.serialization import safe_globals

from jaxdist.formats.stand_ins import STAND_INS

_lock = threading.Lock()


@contextmanager
def allowed() -> Iterator[None]:
    """In this block torch reads files with numpy's arrays; `restored` gives them. One thread at a time: torch has one
    list of what is allowed."""
    with _lock, safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()]):
        yield
