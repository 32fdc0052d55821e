"""glibc's malloc, told how steps on CPUs use it: XLA allocates their temporary memory anew each time, and frees it.

Other C libraries of Linux and macOS have no such call, and go without.
"""

import ctypes
import math
from importlib.util import find_spec

import jax
from jax.sharding import Mesh

from jaxdist.config import Experiment
from jaxdist.planner.plans import footprint
from jaxdist.processes import world

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
HEAP = 64 * 2**20  # bytes, HEAP_MAX_SIZE of glibc: the most that any arena but the main thread's has in one piece
PLUGINS = ("jax_plugins", "libtpu")  # the packages by which JAX finds other devices than CPUs


def keep_freed(mesh: Mesh) -> None:
    """Where devices are CPUs, have what is freed kept for this process: the kernel would clear it, page by page."""
    if mesh.devices.flat[0].platform == "cpu":
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # none


def share_arena(experiment: Experiment, device: str) -> None:
    """Have all threads share the main thread's arena where there can be but CPUs, or `device` asks for them, and a step
    takes more than other arenas have in one piece: such memory glibc would map and unmap each time.

    To be called before JAX makes its devices, whose threads would have arenas of their own. Compiling takes up to four
    tenths longer by it, so small steps do without. Raises ConfigError where the mesh does not fit the model.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    cpus = "cpu" in (device, platforms) or not any(map(find_spec, PLUGINS))
    if cpus and scratch(experiment) > HEAP:
        mallopt(M_ARENA_MAX, 1)


def scratch(experiment: Experiment) -> float:
    """Bytes that a step takes on each of this process's several devices beside its state, by the closed form; 0 where
    their number is not known before they are made."""
    if not experiment.parallel.sized:
        return 0.0
    experiment.check_mesh(mesh := experiment.parallel.axes())
    several = math.prod(mesh.values()) > world().size
    return sum(footprint(experiment, mesh).peak.values()) if several else 0.0


def mallopt(parameter: int, value: int) -> None:
    if call := getattr(ctypes.CDLL(None), "mallopt", None):
        call(parameter, value)
