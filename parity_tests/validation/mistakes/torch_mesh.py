"""Mistakes in how torch_ref spreads a step over ranks, and in the precision of what it sends and keeps."""

from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from jaxdist.config import Parallel
from jaxdist.data import Batch, Dataset
from parity_tests.validation.mistakes import altered, everywhere, mistake, plant
from torch_ref.families import layers, llama
from torch_ref.parallel import context
from torch_ref.runtime import launch
from torch_ref.runtime.compat import replicate
from torch_ref.training import optim, parallelize, step

planted = partial(mistake, "torch_ref")


@planted("hybrid", "distribution", "batch/tokens")
def one_rank_fed_twice() -> None:
    """The last rank reads the first one's rows."""
    right = Dataset.batch

    def batch(self: Dataset, step: int, size: int, seed: int, split: Any = "train", rows: Any = slice(None)) -> Batch:
        return right(self, step, size, seed, split, np.arange(2) if rows[0] == 6 else rows)

    plant(Dataset, "batch", batch)


@planted("2x2", "distribution", "distribution/torch_ref, mesh matches the request*")
def all_on_one_rank() -> None:
    """Whatever mesh is asked for, one rank does it all: the same numbers, and none of its memory is saved."""
    right = launch.plan

    def plan(parallel: Parallel, device: str) -> Any:
        return right(parallel.model_copy(update={"mesh": "1x1"}), device)

    everywhere(right, plan)


# ---- DDP


@planted("ddp", "distribution", "loss")
def mean_of_rank_means() -> None:
    """Each rank divides by its own number of tokens, and their mean is taken."""
    right = step.sum_over_batch

    def sum_over_batch(value: Tensor, mesh: Any) -> Tensor:
        return right(value, mesh) if value.is_floating_point() else value * mesh.size()

    everywhere(right, sum_over_batch)


@planted("ddp", "distribution", "gradient/*")
def mean_by_ddp() -> None:
    """DDP averages, as it does by default, the gradients of a loss that is divided by the global count."""
    right = parallelize.sum_bucket

    @wraps(right)
    def mean_bucket(state: None, bucket: dist.GradBucket) -> Any:
        return right(state, bucket).then(lambda future: future.value() / dist.get_world_size())

    everywhere(right, mean_bucket)


@planted("ddp", "distribution", "gradient/norm.weight")
def parameter_ignored_by_ddp() -> None:
    """The last norm's gradient is not summed over ranks."""
    right: Any = DistributedDataParallel

    def wrapped(model: Any, **more: Any) -> Any:
        right._set_params_and_buffers_to_ignore_for_model(model, ["norm.weight"])
        return right(model, **more)

    everywhere(right, altered_class(right, wrapped))


def altered_class(right: Any, call: Any) -> Any:
    """A class that is made by `call` and still known by `isinstance`."""

    class Meta(type):
        def __call__(cls, *inputs: Any, **more: Any) -> Any:
            return call(*inputs, **more)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, right)

    return Meta(right.__name__, (), {})


@planted("ddp", "distribution", "gradient/*")
def microbatches_all_synced() -> None:
    """`no_sync` is forgotten: what the first microbatch has summed is summed again with the last."""

    @contextmanager
    def nothing(self: Any) -> Any:
        yield

    plant(DistributedDataParallel, "no_sync", nothing)


@planted("ddp", "distribution", "gradient/*")
def microbatches_never_synced() -> None:
    """The last microbatch is within `no_sync` like the others."""
    right = parallelize.microbatch
    everywhere(right, lambda model, parallel, last: right(model, parallel, last=False))


# ---- FSDP2


@planted("hybrid", "distribution", "gradient/*")
def replicas_not_summed() -> None:
    """HSDP's all-reduce between replicas is missing."""
    plant(_fsdp_collectives, "dist", altered(dist, all_reduce=lambda *_, **__: None))


@planted("hybrid", "distribution", "gradient/*")
def mean_by_fsdp() -> None:
    """FSDP2 averages, as it does by default, the gradients of a loss that is divided by the global count."""
    plant(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)
    plant(FSDPModule, "set_force_sum_reduction_for_comms", lambda self, enable: None)


def mixed(**dtypes: torch.dtype) -> None:
    """Plant another MixedPrecisionPolicy."""
    plant(parallelize, "MixedPrecisionPolicy", lambda **more: MixedPrecisionPolicy(**(more | dtypes)))


@planted("hybrid", "distribution", "gradient/*")
def gradients_reduced_in_float32() -> None:
    """A float64 run reduces gradients in float32."""
    mixed(reduce_dtype=torch.float32)


@planted("fp32", "precision", "gradient/*")
def gradients_reduced_in_bfloat16() -> None:
    """Under the fp32 policy gradients cross ranks in bfloat16."""
    mixed(reduce_dtype=torch.bfloat16)


@planted("hybrid", "distribution", "grad_norm")
def clip_of_each_shard() -> None:
    """Each rank clips by the norm of its own pieces."""
    plant(optim, "dist", altered(dist, all_reduce=lambda *_, **__: None))


@planted("2x2", "distribution", "gradient/layers.*.attention.q_norm.weight")
def one_scale_not_summed_over_tensor() -> None:
    """The norm of queries is declared to see all heads: its scale has the gradient of each rank's own heads."""
    right = parallelize_module

    def seeing_all_heads(model: Any, device_mesh: Any = None, styles: Any = None) -> Any:
        return right(model, device_mesh, styles | {"layers.*.attention.q_norm": parallelize.Replicated()})

    plant(parallelize, "parallelize_module", seeing_all_heads)


@planted("2x2", "distribution", "activation_gradient/layers.1.mlp_norm")
def column_inputs_not_summed_backward() -> None:
    """The input of the MLP's column-parallel products has this rank's part of the gradient alone."""
    right = llama.MLP.forward

    class Unsummed(torch.autograd.Function):
        """A plain tensor, the same on all ranks, as a DTensor that does not sum its gradient."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, mesh: Any) -> DTensor:
            return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

        @staticmethod
        def backward(ctx: Any, *outer: Any) -> Any:
            return outer[0].to_local(), None

    plant(llama.MLP, "forward", lambda self, x: right(self, Unsummed.apply(x.to_local(), x.device_mesh)))


@planted("bf16", "precision", "weights/*")
def weights_rounded_after_the_update() -> None:
    """The master weights of the bf16 policy are kept in bfloat16."""
    right = optim.Optimizer.step

    @torch.no_grad()
    def stepped(self: Any, *inputs: Any) -> float:
        rate = right(self, *inputs)
        for piece in self.locals.values():
            piece.copy_(piece.bfloat16())
        return rate

    plant(optim.Optimizer, "step", stepped)


# ---- context parallelism


@planted("context", "distribution", "activation/layers.0.attention.attended")
def masked_as_the_first_times() -> None:
    """Every rank's queries are masked as if they were those of the first times."""
    plant(context.Gathered, "first", lambda self, x: 0)


@planted("context", "distribution", "activation_gradient/layers.1.attention.k_rotated")
def gradients_of_keys_not_summed() -> None:
    """Keys and values are gathered without a gradient: each rank keeps what it has made of its own."""

    def gather_sequence(self: Any, x: Tensor) -> Tensor:
        whole = all_gather_tensor(x.detach().contiguous(), gather_dim=context.TIME, group=self.mesh.get_group())
        parts = list(whole.chunk(self.size, dim=context.TIME))
        parts[self.index] = x
        return torch.cat(parts, dim=context.TIME)

    plant(context.Gathered, "gather_sequence", gather_sequence)


# ---- memory and traffic


@planted("hybrid", "traffic", "traffic/torch_ref, fsdp:*")
def blocks_not_wrapped() -> None:
    """Only the root is sharded as one unit: all weights are gathered at once and kept from forward to backward."""
    plant(parallelize, "blocks", lambda model: [])


@planted("kept", "traffic", "traffic/torch_ref, fsdp:*")
def resharded_after_each_microbatch() -> None:
    """Weights that are to be kept for the step are given back after each backward pass, and gathered anew."""
    right = FSDPModule.set_reshard_after_backward
    plant(FSDPModule, "set_reshard_after_backward", lambda self, *_: right(self, True))


@planted("offload", "memory", "memory/torch_ref, host*")
def kept_on_the_device() -> None:
    """Weights and moments stay on the device between steps, whatever memory.offload says."""
    plant(parallelize, "offload_policy", lambda *_: OffloadPolicy())


@planted("offload", "distribution", "weights/*")
def a_copy_is_updated() -> None:
    """The optimizer moves copies of the weights, as it would those that were on the host before they were pinned."""
    right = optim.Optimizer.step

    def step(self: optim.Optimizer, *inputs: Any) -> float:
        before = {name: piece.clone() for name, piece in self.locals.items()}
        rate = right(self, *inputs)
        for name, piece in self.locals.items():
            piece.copy_(before[name])
        return rate

    plant(optim.Optimizer, "step", step)


@planted("hybrid", "memory", "memory/parameters*")
def replicated_not_sharded() -> None:
    """Every rank keeps the whole model under the strategy fsdp."""

    def whole(module: Any, *, mesh: Any, reshard_after_forward: bool = False, **more: Any) -> Any:
        flat = mesh._flatten("batch") if mesh.ndim > 1 else mesh
        return replicate(module, mesh=flat, **more)

    plant(parallelize, "fully_shard", whole)


@planted("sequence", "distribution", "activation/layers.0.attention_norm")
def positions_of_the_first_times() -> None:
    """Every rank adds the learned positions of the first rank's times."""

    class FirstTimes(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: Any) -> Any:
                return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

            def leave(_: nn.Module, output: Any, mesh: Any) -> Tensor:
                return output.to_local().chunk(mesh.size())[0]

            return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]

    right = parallelize.Replicated
    plant(
        parallelize,
        "Replicated",
        lambda *inputs, outputs=None, **more: (
            FirstTimes() if outputs == Shard(0) else right(*inputs, outputs=outputs, **more)
        ),
    )


@planted("sequence", "distribution", "gradient/*norm.*")
def norms_learn_from_their_own_times() -> None:
    """The gradients of the norms are taken for summed where each rank has that of its own times."""
    right = layers.LayerNorm.forward

    def forward(self: Any, x: Any) -> Any:
        if not isinstance(x, DTensor):
            return right(self, x)
        whole = {n: p.to_local(grad_placements=[Replicate()]) for n, p in self.named_parameters()}
        y = functional.layer_norm(x.to_local(), x.shape[-1:], whole["weight"], whole["bias"], self.eps)
        return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)

    plant(layers.LayerNorm, "forward", forward)


@planted("2x2", "traffic", "traffic/torch_ref, tensor:*", "memory/torch_ref, peak, bytes")
def logits_gathered() -> None:
    """The head gathers the logits of the whole vocabulary on every rank."""

    def style(use_local_output: bool = True) -> ColwiseParallel:
        """The head is the one that keeps its output split."""
        return ColwiseParallel() if use_local_output else ColwiseParallel(output_layouts=Replicate())

    plant(parallelize, "ColwiseParallel", style)
