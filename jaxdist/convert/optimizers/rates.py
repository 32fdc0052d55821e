"""The learning rate at which training continues, where an optimizer's groups have the current rate and not the peak."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.config import ConfigError, Experiment, Optimizer
from jaxdist.convert.optimizers.trainer_schedule import in_words
from jaxdist.formats.torch_files import reading
from jaxdist.runs.display import say
from jaxdist.training.optim import learning_rate

Peak = Literal["schedule", "now"]
CLOSE = 1e-6  # relative
FIELDS = {"learning_rate", "warmup", "decay", "decay_steps", "final"}  # of the schedule
MODEL = "--model"  # whose schedule an experiment has


class Recorded(NamedTuple):
    """Learning rates of a checkpoint: its optimizer's `groups` after `step` steps, and the state of its scheduler,
    empty without one. `found`: the schedule's fields according to other files, as a log; empty without. `reason`: why a
    known scheduler has no equal schedule here."""

    path: Path
    groups: Sequence[Mapping[str, Any]]
    step: int
    scheduler: Mapping[str, Any] = MappingProxyType({})
    found: Callable[[], Mapping[str, Any]] = dict
    reason: str = ""


def peak_in(group: Mapping[str, Any]) -> Any:
    """The peak learning rate that a group of torch's has, None without one: OneCycleLR begins at a share of it, its
    `initial_lr`."""
    return group.get("max_lr", group.get("initial_lr"))


def schedule_origin(wanted: Experiment | None, own: str = "") -> str:
    """Origin of the schedule: --model if it sets any field of one, else the source's `own`; "" if there is none."""
    return MODEL if wanted and wanted.optimizer.model_fields_set & FIELDS else own


def check_unasked(path: Path, peak: Peak | None) -> None:
    """Raises ConfigError for --peak on a checkpoint of ours, whose experiment has its schedule."""
    if peak:
        raise ConfigError(f"--peak {peak}: {path} is jaxdist's own, and its config has its schedule; leave it out")


def rate_at(experiment: Experiment, step: int) -> float:
    """The learning rate of a step, counted from 1."""
    with jax.enable_x64(True):
        return float(learning_rate(experiment.optimizer, experiment.train.steps, jnp.asarray(step)))


def going_on(recorded: Recorded, experiment: Experiment, whose: str, peak: Peak | None) -> dict[str, Any]:
    """The schedule's fields of an optimizer section, for every kind of checkpoint that has an optimizer of torch's.

    A given schedule comes first, that of `experiment`: `whose` it is, --model's or the checkpoint's own; empty without
    one. Then that of the scheduler or a log. Else the current rate stays, with a note. `peak` decides as in
    `peak_of`. Without groups all settings are those of `experiment`, with a note. Raises ConfigError."""
    path = recorded.path
    if not recorded.groups:
        return _without_groups(path, experiment.optimizer, whose, peak)
    now = recorded.groups[0].get("lr")
    if whose:
        found = peak_of(recorded, (whose, experiment), peak)
        if recorded.scheduler:
            say(f"{path}: its scheduler ends here: the schedule of {whose} continues")
        return found
    if rule := recorded.found() or rule_of(path, recorded.scheduler, recorded.groups, recorded.step):
        return {**rule, "learning_rate": float(now)} if peak == "now" and now else dict(rule)
    if peak == "schedule":
        raise ConfigError(
            f"--peak schedule: {path} has no schedule that can be read; give one by --model, as [optimizer] "
            "learning_rate, warmup and decay, or leave --peak out to continue at the current rate"
        )
    reason = recorded.reason or (unlike(recorded.scheduler) if recorded.scheduler else "it has no schedule")
    if not now:
        say(f"{path}: {reason}, and no rate to continue at; the default schedule is taken, --model gives another")
        return {}
    say(f"{path}: {reason}; its current rate, {float(now):g}, stays; --model gives a schedule")
    return {"warmup": 0, "decay": "constant", "learning_rate": float(now)}


# The fields that decay a state, by its name: of the rules that have it.
DECAYS = {"beta1": "exp_avg", "beta2": "exp_avg", "momentum": "momentum_buffer"}


def _without_groups(path: Path, o: Optimizer, whose: str, peak: Peak | None) -> dict[str, Any]:
    if peak == "now" or (peak and not whose):
        raise ConfigError(
            f"--peak {peak}: the optimizer of {path} has no param_groups, and so no rate; give [optimizer] "
            "learning_rate by --model, and leave --peak out"
        )
    fields = ["name", "learning_rate", *(field for field, kind in DECAYS.items() if kind in o.kept), "weight_decay"]
    say(
        f"{path}: its optimizer has no param_groups, which state its settings; it continues with "
        f"{', '.join(f'{field} = {getattr(o, field)}' for field in fields)}; [optimizer] of --model gives others"
    )
    return {}


def rule_of(path: Path, scheduler: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], step: int) -> dict[str, Any]:
    """The schedule's fields of an optimizer section by the state of a scheduler of torch's that has its rule: cosine or
    linear, by itself or after a warm-up. Nothing where it has another, counts other than steps, or where the rate of
    now is not that of the rule.

    Its rate after k steps is that of our step k + 1."""
    now, peak = groups[0].get("lr"), peak_in(groups[0])
    if scheduler.get("last_epoch") != step or now is None or not peak:
        return {}
    with reading(path, "scheduler"):
        rule = _one_cycle(scheduler, groups[0]) if "_schedule_phases" in scheduler else _rule(scheduler)
        if not rule:
            return {}
        going = Experiment.parse({"optimizer": {"learning_rate": float(peak), **rule}}, f"{path}: scheduler")
    if not math.isclose(float(now), rate_at(going, step + 1), rel_tol=CLOSE, abs_tol=CLOSE * CLOSE * float(peak)):
        return {}
    say(f"{path}: its schedule continues: {in_words(rule)}")
    if scheduler.get("cycle_momentum"):
        momentum = groups[0]["betas"][0] if "betas" in groups[0] else groups[0].get("momentum")
        say(f"{path}: its scheduler moves the momentum too; jaxdist keeps the current momentum, {momentum:g}")
    return rule


# A key that only this scheduler of torch saves -> its class, and the keys that messages show. Order matters: the first
# key that is found decides, and `factor` and `gamma`, which several save, come last.
SCHEDULERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "T_max": ("CosineAnnealingLR", ("T_max", "eta_min")),
    "T_0": ("CosineAnnealingWarmRestarts", ("T_0", "T_mult")),
    "_schedule_phases": ("OneCycleLR", ("total_steps",)),
    "start_factor": ("LinearLR", ("start_factor", "end_factor", "total_iters")),
    "step_size": ("StepLR", ("step_size", "gamma")),
    "milestones": ("MultiStepLR", ("gamma",)),
    "power": ("PolynomialLR", ("power", "total_iters")),
    "patience": ("ReduceLROnPlateau", ("factor", "patience")),
    "_milestones": ("SequentialLR", ()),
    "_schedulers": ("ChainedScheduler", ()),
    "_scale_fn_ref": ("CyclicLR", ("total_size",)),
    "factor": ("ConstantLR", ("factor", "total_iters")),
    "gamma": ("ExponentialLR", ("gamma",)),
}


def unlike(scheduler: Mapping[str, Any]) -> str:
    """Why the schedule of a scheduler does not continue, in words."""
    name, keys = next((row for key, row in SCHEDULERS.items() if key in scheduler), ("", ()))
    if not name:
        return "the rule of its scheduler is not in it"
    shown = ", ".join(f"{key} = {scheduler[key]!r:.20}" for key in keys if key in scheduler)
    return f"its scheduler is {name}{f' ({shown})' if shown else ''}, which does not continue here"


def _one_cycle(state: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of OneCycleLR's second phase of two; nothing before it, where the first is not linear."""
    phases = state["_schedule_phases"]
    if len(phases) != 2 or phases[0]["end_step"] != int(phases[0]["end_step"]):
        return {}
    first, last = (int(phase["end_step"]) for phase in phases)
    decay = {"cos": "cosine", "linear": "linear"}.get(state["_anneal_func_type"])
    if state["last_epoch"] < first or not decay:
        return {}
    final = float(group["min_lr"] / group["max_lr"])
    return {"warmup": first + 1, "decay": decay, "decay_steps": last + 1, "final": final}


def _rule(state: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of CosineAnnealingLR, LinearLR from the peak, PolynomialLR of power 1, ConstantLR from its end on,
    or SequentialLR of a warm-up and one of them."""
    parts, milestones = state.get("_schedulers"), state.get("_milestones")
    if isinstance(parts, list) and isinstance(milestones, list) and len(parts) == 2 and "start_factor" in parts[0]:
        rule = _rule(parts[1])
        after = {"warmup": milestones[0] + 1, "decay_steps": rule.get("decay_steps", 0) + milestones[0]}
        return rule and rule | after
    if "T_max" in state and "eta_min" in state:
        final = float(state["eta_min"] / (state["base_lrs"][0] or 1))
        return {"warmup": 1, "decay": "cosine", "decay_steps": state["T_max"] + 1, "final": final}
    if state.get("power") == 1:
        return {"warmup": 1, "decay": "linear", "decay_steps": state["total_iters"] + 1, "final": 0.0}
    if "factor" in state and state["last_epoch"] >= state.get("total_iters", math.inf):
        return {"warmup": 0, "decay": "constant"}
    if state.get("start_factor") == 1 and "end_factor" in state:
        return {"warmup": 1, "decay": "linear", "decay_steps": state["total_iters"] + 1, "final": state["end_factor"]}
    return {}


def peak_of(recorded: Recorded, scheduled: tuple[str, Experiment], peak: Peak | None) -> dict[str, Any]:
    """The peak, a field of an optimizer section: that of the groups where they have it; else that of the schedule where
    this has the current rate, or where `peak` says so; or the current rate where `peak` says that.

    `scheduled`: whose schedule, and the experiment with it. Raises ConfigError, with both rates, where nothing decides.
    """
    path, step = recorded.path, recorded.step
    whose, experiment = scheduled
    kept = {"learning_rate": experiment.optimizer.learning_rate}
    if peak is None and all(peak_in(group) is not None for group in recorded.groups):
        own = float(peak_in(recorded.groups[0]))
        if not math.isclose(own, kept["learning_rate"], rel_tol=CLOSE):
            say(
                f"{path}: its peak, {own:g}, continues by the schedule of {whose}, whose own is "
                f"{kept['learning_rate']:g}; --peak schedule takes that one"
            )
        return {}
    now = float(recorded.groups[0]["lr"])
    # A loop sets the rate before a step, a scheduler that of the next after it.
    rates = {at: rate_at(experiment, at) for at in (step, step + 1) if at}
    if peak != "now" and any(math.isclose(now, rate, rel_tol=CLOSE) for rate in rates.values()):
        say(
            f"{path}: its current rate, {now:g}, is on the schedule of {whose}, whose peak is {kept['learning_rate']:g}"
        )
        return kept
    there = " and ".join(f"{rate:g} at step {at}" for at, rate in rates.items())
    if peak is None:
        raise ConfigError(
            f"{path}: its current rate is {now:g}, and the schedule of {whose} has {there}; give --peak schedule to "
            f"continue by that schedule, its peak {kept['learning_rate']:g}, or --peak now to make the current rate "
            "the peak"
        )
    if peak == "schedule":
        say(f"{path}: its current rate, {now:g}, ends here: the schedule of {whose} has {there}")
        return kept
    say(f"{path}: its current rate, {now:g}, becomes the peak of the schedule of {whose}, which has {there}")
    return {"learning_rate": now}
