"""torch's names that are not public and have no public counterpart. Seen in torch 2.11, 2.12 and 2.13.

All private names of torch on this side are here; `compat_test.py` fails by name where a release drops one.
"""

from collections.abc import Callable, Iterable
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, OffloadPolicy
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FUSED_ATTENTION",
    "SUMS",
    "AfterApply",
    "FakeTensorMode",
    "MemTracker",
    "TorchDispatchMode",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "compute_local_shape_and_global_offset",
    "default_store",
    "free_workspaces",
    "group_named",
    "is_process_group",
    "offload_policies",
    "one_dimensional",
    "read_part",
    "replicate",
    "send_attention_around",
]

FUSED_ATTENTION = {
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
SUMS = {  # functional collectives
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


class AfterApply(nn.Module):
    """A module of which `applied` is called after `to`, `cuda` and the like, also of a module that has it."""

    def applied(self) -> None:
        """Called after the module's tensors have moved or changed dtype."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.applied()
        return self


def one_dimensional(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The axes of `mesh` as one axis, called `name`."""
    return mesh._flatten(name)


def default_store() -> dist.Store:
    """The store of the process group of all ranks."""
    return dist.distributed_c10d._get_default_store()


def group_named(name: Any) -> dist.ProcessGroup:
    """The group that functional collectives call `name`."""
    return dist.distributed_c10d._resolve_process_group(name)


def is_process_group(argument: torch.ScriptObject) -> bool:
    """Whether `dist.ProcessGroup.unbox` can unbox an argument of an operation."""
    return "ProcessGroup" in str(argument._type())


def offload_policies(modules: Iterable[nn.Module]) -> list[OffloadPolicy]:
    """FSDP2's offload policy of each of `modules` that has parameters sharded by it."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in modules if isinstance(m, FSDPModule)]
    return [group.offload_policy for group in groups if group]


def read_part(reader: Any, stream: IO[bytes], part: Any) -> IO[bytes]:
    """The bytes of one part of a tensor, which `dcp.FileSystemReader` reads from a file of a checkpoint."""
    part_bytes: IO[bytes] = reader._slice_file(stream, part)
    return part_bytes


def free_workspaces() -> None:
    """Give back to the allocator what cuBLAS holds for each thread that has called it."""
    torch._C._cuda_clearCublasWorkspaces()


def send_attention_around() -> None:
    """Have fused attention of DTensors that are split over time compute as a ring, from here on in this process."""
    from torch.distributed.tensor.experimental import _attention  # slow to import: for rings alone

    _attention._enable_context_parallel_dispatcher()
