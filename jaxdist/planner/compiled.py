"""Memory and traffic of the step that would run, compiled from abstract arrays: for GPUs by name, or virtual CPU
devices."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxdist.accounting import traffic
from jaxdist.config import Experiment
from jaxdist.config.hardware import Hardware
from jaxdist.parallel.mesh import lay_out, make_mesh, settle
from jaxdist.planner import gpus
from jaxdist.planner.overlap import Overlap, overlaps
from jaxdist.training import metrics
from jaxdist.training.program import Program


@dataclass(frozen=True)
class Compiled:
    """Bytes on one device by category, bytes that it sends by mesh axis, and seconds that compiling took.

    A CPU holds 16 bits as 32 and has no fused attention, so activations take more than on a GPU; parameters, optimizer
    state and traffic are those of any device. For GPUs, `platform` gpu, the operations that overlap with
    collectives are known.
    These have no host in JAX: state that `memory.offload` keeps there counts as theirs.
    """

    platform: str
    memory: dict[str, int]
    traffic: dict[str, float]
    seconds: float
    overlaps: Sequence[Overlap]


def compile_plan(experiment: Experiment, device: Hardware | None = None) -> Compiled:
    """Compile for GPUs if `device` is one and its compiler is installed, else for CPU devices. Call it before anything
    else uses JAX's devices. Raises ConfigError, also for a GPU of unknown chip."""
    gpu = device if device and device.platform == "gpu" and gpus.installed() else None
    program = Program(experiment, mesh_of(experiment, gpu))
    began = time.perf_counter()
    traced = program.step.trace(program.abstract, program.abstract_batch)
    lowered = program.step.lowered(traced)
    compiled = gpus.compiled(lowered, gpu) if gpu else lowered.compile()
    sent: Counter[str] = Counter()
    for collective in traffic.count(traced.jaxpr):
        sent[collective.axis.partition("+")[0]] += collective.bytes  # type: ignore[assignment]
    held: dict[str, Any] = metrics.memory(program, traced, compiled)
    overlapped = overlaps(compiled.as_text()) if gpu else []
    return Compiled("gpu" if gpu else "cpu", held, dict(sent), time.perf_counter() - began, overlapped)


def mesh_of(experiment: Experiment, gpu: Hardware | None) -> Mesh:
    """A mesh of these GPUs, or of CPU devices. Raises ConfigError."""
    if gpu is None:
        return make_mesh(experiment, "cpu")[0]
    settle(experiment)
    axes = experiment.parallel.axes()
    experiment.check_mesh(axes)
    return lay_out(axes, gpus.devices(gpu, math.prod(axes.values())))
