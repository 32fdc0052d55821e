"""Memory of a rank: its share of the state, and the peak of a step, measured."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_forward_pre_hook

from jaxdist.config import Experiment
from torch_ref.parallel.pipeline import Pipeline
from torch_ref.parallel.weights import local
from torch_ref.runtime.compat import MemTracker, free_workspaces
from torch_ref.training.optim import Optimizer
from torch_ref.training.parallelize import accumulated, offloads


class Peak:
    """Within it, the most bytes that this rank's tensors take at once: `bytes`, None before.

    On a GPU the allocator's own figure, of which `workspaces` are cuBLAS's. On the CPU, which keeps none, every tensor
    made and freed is followed, which is slow; what gloo copies inside is not seen.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: str):
        self.model, self.optimizer, self.cuda = model, optimizer, device == "cuda"
        self.parts = list(model) if isinstance(model, Pipeline) else []
        self.tracker, self.context = MemTracker(), ExitStack()
        self.bytes: int | None = None
        self.workspaces = 0

    def __enter__(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        self.tracker.track_external(self.model, self.optimizer)
        # A microbatch calls the model again, which MemTracker refuses unless it forgets the call before.
        forget = register_module_forward_pre_hook(self._forget)
        self.context.callback(forget.remove)
        self.context.enter_context(self.tracker)

    def _forget(self, module: nn.Module, _: Any) -> None:
        if module is self.model or any(module is part for part in self.parts):
            for inner in module.modules():  # of no other part of a pipeline, whose backward pass is to come
                self.tracker.memory_tracking.pop(inner, None)

    def __exit__(self, *_: object) -> None:
        self.context.close()
        tracked = self.tracker.get_tracker_snapshot("peak").values()
        self.bytes = torch.cuda.max_memory_allocated() if self.cuda else sum(device["Total"] for device in tracked)
        self.workspaces = workspaces() if self.cuda else 0


def workspaces() -> int:
    """Bytes that cuBLAS holds of the allocator's, for each thread that has called it; given back, to be taken anew."""
    before = torch.cuda.memory_allocated()
    free_workspaces()
    return before - torch.cuda.memory_allocated()


def memory(
    model: nn.Module,
    optimizer: Optimizer | torch.optim.Optimizer,
    experiment: Experiment,
    mesh: DeviceMesh,
    peak: Peak | None = None,
) -> dict[str, int | None]:
    """Bytes on the fullest device after a step; called by all ranks.

    `host` is what of parameters and optimizer state lies in the host's memory, and so not in the `peak` of a step.
    `statistics` are the running ones of batch norms, where there are any. `temporary` is what else of the peak is none
    of these, on GPUs the `workspaces` of cuBLAS among it; None without a peak.
    """

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in map(local, tensors))

    parameters = list(model.parameters())
    kinds = [
        size(parameters),
        size(p.grad for p in parameters if p.grad is not None) * accumulated(experiment, mesh),
        size(t for state in optimizer.state.values() for t in state.values()),
    ]
    statistics = size(model.buffers())
    host = kinds[0] + kinds[2] if offloads(model) else 0
    most, taken = (peak.bytes or 0, peak.workspaces) if peak else (0, 0)
    if most and mesh.device_type == "cpu":  # where all memory is the host's
        most -= host
    fullest = torch.tensor([*kinds, host, most - sum(kinds) - statistics + host, most, taken], device=mesh.device_type)
    dist.all_reduce(fullest, dist.ReduceOp.MAX)
    names = ("parameters", "gradients", "optimizer_state", "host", "temporary", "peak", "workspaces")
    found: dict[str, int | None] = dict(zip(names, fullest.tolist(), strict=True))
    found |= {"statistics": statistics} if statistics else {}
    if mesh.device_type == "cpu":
        del found["workspaces"]
    return found if most else found | {"temporary": None, "peak": None}
