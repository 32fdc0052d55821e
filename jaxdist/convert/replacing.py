"""What --force may replace: a checkpoint and nothing else, which neither this conversion reads nor a run writes."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from jaxdist.config import ConfigError
from jaxdist.config.checkpoints import MANIFEST
from jaxdist.config.dcp import EXPERIMENT, INDEX
from jaxdist.config.folder import PARTS
from jaxdist.convert.hf import COMPANIONS
from jaxdist.convert.kinds import kind_at
from jaxdist.convert.mapped import is_tree
from jaxdist.convert.target import no_run_in
from jaxdist.step import TrainState

# Names in folders of checkpoints and runs, and of what lies beside weights where these are shared.
KNOWN = (
    *PARTS, *dict.fromkeys(name.partition("/")[0] for name in COMPANIONS), "*.safetensors", "*.safetensors.index.json",
    "*.distcp", INDEX, EXPERIMENT, MANIFEST, *TrainState._fields, "experiment", "params", "_*", "d", "*ocdbt*",
    "array_metadatas", "commit_success.txt", "README.md", "LICENSE*", "USE_POLICY*", ".gitattributes",
)  # fmt: skip
ZIP = b"PK\x03\x04"  # how a torch file begins, among others, and one of before 1.6
LEGACY = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")


def check_replaceable(given: Path, read: Mapping[str, Path | None], there: Path) -> None:
    """Raises ConfigError where --force would take what the conversion reads, or what is no checkpoint. TARGET as it was
    `given`, and where it lies."""
    target = there.resolve()
    for name, path in read.items():
        found = path and path.resolve()
        if found and (found.is_relative_to(target) or target.is_relative_to(found)):
            raise ConfigError(f"TARGET {given} with --force would replace {name} {path}; give another TARGET")
    with no_run_in(target):
        pass
    if other := next(others(target), None):
        what = "is no checkpoint" if other == target else f"has {other.name}, which is of no checkpoint"
        raise ConfigError(f"TARGET {given} {what}, and --force replaces nothing else; remove it, or give another")


def others(target: Path) -> Iterator[Path]:
    """What lies there and is not of a checkpoint: in a folder, or all of it."""
    if target.is_file():
        with target.open("rb") as file:
            begins = file.read(len(LEGACY))
        torchs = begins == LEGACY or (begins.startswith(ZIP) and kind_at(target))  # zips are documents and wheels too
        if not (torchs or target.suffix == ".safetensors"):
            yield target
        return
    if any(target.iterdir()) and not (kind_at(target) or is_tree(target)):
        yield target
    for entry in target.iterdir():
        is_array = (entry / ".zarray").is_file()
        if not is_array and not any(fnmatch(entry.name, name) for name in KNOWN):
            yield entry
