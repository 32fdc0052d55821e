"""Checks of an experiment against the sizes of its mesh axes, which model sections choose from."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxdist.config.errors import ConfigError
from jaxdist.config.fitting import BATCH, CHUNKS, divisibility_fix, mesh_to_fit, multiple, sizes_to_grow, with_changes
from jaxdist.config.parallel import resized, written
from jaxdist.config.registry import families_with

if TYPE_CHECKING:
    from jaxdist.config.experiment import Experiment


def check_rows(e: "Experiment", axes: Mapping[str, int]) -> None:
    """Raises ConfigError where the mesh does not divide the batch."""
    train, devices = e.train, math.prod(axes[axis] for axis in BATCH)
    if train.batch % (devices * train.accumulation):
        named = "data × fsdp × expert" if axes["expert"] > 1 else "data × fsdp"
        least = devices * train.accumulation
        batch, others = multiple(least, train.batch), sizes_to_grow(e, axes)
        fix = f"use a multiple of {least}, as train.batch = {batch}{with_changes(others, 'train.batch')}"
        if e.pinned & {"train.batch", *others}:
            mesh = f"use --mesh {resized(axes, ('data', 'fsdp'), train.batch // train.accumulation)}"
            fix = mesh if e.model.input_kind == "images" else divisibility_fix(e, axes, BATCH, "batch", least)
        raise ConfigError(
            f"train.batch = {train.batch} {e.model.sample_unit} cannot be divided over {named} = {devices} devices and "
            f"train.accumulation = {train.accumulation} microbatches; {fix}"
        )


def check_chunks(e: "Experiment", axes: Mapping[str, int]) -> None:
    """Raises ConfigError where the loss has more chunks than a device has tokens."""
    devices = math.prod(axes[axis] for axis in (*BATCH, "context"))
    tokens = e.train.batch * e.data.sequence // (devices * e.train.accumulation)
    if (chunks := e.memory.loss_chunks) > tokens:
        raise ConfigError(
            f"memory.loss_chunks = {chunks} are more than the {tokens} tokens of a microbatch on a device; use at "
            f"most {tokens}"
        )


def check_experts(e: "Experiment", axes: Mapping[str, int]) -> None:
    """Raises ConfigError where the mesh axis `expert` has nothing to split, or does not divide the experts."""
    model, n = e.model, axes["expert"]
    if not (experts := model.experts):
        if n > 1:
            mesh = mesh_to_fit(e, {**axes, "expert": 1, "fsdp": axes["fsdp"] * n}, ["fsdp"], "dim")
            other = "" if "model.family" in e.pinned else f", or model.family = {families_with('experts')}"
            raise ConfigError(
                f"parallel.mesh: axis expert = {n} splits experts, and model.family = {model.family} has none; use "
                f"--mesh {written(mesh)}{with_changes(sizes_to_grow(e, mesh))}{other}"
            )
        return
    if experts % n:
        raise ConfigError(
            f"model.experts = {experts} cannot be divided over the mesh axis expert = {n}; "
            f"{divisibility_fix(e, axes, ['expert'], 'experts', n)}"
        )


def check_stages(e: "Experiment", axes: Mapping[str, int]) -> None:
    """Raises ConfigError where the axis `pipeline` does not divide the layers, or with what it cannot serve."""
    layers, chunks, stages = e.model.layers, e.parallel.virtual_stages, axes["pipeline"]
    if stages == 1:
        return
    parts, named = stages * chunks, f"the mesh axis pipeline = {stages}"
    if chunks > 1:
        named += f" × parallel.virtual_stages = {chunks}"
    if layers % parts:
        fix = divisibility_fix(e, axes, ["pipeline"], "layers", parts)
        if layers % chunks and "model.layers" not in e.pinned:
            fix = f"use model.layers = {multiple(parts, layers)}{with_changes(sizes_to_grow(e, axes), 'model.layers')}"
        raise ConfigError(f"model.layers = {layers} cannot be divided over {named}; {fix}")
    every = e.memory.remat_every
    if layers // parts % every:
        raise ConfigError(
            f"memory.remat_every = {every} does not divide the {layers // parts} layers of a stage: model.layers = "
            f"{layers} over {named}; use memory.remat_every = {math.gcd(every, layers // parts)}"
        )
    if moved := [part for part in e.memory.offload if part != "optimizer"]:
        raise ConfigError(
            f"memory.offload = {','.join(e.memory.offload)} with {named}: {' and '.join(moved)} cannot wait on "
            "the host while a stage picks its own; use memory.offload = optimizer, or --mesh "
            f"{written({**axes, 'pipeline': 1, 'fsdp': axes['fsdp'] * stages})}"
        )


def check_times(e: "Experiment", axes: Mapping[str, int], times: int, field: str = "data.sequence") -> None:
    """Raises ConfigError, naming `field`, if the mesh does not divide sequences of that length."""
    context, how = axes["context"], e.parallel.context
    splits: list[tuple[tuple[str, ...], int, str]] = []
    if context > 1:
        chunks = CHUNKS[how]
        why = f"in {chunks} chunks each" if chunks > 1 else "in one chunk each"
        splits.append((("context",), chunks, f"{why} under parallel.context = {how}"))
    if e.parallel.sequence:
        splits.append((("context", "tensor") if context > 1 else ("tensor",), 1, "under parallel.sequence"))
    for over, chunks, why in splits:
        size = math.prod(axes[axis] for axis in over)
        if times % (parts := chunks * size):
            if field == "data.sequence":
                fix = divisibility_fix(e, axes, over, "sequence", parts)
            else:
                sequence = math.gcd(times, e.data.sequence)  # the mesh divides that of the config too
                both = e.model_copy(update={"data": e.data.model_copy(update={"sequence": sequence})})
                mesh = written(mesh_to_fit(both, axes, over, "sequence"))
                as_field = field.rpartition(": ")[2]
                fix = f"use --mesh {mesh}, or a multiple of {parts}, as {as_field} = {multiple(parts, times)}"
            raise ConfigError(
                f"{field} = {times} cannot be divided over the mesh axis {' × '.join(over)} = {size}, which splits "
                f"it {why}; {fix}"
            )


def check_sizes(e: "Experiment", axes: Mapping[str, int]) -> None:
    """Raises ConfigError where the mesh does not divide a size of the model."""
    for field, size, parameter, over in e.model.mesh_sizes(e.parallel):
        if size % (parts := math.prod(axes[axis] for axis in over)):
            named = " × ".join(axis for axis in over if axes[axis] > 1)
            larger, padding = sizes_to_grow(e, axes), "model.vocab_multiple"
            if field == "vocab" and not e.pinned & larger.keys():
                fix = f"pad it by {padding} = {larger[padding]}{with_changes(larger, padding)}"
            else:
                size_of = "vocab_multiple" if field == "vocab" else field.rpartition(" × ")[2]
                fix = divisibility_fix(e, axes, over, size_of, parts)
            raise ConfigError(
                f"model.{field} = {size} cannot be divided over the mesh axis {named} = {parts}, which "
                f"splits parameter {parameter}; {fix}"
            )
