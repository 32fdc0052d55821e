"""A nanoGPT checkpoint's experiment, completed by what --model sets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import Experiment
from jaxdist.convert.content import agreed
from jaxdist.formats.nanogpt import EXACT, SOURCE, sections
from jaxdist.runs.display import say


def experiment_of(path: Path, tree: Mapping[str, Any], wanted: Experiment | None) -> Experiment:
    """The experiment of the file, with what --model, `wanted`, sets in place of it.

    Raises ConfigError where this is another model."""
    source, settings = f"{path}: {SOURCE}", sections(path, tree)
    found = Experiment.parse(settings, source)
    if not wanted:
        return found
    fields = wanted.model_dump(exclude_unset=True, exclude_none=True)
    if (gelu := fields["model"].get("gelu", EXACT)) != EXACT:
        say(f"{path}: GELU is {gelu}, as --model says; nanoGPT's own has been exact since March 2023")
        found = Experiment.parse(settings | {"model": settings["model"] | {"gelu": gelu}}, source)
    return agreed(str(path), found, filled(settings, wanted, source))


def filled(settings: Mapping[str, dict[str, Any]], wanted: Experiment, source: str) -> Experiment:
    """The experiment of --model, with fields that it does not set taken from the file; unchanged for another family.
    Raises ConfigError."""
    if wanted.model.family != settings["model"]["family"]:
        return wanted
    fields: dict[str, dict[str, Any]] = wanted.model_dump(exclude={"plugins"}, exclude_unset=True, exclude_none=True)
    return Experiment.parse(
        {name: settings.get(name, {}) | fields.get(name, {}) for name in {**settings, **fields}}, source
    )
