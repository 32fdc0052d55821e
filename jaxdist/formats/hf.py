"""config.json of Hugging Face <-> the model section, by the readers and writers that families register.

A key that a file leaves out has the default of transformers' own config class.
"""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxdist.config import ConfigError, Data, Experiment, Model
from jaxdist.config.bounded import read_json
from jaxdist.config.errors import shown
from jaxdist.config.plugins import checked, named, optional, read_each, running
from jaxdist.config.registry import FAMILIES
from jaxdist.formats.hf_decisions import HuggingFace, ModelType, check, notes
from jaxdist.formats.hf_keys import Settings, together
from jaxdist.formats.tables import lacking

HEADS = re.compile("(ForCausalLM|LMHeadModel|ForImageClassification)$")  # ends of architectures with a head


def read_model(path: Path) -> Model:
    """The model that `path`/config.json describes. Raises ConfigError for what jaxdist cannot compute."""
    return read_folder(path)[0]


def read_folder(path: Path) -> tuple[Model, list[str]]:
    """The model of a file, and notes on it: see `notes_on`. Raises ConfigError."""
    file = path / "config.json"
    try:
        settings = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; give a Hugging Face folder with a readable config.json") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: {shown(settings)} is not a table of settings; give a Hugging Face config.json")
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


class Readers(NamedTuple):
    """The `huggingface` of all families, by family, and the errors of those whose own is broken."""

    types: Mapping[str, tuple[str, ModelType]]
    """model_type -> the family that reads it, and its reader."""
    pieces: Mapping[str, HuggingFace | None]
    errors: Mapping[str, ConfigError]


def readers() -> Readers:
    """Model types of the registered families."""
    types: dict[str, tuple[str, ModelType]] = {}

    def read(family: str) -> HuggingFace | None:
        if (piece := optional(FAMILIES, family, "huggingface", HuggingFace)) is None:
            return None
        source = f"{named(FAMILIES, family)}: huggingface.types"
        for model_type, reader in checked(piece.types, Mapping, f"{source} =").items():
            checked(reader, ModelType, f"{source}[{model_type!r}] =")
            if model_type in types:
                raise ConfigError(
                    f"{named(FAMILIES, family)} reads a config.json of model_type {model_type!r}, which the family "
                    f"{types[model_type][0]!r} reads; give it another model_type"
                )
        types.update({model_type: (family, reader) for model_type, reader in piece.types.items()})
        return piece

    return Readers(types, *read_each(FAMILIES, read))


def huggingface_of(family: str) -> HuggingFace | None:
    """The reader and writer that a family registers; None without one. Raises ConfigError where they are broken."""
    found = readers()
    if family in found.errors:
        raise found.errors[family]
    return found.pieces[family]


def model_types() -> Mapping[str, tuple[str, ModelType]]:
    """model_type -> the family that reads it, and its reader."""
    return readers().types


def from_settings(settings: Settings) -> Settings:
    """The model section, not yet validated, from the settings of a config.json. Raises ConfigError."""
    model_type, architectures = settings.get("model_type"), settings.get("architectures") or []
    known, _, errors = readers()
    if not isinstance(model_type, str) or model_type not in known:
        if errors:  # one of these families may read it
            raise next(iter(errors.values()))
        raise ConfigError(
            f"model_type = {shown(model_type)}; choose a model of type {', '.join(known)}, or give --plugins the "
            "package that registers its family"
        )
    family, reader = known[model_type]
    name = reader.architecture
    if not isinstance(architectures, list) or (
        architectures and architectures[0] not in (name, HEADS.sub("Model", name))
    ):
        raise ConfigError(f"architectures = {shown(architectures)}; jaxdist reads {name} of model_type {model_type}")
    with running(FAMILIES, family, "huggingface"):
        _, fields = together(partial(check, settings, reader.decisions), partial(reader.read, settings))
    return {"family": family, **fields}


def to_settings(model: Model, dtype: str) -> Settings:
    """Settings of a config.json that transformers 4 and 5 read alike. Raises ConfigError if none fits."""
    if (row := huggingface_of(model.family)) is None:
        raise lacking(model.family, "huggingface", "there is no config.json for it")
    # Token ids belong to a tokenizer; left out, transformers would assume those of its own.
    tokens = {"bos_token_id": None, "eos_token_id": None} if model.input_kind == "tokens" else {}
    with running(FAMILIES, model.family, "huggingface"):
        return row.write(model) | tokens | {"torch_dtype": dtype}


def notes_on(settings: Settings) -> list[str]:
    """Notes on a config.json that jaxdist reads, see `hf_decisions.notes`."""
    family, reader = model_types()[settings["model_type"]]
    with running(FAMILIES, family, "huggingface"):
        return notes(settings, reader)
