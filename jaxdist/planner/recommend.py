"""Which mesh, strategy, rematerialization and microbatches to take: all that fit, ranked by their predicted time."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from rich.progress import track

from jaxdist.config import ConfigError, Experiment, Mixture, ResNet
from jaxdist.config.display import console
from jaxdist.config.hardware import Hardware
from jaxdist.planner.plans import Plan, changed, written

REMATS = ("none", "selective", "full")  # the fastest first
LONG = 16384  # tokens: below that nobody splits sequences


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def meshes(e: Experiment, devices: int, hardware: Hardware) -> Iterator[tuple[dict[str, int], str]]:
    """Sizes of the mesh axes over so many devices, and a strategy, that may be worth a look.

    Tensor stays within the fast links, as it waits for each of its sums; stages divide the layers; sequences are split
    where they are LONG; what is left is shared by `fsdp` and its replicas `data`.
    """
    m = e.model
    if isinstance(m, ResNet):
        tensors, stages, contexts, experts = [1], [1], [1], [1]
    else:
        tensors = [t for t in divisors(m.kv_heads) if t <= hardware.group and devices % t == 0]
        stages = [p for p in divisors(m.layers) if p <= 16 and devices % p == 0]
        contexts = [c for c in (1, 2, 4, 8, 16) if devices % c == 0 and (c == 1 or e.data.sequence >= LONG)]
        experts = [x for x in divisors(m.experts) if devices % x == 0] if isinstance(m, Mixture) else [1]
    for tensor, pipeline, context, expert in product(tensors, stages, contexts, experts):
        rest, left = divmod(devices, tensor * pipeline * context * expert)
        if left or not rest:
            continue
        for fsdp in divisors(rest):
            axes = {"pipeline": pipeline, "data": rest // fsdp, "fsdp": fsdp, "expert": expert, "context": context}
            shares = fsdp * expert * context > 1
            for strategy in ("fsdp", "zero1") if shares else ("ddp",):
                yield axes | {"tensor": tensor}, strategy


def candidates(e: Experiment, devices: int, hardware: Hardware) -> Iterator[Plan]:
    """Of each mesh and strategy the fastest that fits, by mode of rematerialization and number of microbatches."""
    for axes, strategy in meshes(e, devices, hardware):
        rows, left = divmod(e.train.batch, axes["data"] * axes["fsdp"] * axes["expert"])
        if left or not rows:
            continue
        fields: dict[str, Any] = {"mesh": written(axes), "strategy": strategy, "sequence": axes["tensor"] > 1}
        if strategy != "fsdp":
            fields |= {"reshard_after_forward": True, "reduce": "auto"}
        fields = {f"parallel__{name}": value for name, value in fields.items()} | {"memory__remat_every": 1}
        best: Plan | None = None
        for remat in REMATS if e.model.takes == "tokens" else ("none",):
            for accumulation in divisors(rows):
                if axes["pipeline"] > 1 and accumulation < axes["pipeline"]:
                    continue
                try:
                    plan = Plan(changed(e, **fields, memory__remat=remat, train__accumulation=accumulation), hardware)
                except ConfigError:  # something does not divide, or go together
                    continue
                if plan.fits:
                    if best is None or plan.time.step < best.time.step:
                        best = plan
                    if axes["pipeline"] == 1:
                        break  # more microbatches are slower
        if best:
            yield best


def recommend(e: Experiment, devices: int, hardware: Hardware) -> list[Plan]:
    """All candidates, the fastest first. Raises ConfigError where none fits."""
    found = candidates(e, devices, hardware)
    shown = track(found, description="comparing", console=console, disable=not console.is_terminal)
    plans = sorted(shown, key=lambda plan: plan.time.step)
    if not plans:
        raise ConfigError(
            f"--devices {devices}: {told_why(e, devices, hardware)}; give more devices, or devices with more memory"
        )
    return plans


def told_why(e: Experiment, devices: int, hardware: Hardware) -> str:
    """Why no mesh serves: the batch, or memory."""
    splits = [math.prod((a["data"], a["fsdp"], a["expert"])) for a, _ in meshes(e, devices, hardware)]
    rows = "sequences" if e.model.takes == "tokens" else "images"
    if not any(e.train.batch % ways == 0 for ways in splits):
        return f"train.batch = {e.train.batch} {rows} cannot be divided over any mesh of them"
    return f"no mesh, strategy and rematerialization fits in {hardware.memory / 1e9:.0f} GB of each"


def reasons(plan: Plan) -> list[str]:
    """Why a plan is as it is, in the terms of those who choose."""
    mesh, time, e = plan.mesh, plan.time, plan.experiment
    found = []
    group = plan.hardware.group
    if mesh["tensor"] > 1:
        found.append(
            f"tensor = {mesh['tensor']} within the {group} devices that the fast links join: its sums wait for each "
            f"other, {plan.traffic.get('tensor', 0) / 1e9:.1f} GB a step"
        )
    sharded = mesh["fsdp"] * mesh["expert"] * mesh["context"]
    f = plan.footprint
    state = 2 * f.held(False) * f.at_rest + f.optimizer_states(False)
    if e.parallel.strategy == "fsdp" and sharded > 1:
        share = (time.parameters - time.hidden) / time.step
        fits = "would not fit" if state > plan.room else "would fit"
        found.append(
            f"fsdp, as parameters, gradients and optimizer state by themselves would be {state / 1e9:.0f} GB on each "
            f"device under ddp, and {fits}; its traffic takes {share:.0%} of the step"
        )
    if e.parallel.strategy in ("ddp", "zero1"):
        found.append(
            f"{e.parallel.strategy}: the model fits on each device, and gradients cross them once a step instead of "
            "parameters twice a microbatch"
        )
    if mesh["data"] > 1 and sharded > 1:
        found.append(f"data = {mesh['data']} replicas of {sharded} devices: between them gradients alone are summed")
    if mesh["pipeline"] > 1:
        idle = (mesh["pipeline"] - 1) / (e.train.accumulation + mesh["pipeline"] - 1)
        found.append(f"pipeline = {mesh['pipeline']}: layers as they fit, {idle:.0%} of the time idle")
    if mesh["context"] > 1:
        found.append(f"context = {mesh['context']}: sequences of {e.data.sequence:,} tokens, for their activations")
    if e.memory.remat != "none":
        found.append(f"remat = {e.memory.remat}: with less computed again activations would not fit")
    if e.train.accumulation > 1 and mesh["pipeline"] == 1:
        found.append(f"accumulation = {e.train.accumulation}: with fewer microbatches activations would not fit")
    return found
