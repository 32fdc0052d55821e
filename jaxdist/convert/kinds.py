"""The kinds of checkpoint that can be read, written and listed: one row each."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from jaxdist import checkpoint
from jaxdist.config import ConfigError, Experiment, checkpoint_in, llmc
from jaxdist.config.dcp import INDEX
from jaxdist.convert import peft
from jaxdist.convert.content import Content, Leaf
from jaxdist.convert.peft import is_adapter
from jaxdist.convert.stream import Conversion
from jaxdist.convert.target import beside
from jaxdist.formats.folders import is_bin_folder, is_deepspeed, is_hf, is_trainer_folder
from jaxdist.formats.refusals import is_torch_zip, refusal, several
from jaxdist.formats.tables import LAYERS
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
    holds: Callable[[Path], bool]
    module: str
    naming: str
    state: bool = True
    rates: bool = False

    @property
    def padded(self) -> bool:
        """Whether it keeps the padding of the vocabulary: our own kinds do."""
        return self.naming in (LAYERS, "torch_ref")

    @property
    def format(self) -> Format:
        """Raises ConfigError where torch is needed and missing."""
        try:
            return cast(Format, importlib.import_module(f"jaxdist.convert.{self.module}"))
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ConfigError(f"a {self.title} needs torch; pip install 'jaxdist[torch]'") from None

    def naming_of(self, content: Content) -> str:
        """What tensors of this content are called when they are written: as they were in a source of this kind."""
        origin = content.origin
        return origin.naming if KINDS.get(origin.kind) == self and origin.naming else self.naming


def _is_torch(path: Path) -> bool:
    """A file of torch.save's: a zip with the pickle, or by its name one of before torch 1.6."""
    if not path.is_file():
        return False
    try:
        return is_torch_zip(path)
    except Exception:  # of a damaged directory, many kinds
        return path.suffix in SUFFIXES


def _is_dcp(path: Path) -> bool:
    return (checkpoint_in(path) / INDEX).is_file()


def _is_meta(path: Path) -> bool:
    return (path / "params.json").is_file() and any(path.glob("consolidated.*.pth"))


KINDS = {
    "deepspeed": Kind("checkpoint of DeepSpeed's", is_deepspeed, "deepspeed_folders", "", rates=True),
    "trainer": Kind("folder of a Trainer or of Accelerate", is_trainer_folder, "trainer_folders", "", rates=True),
    "hf": Kind("Hugging Face folder", is_hf, "hf", "huggingface", state=False),
    "orbax": Kind("Orbax checkpoint", checkpoint.is_checkpoint, "orbax_files", LAYERS),
    "dcp": Kind("torch distributed checkpoint", _is_dcp, "dcp_files", "torch_ref", rates=True),
    "llmc": Kind("checkpoint of llm.c's", llmc.is_model, "llmc_files", ""),
    "torch": Kind("torch file", _is_torch, "torch_files", "huggingface", rates=True),
    "meta": Kind("folder of Meta's", _is_meta, "meta", "", state=False),
    "bin": Kind("folder with pytorch_model.bin", is_bin_folder, "bin_files", "", state=False),
}
TARGETS = tuple(name for name, kind in KINDS.items() if kind.naming)


def kind_at(path: Path) -> str | None:
    """The kind of checkpoint at `path`, recognized by its files; None where it is of no kind. Raises ConfigError where
    they cannot be looked at."""
    try:
        return next((name for name, kind in KINDS.items() if kind.holds(path)), None)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give what can be read") from None


def kind_of(path: Path) -> str:
    """The kind of checkpoint at `path`. Raises ConfigError where it is of none, or a file that is a part of one."""
    found = kind_at(path)
    if found in (None, "torch") and (error := refusal(path)):
        raise error
    if found is None and is_adapter(path):
        raise peft.refusal(path)
    if found is None:
        if error := several(path, kind_at):
            raise error
        missing = "no such file or folder" if not path.exists() else "no checkpoint of a known kind"
        if (old := beside(path.resolve(), "old")).exists() and not path.exists():
            missing += f", it was being replaced when a conversion was killed, and lies in {old}"
        raise ConfigError(
            f"{path}: {missing}; give a run folder, its checkpoints/<step>, a folder with config.json and "
            "*.safetensors or pytorch_model.bin, a torch file, or a folder with .metadata of "
            "torch.distributed.checkpoint"
        )
    return found


def check_name(target: Path, kind: Kind) -> None:
    """Raises ConfigError where a folder would get the name of a file."""
    if kind is not KINDS["torch"] and target.suffix in (".safetensors", *SUFFIXES):
        other = "" if target.suffix == ".safetensors" else ", or --to torch"
        raise ConfigError(
            f"TARGET {target}: {target.suffix} ends the name of a file, and what is to be written is a folder, a "
            f"{kind.title}; give the name of one{other}"
        )


def target_kind(source: str, target: Path) -> str:
    """What is written where `--to` does not say: a torch file if the name is one's, else Orbax, or from it hf."""
    if target.suffix in SUFFIXES:
        return "torch"
    return "hf" if source == "orbax" else "orbax"
