"""The private names of JAX that the code uses exist. `parity_tests/private_names_test.py` checks that only `compat`
uses them."""

from importlib import import_module

import pytest

COMPAT = "jaxdist/runtime/compat.py"
NAMES = {
    "jax._src.clusters": "ClusterEnv.auto_detect_unset_distributed_params",
    "jax._src.compilation_cache": "get_file_cache",
    "jax.experimental.compilation_cache.compilation_cache": "reset_cache",  # public
    "jax._src.compilation_cache_interface": "CacheInterface",
    "jax._src.distributed": "global_state.client",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_private_name_exists(module: str) -> None:
    found = import_module(module)
    for name in NAMES[module].split("."):
        assert hasattr(found, name), f"{module}: {NAMES[module]} is gone; find its successor in {COMPAT}"
        found = getattr(found, name)
