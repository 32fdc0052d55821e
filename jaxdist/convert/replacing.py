"""Targets that --force may replace: a checkpoint and nothing else, which neither this conversion reads nor a run
writes."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.convert.mappings.mapped import holds_tensors, is_tree
from jaxdist.convert.target import no_run_in, refusing
from jaxdist.formats.companions import is_listed
from jaxdist.formats.folders import is_hf
from jaxdist.formats.origin import ORIGIN
from jaxdist.formats.sources import kind_at, sibling
from jaxdist.formats.torch_zips import BEGIN
from jaxdist.runs.checkpoints import DAMAGED, FOLDER, UNFINISHED, listed, newest
from jaxdist.training.step import TrainState

# Paths of all the files within a folder of each kind. A manifest lists others, and chunks of arrays are numbered.
HUGGING_FACE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
RUN = re.compile(
    r"(config\.toml|metrics\.jsonl|summary\.json)(\.tmp)?|\.lock|events\.out\.tfevents\.[^/]+|record/\d+\.safetensors"
    rf"|{FOLDER}/\d+{re.escape(UNFINISHED)}[^/]*/.*"
)
OCDBT = r"(manifest\.ocdbt|d/[0-9a-f]{32})"
CHECKPOINT = re.compile(
    rf"(({'|'.join(TrainState._fields)}|params|experiment)/)?(_METADATA|_sharding|_CHECKPOINT_METADATA|_strings\.json"
    rf"|commit_success\.txt|array_metadatas/process_\d+|(ocdbt\.process_\d+/)?{OCDBT})"
    r"|experiment/metadata|\.metadata|__\d+_\d+\.distcp|experiment\.json|manifest\.json"
)
CHUNK = re.compile(r"\.zarray|\d+(\.\d+)*")
OTHER_CHECKPOINT = re.compile(rf"\d+({re.escape(DAMAGED)}(-\d+)?)?")
LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")  # how a torch file of before 1.6 begins


def check_apart(shown: Path, read: Mapping[str, Path | None], force: bool) -> None:
    """Raises ConfigError where a conversion to TARGET would take what it reads, or by `force` what a run writes."""
    target = shown.resolve()
    with refusing(shown):
        replaced = force and target.exists()
        removed = [sibling(target, part) for part in ("partial", "old")] + [target] * replaced
        for name, path in read.items():
            found = path and path.resolve()
            if found and (any(map(found.is_relative_to, removed)) or (replaced and target.is_relative_to(found))):
                raise ConfigError(
                    f"TARGET {shown}{' with --force' * force} would replace {name} {path}; give another TARGET"
                )
        if replaced:
            with no_run_in(target):
                pass


def check_replaceable(shown: Path, coming: Mapping[str, bytes], there: Path) -> None:
    """Raises ConfigError where --force would take what is not a checkpoint, and OSError.

    TARGET as it was `shown`, and where it lies. `coming`: files that the new one has besides its weights.
    """
    target = there.resolve()
    if not (is_file(target) if target.is_file() else is_folder(target)):
        raise ConfigError(
            f"TARGET {shown} is not a checkpoint, and --force replaces nothing else; remove it, or give another"
        )
    if target.is_file():
        return
    if other := next(other_checkpoints(target), None):
        raise ConfigError(f"TARGET {shown} has {other} too, and --force replaces one checkpoint; move it elsewhere")
    if other := next(others(target, coming), None):
        raise ConfigError(
            f"TARGET {shown} has {other}, which is of no checkpoint or does not come again, and --force replaces "
            "nothing else; remove it, or give another"
        )


def is_file(target: Path) -> bool:
    """Whether a file is a torch file, maybe cut short, or safetensors."""
    with target.open("rb") as file:
        begins = file.read(len(LEGACY))
    if target.suffix == ".safetensors":
        return begins[8:9] == b"{"
    return begins == LEGACY or (begins.startswith(BEGIN) and kind_at(target) is not None)  # zips are documents too


def is_folder(target: Path) -> bool:
    """Whether a folder is a checkpoint or empty."""
    return not any(target.iterdir()) or kind_at(target) is not None or is_tree(target)


def other_checkpoints(target: Path) -> Iterator[str]:
    """Checkpoints of a run besides its newest, and those that were set aside."""
    checkpoints = target / FOLDER
    for entry in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else ():
        if OTHER_CHECKPOINT.fullmatch(entry.name) and entry.name != str(newest(checkpoints)):
            yield f"{FOLDER}/{entry.name}"


def others(target: Path, coming: Mapping[str, bytes]) -> Iterator[str]:
    """Paths in a folder of what is not of its checkpoint, and does not come again. Raises OSError."""
    known = known_in(target)
    for name in files_in(target):
        # A tokenizer gives way to another one, and other files to themselves.
        again = name in coming and (is_listed(name) or (target / name).read_bytes() == coming[name])
        if not (again or known(name)):
            yield name


def files_in(folder: Path) -> Iterator[str]:
    """All files and links, also in folders within it. Raises OSError for one that is closed."""

    def closed(error: OSError) -> None:
        raise error

    for place, folders, files in os.walk(folder, onerror=closed):
        here = Path(place)
        for name in sorted((*files, *(name for name in folders if (here / name).is_symlink()))):
            yield (here / name).relative_to(folder).as_posix()


def known_in(target: Path) -> Callable[[str], object]:
    """A predicate: whether a file belongs to the checkpoint, or the run, in a folder."""
    if is_hf(target) or holds_tensors(target):
        return HUGGING_FACE.fullmatch
    if not (target / FOLDER).is_dir():
        return known_to(target)
    parts = {f"{part}/": known_to(target / part) for part in (ORIGIN, f"{FOLDER}/{newest(target / FOLDER)}")}

    def known(name: str) -> object:
        part = next(filter(name.startswith, parts), None)
        return parts[part](name.removeprefix(part)) if part else RUN.fullmatch(name)

    return known


def known_to(folder: Path) -> Callable[[str], object]:
    """A predicate: whether a folder's manifest lists a file, or its name is one of a checkpoint's files."""
    names = listed(folder)

    def known(name: str) -> object:
        chunk = CHUNK.fullmatch(Path(name).name) and (folder / name).with_name(".zarray").is_file()
        return chunk or name in names or CHECKPOINT.fullmatch(name)

    return known
