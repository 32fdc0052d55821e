"""A run's report: arithmetic, and summary.json."""

import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jaxdist import __version__
from jaxdist.config import Experiment, Optimizer
from jaxdist.config.hardware import peak_flops
from torch_ref.families.accounting import flops_per_token
from torch_ref.training import optim
from torch_ref.training.program import Program

WARM_UP = 2  # steps left out of medians


def utilization(experiment: Experiment, model: nn.Module, mesh: DeviceMesh, tokens_per_second: float) -> float | None:
    """Model FLOPs utilization: arithmetic done over the GPUs' peak in the dtype of products; None where either is
    unknown."""
    kind = torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU"
    flops, peak = flops_per_token(experiment, model), peak_flops(kind, experiment.precision.compute)
    return None if flops is None or peak is None else tokens_per_second * flops / (peak * mesh.size())


def parameter_count(model: nn.Module) -> int:
    """Number of trained parameters of the model, a tied one once."""
    return sum(p.numel() for p in model.parameters())


def schedule(o: Optimizer, steps: int) -> dict[int, float]:
    """Learning rates at steps that identify a schedule, including steps that are not run: `{step: rate}`."""
    return {step: optim.learning_rate(o, steps, step) for step in o.landmarks(steps)}


def median_of(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Median of a field after the warm-up; None without records."""
    values = [record[name] for record in records]
    return statistics.median(values[WARM_UP:] or values) if values else None


def summary(
    program: Program,
    memory: Mapping[str, int | None],
    collectives: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """summary.json of the contract; `memory` is in bytes per device, `records` are this process's steps."""
    experiment, mesh, model = program.experiment, program.mesh, program.unsharded
    rate, target_rate = (median_of(records, name) for name in ("tokens_per_second", "target_tokens_per_second"))
    return {
        "backend": "torch",
        "versions": {"jaxdist": __version__, "torch": version("torch")},
        "parameters": parameter_count(model),
        "devices": mesh.size(),
        "platform": mesh.device_type,
        "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "strategy": experiment.parallel.strategy,
        "precision": experiment.precision.policy,
        "memory": memory,
        "collectives": collectives,
        "schedule": schedule(experiment.optimizer, experiment.train.steps),
        "compile_seconds": 0.0,
        "counted": experiment.model.input_kind,  # as tokens
        "tokens_per_second": rate,
        "target_tokens_per_second": target_rate,
        "flops_per_token": flops_per_token(experiment, model),
        "mfu": utilization(experiment, model, mesh, rate) if rate else None,
        "target_mfu": utilization(experiment, model, mesh, target_rate) if target_rate else None,
    }
