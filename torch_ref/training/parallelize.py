"""A plain module laid out over a mesh: in stages, tensor, expert and context parallel, activation checkpointing, data
parallel.

`jaxdist/config/strategies.py` states the bytes that each strategy sends per step, with P parameter bytes over n
devices. Gradients are summed over ranks everywhere, never averaged: the loss is already divided by the global token
count.
"""

import fnmatch
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from jaxdist.config import ConfigError, Experiment, Memory, Parallel
from jaxdist.config.fitting import mesh_without
from jaxdist.config.plugins import named
from torch_ref.families.models import blocks, row_of
from torch_ref.families.registry import FAMILIES, STYLES
from torch_ref.parallel.context import Context, context
from torch_ref.parallel.experts import AllToAll, Dispatch, experts_of, spread
from torch_ref.parallel.images import AllImages, Images
from torch_ref.parallel.mesh import EXPERT_SHARDS, SHARDS, TOKENS, axis_size, over
from torch_ref.parallel.pipeline import Pipeline, part
from torch_ref.runtime.compat import FUSED_ATTENTION, SUMS, offload_policies, replicate


def parallelize(model: nn.Module, experiment: Experiment, mesh: DeviceMesh) -> nn.Module:
    """Lay `model`, built on the meta device, out over `mesh` (axes pipeline, data, fsdp, expert, context, tensor);
    allocate its pieces.

    Returns the module to call, or a Pipeline, whose parameters hold no values yet: see `weights.fill`.
    """
    if (stages := axis_size(mesh, "pipeline")) == 1:
        return laid_out(model, experiment, mesh)
    total = stages * experiment.parallel.virtual_stages
    own = range(mesh.get_local_rank("pipeline"), total, stages)
    parts = [laid_out(part(deepcopy(model), index, total), experiment, mesh) for index in own]
    return Pipeline(parts, experiment, mesh)


def laid_out(model: nn.Module, experiment: Experiment, mesh: DeviceMesh) -> nn.Module:
    """Lay out a model, or one part of a pipeline's."""
    if axis_size(mesh, "tensor") > 1:
        tensor_parallel(model, mesh["tensor"], experiment.parallel.sequence)
    expert_parallel(model, mesh, experiment.parallel.sequence)
    if experiment.parallel.batch_norm == "global":
        model = normalize_over_ranks(model, mesh)
    if axis_size(mesh, "context") > 1:
        context_parallel(model, context(experiment, mesh))
    rematerialize(model, experiment.memory, pinned=mesh.device_type == "cuda")
    if experiment.train.compile:
        for module in [model] if mesh.size() == 1 else blocks(model):  # a block at a time, FSDP2 gathers between them
            module.compile()
    return data_parallel(model, experiment, mesh)


class Replicated(ParallelStyle):
    """Parameters replicated on every tensor rank, as DTensors, so that the clip sees all parameters on one mesh.

    `layout`: placement of the ranks' plain inputs and outputs: replicated, or a slice of heads or times each;
    `outputs`, where given, how the outputs are laid out anew. With `local` False the output stays a DTensor, for a tied
    head to multiply with the embedding's.
    """

    def __init__(self, layout: Placement | None = None, *, outputs: Placement | None = None, local: bool = True):
        super().__init__()
        self.layout, self.local = layout or Replicate(), local
        self.outputs = outputs or self.layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [self.layout], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
            y: DTensor = output.redistribute(mesh, [self.outputs])
            if self.local or self.outputs != self.layout:
                return y.to_local() if self.local else y
            # Through a plain tensor: its backward pass sums partial gradients once.
            return DTensor.from_local(y.to_local(), mesh, [self.layout], run_check=False)

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


class Entered(ParallelStyle):
    """Makes a module's first input one DTensor, replicated, for all projections that read it: their input gradients are
    summed in one all-reduce. Its other inputs are unchanged. `layout` is that of the plain input."""

    def __init__(self, layout: Placement):
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
            x, *others = inputs
            x = DTensor.from_local(x, device_mesh, [self.layout], run_check=False)
            return (x if self.layout.is_replicate() else x.redistribute(device_mesh, [Replicate()]), *others)

        module.register_forward_pre_hook(enter)
        return module


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Heads, MLP width and vocabulary over the axis `tensor` (Megatron-LM, arXiv:1909.08053).

    Forward, one all-reduce of the activations after the embedding, each attention and each MLP; as many
    backward, at the same places from the other side. Activations between them are replicated, or
    under `sequence` each rank has its times of them (torch: `SequenceParallel`), and each all-reduce is a
    reduce-scatter there and an all-gather before the next product. Raises ConfigError for matrices of a plugin's
    family without a style.
    """
    row, modules = row_of(model), dict(model.named_modules())
    matrices = (name for name, module in modules.items() if any(p.ndim > 1 for p in module.parameters(recurse=False)))
    if missing := row.unplanned(matrices):
        raise ConfigError(
            f"{named(FAMILIES, row.name)}: tensor has no style for {', '.join(missing)}, which the mesh axis tensor = "
            f"{mesh.size()} splits; give each one of {', '.join(STYLES)}, or '' to replicate it, or use a mesh "
            "without that axis"
        )
    between: Placement = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "positions": Replicated(outputs=Shard(0) if sequence else None),
        "norm": Replicated(between),
        "enter": Entered(between),
        "column": ColwiseParallel(),
        "heads": Replicated(Shard(2)),
        "row": RowwiseParallel(output_layouts=between),
        "last_norm": Replicated(between, outputs=Replicate(), local=False),
        "head": ColwiseParallel(use_local_output=False),
    }
    plan = {name: styles[style] for name, style in row.plan.items() if fnmatch.filter(modules, name)}
    parallelize_module(model, mesh, plan)


def expert_parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """Split experts over `expert`, and their width over `tensor`; for traffic see `torch_ref/parallel/experts.py`."""
    counted = [axis for axis in (*TOKENS, *(("tensor",) if sequence else ())) if axis_size(mesh, axis) > 1]
    groups = [mesh.get_group(axis) for axis in counted]
    part = (mesh.get_local_rank("tensor"), axis_size(mesh, "tensor")) if sequence else (0, 1)
    over_expert = axis_size(mesh, "expert") > 1
    dispatch = AllToAll(mesh["expert"], *groups, part=part) if over_expert else Dispatch(*groups, part=part)
    for module in model.modules():
        if isinstance(getattr(module, "dispatch", None), Dispatch):
            module.dispatch = dispatch  # type: ignore[assignment]
    split = tuple(axis for axis in ("expert", "tensor") if axis_size(mesh, axis) > 1)
    for experts in experts_of(model) if split else ():
        spread(experts, mesh[split], Shard(1) if sequence else Replicate())


def context_parallel(model: nn.Module, row: Context) -> None:
    """Split times over the axis `context`: a model calls its `context` for operations over times."""
    row.begin()
    for module in model.modules():
        if isinstance(getattr(module, "context", None), Context):
            module.context = row  # type: ignore[assignment]


def normalize_over_ranks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Batch norms over the images of all ranks: torch's SyncBatchNorm on GPUs, all-reduced sums on the CPU."""
    norms = [module for module in model.modules() if isinstance(getattr(module, "images", None), Images)]
    if not norms:
        return model
    group = over(mesh, *TOKENS).get_group()
    if mesh.device_type == "cuda":
        synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
        return synchronized
    for norm in norms:
        norm.images = AllImages(group)  # type: ignore[assignment]
    return model


SAVED_OPS = {
    # Results of matrix products and of the sums over ranks after them. Batched products are attention's own:
    # recomputed, except the fused kernels.
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    *FUSED_ATTENTION,
    *SUMS,
}


def rematerialize(model: nn.Module, memory: Memory, pinned: bool = False) -> None:
    """`memory.remat` on every `memory.remat_every`-th block. Its forward method is replaced: names stay.

    Under `memory.offload` activations what a checkpoint saves, a block's inputs, waits on the host, in pinned memory
    where that is asked for.
    """
    if memory.remat == "none":
        return

    def keep(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if memory.remat == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep)
    for block in blocks(model)[:: memory.remat_every]:
        again: Any = partial(checkpoint, block.forward, **options)
        block.forward = saved_on_host(again, pinned) if "activations" in memory.offload else again


def saved_on_host(forward: Any, pinned: bool) -> Any:
    """`forward`, with tensors saved for the backward pass in host memory."""

    def saving(*inputs: Any) -> Any:
        with save_on_cpu(pin_memory=pinned):
            return forward(*inputs)

    return saving


def check_offload(experiment: Experiment) -> None:
    """Raises ConfigError if torch cannot offload as `memory.offload` says."""
    memory, parallel = experiment.memory, experiment.parallel
    setting = f"memory.offload = {','.join(memory.offload)}"
    state = {"optimizer", "parameters"}.intersection(memory.offload)
    if state and parallel.row.replicates:
        raise ConfigError(
            f"{setting} with parallel.strategy = {parallel.strategy}: torch offloads by FSDP2 alone; use "
            "parallel.strategy = zero2 or fsdp"
        )
    if len(state) == 1:
        raise ConfigError(
            f"{setting}: torch's CPUOffloadPolicy takes parameters, gradients and optimizer state together; use "
            f"memory.offload = {','.join(['optimizer', 'parameters', *sorted({*memory.offload} - {*state})])}"
        )
    if "activations" in memory.offload and memory.remat != "full":
        raise ConfigError(
            f"{setting} with memory.remat = {memory.remat}: torch's selective checkpoint keeps results on the device; "
            "use memory.remat = full"
        )


def check_compile(experiment: Experiment, axes: Mapping[str, int], device: str) -> None:
    """Raises ConfigError where torch.compile has no compiler, or is not known to keep the numbers."""
    if not experiment.train.compile:
        return
    for axis in ("pipeline", "expert", "context", "tensor"):
        if axes[axis] > 1:
            raise ConfigError(
                f"train.compile = true with the mesh axis {axis} = {axes[axis]}: over tensor compiled blocks had other "
                "losses than eager ones (torch 2.13), and expert, context and pipeline were not tried; use "
                f"{mesh_without(experiment, axes, 'pipeline', 'expert', 'context', 'tensor')}, or leave it out"
            )
    compiler = os.environ.get("CXX", "g++")
    if device == "cpu" and not shutil.which(compiler):
        raise ConfigError(
            f"train.compile = true: torch.compile needs the C++ compiler {compiler}, which is not here; install g++, "
            "set CXX, or leave it out"
        )


def offload_policy(experiment: Experiment, mesh: DeviceMesh) -> OffloadPolicy:
    """FSDP2's: parameters, gradients and optimizer state on the host, a block's weights copied for its gather."""
    if "parameters" not in experiment.memory.offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")  # without a GPU there is nothing to pin it for


def offloads(model: nn.Module) -> bool:
    """Whether FSDP2 keeps the state of `model` on the host."""
    policies = offload_policies(model.modules())
    return bool(policies) and all(isinstance(policy, CPUOffloadPolicy) for policy in policies)


def data_parallel(model: nn.Module, experiment: Experiment, mesh: DeviceMesh) -> nn.Module:
    """DDP, `replicate` or FSDP2 over the axes data, fsdp and context, and memory for the parameters."""
    parallel, precision = experiment.parallel, experiment.precision
    device = torch.device(mesh.device_type)
    replicated = parallel.row.replicates
    mixed = len({precision.parameters, precision.compute, precision.reduce}) > 1
    split = axis_size(mesh, "pipeline") * axis_size(mesh, "tensor") * axis_size(mesh, "expert")
    if replicated and not mixed and split == 1:
        model.to_empty(device=device)
        bucket = parallel.bucket_mb or None  # torch's own: 25 MB, the first of 1
        with warnings.catch_warnings():  # the option's new name, of torch 2.13, is not in 2.11
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DistributedDataParallel(
                model, init_sync=False, gradient_as_bucket_view=True, bucket_cap_mb=bucket, broadcast_buffers=False
            )
        ddp.register_comm_hook(None, sum_bucket)
        return ddp

    # DDP knows neither per-module precision nor DTensors, and takes a backward pass to follow its forward pass:
    # `replicate` is FSDP2's machinery without sharding.
    apply: Any = replicate if replicated else fully_shard
    again: dict[str, Any] = {} if replicated else {"reshard_after_forward": parallel.reshards}
    policy = offload_policy(experiment, mesh)
    if isinstance(policy, CPUOffloadPolicy):
        device = torch.device("cpu")
    options: dict[str, Any] = {
        "mesh": batch_mesh(mesh, replicated, SHARDS),
        "offload_policy": policy,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, str(precision.compute)),
            reduce_dtype=getattr(torch, str(precision.reduce)),
            cast_forward_inputs=False,  # the rotation stays float32
        ),
    }
    for block in blocks(model):
        if axis_size(mesh, "expert") > 1:
            for experts in experts_of(block):
                apply(experts, **(options | again | expert_arguments(experts, mesh, replicated)))
        apply(block, **options, **again)
    apply(model, **options)  # the root's own stay gathered: the backward pass starts with them
    if parallel.overlap and not replicated:
        for block, following in pairwise(blocks(model)):
            block.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=device)
    return model


def expert_arguments(experts: nn.Module, mesh: DeviceMesh, replicated: bool) -> dict[str, Any]:
    """FSDP2's arguments for a block's experts, which one axis less shards: along D, as they are split along E and F."""
    along = {id(p): Shard(1 if name.startswith("down_proj") else 2) for name, p in experts.named_parameters()}
    placement = {} if replicated else {"shard_placement_fn": lambda p: along[id(p)]}
    return {"mesh": batch_mesh(mesh, replicated, EXPERT_SHARDS), **placement}


def reshard(model: nn.Module) -> None:
    """Free the parameters that FSDP2 gathered. It keeps the root's for a backward pass, which an evaluation has not."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def accumulated(experiment: Experiment, mesh: DeviceMesh) -> int:
    """A rank's gradients while they accumulate, in multiples of its pieces of the parameters.

    FSDP2 holds them unsharded until the one reduction that parallel.reduce = step asks for, and a pipeline's schedule.
    """
    parallel, several = experiment.parallel, experiment.train.accumulation > 1
    once = parallel.once or axis_size(mesh, "pipeline") > 1
    waits = not parallel.row.replicates and once and several
    return over(mesh, *SHARDS).size() if waits else 1


def batch_mesh(mesh: DeviceMesh, replicated: bool, axes: tuple[str, ...]) -> DeviceMesh:
    """The mesh over which gradients are summed, `axes` those that shard. Two axes mean HSDP: replicas of shards."""
    shards = over(mesh, *axes)
    if replicated or axis_size(mesh, "data") == 1:
        return over(mesh, "data", *axes) if replicated else shards
    return mesh["data", *(shards.mesh_dim_names or ())]


def sum_bucket(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: a sum in place of the default mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    total: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return total


@contextmanager
def microbatch(model: nn.Module, parallel: Parallel, last: bool) -> Iterator[None]:
    """Context manager for forward and backward of a microbatch: which gradients are reduced now, and which later.

    DDP and `replicate` send once a step. FSDP2 reduce-scatters every microbatch, unless parallel.reduce =
    step; its all-reduce between replicas (HSDP) waits for the last. Gathered parameters are kept until the last,
    unless they are resharded after forward.
    """
    with ExitStack() as stack:
        if isinstance(model, DistributedDataParallel):
            if not last:
                stack.enter_context(model.no_sync())
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or not parallel.once)
            model.set_requires_all_reduce(last)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or parallel.reshards)
        stack.enter_context(loss_parallel())
        yield
