"""Small files read within bounds: JSON without repeated keys, sizes, and paths that stay in their folder."""

import json
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A trillion parameters have an index of 14 MB; the worst JSON takes 35 times its bytes of memory.
MOST_BYTES = 32_000_000

LFS = b"version https://git-lfs"  # how the pointer to a file begins that a clone without Git LFS has in its place
POINTER, FETCH = "a pointer of Git LFS to a file that was not fetched", "fetch it by git lfs pull"


def check_fetched(start: bytes) -> None:
    """Raises ValueError for a file that starts as a pointer of Git LFS."""
    if start.startswith(LFS):
        raise ValueError(f"it is {POINTER}; {FETCH}")


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Content of a JSON file.

    Raises OSError, and ValueError for a path that is not a file (a pipe would block), is too long, or cannot be parsed.
    """
    return parse(read_bytes(path, most))


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file. Raises OSError, and ValueError unless it is a regular file of at most `most` bytes."""
    if (size := size_of(path)) > most:
        raise ValueError(f"it has {size:,} bytes, more than {most:,}")
    return path.read_bytes()


def parse(text: bytes, constant: Callable[[str], Any] | None = None) -> Any:
    """Content of JSON in UTF-8. Raises ValueError if it is invalid, too deep, or has a key twice; also for NaN and
    Infinity, unless `constant` maps them to a value."""
    check_fetched(text)
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_object, parse_constant=constant or _no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeError as error:  # the error itself would show all of the text
        raise ValueError(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python and the safetensors library would take the last of two values for one key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it gives {name[:100]!r} twice")
    for text in (*found, *found.values()):
        if isinstance(text, str):
            text.encode()  # half a surrogate pair can be no name of a file, and not be printed
    return found


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def size_of(path: Path) -> int:
    """Size of a file in bytes. Raises OSError, and ValueError unless it is a regular file: a pipe would block."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a file")
    return status.st_size


def file_within(folder: Path, name: str) -> Path:
    """The file that an index in `folder` calls `name`. Raises ValueError for one that lies outside, also by a link.

    In the Hugging Face cache the files of snapshots/<revision> are links into the blobs beside `snapshots`: these pass.
    """
    file, root = folder / name, folder.resolve()
    try:
        found = file.resolve()
    except (OSError, RuntimeError):  # links in a circle, before Python 3.13
        raise ValueError(f"{name[:100]!r} leads nowhere") from None
    inside = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    if Path(name).is_absolute() or ".." in Path(name).parts or not any(map(found.is_relative_to, inside)):
        raise ValueError(f"{name[:100]!r} is outside of {folder}")
    return file
