"""One process at a time, by a lock on a file, which the operating system takes back when its holder ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Taken(Exception):
    """Another process holds the lock, or did until now."""


@contextmanager
def alone(file: Path, create: bool = True) -> Iterator[None]:
    """Within, no other process holds the lock on `file`. `create`: make the file and remove it at the end; else it is
    there and stays. Raises Taken, and OSError, as for a link.

    File systems without locks let everyone in.
    """
    with os.fdopen(os.open(file, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o666), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken from None
        except OSError:  # as some network file systems answer
            pass
        if not os.fstat(lock.fileno()).st_nlink:  # the other has ended meanwhile, and taken its file along
            raise Taken
        try:
            yield
        finally:
            if create:
                file.unlink(missing_ok=True)
