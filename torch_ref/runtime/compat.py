"""torch's names that are not public and have no public counterpart. Seen in torch 2.11, 2.12 and 2.13.

All private names of torch on this side are here; `compat_test.py` fails by name where a release drops one.
"""

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensorMode",
    "MemTracker",
    "TorchDispatchMode",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "compute_local_shape_and_global_offset",
    "replicate",
    "send_attention_around",
]


def send_attention_around() -> None:
    """Have fused attention of DTensors that are split over time compute as a ring, from here on in this process."""
    from torch.distributed.tensor.experimental import _attention  # slow to import: for rings alone

    _attention._enable_context_parallel_dispatcher()
