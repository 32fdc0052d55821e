"""The files beside the weights of a Hugging Face folder: config.json, tokenizer, settings of generation, model card."""

import os
import re
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from jaxdist.config import ConfigError
from jaxdist.config.bounded import file_within, read_bytes
from jaxdist.runs.display import say

CONFIG = "config.json"
# Files of a Hugging Face folder that say nothing of the weights, and go along.
COMPANIONS = (
    CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tekken.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
MOST_BYTES = 200_000_000  # of all of them, which are in memory; the largest tokenizers have 40 MB
# Other files beside weights, as a model card, a license or code, are copied too, each up to this many bytes, unless
# they are weights of another format, or an index of some.
MOST_EACH = 100_000_000
FOLDERS = {PurePosixPath(pattern).parts[0] for pattern in COMPANIONS if "/" in pattern}
LONGEST = 255  # bytes of a name
OTHER_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|pkl|pickle|npz|npy|msgpack|h5|onnx|onnx_data|gguf|ggml|ot|tflite|index\.json)",
    re.IGNORECASE,
)


def is_companion(name: object) -> bool:
    """Whether a file of this name goes along with weights."""
    if not isinstance(name, str) or "/".join(parts := PurePosixPath(name).parts) != name or ".." in parts:
        return False
    writable = name.isprintable() and all(len(os.fsencode(part)) <= LONGEST for part in parts)
    return writable and (is_listed(name) or (len(parts) == 1 and _goes_along(name)))


def is_listed(name: str) -> bool:
    """Whether it is one of COMPANIONS, in the folder or in one within."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in COMPANIONS)


def _goes_along(name: str) -> bool:
    """Whether a file that we do not know goes along; what is hidden is of a program."""
    hidden = name.startswith(".") and name != ".gitattributes"
    return not hidden and name not in FOLDERS and not OTHER_WEIGHTS.fullmatch(name)


def files_of(folder: Path, read: Collection[str] = ()) -> tuple[dict[str, bytes], list[str]]:
    """All that goes along from a Hugging Face folder whose weights were `read` from files, and names of what stays
    behind. Raises ConfigError as `companions` does."""
    found, left = companions(folder), []
    taken, room = {*read, *(PurePosixPath(name).parts[0] for name in found)}, MOST_BYTES - sum(map(len, found.values()))
    for name in sorted(entry.name for entry in folder.iterdir() if entry.name not in taken):
        try:
            if not is_companion(name):
                raise ValueError("it is of something else")
            found[name] = read_bytes(file_within(folder, name), min(MOST_EACH, room))
            room -= len(found[name])
        except (OSError, ValueError):
            left.append(name)
    return found, left


def companions(folder: Path) -> dict[str, bytes]:
    """config.json and the tokenizer's files. Raises ConfigError for links that lead outside, and for absurd sizes."""
    found = {file for pattern in COMPANIONS for file in folder.glob(pattern) if file.is_file()}
    names = sorted(filter(is_companion, (file.relative_to(folder).as_posix() for file in found)))
    try:
        if (size := sum((folder / name).stat().st_size for name in names)) > MOST_BYTES:
            raise ValueError(f"its config.json and tokenizer have {size:,} bytes, more than {MOST_BYTES:,}")
        return {name: file_within(folder, name).read_bytes() for name in names}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}; give a folder with its files in it") from None


def neighbours(file: Path) -> dict[str, bytes]:
    """Companions in the folder of a file; they may belong to something else, so their errors become notes."""
    try:
        return companions(file.parent)
    except ConfigError as error:
        say(f"files next to {file} stay behind: {error}")
        return {}
