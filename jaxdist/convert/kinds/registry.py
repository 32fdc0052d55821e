"""The kinds of checkpoint that can be read, written and listed: one row each. `formats/sources.py` recognizes them."""

import importlib
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from jaxdist.config import ConfigError, Experiment
from jaxdist.convert.content import Content, Leaf
from jaxdist.convert.stream import Conversion
from jaxdist.formats.tables import HUGGINGFACE, LAYERS, TORCH_REF, naming_for
from jaxdist.formats.torch_files import SUFFIXES


class Format(Protocol):
    """What the module of a kind has."""

    def described(self, path: Path) -> dict[str, Leaf]:
        """Every tensor of the model, under the names of the source. Raises ConfigError."""

    def opened(self, path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
        """The content, none of its tensors read yet; without `training` no optimizer, whatever it may be.

        Raises ConfigError, also where it is not the model `wanted`.
        """

    def check(self, conversion: Conversion) -> object:
        """Raises ConfigError for what cannot be written."""

    def write(self, path: Path, conversion: Conversion) -> None:
        """Write a new file or folder. Raises ConfigError as `check` does."""


class Kind(NamedTuple):
    """`naming`: what its tensors are called if they did not come from one; empty where it is read alone.

    `state`: whether it holds an optimizer's state and a step. `rates`: whether such an optimizer is torch's, which has
    learning rates and no schedule; `opened` takes --peak then.
    """

    title: str
    module: str
    naming: str
    state: bool = True
    rates: bool = False

    @property
    def padded(self) -> bool:
        """Whether it keeps the padding of the vocabulary: our own kinds do."""
        return self.naming in (LAYERS, TORCH_REF)

    @property
    def format(self) -> Format:
        """Raises ConfigError where torch is needed and missing."""
        try:
            return cast(Format, importlib.import_module(f"jaxdist.convert.kinds.{self.module}"))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ConfigError(f"{with_article(self.title)} needs torch; pip install 'jaxdist[torch]'") from None

    def naming_of(self, content: Content) -> str:
        """What tensors of this content are called when they are written: as they were in a source of this kind."""
        origin = content.origin
        if KINDS.get(origin.kind) == self and origin.naming:
            return origin.naming
        return naming_for(self.naming, content.experiment.model)


KINDS = {
    "deepspeed": Kind("checkpoint of DeepSpeed's", "deepspeed_folders", "", rates=True),
    "trainer": Kind("folder of a Trainer or of Accelerate", "trainer_folders", "", rates=True),
    "hf": Kind("Hugging Face folder", "hf", HUGGINGFACE, state=False),
    "orbax": Kind("Orbax checkpoint", "orbax_files", LAYERS),
    "dcp": Kind("torch distributed checkpoint", "dcp_files", TORCH_REF, rates=True),
    "llmc": Kind("checkpoint of llm.c's", "llmc_files", ""),
    "torch": Kind("torch file", "torch_files", HUGGINGFACE, rates=True),
    "meta": Kind("folder of Meta's", "meta", "", state=False),
    "bin": Kind("folder with pytorch_model.bin", "bin_files", "", state=False),
}
TARGETS = tuple(name for name, kind in KINDS.items() if kind.naming)


def check_name(target: Path, kind: Kind) -> None:
    """Raises ConfigError where a folder would get the name of a file."""
    if kind is not KINDS["torch"]:
        check_folder_name(target, kind.title, "" if target.suffix == ".safetensors" else ", or --to torch")


def check_folder_name(target: Path, title: str, other: str = "") -> None:
    """Raises ConfigError where a folder, which holds what `title` says, would get the name of a file. `other`: what to
    do instead, for the end of the message."""
    if target.suffix in (".safetensors", *SUFFIXES):
        raise ConfigError(
            f"TARGET {target}: {target.suffix} ends the name of a file, and what is to be written is a folder, "
            f"{with_article(title)}; give the name of one{other}"
        )


def with_article(title: str) -> str:
    """The name of a kind of checkpoint, after "a" or "an"."""
    return f"{'an' if title[0] in 'AEIOaeio' else 'a'} {title}"


def target_kind(source: str, target: Path) -> str:
    """What is written where `--to` does not say: a torch file if the name is one's, else Orbax, or from it hf."""
    if target.suffix in SUFFIXES:
        return "torch"
    return "hf" if source == "orbax" else "orbax"
