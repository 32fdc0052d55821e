"""JAX's names that are not public and have no public counterpart. Seen in jax 0.10.2, 0.11.0 and 0.12.0.

All private names of JAX are here, Orbax's in `jaxdist/convert/kinds/orbax_compat.py`; `compat_test.py` fails by name
where a release drops one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax._src import compilation_cache
from jax._src.clusters import ClusterEnv
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.distributed import global_state

__all__ = ["CacheInterface", "cluster", "key_value_store", "programs_kept_in"]


def cluster(seconds: int) -> tuple[str | None, Any]:
    """The coordinator's address and the number of processes that JAX reads from a cluster's environment in `seconds`.

    `jax.distributed.initialize` finds the same, and does not return it.
    """
    address, processes, *_ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, seconds)
    return address, processes


def key_value_store() -> Any:
    """The key-value store of all processes of a run. It needs no device, and Orbax uses it too."""
    return global_state.client


@contextmanager
def programs_kept_in(make: Callable[[str], CacheInterface]) -> Iterator[None]:
    """Within, JAX keeps compiled programs in `make(folder)`, in place of its own cache of files; afterwards it opens
    its own again for the next program."""
    original = compilation_cache.get_file_cache
    compilation_cache.get_file_cache = lambda path: (make(path), path)
    try:
        yield
    finally:
        compilation_cache.get_file_cache = original
        compilation_cache.reset_cache()
