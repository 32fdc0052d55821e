"""The private names of torch that the code uses exist. `parity_tests/private_names_test.py` checks that only `compat`
modules use them."""

import pytest

from jaxdist.runtime.compat_test import check_exists

COMPAT = "jaxdist/convert/kinds/torch_compat.py"
NAMES = {
    "torch._C": ("PyTorchFileReader",),
    "torch._subclasses.fake_tensor": ("FakeTensor", "FakeTensorMode"),
    "torch._weights_only_unpickler": ("Unpickler",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.utils._pytree": ("tree_map_only",),
}


@pytest.mark.parametrize("module", NAMES)
def test_private_names_exist(module: str) -> None:
    pytest.importorskip("torch")
    for name in NAMES[module]:
        check_exists(module, name, COMPAT)
