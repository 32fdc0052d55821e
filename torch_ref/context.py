"""How a sequence is split over the mesh axis `context`: rank i of n has the i-th part of its times.

Each rank attends for its own queries over the keys and values of all times, which are gathered, as Llama 3's training
did (arXiv:2407.21783, 3.3.2): x(n-1)/n bytes of their x forward, and as many backward, where their gradients are summed
and each rank gets its own. The first ranks have less to do, as they see fewer keys.
"""

from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh

TIME = 1  # the dimension of activations [B, T, ...]


class Context:
    """All times on every rank: the axis has size 1."""

    index, size = 0, 1

    def rows(self, table_TD: Tensor) -> Tensor:
        """The rows of this rank's times, of a table of all."""
        return table_TD.chunk(self.size)[self.index]

    def first(self, x: Tensor) -> int:
        """The time of the first of this rank's x [B, T, ...]."""
        return self.index * x.shape[TIME]

    def gather(self, x_BT: Tensor) -> Tensor:
        """x [B, S, ...] of all times."""
        return x_BT


class Gathered(Context):
    """Each rank's own times, over the axis of a one-dimensional mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.index, self.size, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group()

    def gather(self, x_BT: Tensor) -> Tensor:
        return all_gather_tensor_autograd(x_BT.contiguous(), gather_dim=TIME, group=self.group)
