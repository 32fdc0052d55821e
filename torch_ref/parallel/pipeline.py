"""A model in stages over the mesh axis `pipeline`, by the schedules of `torch.distributed.pipelining`.

With S ranks of v parts each, rank s has the parts s, S + s, ...; an interleaved schedule has several. A rank sends the
activations of each microbatch to the next one, and their gradients back: B·T·D numbers each. FSDP2 below a schedule
keeps unsharded gradients and reduces them once a step. A tied embedding is on the first rank and on the last, and its
gradients are summed over both.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor.parallel import loss_parallel

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.fitting import mesh_without, split_into
from torch_ref.families.registry import FAMILIES
from torch_ref.parallel.mesh import BATCH, axis_size
from torch_ref.parallel.weights import local

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
}
Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets of a microbatch


def check(experiment: Experiment, axes: dict[str, int]) -> None:
    """Raises ConfigError for settings that torch does not support."""
    stages, parallel, model = axes["pipeline"], experiment.parallel, experiment.model
    microbatches = experiment.train.accumulation
    if stages == 1:
        return
    setting = f"the mesh axis pipeline = {stages}"
    if why := FAMILIES[model.family].no_pipeline:
        raise ConfigError(
            f"model.family = {model.family} with {setting}: {why}; use "
            f"{mesh_without(experiment, axes, 'pipeline')}, or jaxdist.train"
        )
    if parallel.sequence:
        raise ConfigError(
            f"parallel.sequence = true with {setting}: torch's stages would not know the length of sequences that they "
            "have parts of; leave it out, or use jaxdist.train"
        )
    if (chunks := experiment.memory.loss_chunks) > 1:
        raise ConfigError(
            f"memory.loss_chunks = {chunks} with {setting}: torch's schedules take the loss of what the last stage "
            "returns, which is unsharded; leave it out, or use jaxdist.train"
        )
    if experiment.memory.offload:
        raise ConfigError(
            f"memory.offload = {','.join(experiment.memory.offload)} with {setting}: torch's schedules unshard by "
            "themselves what FSDP2 would fetch; leave it out"
        )
    if parallel.pipeline_schedule == "1F1B" and microbatches < stages:
        raise ConfigError(
            f"train.accumulation = {microbatches} with {setting}: torch's Schedule1F1B takes at least as many "
            f"microbatches as stages; use {split_into(experiment, axes, stages)}, or parallel.pipeline_schedule = GPipe"
        )
    rounds = max(1, microbatches // stages)
    if parallel.pipeline_schedule == "Interleaved1F1B" and microbatches % rounds:
        raise ConfigError(
            f"train.accumulation = {microbatches} with {setting}: torch's ScheduleInterleaved1F1B needs a multiple of "
            f"its {rounds} rounds; use {split_into(experiment, axes, microbatches - microbatches % rounds)}"
        )


def part(model: nn.Module, index: int, parts: int) -> nn.Module:
    """Part `index` of `model`: modules keep their names, and those of other parts are None."""
    layers = model.get_submodule("layers")
    count = len(list(layers.children())) // parts
    for name, _ in list(layers.named_children()):
        if int(name) // count != index:
            delattr(layers, name)
    first, last = index == 0, index == parts - 1
    tied = model.lm_head is None
    absent = {"embed": not (first or (last and tied)), "positions": not first, "norm": not last, "lm_head": not last}
    for name in (name for name, gone in absent.items() if gone and hasattr(model, name)):
        setattr(model, name, None)
    return model


def parts_of(model: nn.Module) -> list[nn.Module]:
    """Modules that a microbatch calls: each of a pipeline's parts, or the model inside of DDP."""
    return list(model) if isinstance(model, Pipeline) else [getattr(model, "module", model)]


class Pipeline(nn.ModuleList):
    """This rank's parts of a model, laid out already, and the schedule of microbatches."""

    def __init__(self, parts: list[nn.Module], experiment: Experiment, mesh: DeviceMesh):
        super().__init__(parts)
        e, stages, rank = experiment, axis_size(mesh, "pipeline"), mesh.get_local_rank("pipeline")
        self.group, device = mesh.get_group("pipeline"), torch.device(mesh.device_type)
        self.first, self.last = rank == 0, rank == stages - 1
        rows = e.train.batch // math.prod(axis_size(mesh, axis) for axis in BATCH) // e.train.accumulation
        times = e.data.sequence // axis_size(mesh, "context")
        tokens = torch.zeros(rows, times, dtype=torch.int64, device="meta")
        dtype = getattr(torch, str(e.precision.compute))
        x = torch.zeros(rows, times, e.model.dim, dtype=dtype, device="meta", requires_grad=True)
        several, total = len(parts) > 1, stages * len(parts)
        stages_here = [
            PipelineStage(p, i, total, device, input_args=x if i else tokens, output_args=x, group=self.group)
            for p, i in zip(parts, range(rank, total, stages), strict=True)
        ]
        make = SCHEDULES[e.parallel.pipeline_schedule]
        stage: Any = stages_here if several else stages_here[0]
        self.microbatches = e.train.accumulation
        self.schedule = make(stage, self.microbatches, loss_fn=self._loss, scale_grads=False)
        self.loss: Loss | None = None
        self.tied = self._ends(mesh) if e.model.tied else None

    def _ends(self, mesh: DeviceMesh) -> dist.ProcessGroup | None:
        """Process group of the first and the last rank of this pipeline; None in between. Called by all ranks."""
        own = None
        for pipeline in mesh.mesh.flatten(1).T.tolist():
            group = dist.new_group([pipeline[0], pipeline[-1]])
            own = group if dist.get_rank() in (pipeline[0], pipeline[-1]) else own
        return own

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        assert self.loss is not None
        return self.loss(logits, targets)

    def accumulate(self, loss: Loss, tokens: Tensor, targets: Tensor) -> None:
        """Forward and backward passes of all microbatches, each through all stages; `loss` is called on the last."""
        self._through(self.schedule.step, loss, tokens, targets)
        if self.tied:
            embed = self.embedding.grad
            assert embed is not None
            dist.all_reduce(local(embed), group=self.tied)

    def evaluate(self, loss: Loss, tokens: Tensor, targets: Tensor) -> None:
        """Forward passes alone."""
        self._through(self.schedule.eval, loss, tokens, targets)

    def _through(self, run: Any, loss: Loss, tokens: Tensor, targets: Tensor) -> None:
        self.loss = loss
        with loss_parallel():
            run(*([tokens] if self.first else []), target=targets if self.last else None, return_outputs=False)

    @property
    def embedding(self) -> nn.Parameter:
        """The embedding [V, D] on the first rank; the tied head's copy of it on the last."""
        return self[0 if self.first else -1].get_parameter("embed.weight")

    def counted(self) -> Iterator[nn.Parameter]:
        """Parameters; a tied embedding on the first rank alone."""
        again = id(self.embedding) if self.tied and not self.first else None
        return (p for p in self.parameters() if id(p) != again)

    @property
    def bubble(self) -> dict[str, Any]:
        """Numbers of microbatches and parts, and the least idle share of a rank's time."""
        stages, several, microbatches = dist.get_world_size(self.group), len(self), self.microbatches
        return {
            "stages": stages,
            "virtual_stages": several,
            "microbatches": microbatches,
            "least_bubble": (stages - 1) / (microbatches * several + stages - 1),
        }
