"""Batch norm over each rank's own images, or, by all-reduced sums, over those of all ranks.

`torch.nn.SyncBatchNorm`, which is taken on GPUs, refuses a CPU: there a rank sends, of C channels, the sums of C values
and of C squares forward and the sums of both gradients backward, 4C · 2(n-1)/n numbers a batch norm.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Images:
    """Statistics of this rank's images alone."""

    def sum_over_images(self, sums: Tensor) -> Tensor:
        """Sums [C] over the images normalized together."""
        return sums

    def normalized_together(self, own: int) -> int:
        """Number of elements normalized together, given `own` on this rank."""
        return own


class AllImages(Images):
    """Statistics over all ranks of a group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def sum_over_images(self, sums: Tensor) -> Tensor:
        """All-reduce [C] over the group, differentiable."""
        total: Tensor = AllReduce.apply(sums, self.group)  # type: ignore[no-untyped-call]
        return total

    def normalized_together(self, own: int) -> int:
        """`own` times the ranks of the group."""
        return own * self.group.size()


class AllReduce(torch.autograd.Function):
    """All-reduce whose gradient is all-reduced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """All-reduce of x."""
        ctx.group = group
        return reduced(x, group)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        """All-reduce of the gradient."""
        return reduced(outer[0], ctx.group), None


def reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce of a copy of x."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def statistics_from_first_replica(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the first rank's running statistics, as DDP's `broadcast_buffers` does before a forward pass."""
    for _, buffer in model.named_buffers():
        dist.broadcast(buffer, dist.get_global_rank(group, 0), group=group)
