"""The private names of torch that the code uses exist. `parity_tests/private_names_test.py` checks that only `compat`
modules use them."""

import inspect
from importlib import import_module

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

COMPAT = "torch_ref/runtime/compat.py"
NAMES = {
    "torch": ("ScriptObject._type", "nn.Module._apply"),
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate",),
    "torch.distributed._functional_collectives": (
        *("all_gather_tensor", "all_gather_tensor_autograd", "all_to_all_single", "all_to_all_single_autograd"),
    ),
    "torch.distributed._tools.mem_tracker": ("MemTracker",),
    "torch.distributed.checkpoint.filesystem": ("FileSystemReader._slice_file",),
    "torch.distributed.device_mesh": ("DeviceMesh._flatten",),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_resolve_process_group"),
    "torch.distributed.fsdp": ("FSDPModule._get_fsdp_state",),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.experimental._attention": ("_enable_context_parallel_dispatcher",),
    "torch.ops": (
        "_c10d_functional.all_reduce",
        "_c10d_functional.reduce_scatter_tensor",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_flash_attention",
    ),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
}


@pytest.mark.parametrize("module", NAMES)
def test_private_names_exist(module: str) -> None:
    for name in NAMES[module]:
        found = import_module(module)
        for part in name.split("."):
            assert hasattr(found, part), f"{module}.{name} is gone; find its successor in {COMPAT}"
            found = getattr(found, part)


def test_fsdp_reports_its_offload_policy() -> None:
    """An attribute of its state reports it: a property, or set on each instance."""
    assert "_fsdp_param_group" in inspect.getsource(FSDPState)


@pytest.mark.skipif(torch.version.cuda is None, reason="built without CUDA")
def test_workspaces_of_cublas_can_be_freed() -> None:
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces")
