"""The same of the step that would run, compiled from abstract arrays: for GPUs by name, or virtual CPU devices."""

import math
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxdist import metrics, traffic
from jaxdist.config import Experiment
from jaxdist.config.hardware import Hardware
from jaxdist.mesh import lay_out, make_mesh, settle
from jaxdist.planner import gpus
from jaxdist.planner.overlap import Overlap, overlaps
from jaxdist.program import Program


@dataclass(frozen=True)
class Compiled:
    """Bytes on one device by category, bytes that it sends by mesh axis, and seconds that compiling took.

    A CPU holds 16 bits as 32 and has no fused attention, so activations take more than on a GPU; parameters, optimizer
    state and traffic are those of any device. Of GPUs, `platform` gpu, it is known what computes beside collectives.
    """

    platform: str
    memory: dict[str, int]
    traffic: dict[str, float]
    seconds: float
    overlaps: Sequence[Overlap]


def mesh_of(experiment: Experiment, device: Hardware | None) -> Mesh:
    """Of such GPUs where there is what compiles for them, else of CPU devices. Raises ConfigError."""
    if device is None or device.chip is None or not gpus.installed():
        return make_mesh(experiment, "cpu")[0]
    settle(experiment)
    axes = experiment.parallel.axes()
    experiment.check_mesh(axes)
    return lay_out(axes, gpus.devices(device, math.prod(axes.values())))


def compile_plan(experiment: Experiment, device: Hardware | None = None) -> Compiled:
    """Call it before anything else touches JAX's devices. Raises ConfigError."""
    mesh = mesh_of(experiment, device)
    program, platform = Program(experiment, mesh), mesh.devices.flat[0].platform
    began = time.perf_counter()
    traced = program.step.trace(program.abstract, program.abstract_batch)
    with gpus.refused(device) if device and platform == "gpu" else nullcontext():
        compiled = traced.lower().compile(gpus.OPTIONS if platform == "gpu" else None)
    sent: Counter[str] = Counter()
    for collective in traffic.count(traced.jaxpr):
        sent[collective.axis.partition("+")[0]] += collective.bytes  # type: ignore[assignment]
    held: dict[str, Any] = metrics.memory(program, traced, compiled)
    beside = overlaps(compiled.as_text()) if platform == "gpu" else []
    return Compiled(platform, held, dict(sent), time.perf_counter() - began, beside)
