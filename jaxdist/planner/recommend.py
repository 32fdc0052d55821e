"""Choice of mesh, strategy, rematerialization and microbatches: all that fit, ranked by their predicted time."""

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from rich.progress import track

from jaxdist.config import AXES, STRATEGIES, ConfigError, Experiment
from jaxdist.config.errors import DoesNotFit
from jaxdist.config.hardware import USABLE, Hardware
from jaxdist.config.parallel import written
from jaxdist.parallel import sharding
from jaxdist.parallel.sharding import BATCH, SHARDS, TOKENS
from jaxdist.planner.plans import Plan, changed
from jaxdist.runs.display import console, megabytes

REMATS = ("none", "selective", "full")  # the fastest first
LONG = 16384  # tokens: below that nobody splits sequences
Shape = tuple[dict[str, int], str]  # sizes of the mesh axes, and a strategy


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def ways(sizes: Mapping[str, int], axes: tuple[str, ...]) -> int:
    """Devices along these axes of a mesh together."""
    return math.prod(sizes[axis] for axis in axes)


# ---- the search


def meshes(e: Experiment, devices: int, hardware: Hardware) -> Iterator[Shape]:
    """Candidate sizes of the mesh axes over that number of devices, with a strategy.

    Tensor stays within the fast links, as it waits for each of its sums; stages divide the layers; sequences are split
    where they are LONG; what is left is shared by `fsdp` and its replicas `data`.
    """
    m = e.model
    if m.input_kind == "images":  # rows of the batch alone are split
        tensors, stages, contexts, experts = [1], [1], [1], [1]
    else:
        tensors = [t for t in divisors(m.kv_heads) if devices % t == 0 and min(devices, hardware.group) % t == 0]
        stages = [p for p in divisors(m.layers) if p <= 16 and devices % p == 0]
        contexts = [c for c in (1, 2, 4, 8, 16) if devices % c == 0 and (c == 1 or e.data.sequence >= LONG)]
        experts = [x for x in divisors(m.experts or 1) if devices % x == 0]
    for tensor, pipeline, context, expert in product(tensors, stages, contexts, experts):
        rest, left = divmod(devices, tensor * pipeline * context * expert)
        if left or not rest:
            continue
        for fsdp in divisors(rest):
            axes = {"pipeline": pipeline, "data": rest // fsdp, "fsdp": fsdp, "expert": expert, "context": context}
            shares = ways(axes, SHARDS) > 1
            for name in ("ddp",) * (fsdp == 1) + ("fsdp", "zero2", "zero1") * shares:
                yield axes | {"tensor": tensor}, name


def built(e: Experiment, shape: Shape, remat: str, accumulation: int, hardware: Hardware) -> Plan:
    """The plan of an experiment so laid out. Raises ConfigError where something does not divide, or go together."""
    axes, name = shape
    fields: dict[str, Any] = {"mesh": written(axes), "strategy": name, "sequence": axes["tensor"] > 1}
    if name != "fsdp":
        fields |= {"reshard_after_forward": True, "reduce": "auto"}
    fields = {f"parallel__{field}": value for field, value in fields.items()}
    fields |= {"memory__remat": remat, "memory__remat_every": 1, "train__accumulation": accumulation}
    return Plan(changed(e, **fields), hardware)


def tried(e: Experiment, shape: Shape, hardware: Hardware) -> Iterator[Plan]:
    """Plans of a mesh and strategy, by mode of rematerialization and number of microbatches, whether or not they fit.

    More microbatches than it takes to fit are slower, but in a pipeline; and where one row to each does not fit, no
    number between that and the fewest does, so these are left out.
    """
    axes, _ = shape
    rows, left = divmod(e.train.batch, ways(axes, BATCH))
    parts = [] if left else [n for n in divisors(rows) if n >= axes["pipeline"]]
    for remat in REMATS if e.model.input_kind == "tokens" else REMATS[:1]:
        for accumulation in [*parts[:1], *parts[1:][-1:], *parts[1:-1]]:
            try:
                plan = built(e, shape, remat, accumulation, hardware)
            except ConfigError:
                continue
            yield plan
            most = accumulation == parts[-1]
            if (most and not plan.fits) or (plan.fits and not most and axes["pipeline"] == 1):
                break


def fastest(plans: Iterable[Plan]) -> Plan | None:
    """The fastest of the plans that fit; None if none fits."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.time.step, default=None)


def candidates(e: Experiment, devices: int, hardware: Hardware) -> Iterator[Plan]:
    """The fastest plan that fits of each mesh and strategy, over rematerialization and numbers of microbatches."""
    for shape in shown(list(meshes(e, devices, hardware)), "comparing meshes and strategies"):
        if best := fastest(tried(e, shape, hardware)):
            yield best


def shown(shapes: list[Shape], what: str) -> Iterable[Shape]:
    """The same shapes, with a progress bar on a terminal."""
    return track(shapes, description=what, console=console, disable=not console.is_terminal, transient=True)


def recommend(e: Experiment, devices: int, hardware: Hardware) -> list[Plan]:
    """All candidates, the fastest first. Raises DoesNotFit where none fits, ConfigError where no mesh divides the
    batch."""
    plans = sorted(candidates(e, devices, hardware), key=lambda plan: plan.time.step)
    if not plans:
        raise none_fits(e, devices, hardware)
    return plans


# ---- why none fits


def none_fits(e: Experiment, devices: int, hardware: Hardware) -> Exception:
    """The error where nothing fits: ConfigError, naming a batch that serves, if there is one; else DoesNotFit. Raises
    ConfigError where none of the batches that are tried makes a plan on any mesh, with the obstacle of the first.

    One row for each microbatch takes the least memory, so of each mesh two batches are tried: the least from the one
    that is given, and the least of all. Both are multiples of the experiment's own microbatches, to be given by
    themselves.
    """

    def least(shape: Shape, rows: int) -> int:
        axes, own = shape[0], e.train.accumulation
        step = math.lcm(ways(axes, BATCH), own)
        return step * math.ceil(max(rows, ways(axes, BATCH) * axes["pipeline"]) / step)

    shapes, room, peaks = list(meshes(e, devices, hardware)), megabytes(hardware.memory), []
    for rows in (e.train.batch, 1):
        by_batch = sorted(shapes, key=lambda shape: least(shape, rows))
        for shape in shown(by_batch, "looking for a batch that fits"):
            batch = least(shape, rows)
            plans = list(tried(changed(e, train__batch=batch), shape, hardware))
            if any(plan.fits for plan in plans):
                divides = any(True for shape in shapes for _ in tried(e, shape, hardware))
                how = f"{devices} devices so that a step fits in {USABLE:.0%} of {room} each"
                return ConfigError(
                    f"train.batch = {e.train.batch} {e.model.sample_unit} cannot be divided over "
                    f"{how if divides else f'any mesh of {devices} devices'}; use --train.batch {batch}"
                )
            peaks += [plan.memory["peak"] for plan in plans]
    if not peaks:
        built(changed(e, train__batch=least(shapes[0], e.train.batch)), shapes[0], REMATS[0], 1, hardware)
    return DoesNotFit(
        f"--devices {devices}: no mesh, strategy and rematerialization fits in {USABLE:.0%} of {room} each, whatever "
        f"train.batch is, as {megabytes(min(peaks))} are the least; give more devices, or devices with more memory"
    )


# ---- why the first is first


class Choice(NamedTuple):
    """A setting of a plan: its text in `facts`, and the alternatives, name -> values."""

    text: str
    others: Callable[[Plan], dict[str, Container[Any]]]


def undivided(axis: str) -> Callable[[Plan], dict[str, Container[Any]]]:
    return lambda plan: {f"{axis} = 1": (1,)} if plan.mesh[axis] > 1 else {}


CHOICES = {
    "tensor": Choice(
        "tensor = {tensor} within the {group} devices that fast links join, as its sums are waited for, {of_tensor} a "
        "step",
        undivided("tensor"),
    ),
    "expert": Choice("expert = {expert} groups of experts, {of_expert} a step between them", undivided("expert")),
    "context": Choice(
        "context = {context} parts of {length:,} tokens of each sequence, {of_context} a step between them",
        undivided("context"),
    ),
    "pipeline": Choice("pipeline = {pipeline} stages, idle {idle:.0%} of the time", undivided("pipeline")),
    "strategy": Choice(
        "{strategy} {divides} over {ways} devices{across}, with {share:.0%} of the step for traffic of parameters and "
        "gradients",
        lambda plan: (
            {name: (name,) for name in STRATEGIES if name != plan.experiment.parallel.strategy}
            if ways(plan.mesh, TOKENS) > 1
            else {}
        ),
    ),
    "data": Choice(
        "data = {data} replicas, between which gradients alone are summed",
        lambda plan: undivided("data")(plan) if ways(plan.mesh, SHARDS) > 1 else {},
    ),
    "remat": Choice(
        "remat = {remat}",
        lambda plan: {f"remat = {name}": (name,) for name in REMATS[: REMATS.index(plan.experiment.memory.remat)]},
    ),
    "accumulation": Choice(
        "accumulation = {accumulation}",
        lambda plan: {"fewer microbatches": range(1, plan.experiment.train.accumulation)},
    ),
}


COMPARED = (
    "each is compared with the fastest plan of the other kind that fits on as many devices; tensor, expert, context "
    "and pipeline are otherwise as above"
)


def settings(plan: Plan) -> dict[str, Any]:
    """Settings in which plans of an experiment on that number of devices differ."""
    e = plan.experiment
    own = {"strategy": e.parallel.strategy, "remat": e.memory.remat, "accumulation": e.train.accumulation}
    return {**plan.mesh, **own}


def facts(plan: Plan) -> dict[str, Any]:
    """A plan's value of each of CHOICES."""
    e, mesh, time, row = plan.experiment, plan.mesh, plan.time, sharding.strategy(plan.experiment.parallel)
    parts = {"parameters": row.parameters, "gradients": row.gradients, "optimizer state": row.optimizer}
    divided = " and ".join(", ".join(part for part, there in parts.items() if there).rsplit(", ", 1))
    axes = SHARDS if divided else TOKENS
    bubble = mesh["pipeline"] - 1
    return {
        **settings(plan),
        **{f"of_{axis}": megabytes(plan.traffic.get(axis, 0.0)) for axis in mesh},
        "group": plan.hardware.group,
        "length": e.data.sequence // mesh["context"],
        "idle": bubble / (e.train.accumulation * e.parallel.virtual_stages + bubble),
        "divides": f"divides {divided}" if divided else "suffices, which sums gradients alone",
        "ways": ways(mesh, axes),
        "across": f" across groups of {plan.hardware.group}" * (ways(mesh, (*axes, "tensor")) > plan.hardware.group),
        "share": (time.parameters - time.hidden) / time.step,
    }


def reasons(plan: Plan) -> list[str]:
    """Reasons for a plan: each choice with the outcome of its alternatives, and how they were COMPARED; nothing without
    a choice."""
    known, found = facts(plan), []
    for name, choice in CHOICES.items():
        verdicts = [verdict(plan, name, called, values) for called, values in choice.others(plan).items()]
        if text := "; ".join(filter(None, verdicts)):
            found.append(f"{choice.text.format(**known)}: {text}")
    return [*found, COMPARED] if found else []


def verdict(plan: Plan, name: str, called: str, values: Container[Any]) -> str:
    """Outcome if the setting `name` had one of these values: time and memory of the fastest of the plans that are
    COMPARED, or why there is none; empty if unknown."""
    e, hardware, own = plan.experiment, plan.hardware, settings(plan)
    allowed = {axis: (own[axis],) for axis in AXES if axis not in ("data", "fsdp")} | {name: values}

    def meant(found: Mapping[str, Any]) -> bool:
        return all(value in allowed.get(setting, (value,)) for setting, value in found.items())

    shapes = [shape for shape in meshes(e, plan.devices, hardware) if meant({**shape[0], "strategy": shape[1]})]
    plans = [other for shape in shapes for other in tried(e, shape, hardware) if meant(settings(other))]
    if best := fastest(plans):
        longer = best.time.step / plan.time.step - 1
        took = f"{abs(longer):.1%} {'longer' if longer > 0 else 'less'}" if abs(longer) >= 0.0005 else "as long"
        new = (f"{setting} = {value}" for setting, value in settings(best).items() if value != own[setting])
        also = ", ".join(text for text in new if text not in (called, f"strategy = {called}"))
        return f"{called} would take {took}{also and f' ({also})'} and hold {megabytes(best.memory['peak'])}"
    if plans:
        return f"{called} would not fit, as it holds at least {megabytes(min(p.memory['peak'] for p in plans))}"
    try:
        for shape in shapes[:1]:
            built(e, shape, own["remat"], shape[0]["pipeline"], hardware)
    except ConfigError as error:
        return f"{called} cannot be, as {str(error).partition(';')[0]}"
    return ""
