"""Which learning rate training goes on by, where an optimizer's groups tell the rate of now and not the peak."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.display import say
from jaxdist.convert.torch_parts import reading
from jaxdist.optim import learning_rate

Peak = Literal["schedule", "now"]
PEAKS: tuple[Peak, ...] = ("schedule", "now")
CLOSE = 1e-6  # relative
FIELDS = {"learning_rate", "warmup", "decay", "decay_steps", "final"}  # of the schedule


MODEL = "--model"  # whose schedule an experiment has


def has_schedule(wanted: Experiment | None) -> bool:
    """Whether --model says anything of a schedule."""
    return bool(wanted and wanted.optimizer.model_fields_set & FIELDS)


def rate_at(experiment: Experiment, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    with jax.enable_x64(True):
        return float(learning_rate(experiment.optimizer, experiment.train.steps, jnp.asarray(step)))


def rule_of(path: Path, scheduler: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    """The schedule's fields of an optimizer section by the state of a scheduler of torch's that has its rule: cosine or
    linear, by itself or after a warm-up. Nothing where it has another, counts other than steps, or where the rate of
    now is not that of the rule.

    Its rate after k steps is that of our step k + 1."""
    now, peak = groups[0].get("lr"), groups[0].get("initial_lr")
    if scheduler.get("last_epoch") != step or not now or not peak:
        return {}
    with reading(path, "scheduler"):
        rule = _rule(scheduler)
        if not rule:
            return {}
        going = Experiment.parse({"optimizer": {"learning_rate": float(peak), **rule}}, f"{path}: scheduler")
    if not math.isclose(float(now), rate_at(going, step + 1), rel_tol=CLOSE):
        return {}
    say(f"{path}: its schedule goes on: {', '.join(f'{name} = {value}' for name, value in rule.items())}")
    return rule


def _rule(state: Mapping[str, Any]) -> dict[str, Any]:
    """That of CosineAnnealingLR, LinearLR from the peak, or SequentialLR of a warm-up and one of them."""
    parts, milestones = state.get("_schedulers"), state.get("_milestones")
    if isinstance(parts, list) and isinstance(milestones, list) and len(parts) == 2 and "start_factor" in parts[0]:
        rule = _rule(parts[1])
        after = {"warmup": milestones[0] + 1, "decay_steps": rule.get("decay_steps", 0) + milestones[0]}
        return rule and rule | after
    if "T_max" in state and "eta_min" in state:
        final = float(state["eta_min"] / (state["base_lrs"][0] or 1))
        return {"warmup": 1, "decay": "cosine", "decay_steps": state["T_max"] + 1, "final": final}
    if state.get("start_factor") == 1 and "end_factor" in state:
        return {"warmup": 1, "decay": "linear", "decay_steps": state["total_iters"] + 1, "final": state["end_factor"]}
    return {}


def peak_of(
    path: Path, groups: Sequence[Mapping[str, Any]], scheduled: tuple[str, Experiment], step: int, peak: Peak | None
) -> dict[str, Any]:
    """The peak, a field of an optimizer section: that of the schedule where this has the rate of now after `step`
    steps, or where `peak` says so; nothing where the groups tell their peak.

    `scheduled`: whose schedule, and the experiment with it. Raises ConfigError where nothing tells.
    """
    if peak is None and all("initial_lr" in group for group in groups):
        return {}
    whose, experiment = scheduled
    now, kept = float(groups[0]["lr"]), {"learning_rate": experiment.optimizer.learning_rate}
    # A loop sets the rate before a step, a scheduler that of the next after it.
    rates = {at: rate_at(experiment, at) for at in (step, step + 1) if at}
    if peak != "now" and any(math.isclose(now, rate, rel_tol=CLOSE) for rate in rates.values()):
        say(f"{path}: its rate of now, {now:g}, is on the schedule of {whose}, whose peak is {kept['learning_rate']:g}")
        return kept
    told = " and ".join(f"{rate:g} at step {at}" for at, rate in rates.items())
    if peak is None and whose != MODEL:  # a file that contradicts itself
        raise ConfigError(
            f"{path}: its rate of now is {now:g}, and the schedule of {whose} has {told}; give --peak schedule to go "
            f"on by that schedule, its peak {kept['learning_rate']:g}, or --peak now to make the rate of now the peak"
        )
    if peak == "schedule":
        say(f"{path}: its rate of now, {now:g}, ends here: the schedule of {whose} has {told}")
        return kept
    say(
        f"{path}: its rate of now, {now:g}, becomes the peak of the schedule of {whose}, which has {told}; --peak "
        "schedule goes on by that schedule instead"
    )
    return {"learning_rate": now}
