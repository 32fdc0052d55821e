"""Which files data.path stands for, of which kind they are, and the split that their names tell."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import ConfigError
from jaxdist.config.foreign import FETCH, LFS, POINTER

# Tests are half of the library and dull to learn from.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# What lies beside data and is none: pickles (nanoGPT's meta.pkl), weights; tokenizers and descriptions.
NOT_DATA = {
    **dict.fromkeys((".pkl", ".pickle"), "pickles are never opened"),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".onnx", ".h5"), "weights, no text"),
}
NOT_DATA_NAMES = {
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
    "generation_config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
}  # fmt: skip
ABOUT = ("readme", "license")  # how names of files begin that are data only among other text
# Words in a file's name that say which split it is.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    "test": "test",
}
KINDS = {
    ".npy": ".npy", ".bin": ".bin", ".jsonl": "JSON", ".json": "JSON", ".ndjson": "JSON", ".parquet": "Arrow",
    ".arrow": "Arrow", ".feather": "Arrow",
}  # fmt: skip
PACKED = (".gz", ".zst", ".bz2", ".xz")
# How files begin that are neither text nor raw ids, whatever they are called.
SIGNATURES = {
    b"PK\x03\x04": "a zip archive, as torch.save and numpy.savez write", b"\x93NUMPY": "a .npy file",
    b"PAR1": "a Parquet file", b"ARROW1": "an Arrow file", b"%PDF-": "a PDF", b"\x89HDF": "an HDF5 file",
    b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"SQLite format": "a database", b"GGUF": "a GGUF model",
    LFS: POINTER,
}  # fmt: skip


class Files(NamedTuple):
    """The files of each split, all of one kind, and the names of those left alone. Without a split all are `train`."""

    train: list[Path]
    validation: list[Path]
    kind: str
    aside: list[str]

    @property
    def all(self) -> list[Path]:
        return self.train + self.validation


def library_files(root: Path) -> list[Path]:
    """Every .py of the standard library at `root`, by path, without tests and packages: about 12 MB.

    Raises ConfigError where Python came without its source.
    """
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]
        # _sysconfigdata spells out the paths of the machine that built this Python.
        names = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [Path(folder, name) for name in names]
    if not found:
        raise ConfigError(f"data.path = '': this Python has no source at {root}; give a file or folder of text")
    return sorted(found, key=Path.as_posix)


def find_files(path: Path, by_name: bool) -> Files:
    """The files of data.path, none hidden. Raises ConfigError.

    A file; a folder's own files by name, or, where it has none, those of its folders train, validation and so on; or
    the prefix of Megatron's pair of .bin and .idx. With `by_name`, names that say train and validation (see SPLITS)
    make the split: within a folder, and of what lies beside a file. Without a validation file a test file serves.
    """
    if path.suffix == ".idx" or not path.exists():  # Megatron's name for a pair is that without its endings
        pair = path.with_suffix(".bin") if path.suffix == ".idx" else path.with_name(f"{path.name}.bin")
        path = pair if pair.is_file() and pair.with_suffix(".idx").is_file() else path
    if path.is_file():
        beside = [path, *siblings(path)] if by_name else [path]
        return _files(path, beside, [], by_name)
    if not path.is_dir():
        what = "neither a file nor a folder, as a pipe" if path.exists() else "no such file or folder"
        raise ConfigError(f"data.path = {str(path)!r}: {what}; give one that exists")
    own = list(_visible(path))
    found = [file for file in own if _is_data(file)]
    if all(file.name.lower().startswith(ABOUT) for file in found):
        folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
        below = [file for folder in folders if folder.name.lower() in (*SPLITS, "data") for file in _visible(folder)]
        own, found = (own + below, [file for file in below if _is_data(file)]) if below else (own, found)
    elif {kind_of(file) for file in found if not file.name.lower().startswith(ABOUT)} != {"text"}:
        found = [file for file in found if not file.name.lower().startswith(ABOUT)]
    if not found:
        raise ConfigError(f"data.path = {str(path)!r}: the folder holds no files; put text or token ids in it")
    aside = [file.name for file in own if file not in found and not _is_index(file)]
    return _files(path, found, aside, by_name)


def _is_data(file: Path) -> bool:
    cached = file.suffix == ".arrow" and file.name.startswith("cache-")  # copies that `datasets` keeps
    known = file.suffix.lower() in NOT_DATA or file.name in NOT_DATA_NAMES
    return not (known or cached or _is_index(file))


def _files(path: Path, found: list[Path], aside: list[str], by_name: bool) -> Files:
    """Files as the splits that they are. Raises ConfigError where they are of several kinds."""
    named = {
        split: [file for file in found if split_of(file, path) == split] for split in ("train", "validation", "test")
    }
    held = named["validation"] or named["test"]
    if not (by_name and named["train"] and held):
        return Files(found, [], _kind(path, found), aside)
    kind = _kind(path, named["train"] + held)
    rest = [file for file in found if file not in named["train"] and file not in held]
    if stray := next((file for file in rest if split_of(file, path) is None and kind_of(file) == kind), None):
        raise ConfigError(
            f"data.path = {str(path)!r}: {named['train'][0].name} and {held[0].name} are a training and a validation "
            f"split, and the name of {stray.name} says neither; put train or validation in it, move it elsewhere, or "
            "set data.split = share to take all files together"
        )
    return Files(named["train"], held, kind, aside + [file.name for file in rest])


def split_of(file: Path, root: Path) -> str | None:
    """ "train", "validation" or "test", by the words of a file's name or its folder's below `root`; None without."""
    found = {SPLITS[word] for word in _words(file.name) if word in SPLITS}
    if not found and file.parent != root and file != root:
        found = {SPLITS.get(file.parent.name.lower(), "")} - {""}
    return found.pop() if len(found) == 1 else None


def siblings(file: Path) -> list[Path]:
    """Beside a file of training data, those of the other splits, whose names differ in the split's word and numbers."""

    def stem(name: str) -> list[str]:
        return [word for word in _words(name) if word not in SPLITS and not word.isdigit()]

    if split_of(file, file) != "train":
        return []
    alike = (other for other in _visible(file.parent) if stem(other.name) == stem(file.name))
    return [other for other in alike if split_of(other, file) in ("validation", "test")]


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _visible(folder: Path) -> Iterator[Path]:
    yield from sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))


def _is_index(file: Path) -> bool:
    """Whether it is the index of a .bin that lies beside it."""
    return file.suffix == ".idx" and file.with_suffix(".bin").is_file()


def _kind(path: Path, files: Sequence[Path]) -> str:
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise ConfigError(f"data.path = {str(path)!r}: the folder mixes {', '.join(kinds)} files; keep one kind in it")
    return kinds[0]


def kind_of(file: Path) -> str:
    """.npy, .bin, JSON, Arrow or text, by the file's ending; packed are JSON and text alone. Raises ConfigError."""
    suffix = file.suffix.lower()
    if suffix in PACKED:
        kind = KINDS.get(Path(file.stem).suffix.lower(), "text")
        if kind not in ("JSON", "text"):
            raise ConfigError(f"data.path = {str(file)!r}: {kind} files are not read packed; unpack it")
        return kind
    if suffix == ".npz":
        raise ConfigError(
            f"data.path = {str(file)!r}: .npz holds images, and this model.family takes tokens; give text or "
            "token ids, or model.family = resnet"
        )
    if suffix == ".idx":
        raise ConfigError(f"data.path = {str(file)!r}: an index without {file.stem}.bin beside it; put that there")
    if suffix in NOT_DATA:
        raise ConfigError(f"data.path = {str(file)!r}: {NOT_DATA[suffix]}; give text or token ids")
    return KINDS.get(suffix, "text")


def signature(head: bytes) -> str | None:
    """What a file is that begins so, where that is neither text nor raw ids."""
    if head[257:262] == b"ustar":
        return "a tar archive"
    return next((what for begin, what in SIGNATURES.items() if head.startswith(begin)), None)


def cure(head: bytes) -> str:
    """What to do about a file that is no data, and begins so."""
    return FETCH if head.startswith(LFS) else "give it the name of what it is"


def names(files: Iterable[Path], most: int = 3) -> str:
    """A few of them by name, and how many more."""
    listed = [file.name for file in files]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
