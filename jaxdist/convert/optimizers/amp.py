"""The loss scale that a training script kept: the state of `torch.amp.GradScaler`, with its rule beside its numbers, or
of `apex.amp`, whose rule is the one that GradScaler has by itself."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdist.config import Experiment, Precision
from jaxdist.convert.content import Content
from jaxdist.convert.kinds.torch_parts import APEX, SCALER, put
from jaxdist.formats.torch_files import part
from jaxdist.runs.display import say
from jaxdist.training.loss_scale import LossScale, state_of

RULE = ("growth_factor", "backoff_factor", "growth_interval")


def scaling(scaler: Mapping[str, Any], apex: Mapping[str, Any]) -> LossScale | None:
    """The scaler's numbers; None without a scaler, or for one that is switched off, whose state is empty."""
    if "scale" in scaler:
        return state_of(scaler["scale"], scaler.get("_growth_tracker", 0))
    state = _only_loss(apex)
    return state_of(state["loss_scale"], state.get("unskipped", 0)) if state else None


def going_on(path: Path, experiment: Experiment, scaler: Mapping[str, Any], wanted: bool) -> Experiment:
    """The experiment with the rule of a file's scale, of which Apex keeps none; without --model its policy is autocast
    to float16. Raises ConfigError."""
    values, policy = experiment.model_dump(exclude_none=True), experiment.precision.policy
    if wanted and not experiment.precision.loss_scale:
        say(
            f"{path}: its loss scale ends here, precision.policy = {policy} of --model has none; fp16 continues with it"
        )
        return experiment
    precision = values["precision"] if wanted else {"policy": "fp16"}
    rule = {name: scaler[name] for name in RULE if name in scaler}
    return Experiment.parse(values | {"precision": precision | rule}, f"{path}: scaler")


def scaled(path: Path, content: Content, scaler: Mapping[str, Any], wanted: bool) -> Content:
    """The content with the loss scale of its source, as GradScaler keeps it; itself where none is kept. Raises
    ConfigError."""
    if (found := scaling(scaler, {})) is None:
        return content
    experiment = going_on(path, content.experiment, scaler, wanted)
    return replace(content, experiment=experiment, scaling=found).checked(path)


def put_scaling(tree: Mapping[str, Any], now: LossScale, precision: Precision) -> dict[str, Any]:
    """Entries that put the current scale into a script's file, in place of its own, or as GradScaler's."""
    scale, good, scaler, apex = float(now.scale), int(now.good), part(tree, SCALER), part(tree, APEX)
    if not scaler and (state := _only_loss(apex)):
        return put(tree, APEX, {name: {**state, "loss_scale": scale, "unskipped": good} for name in apex})
    kept: dict[str, Any] = {name: getattr(precision, name) for name in RULE}
    return put(tree, SCALER, {**scaler, "scale": scale, **kept, "_growth_tracker": good})


def _only_loss(apex: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scaler of a script of one loss; empty where it has several, or keeps something else under that key."""
    states = [state for state in apex.values() if isinstance(state, dict) and "loss_scale" in state]
    return states[0] if len(states) == len(apex) == 1 else {}
