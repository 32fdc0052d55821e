"""A model described by something other than a TOML file: a Hugging Face folder, a run folder, a checkpoint.

Both backends read these here. Sources that only one of them can open, such as a torch file, it describes itself.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config.bounded import read_json
from jaxdist.config.data import Data
from jaxdist.config.errors import ConfigError
from jaxdist.config.experiment import Experiment, read_toml
from jaxdist.config.model import Model
from jaxdist.formats.dcp_index import EXPERIMENT
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.runs.checkpoints import checkpoint_in

HF_CONFIG, RUN_CONFIG, TOKENIZER = "config.json", "config.toml", "tokenizer.json"
# Files that stand for their Hugging Face folder, as transformers writes it.
SAFETENSORS, PICKLED = (SINGLE, INDEX), ("pytorch_model.bin",)
# Tokenizers in other formats: SentencePiece, byte-level BPE, WordPiece. transformers makes a tokenizer.json of these.
OLDER_TOKENIZERS = ("tokenizer.model", "spiece.model", "merges.txt", "vocab.txt")
ORBAX_EXPERIMENT = "experiment/metadata"  # in a checkpoint of jaxdist's


class Source(NamedTuple):
    """The model of `path`, the tokenizer.json that belongs to it, if there is one, and a note about it."""

    path: Path
    model: Model
    tokenizer: Path | None = None
    notes: Sequence[str] = ()

    def tables(self) -> dict[str, dict[str, Any]]:
        """The sections of a config that follow from it: the model, and data that fit it."""
        model = self.model.model_dump()
        data: dict[str, Any] = {"sequence": min(Data().sequence, model.get("positions", Data().sequence))}
        if self.tokenizer:
            data["tokenizer"] = str(self.tokenizer)
        return {"model": model, "data": data}


def folder_of(path: Path) -> Path:
    """The Hugging Face folder whose config.json or weights are at `path`; any other path itself."""
    if not (path.is_file() and (path.parent / HF_CONFIG).is_file()):
        return path
    pickled = () if any((path.parent / name).exists() for name in SAFETENSORS) else PICKLED  # the folder's are read
    return path.parent if path.name in (HF_CONFIG, *SAFETENSORS, *pickled) else path


def source_of(path: Path) -> Source | None:
    """The source at `path`; None where it does not describe its model in a way that both backends read.

    A damaged checkpoint counts as such: whoever reads its weights says what is wrong. Raises ConfigError for a
    config.json that jaxdist cannot compute.
    """
    checkpoint = checkpoint_in(path)
    for file in (checkpoint / EXPERIMENT, checkpoint / ORBAX_EXPERIMENT):
        if file.is_file():
            with suppress(ConfigError, OSError, ValueError):
                return experiment_source(path, Experiment.parse(read_json(file), source=str(file)))
    return _hf_source(path) if (path / HF_CONFIG).is_file() else None


def experiment_source(path: Path, experiment: Experiment) -> Source:
    """The source at `path`, which belongs to an experiment."""
    tokenizer = Path(experiment.data.tokenizer)
    return Source(path, experiment.model, tokenizer if tokenizer.is_file() and tokenizer.is_absolute() else None)


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """The sections of a TOML file, a run folder or a Hugging Face folder (or its config.json), which `option` asked
    for. Raises ConfigError."""
    if found := _config_source(path):
        return found.tables()
    if (path / RUN_CONFIG).is_file():
        return read_toml(path / RUN_CONFIG, option)
    if path.is_dir():
        raise ConfigError(
            f"{option} {path}: the folder has neither {HF_CONFIG} nor {RUN_CONFIG}; give a TOML file, a Hugging Face "
            "folder or a run folder"
        )
    return read_toml(path, option)


def config_notes(config: Path | None) -> Sequence[str]:
    """Notes on a config.json that is used as config; none on other configs. Raises ConfigError."""
    found = _config_source(config) if config else None
    return found.notes if found else ()


def _config_source(path: Path) -> Source | None:
    """The source whose config.json `path` is or holds; None for a run folder, and if there is none."""
    folder = path.parent if path.name == HF_CONFIG else path
    return _hf_source(folder) if (folder / HF_CONFIG).is_file() and not (path / RUN_CONFIG).is_file() else None


def _hf_source(folder: Path) -> Source:
    """Raises ConfigError."""
    from jaxdist.formats.hf import read_folder  # few commands need it

    (model, notes), tokenizer = read_folder(folder), folder / TOKENIZER
    if model.input_kind != "tokens":
        return Source(folder, model, None, notes)
    others = [name for name in (*OLDER_TOKENIZERS, "tekken.json") if (folder / name).is_file()]
    if others and not tokenizer.is_file():
        notes.append(f"{folder}: {others[0]} is not read; without data.tokenizer, text is read as bytes")
    return Source(folder, model, tokenizer if tokenizer.is_file() else None, notes)
