"""Interface of a checkpoint kind's module, and the kinds that can be written."""

from pathlib import Path
from typing import Protocol

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.plugins import named
from jaxdist.convert.content import Content, Leaf
from jaxdist.convert.stream import Conversion
from jaxdist.formats.kinds import KINDS, CheckpointKind, with_article
from jaxdist.formats.torch_files import SUFFIXES

__all__ = ["KINDS", "Format", "check_folder_name", "check_kind", "check_name", "target_kind", "targets", "with_article"]


class Format(Protocol):
    """Interface of a kind's module."""

    def described(self, path: Path) -> dict[str, Leaf]:
        """Every tensor of the model, under the names of the source. Raises ConfigError."""

    def read_content(self, path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
        """The content, none of its tensors read yet; without `training` no optimizer, whatever it may be.

        Raises ConfigError, also where it is not the model `wanted`.
        """

    def check(self, conversion: Conversion) -> object:
        """Raises ConfigError for what cannot be written."""

    def write(self, path: Path, conversion: Conversion) -> None:
        """Write a new file or folder. Raises ConfigError as `check` does."""


def targets() -> tuple[str, ...]:
    """The kinds that can be written."""
    return tuple(name for name, kind in KINDS.items() if kind.naming)


def check_kind(name: str) -> None:
    """Raises ConfigError for a value of --to that is no kind, or one that is only read."""
    if name in targets():
        return
    if name in KINDS and not KINDS.built_in(name):
        raise ConfigError(
            f"--to: {named(KINDS, name)} has no naming, which writing it needs; register it with one, and with a "
            f"module that has check and write, or choose from {', '.join(targets())}"
        )
    raise ConfigError(
        f"--to: invalid choice: {name!r}; choose from {', '.join(targets())}, or give --plugins the package that "
        "registers it"
    )


def check_name(target: Path, kind: CheckpointKind) -> None:
    """Raises ConfigError where a folder would get the name of a file."""
    if kind is not KINDS["torch"]:
        check_folder_name(target, kind.title, "" if target.suffix == ".safetensors" else ", or --to torch")


def check_folder_name(target: Path, title: str, other: str = "") -> None:
    """Raises ConfigError where a folder, which holds what `title` says, would get the name of a file. `other`: what to
    do instead, for the end of the message."""
    if target.suffix in (".safetensors", *SUFFIXES):
        raise ConfigError(
            f"TARGET {target}: {target.suffix} ends the name of a file, and the target is a folder, "
            f"{with_article(title)}; give the name of one{other}"
        )


def target_kind(source: str, target: Path) -> str:
    """The kind to write without `--to`: a torch file if the name is one's, else Orbax, or hf from Orbax."""
    if target.suffix in SUFFIXES:
        return "torch"
    return "hf" if source == "orbax" else "orbax"
