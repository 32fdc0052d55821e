"""Compiled programs are kept from run to run: a second start loads its step in place of compiling it.

They lie in `~/.cache/jaxdist/compiled`, or below XDG_CACHE_HOME. JAX's own variables go before this: with
JAX_COMPILATION_CACHE_DIR it keeps them there, by its own rules, JAX_ENABLE_COMPILATION_CACHE=false keeps none, and
JAX_COMPILATION_CACHE_MAX_SIZE says how many bytes, -1 any number.

JAX's key of a program is a hash of its text, with numbered collectives (`jaxdist/runtime/xla.py`), of the compiler's
options and flags, of the versions, and of the devices. JAX (0.10.2, 0.12.0) writes its own in place: a kill leaves half
of one, which all read and none writes again. Here a file appears complete or not at all, is compared with its checksum,
and is removed where it is damaged.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import xxhash

from jaxdist.runtime.compat import CacheInterface, programs_kept_in
from jaxdist.runtime.processes import world

SECONDS = 0.1  # what is compiled in less is not kept
MOST_BYTES = 2 * 2**30  # of all programs; those that were used the longest time ago make room
SUM = 16  # bytes of XXH3's checksum, with which a file begins


@contextmanager
def keep_compiled() -> Iterator[None]:
    """Context manager of a command: keep the programs that are compiled within, and load kept ones; afterwards JAX's
    settings are as before.

    Without effect where the user has chosen otherwise, where no folder can be made, and for one of several processes:
    JAX has the first alone write, which would load, and wait in a collective while the others compile.
    """
    chosen, folder = jax.config.jax_compilation_cache_dir, user_folder()  # type: ignore[attr-defined]
    if chosen is not None or world().size > 1 or folder is None:
        yield
        return
    settings: dict[str, Any] = {"jax_compilation_cache_dir": str(folder)}
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        settings["jax_persistent_cache_min_compile_time_secs"] = SECONDS
    before = {name: getattr(jax.config, name) for name in settings}
    with programs_kept_in(opened):
        try:
            configure(settings)
            yield
        finally:
            configure(before)


def configure(settings: Mapping[str, Any]) -> None:
    """Set options of JAX by name."""
    for name, value in settings.items():
        jax.config.update(name, value)


def opened(folder: str) -> "Cache":
    """The programs in `folder`, which is made at the first program that is compiled."""
    with suppress(OSError):  # nothing is kept then
        Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)  # who can write there can have a run do anything
    return Cache(Path(folder), most())


def most() -> float:
    """Bytes that are kept."""
    if "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ:
        return MOST_BYTES
    chosen = jax.config.jax_compilation_cache_max_size  # type: ignore[attr-defined]
    return math.inf if chosen == -1 else chosen


def user_folder() -> Path | None:
    """Folder of this user's programs; None where there is no home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))  # to be ignored where it is relative, says its specification
    try:
        return (chosen if chosen.is_absolute() else Path.home() / ".cache") / "jaxdist" / "compiled"
    except RuntimeError:
        return None


class Cache(CacheInterface):
    """Programs by their key, a file each. Unreadable files count as absent, unwritable ones are left out."""

    def __init__(self, path: Path, most: float) -> None:
        self._path, self.most = path, most

    def get(self, key: str) -> bytes | None:
        """A program, if it is there and intact."""
        file = self._path / key
        try:
            content = file.read_bytes()
            value = content[SUM:]
            if content[:SUM] == xxhash.xxh3_128_digest(value):
                with suppress(OSError):  # of a file that can be read alone
                    os.utime(file)
                return value
            file.unlink(missing_ok=True)
        except OSError:
            pass
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""
        temporary = self._path / f"{key}.{os.getpid()}"
        try:
            temporary.write_bytes(xxhash.xxh3_128_digest(value) + value)
            temporary.replace(self._path / key)
            self._make_room()
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _make_room(self) -> None:
        files = [file for file in self._path.iterdir() if file.is_file()]
        used = {file: file.stat() for file in files}
        size = sum(stat.st_size for stat in used.values())
        for file in sorted(files, key=lambda file: used[file].st_mtime):
            if size <= self.most:
                return
            size -= used[file].st_size
            file.unlink(missing_ok=True)
