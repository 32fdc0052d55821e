"""config.json of Hugging Face <-> the model section, by the readers and writers that families register.

A key that a file leaves out has the default of transformers' own config class.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from jaxdist.config import ConfigError, Data, Experiment, Model
from jaxdist.config.bounded import read_json
from jaxdist.config.plugins import optional
from jaxdist.config.registry import FAMILIES
from jaxdist.formats.hf_decisions import HuggingFace, ModelType, check, notes
from jaxdist.formats.hf_keys import SHOWN, Settings, together
from jaxdist.formats.tables import lacking, unusable

HEADS = re.compile("(ForCausalLM|LMHeadModel|ForImageClassification)$")  # ends of architectures with a head


def read_model(path: Path) -> Model:
    """The model that `path`/config.json describes. Raises ConfigError for what jaxdist cannot compute."""
    return read_folder(path)[0]


def read_folder(path: Path) -> tuple[Model, list[str]]:
    """That model, and notes on the file: see `notes_on`. Raises ConfigError."""
    file = path / "config.json"
    try:
        settings = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; give a Hugging Face folder with a readable config.json") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: {SHOWN.repr(settings)} is no table of settings; give a Hugging Face config.json")
    try:
        values = from_settings(settings)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
    try:
        return experiment_for(values, source=str(file)).model, [f"{file}: {note}" for note in notes_on(settings)]
    except ConfigError as error:
        raise ConfigError(in_their_words(str(error), settings["model_type"])) from None


def in_their_words(message: str, model_type: str) -> str:
    """An error of a model section, with the keys of the config.json that it was read from in place of our fields."""
    names = model_types()[model_type][1].names
    return re.sub(r"\bmodel\.(\w+)", lambda found: names.get(found[1], found[0]), message)


def experiment_for(model: Settings, source: str) -> Experiment:
    """The default experiment around a model section, its sequences within positions. Raises ConfigError."""
    sequence = min(Data().sequence, model.get("positions", Data().sequence))
    return Experiment.parse({"model": model, "data": {"sequence": sequence}}, source)


def huggingface_of(family: str) -> HuggingFace | None:
    """The reader and writer that a family registers; None without one. Raises ConfigError for anything else."""
    found = optional(FAMILIES, family, "huggingface")
    if not isinstance(found, HuggingFace | None):
        raise unusable(family, "huggingface", found, "a jaxdist.formats.hf_decisions.HuggingFace")
    return found


def model_types() -> Mapping[str, tuple[str, ModelType]]:
    """model_type -> the family that reads it, and its reader. Raises ConfigError where two families read one."""
    found: dict[str, tuple[str, ModelType]] = {}
    for family in FAMILIES:
        row = huggingface_of(family)
        for model_type, reader in row.types.items() if row else ():
            if model_type in found:
                raise ConfigError(
                    f"{FAMILIES.owner(family)}: the family {family!r} reads a config.json of model_type "
                    f"{model_type!r}, which the family {found[model_type][0]!r} reads; give it another model_type"
                )
            found[model_type] = family, reader
    return found


def from_settings(settings: Settings) -> Settings:
    """The model section, not yet validated, from the settings of a config.json. Raises ConfigError."""
    model_type, named, known = settings.get("model_type"), settings.get("architectures") or [], model_types()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"model_type = {SHOWN.repr(model_type)}; choose a model of type {', '.join(known)}, or give --plugins the "
            "package that registers its family"
        )
    family, reader = known[model_type]
    name = reader.architecture
    if not isinstance(named, list) or (named and named[0] not in (name, HEADS.sub("Model", name))):
        raise ConfigError(f"architectures = {SHOWN.repr(named)}; jaxdist reads {name} of model_type {model_type}")
    _, fields = together(partial(check, settings, reader.decisions), partial(reader.read, settings))
    return {"family": family, **fields}


def to_settings(model: Model, dtype: str) -> Settings:
    """Settings of a config.json that transformers 4 and 5 read alike. Raises ConfigError if none fits."""
    if (row := huggingface_of(model.family)) is None:
        raise lacking(model.family, "huggingface", "there is no config.json for it")
    # Token ids belong to a tokenizer; left out, transformers would assume those of its own.
    tokens = {"bos_token_id": None, "eos_token_id": None} if model.input_kind == "tokens" else {}
    return row.write(model) | tokens | {"torch_dtype": dtype}


def notes_on(settings: Settings) -> list[str]:
    """Notes on a config.json that jaxdist reads, see `hf_decisions.notes`."""
    return notes(settings, model_types()[settings["model_type"]][1])
