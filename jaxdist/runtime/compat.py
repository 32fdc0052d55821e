"""JAX's names that are not public and have no public counterpart. Seen in jax 0.10.2, 0.11.0 and 0.12.0.

All private names of JAX are here; `compat_test.py` fails by name where a release drops one.
"""

from collections.abc import Callable
from typing import Any

from jax._src import compilation_cache
from jax._src.clusters import ClusterEnv
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.distributed import global_state

__all__ = ["CacheInterface", "cluster", "keep_programs_in", "key_value_store"]


def cluster(seconds: int) -> tuple[str | None, Any]:
    """The coordinator's address and the number of processes that JAX reads from a cluster's environment in `seconds`.

    `jax.distributed.initialize` finds the same, and does not return it.
    """
    address, processes, *_ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, seconds)
    return address, processes


def key_value_store() -> Any:
    """The key-value store of all processes of a run. It needs no device, and Orbax uses it too."""
    return global_state.client


def keep_programs_in(make: Callable[[str], CacheInterface]) -> None:
    """Have JAX keep compiled programs in `make(folder)`, in place of its own cache of files."""
    compilation_cache.get_file_cache = lambda path: (make(path), path)
