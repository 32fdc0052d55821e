"""The files of karpathy/llm.c: each begins with a number that says what it is."""

from pathlib import Path

HEADER = 256  # numbers, int32
MODEL, STATE = 20240326, 20240527  # of a checkpoint: its weights, and what its optimizer keeps
# Headers of token ids: magic -> version, type of the ids (dev/data/data_common.py).
TOKENS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
OTHERS = {
    20240522: "evaluation set", MODEL: "checkpoint", 20240327: "debugging state", 20240328: "tokenizer",
    STATE: "optimizer state", 20240803: "Llama 3 checkpoint",
}  # fmt: skip


def magic_of(path: Path) -> int:
    """The number that begins a file; 0 of what is not a file."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return int.from_bytes(file.read(4), "little")


def is_model(path: Path) -> bool:
    """Whether `path` is a model file."""
    return magic_of(path) == MODEL
