"""Each private name of torch that the code relies on is there, and private names are in one module a package."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPAT = {"jaxdist/convert/kinds/torch_compat.py", "torch_ref/runtime/compat.py"}
PRIVATE = re.compile(r"^ *(?:from|import) +torch(?:\.\w+)*(?:\._\w|.* import +_\w)", re.MULTILINE)
NAMES = {
    "torch._subclasses.fake_tensor": ("FakeTensor", "FakeTensorMode"),
    "torch._weights_only_unpickler": ("Unpickler",),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate",),
    "torch.distributed._functional_collectives": (
        *("all_gather_tensor", "all_gather_tensor_autograd", "all_to_all_single", "all_to_all_single_autograd"),
    ),
    "torch.distributed._tools.mem_tracker": ("MemTracker",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.experimental._attention": ("_enable_context_parallel_dispatcher",),
    "torch.utils._python_dispatch": ("TorchDispatchMode",),
    "torch.utils._pytree": ("tree_map_only",),
}


@pytest.mark.parametrize("module", NAMES)
def test_private_names_are_there(module: str) -> None:
    found = import_module(module)
    for name in NAMES[module]:
        assert hasattr(found, name), f"{module}.{name} is gone; find its successor in {' or '.join(COMPAT)}"


def test_private_names_of_torch_are_in_one_module_a_package() -> None:
    """Planted mistakes alone reach further: they break what is private."""
    files = [file for folder in ("jaxdist", "torch_ref", "parity_tests") for file in (ROOT / folder).rglob("*.py")]
    others = [f for f in files if not f.name.endswith("_test.py") and "mistakes" not in f.parts]
    assert {str(f.relative_to(ROOT)) for f in others if PRIVATE.search(f.read_text(encoding="utf-8"))} == COMPAT
