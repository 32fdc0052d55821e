"""Exchange of tokens with their experts: rows by all-to-all over the mesh axis `expert`; their width is over `tensor`.

A rank of n sends a row of D numbers for each of a token's k experts that another rank has, and gets as many back: of
evenly used experts 2 · B·T·k·D · (n-1)/n numbers forward, and as many backward, of its own B·T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from jaxdist.config import ConfigError, Experiment
from torch_ref.runtime.compat import all_to_all_single, all_to_all_single_autograd

Rows = Callable[[Tensor, list[int]], Tensor]  # rows [N, D] sorted by expert, and how many each has


class Dispatch:
    """All experts on this rank; `groups` are those over which tokens differ."""

    def __init__(self, *groups: dist.ProcessGroup, part: tuple[int, int] = (0, 1)):
        """`part`: (index, number) of the parts of times that tensor ranks have under sequence parallelism."""
        self.groups, self.part = groups, part

    def __call__(self, experts: Rows, x_BTD: Tensor, chosen_BTk: Tensor, taken_BTk: Tensor, count: int) -> Tensor:
        """Outputs of each token's k experts [B, T, k, D], 0 where the expert has no capacity; `count` experts in
        all."""
        shape, k = (*chosen_BTk.shape, x_BTD.shape[-1]), chosen_BTk.shape[-1]
        pair_N = taken_BTk.flatten().nonzero()[:, 0]
        expert_N = chosen_BTk.flatten()[pair_N]
        pair_N = pair_N[expert_N.argsort(stable=True)]
        y_ND = self.exchange(experts, x_BTD.flatten(0, 1)[pair_N // k], expert_N.bincount(minlength=count))
        return y_ND.new_zeros(taken_BTk.numel(), shape[-1]).index_copy(0, pair_N, y_ND).view(shape)

    def exchange(self, experts: Rows, x_ND: Tensor, count_E: Tensor) -> Tensor:
        """The experts' outputs for this rank's rows, in the order of the rows."""
        return experts(x_ND, count_E.tolist())

    def slice_sequence(self, x_BT: Tensor) -> Tensor:
        """The times of x [B, T, ...] that this rank's router sees, [B, T/t, ...]."""
        index, number = self.part
        return x_BT.chunk(number, dim=1)[index]

    def sum_over_tokens(self, sums: Tensor) -> Tensor:
        """All-reduce sums over the microbatch on all ranks. Not differentiable."""
        sums = sums.detach().clone()
        for group in self.groups:
            dist.all_reduce(sums, group=group)
        return sums


class AllToAll(Dispatch):
    """Experts split over the axis of a one-dimensional mesh."""

    def __init__(self, mesh: DeviceMesh, *groups: dist.ProcessGroup, part: tuple[int, int] = (0, 1)):
        super().__init__(*groups, part=part)
        self.size, self.group = mesh.size(), mesh.get_group()

    def exchange(self, experts: Rows, x_ND: Tensor, count_E: Tensor) -> Tensor:
        """All-to-all of rows to the ranks of their experts, and of outputs back."""
        sent = count_E.view(self.size, -1)  # by rank and its experts
        got = all_to_all_single(count_E, None, None, self.group).view(self.size, -1)
        sizes_out, sizes_in = sent.sum(1).tolist(), got.sum(1).tolist()
        rows_ND = all_to_all_single_autograd(x_ND, sizes_in, sizes_out, self.group)
        own = torch.arange(got.shape[1], device=got.device).repeat(self.size).repeat_interleave(got.flatten())
        order = own.argsort(stable=True)
        y_ND = experts(rows_ND[order], got.sum(0).tolist())
        return all_to_all_single_autograd(y_ND[order.argsort()], sizes_out, sizes_in, self.group)


def own(weight: Tensor) -> Tensor:
    """This rank's shard of the weights of experts."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Modules that hold the experts of a block: those with a Dispatch and `rows`."""
    holders = [module for module in model.modules() if isinstance(getattr(module, "dispatch", None), Dispatch)]
    return [module for module in holders if hasattr(module, "rows")]


def spread(experts: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    """The experts of a block over `mesh` of the axes `expert` and `tensor`, or one of them.

    Over `tensor` tokens are laid out as `between` says outside of it; inside each rank has all of the expert rank's,
    and a part of each result, whose sum leaves.
    """
    names = mesh.mesh_dim_names or ()
    for name, module in experts.named_children():
        split = {"expert": Shard(0), "tensor": Shard(2 if name == "down_proj" else 1)}
        weight = distribute_tensor(module.get_parameter("weight"), mesh, [split[axis] for axis in names])
        module.register_parameter("weight", nn.Parameter(weight))
    if "tensor" not in names:
        return
    tensor = mesh["tensor"]

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
        laid_out = (DTensor.from_local(x, tensor, [between], run_check=False) for x in inputs)
        return tuple(x.redistribute(tensor, [Replicate()]).to_local(grad_placements=[Partial()]) for x in laid_out)

    def leave(_: nn.Module, __: Any, y_BTD: Tensor) -> Tensor:
        partial = DTensor.from_local(y_BTD, tensor, [Partial()], run_check=False)
        return partial.redistribute(tensor, [between]).to_local()

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(leave)


def check(experiment: Experiment, axes: dict[str, int]) -> None:
    """Raises ConfigError for settings that torch does not support."""
    row = experiment.parallel.row
    if axes["expert"] > 1 and row.splits_update:
        raise ConfigError(
            f"parallel.strategy = {row.name} with the mesh axis expert = {axes['expert']}: torch's "
            "ZeroRedundancyOptimizer assigns parameters that all ranks have to ranks, and experts are none; use "
            "parallel.strategy = zero2 or fsdp, or jaxdist.train"
        )
