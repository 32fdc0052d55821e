"""glibc's malloc, told how steps on CPUs use it: XLA allocates their temporary memory anew each time, and frees it."""

import ctypes
import math
from importlib.util import find_spec

import jax

from jaxdist.config import Experiment
from jaxdist.planner.plans import footprint

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
ARENA = 64 * 2**20  # bytes that one holds, but for the main thread's
PLUGINS = ("jax_plugins", "libtpu")  # the packages by which JAX finds other devices than CPUs


def keep_freed(experiment: Experiment, device: str) -> None:
    """Where there are but CPUs, or `device` asks for them, have glibc keep for this process what it frees, which the
    kernel would clear again, page by page. Other C libraries have no such call.

    To be called before JAX makes its devices: each of their threads would have an arena of its own, and what is larger
    than one would be mapped anew each step. Compiling takes up to a third longer where threads share one, so they do
    for large steps alone. Raises ConfigError where the mesh does not fit the model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if mallopt and ("cpu" in (device, platforms) or not any(map(find_spec, PLUGINS))):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # none
        if scratch(experiment) > ARENA:
            mallopt(M_ARENA_MAX, 1)


def scratch(experiment: Experiment) -> float:
    """Bytes that a step takes on each of several devices beside its state, by the closed form; 0 where their number is
    not known before they are made."""
    if "-1" in experiment.parallel.mesh:
        return 0.0
    experiment.check_mesh(mesh := experiment.parallel.axes())
    return sum(footprint(experiment, mesh).peak.values()) * (math.prod(mesh.values()) > 1)
