"""Settings of glibc's malloc for steps on CPUs: XLA allocates their temporary memory at each step, and frees it.

Other C libraries of Linux and macOS have no such call; there these functions do nothing.
"""

import ctypes
import math
from importlib.util import find_spec

import jax
from jax.sharding import Mesh

from jaxdist import models, sharding
from jaxdist.config import Experiment
from jaxdist.config.model import Decoder
from jaxdist.processes import world
from jaxdist.traffic import ITEMSIZE, tokens_of

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h
HEAP = 64 * 2**20  # bytes, HEAP_MAX_SIZE of glibc: the most that any arena but the main thread's has in one piece
PLUGINS = ("jax_plugins", "libtpu")  # the packages by which JAX finds other devices than CPUs


def keep_freed(mesh: Mesh) -> None:
    """Keep freed memory in the process on CPU: returning it makes the kernel zero every page again."""
    if mesh.devices.flat[0].platform == "cpu":
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)  # none


def share_arena(experiment: Experiment, device: str) -> None:
    """Let all threads share the main thread's arena where a step on CPUs needs more memory than another arena has in
    one piece: glibc would map and unmap that memory at each step.

    Call it before JAX makes its devices, whose threads would get arenas of their own. Compiling takes up to 1.4 times
    as long with one arena, so small steps keep several. Raises ConfigError where the mesh does not fit the model.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    cpus = "cpu" in (device, platforms) or not any(map(find_spec, PLUGINS))
    if cpus and scratch(experiment) > HEAP:
        mallopt(M_ARENA_MAX, 1)


def scratch(experiment: Experiment) -> float:
    """Estimated bytes that a step needs beside its state on each of this process's devices; 0 for a single device, and
    where their number is not known before they are made.

    It reads declared parameters alone, so it holds for any model: gradients, and for each token (or image) of a
    microbatch the results of all products, half of them with their gradient; with rematerialization those of three
    blocks. Decoders add attention's scores. The planner's closed form is more exact, but knows certain families alone.
    """
    e = experiment
    if not e.parallel.sized:
        return 0.0
    e.check_mesh(mesh := e.parallel.axes())
    if math.prod(mesh.values()) == world().size:
        return 0.0
    matrices = [layout for layout in models.layouts(models.build(e.model)).values() if layout.decays]
    row, kept = sharding.strategy(e.parallel), 1 if e.memory.remat == "none" else min(1, 3 / e.model.layers)
    gradients = results = 0.0
    for layout in matrices:
        gradients += math.prod(layout.local_shape(mesh, row.gradients))
        stacked, *_, out = layout.local_shape(mesh, sharded=False)
        results += kept * stacked * out if "layers" in layout.axes else out
    if isinstance(e.model, Decoder):
        scores = e.model.layers * e.model.heads * e.data.sequence
        results += kept * scores / (mesh["pipeline"] * mesh["tensor"] * mesh["context"])
    copies = 1 + (e.train.accumulation > 1)  # those of a microbatch, and their sum
    return ITEMSIZE["float32"] * (copies * gradients + 1.5 * tokens_of(e, mesh) * results)


def mallopt(parameter: int, value: int) -> None:
    if call := getattr(ctypes.CDLL(None), "mallopt", None):
        call(parameter, value)
