"""Split of a sequence over the mesh axis `context`: the times of each rank, and their attention.

| row | a rank has | attention sends, forward (backward) |
|---|---|---|
| `Context` | all times: the axis has size 1 | nothing |
| `Gathered` | the i-th of n parts | x(n-1)/n of keys and values (as much, their gradients) |
| `Ring` | chunks i and 2n-1-i of 2n | the same (the same again, and gradients in float32 n times on) |

x being the bytes of keys and values of all times. `Gathered` is what Llama 3's training did (arXiv:2407.21783, 3.3.2):
the first ranks have less to do, as they see fewer keys. `Ring` is torch's own, whose kernels are of 16 bits, on GPUs.
"""

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from jaxdist.config import Experiment
from torch_ref.parallel.mesh import axis_size
from torch_ref.runtime.compat import all_gather_tensor_autograd, send_attention_around

TIME = 1  # the dimension of activations [B, T, ...]


class Context:
    """All times on every rank: the axis has size 1."""

    index, size = 0, 1

    def begin(self) -> None:
        """Prepare the process, once, before the first pass."""

    def order(self, length: int) -> np.ndarray:
        """Indices of all times [T], those of the first rank first."""
        return np.arange(length)

    def own(self, length: int) -> np.ndarray:
        """Indices of this rank's times [T/n]."""
        return np.split(self.order(length), self.size)[self.index]

    def rows(self, table_TD: Tensor) -> Tensor:
        """Rows [T/n, ...] of this rank's times, of a table [T, ...]."""
        return table_TD.chunk(self.size)[self.index]

    def first(self, x: Tensor) -> int:
        """Index of the first time of this rank's x [B, T/n, ...]."""
        return self.index * x.shape[TIME]

    def gather_sequence(self, x_BT: Tensor) -> Tensor:
        """All-gather x [B, T/n, ...] to [B, T, ...], sorted by time."""
        return x_BT

    def across(self, q_BT: Tensor, k_BT: Tensor, v_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's queries, and the keys and values that they attend to, as arguments of `attend`."""
        return q_BT, self.gather_sequence(k_BT), self.gather_sequence(v_BT)


class Gathered(Context):
    """Each rank's own times, all-gathered for attention over the axis of a one-dimensional mesh."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh, self.index, self.size = mesh, mesh.get_local_rank(), mesh.size()

    def gather_sequence(self, x_BT: Tensor) -> Tensor:
        """All-gather over `context`, differentiable: [B, T, ...]."""
        x_BS: Tensor = all_gather_tensor_autograd(x_BT.contiguous(), gather_dim=TIME, group=self.mesh.get_group())
        return x_BS


class Ring(Gathered):
    """torch's context parallelism: fused attention on DTensors that are split over time."""

    def begin(self) -> None:
        """Enable torch's ring for attention on DTensors."""
        send_attention_around()

    def order(self, length: int) -> np.ndarray:
        """For each rank i of n chunk i, then chunk 2n-1-i, [T]."""
        chunks = np.arange(length).reshape(2 * self.size, -1)
        return np.stack([chunks[: self.size], chunks[: self.size - 1 : -1]], axis=1).ravel()

    def rows(self, table_TD: Tensor) -> Tensor:
        """The rows of both chunks, [T/n, ...]."""
        return table_TD[torch.from_numpy(self.own(len(table_TD))).to(table_TD.device)]

    def gather_sequence(self, x_BT: Tensor) -> Tensor:
        """All-gather over `context`, then sort by time: [B, T, ...]."""
        back = np.argsort(self.order(self.size * x_BT.shape[TIME]))
        return super().gather_sequence(x_BT)[:, torch.from_numpy(back).to(x_BT.device)]

    def across(self, q_BT: Tensor, k_BT: Tensor, v_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as DTensors split over time, which torch's ring attends to."""
        q, k, v = (DTensor.from_local(x, self.mesh, [Shard(TIME)], run_check=False) for x in (q_BT, k_BT, v_BT))
        return q, k, v


def context(experiment: Experiment, mesh: DeviceMesh) -> Context:
    """Context-parallel implementation for the axis `context` of a mesh."""
    if axis_size(mesh, "context") == 1:
        return Context()
    return (Ring if rings(experiment, mesh.device_type) else Gathered)(mesh["context"])


def rings(experiment: Experiment, device: str) -> bool:
    """Whether torch's ring supports a config: fused attention in 16 bits on GPUs, without a window, with heads of a
    width that its kernels accept."""
    e = experiment
    narrow, size = e.precision.compute in ("bfloat16", "float16"), e.model.head_dim
    fused = narrow and 0 < size <= 256 and size % 8 == 0 and not e.model.window
    return device == "cuda" and fused and e.parallel.context == "ring"
