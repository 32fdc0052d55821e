"""The same of the step that would run: compiled from abstract arrays on as many virtual CPU devices."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxdist import metrics, traffic
from jaxdist.config import Experiment
from jaxdist.mesh import make_mesh
from jaxdist.program import Program


@dataclass(frozen=True)
class Compiled:
    """Bytes on one device by category, bytes that it sends by mesh axis, and seconds that compiling took.

    A CPU holds 16 bits as 32 and has no fused attention, so activations take more than on a GPU; parameters, optimizer
    state and traffic are those of any device.
    """

    memory: dict[str, int]
    traffic: dict[str, float]
    seconds: float


def compile_plan(experiment: Experiment) -> Compiled:
    """Call it before anything else touches JAX's devices. Raises ConfigError."""
    mesh, _ = make_mesh(experiment, "cpu")
    program = Program(experiment, mesh)
    began = time.perf_counter()
    traced = program.step.trace(program.abstract, program.abstract_batch)
    compiled = traced.lower().compile()
    sent: Counter[str] = Counter()
    for collective in traffic.count(traced.jaxpr):
        sent[collective.axis.partition("+")[0]] += collective.bytes  # type: ignore[assignment]
    held: dict[str, Any] = metrics.memory(program, traced, compiled)
    return Compiled(held, dict(sent), time.perf_counter() - began)
