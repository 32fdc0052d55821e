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


def check_exists(module: str, name: str, compat: str) -> None:
    """Raises AssertionError, naming the module `compat` to mend, unless `module` has the dotted `name`."""
    found = import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module}.{name} is gone; find its successor in {compat}"
        found = getattr(found, part)


@pytest.mark.parametrize("module", NAMES)
def test_a_private_name_exists(module: str) -> None:
    check_exists(module, NAMES[module], COMPAT)
