"""The model of a torch file, as stated by the file or by the config.json beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import Experiment, Model
from jaxdist.formats import nanogpt
from jaxdist.formats.folders import CONFIG
from jaxdist.formats.hf import experiment_for, read_model
from jaxdist.formats.naming import CURRENT, MODEL, Shaped, recognized
from jaxdist.formats.plan import embedding
from jaxdist.formats.torch_files import EXPERIMENT, is_own, key_of


def states_model(tree: Any) -> bool:
    """Whether the content of a torch file says what model it is."""
    return is_own(tree) or nanogpt.is_nanogpt(tree)


def experiment_in(path: Path, tree: Any) -> Experiment | None:
    """The experiment in a torch file: jaxdist's own, or nanoGPT's; None where its content states no model.

    Raises ConfigError."""
    if is_own(tree):
        return Experiment.parse(tree[EXPERIMENT], source=str(path))
    if nanogpt.is_nanogpt(tree):
        return Experiment.parse(nanogpt.sections(path, tree), source=f"{path}: {nanogpt.SOURCE}")
    return None


def notes(path: Path, tree: Any) -> list[str]:
    """Notes on a file: how a model that it states is read, and weights that it has besides."""
    if nanogpt.is_nanogpt(tree) and not is_own(tree):
        return nanogpt.notes(path, tree)
    if has_averages(tree):
        return [
            f"{path}: its state_dict has averages of the weights, which stay behind unless convert takes them by "
            f"--ema; {CURRENT} has the weights"
        ]
    return []


def has_averages(tree: Any) -> bool:
    """Whether a file has averages of the weights where others have the weights, as Lightning's WeightAveraging."""
    return isinstance(tree, dict) and key_of(tree, MODEL) == CURRENT


def experiment_beside(path: Path) -> Experiment | None:
    """The experiment of the config.json beside a torch file; None where there is none. Raises ConfigError."""
    file = path.parent / CONFIG
    return experiment_for(read_model(path.parent).model_dump(), source=str(file)) if file.exists() else None


def fitted(source: str, model: Model, tensors: Mapping[str, Shaped]) -> Model:
    """The model `with_tokens` of these tensors of a source. Raises ConfigError where two are one parameter."""
    return with_tokens(model, *recognized(source, tensors, model), tensors)


def with_tokens(model: Model, naming: str, names: Mapping[str, str], tensors: Mapping[str, Shaped]) -> Model:
    """The model with as many tokens as its embedding has rows, where that has fewer. `naming` and `names` as
    `recognized` has them."""
    first = tensors.get(names.get(embedding(naming, model), ""))
    rows = first.shape[0] if first and first.shape else 0
    fewer = model.vocabulary and 0 < rows < model.vocab
    return model.model_copy(update={"vocab": rows, "vocab_multiple": 1}) if fewer else model
