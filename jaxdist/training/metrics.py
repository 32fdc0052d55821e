"""A run's report: arithmetic, memory, traffic, and summary.json."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist import __version__
from jaxdist.accounting import arithmetic, traffic
from jaxdist.accounting.forms import flops_per_token, least_bytes
from jaxdist.config import Optimizer
from jaxdist.config.hardware import peak_flops
from jaxdist.parallel.mesh import axes_of
from jaxdist.parallel.pipeline import Pipeline
from jaxdist.parallel.rematerialization import HOST
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.training import optim
from jaxdist.training.program import Program
from jaxdist.training.step import TrainState

WARM_UP = 2  # steps left out of medians


def parameter_count(param_specs: Mapping[str, ParamSpec]) -> int:
    """Number of trained parameters of the model, not counting running statistics."""
    return sum(math.prod(spec.shape) for spec in param_specs.values() if not spec.statistic)


def utilization(program: Program, tokens_per_second: float) -> float | None:
    """Model FLOPs utilization: arithmetic done over the devices' peak in the dtype of products; None where either is
    unknown."""
    kind, experiment = program.mesh.devices.flat[0].device_kind, program.experiment
    flops, peak = flops_per_token(experiment, program.param_specs), peak_flops(kind, experiment.precision.compute)
    return None if flops is None or peak is None else tokens_per_second * flops / (peak * program.mesh.devices.size)


def schedule(o: Optimizer, steps: int) -> dict[int, float]:
    """Learning rates at steps that identify a schedule, including steps that are not run: `{step: rate}`."""
    landmarks = o.landmarks(steps)
    rates = jax.jit(partial(optim.learning_rate, o, steps))(jnp.asarray(landmarks))
    return dict(zip(landmarks, rates.tolist(), strict=True))


def memory(program: Program, traced: Any, compiled: Any, state: TrainState | None = None) -> dict[str, int]:
    """Bytes per device. `temporary` is the compiled step's scratch, unsharded gradients and activations included;
    `peak` is arguments + temporaries + outputs - reused arguments.

    Parameters and optimizer state are a device's of `state`; before there is one, as declared. `host` is what of them
    lies in the host's memory and so not in the peak, `statistics` the running ones of batch norms, where there are any.
    Gradients are those that the traced step adds up over the microbatches.
    """
    analysis = compiled.memory_analysis()
    state = state or program.abstract
    host = bytes_on_device((state.parameters, state.optimizer), offloaded=True)
    running = {n: a for n, a in state.parameters.items() if program.param_specs[n].statistic}
    statistics = bytes_on_device(running)
    seen = analysis.host_argument_size_in_bytes  # nothing on the CPU, where XLA takes all for the device's
    return {
        "parameters": bytes_on_device(state.parameters) - statistics,
        "gradients": accumulated(program, traced.jaxpr) - bytes_on_device([a for a in running.values() if a.ndim]),
        "optimizer_state": bytes_on_device(state.optimizer),
        "host": host,
        "temporary": analysis.temp_size_in_bytes,
        "peak": analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        - (0 if seen else host),
    } | ({"statistics": statistics} if statistics else {})


def accumulated(program: Program, closed: Any) -> int:
    """Bytes of the arrays that a traced step's outermost scan, over the microbatches, carries on each device, without
    the buffers that pipeline stages exchange."""
    *_, scan = (equation for equation, *_ in traffic.equations(closed) if equation.primitive.name == "scan")
    # A carry leaves the scan in the shape of one iteration, stacked outputs with an axis more; parameters differ by
    # version.
    ends = zip(scan.outvars, scan.params["jaxpr"].jaxpr.outvars, strict=True)
    carried = [out.aval for out, one in ends if out.aval.shape == one.aval.shape]
    mesh, sharded = axes_of(program.mesh), program.strategy.gradients
    shapes = {spec.local_shape(mesh, sharded) for spec in program.param_specs.values()}
    # Single numbers are the loss and, where a model has such, counts.
    return sum(aval.size * aval.dtype.itemsize for aval in carried if aval.shape and aval.shape in shapes)


def pipeline(program: Program) -> dict[str, Any]:
    """A pipeline's schedule, and the idle share of a stage's time: `bubble` counted slot by slot, `least_bubble`
    (p-1)/(mv + p-1) with m microbatches through p stages of v parts each."""
    if not isinstance(program.schedule, Pipeline):
        return {}
    table = program.schedule.table
    idle, busy = table.stages - 1, table.microbatches * table.chunks
    return {
        "pipeline": {
            "schedule": program.experiment.parallel.pipeline_schedule,
            "stages": table.stages,
            "virtual_stages": table.chunks,
            "microbatches": table.microbatches,
            "bubble": table.bubble,
            "least_bubble": idle / (busy + idle),
        }
    }


def bytes_on_device(tree: Any, offloaded: bool = False) -> int:
    """Bytes of a device's shards of the arrays of `tree`; with `offloaded`, only of arrays in host memory."""
    return sum(
        math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for a in jax.tree.leaves(tree) if a.sharding.memory_kind == HOST or not offloaded
    )  # fmt: skip


def allocated(program: Program) -> dict[str, int]:
    """Peak bytes in use by the allocator of the fullest device; empty where it keeps no count (CPU)."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in program.mesh.local_devices]
    return {"allocator_peak": max(peaks)} if any(peaks) else {}


def median_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Median of a field after the warm-up; None without records."""
    values = [record[name] for record in records]
    return statistics.median(values[WARM_UP:] or values) if values else None


def summary(
    program: Program,
    memory: Mapping[str, Any],
    traced: Any,
    compile_seconds: float,
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """summary.json of the contract; `memory` is in bytes per device, `records` are this process's steps."""
    rate, target_rate = (median_of(records, name) for name in ("tokens_per_second", "target_tokens_per_second"))
    return {
        "backend": "jax",
        "versions": {"jaxdist": __version__}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")},
        "parameters": parameter_count(program.param_specs),
        "devices": program.mesh.devices.size,
        "platform": program.mesh.devices.flat[0].platform,
        "mesh": axes_of(program.mesh),
        "strategy": program.experiment.parallel.strategy,
        "precision": program.experiment.precision.policy,
        "memory": dict(memory),
        "collectives": [asdict(collective) for collective in traffic.count(traced.jaxpr)],
        "least_bytes": least_bytes(program.experiment, program.param_specs, axes_of(program.mesh)),
        "arithmetic": arithmetic.narrowest(traced.jaxpr),
        **pipeline(program),
        "schedule": schedule(program.experiment.optimizer, program.experiment.train.steps),
        "compile_seconds": compile_seconds,
        "compiler_options": program.compiler_options,
        "counted": program.experiment.model.input_kind,  # as tokens
        "tokens_per_second": rate,
        "target_tokens_per_second": target_rate,
        "flops_per_token": flops_per_token(program.experiment, program.param_specs),
        "mfu": utilization(program, rate) if rate else None,
        "target_mfu": utilization(program, target_rate) if target_rate else None,
    }
