"""Finds the files of data.path, their kind, and the splits that their names say."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import ConfigError
from jaxdist.config.bounded import read_json
from jaxdist.config.registry import families_of

# Tests are half of the library and dull to learn from.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Files beside data that are not data: pickles (nanoGPT's meta.pkl), weights; tokenizers and descriptions.
NOT_DATA = {
    **dict.fromkeys((".pkl", ".pickle"), "pickles are never opened"),
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".safetensors", ".gguf", ".onnx", ".h5"), "weights, no text"),
}
# Locks, copies, half a download, sums.
LEFTOVERS = (
    ".lock", ".tmp", ".temp", ".bak", ".orig", ".swp", ".part", ".partial", ".crdownload", ".incomplete", ".md5",
    ".sha1", ".sha256", ".crc", ".aria2",
)  # fmt: skip
NOT_DATA_NAMES = {
    "Thumbs.db", "desktop.ini", "_SUCCESS", "_metadata", "_common_metadata",  # the last three of Spark and Arrow
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json",
    "generation_config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
}  # fmt: skip
ABOUT = ("readme", "license")  # how names of files begin that are data only among other text
SHARD = re.compile(r"(.*?)(\d+)-of-(\d{1,6})(\D.*|)")  # from 0 on, or from 1 to the count
# Words in a file's name that say which split it is.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "validation"),
    "test": "test",
}
KINDS = {
    ".npy": ".npy", ".bin": ".bin", ".jsonl": "JSON", ".json": "JSON", ".ndjson": "JSON",
    ".jsonlines": "JSON", ".jl": "JSON", ".ldjson": "JSON", ".csv": "CSV", ".tsv": "CSV",
    ".parquet": "Arrow", ".arrow": "Arrow", ".arrows": "Arrow", ".ipc": "Arrow", ".feather": "Arrow",
}  # fmt: skip
PLAIN = ("", ".txt", ".text")  # endings of text alone; others, as .md and .py, are read as text too
PACKED = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz")


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
        candidates = [path, *siblings(path)] if by_name else [path]
        return _files(path, candidates, [], by_name)
    if not path.is_dir():
        what = "neither a file nor a folder, as a pipe" if path.exists() else "no such file or folder"
        raise ConfigError(f"data.path = {str(path)!r}: {what}; give one that exists")
    own = list(_visible(path))
    found = [file for file in own if _is_data(file)]
    if all(map(_is_about, found)):
        folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
        named = (folder for folder in folders if folder.name == "data" or _split_in(folder))
        if below := [file for folder in named for file in _visible(folder)]:
            own, found = own + below, [file for file in below if _is_data(file)]
        elif others := [folder for folder in folders if any(map(_is_data, _visible(folder)))]:
            raise ConfigError(
                f"data.path = {str(path)!r}: its data are in folders whose names say no split ({names(others)}); give "
                "one of these, or put the files of all in one folder"
            )
    elif {kind_of(file) for file in found if not _is_about(file)} - {"text"}:
        found = [file for file in found if not (_is_about(file) or _is_script(file))]
    if not found:
        what = f"no data, only {names(own)}" if own else "no files"
        raise ConfigError(f"data.path = {str(path)!r}: the folder holds {what}; put text or token ids in it")
    _check_copies(found)
    if (state := path / "state.json").is_file():
        _check_order(state)
    aside = [file.name for file in own if file not in found and not _is_index(file)]
    if found[0].parent == path:
        aside += [f"{folder.name}/" for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name[0] != "."]
    return _files(path, found, aside, by_name)


def _is_data(file: Path) -> bool:
    cached = file.suffix == ".arrow" and file.name.startswith("cache-")  # copies that `datasets` keeps
    known = file.suffix.lower() in (*NOT_DATA, *LEFTOVERS) or file.name in NOT_DATA_NAMES or file.name.endswith("~")
    return not (known or cached or _is_index(file))


def _is_about(file: Path) -> bool:
    return file.name.lower().startswith(ABOUT)


def _is_script(file: Path) -> bool:
    """Whether, beside records or ids, it is probably a script or description, and no text of the same corpus."""
    return kind_of(file) == "text" and not is_plain(file)


def _check_copies(found: Sequence[Path]) -> None:
    """Raises ConfigError for a file that is there twice, compressed and not."""
    bare: dict[Path, Path] = {}
    for file in found:
        name = file.with_suffix("") if file.suffix.lower() in PACKED else file
        if (other := bare.setdefault(name, file)) is not file:
            raise ConfigError(
                f"data.path = {str(file.parent)!r}: {other.name} and {file.name} are the same file, packed and not, by "
                "their names; keep one of them"
            )


def _check_order(state: Path) -> None:
    """Raises ConfigError where `datasets` saved the order or the choice of rows in another file."""
    try:
        found = read_json(state)
    except (OSError, ValueError):
        return
    if isinstance(found, dict) and found.get("_indices_data_files"):
        raise ConfigError(
            f"data.path = {str(state.parent)!r}: {state.name} names indices, by which the dataset was shuffled or "
            "selected; save it again by dataset.flatten_indices().save_to_disk(path)"
        )


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
    below = file.parent != root and file != root
    return _split_in(file) or (_split_in(file.parent) if below else None)


def _split_in(path: Path) -> str | None:
    """The split that the words of a name say; None where they say none, or several."""
    found = {SPLITS[word] for word in _words(path.name) if word in SPLITS}
    return found.pop() if len(found) == 1 else None


def siblings(file: Path) -> list[Path]:
    """Files of the other splits beside one of training data: their names differ in the split's word and numbers."""

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
    """Whether it is the index of a .bin beside it."""
    return file.suffix == ".idx" and file.with_suffix(".bin").is_file()


def _kind(path: Path, files: Sequence[Path]) -> str:
    kinds = sorted({kind_of(file) for file in files})
    if len(kinds) > 1:
        raise ConfigError(f"data.path = {str(path)!r}: the folder mixes {', '.join(kinds)} files; keep one kind in it")
    return kinds[0]


def kind_of(file: Path) -> str:
    """.npy, .bin, JSON, CSV, Arrow or text, by the file's ending; packed are JSON, CSV and text. Raises ConfigError."""
    suffix = file.suffix.lower()
    if suffix in PACKED:
        kind = KINDS.get(_ending(file), "text")
        if kind not in ("JSON", "CSV", "text"):
            raise ConfigError(f"data.path = {str(file)!r}: {kind} files are not read packed; unpack it")
        return kind
    if suffix == ".npz":
        raise ConfigError(
            f"data.path = {str(file)!r}: .npz holds images, and this model.family takes tokens; give text or "
            f"token ids, or model.family = {families_of('images')}"
        )
    if suffix == ".idx":
        raise ConfigError(f"data.path = {str(file)!r}: an index without {file.stem}.bin next to it; put that there")
    if suffix in NOT_DATA:
        raise ConfigError(f"data.path = {str(file)!r}: {NOT_DATA[suffix]}; give text or token ids")
    return KINDS.get(suffix, "text")


def _ending(file: Path) -> str:
    """The kind of a file by its name, without the suffix of a packer."""
    return (Path(file.stem) if file.suffix.lower() in PACKED else file).suffix.lower()


def is_plain(file: Path) -> bool:
    """Whether its name says that it is text and nothing else."""
    return _ending(file) in PLAIN


def missing_shards(files: Iterable[Path]) -> list[str]:
    """Names of files that the names of others count, as a-00001-of-00003, and that are not there."""
    held: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        if parts := SHARD.fullmatch(file.name):
            before, number, count, after = parts.groups()
            held.setdefault((before, count, after), set()).add(int(number))
    return [
        f"{before}{number:0{len(count)}}-of-{count}{after}"
        for (before, count, after), numbers in held.items()
        for number in sorted({*range(int(count) in numbers, int(count) + (int(count) in numbers))} - numbers)
    ]


def names(files: Iterable[Path], most: int = 3) -> str:
    """A few of them by name, and how many more."""
    listed = [file.name for file in files]
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
