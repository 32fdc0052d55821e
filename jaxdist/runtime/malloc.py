"""Settings of glibc's malloc for steps on CPUs: XLA allocates their temporary memory at each step, and frees it.

Other C libraries of Linux and macOS have no such call; there these functions do nothing.
"""

import ctypes
from collections.abc import Callable
from importlib.util import find_spec

import jax
from jax.sharding import Mesh

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
HEAP = 64 * 2**20  # bytes, HEAP_MAX_SIZE of glibc: the most that any arena but the main thread's has in one piece
PLUGINS = ("jax_plugins", "libtpu")  # the packages by which JAX finds other devices than CPUs


def keep_freed(mesh: Mesh) -> None:
    """Keep freed memory in the process on CPU: returning it makes the kernel zero every page again."""
    if mesh.devices.flat[0].platform == "cpu":
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # none


def share_arena(needed: Callable[[], float], device: str) -> None:
    """Let all threads share the main thread's arena where a step on CPUs needs more temporary memory, `needed()` bytes,
    than another arena has in one piece: glibc would map and unmap that memory at each step.

    Call it before JAX makes its devices, whose threads would get arenas of their own. Compiling takes up to 1.4 times
    as long with one arena, so small steps keep several.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    cpus = "cpu" in (device, platforms) or not any(map(find_spec, PLUGINS))
    if cpus and needed() > HEAP:
        mallopt(M_ARENA_MAX, 1)


def mallopt(parameter: int, value: int) -> None:
    if call := getattr(ctypes.CDLL(None), "mallopt", None):
        call(parameter, value)
