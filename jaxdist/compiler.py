"""What XLA's compiler is told of communication: DDP's buckets and the overlap with computation, under its own names.

GPUs heed these options; the compilers of CPUs and TPUs take them and go by their own rules, or do not know them.
"""

from functools import cache
from typing import Any

import jax

from jaxdist.config import Parallel

OPS = ("all_reduce", "reduce_scatter", "all_gather")
# Collectives of one kind are sent as one until they come to so many bytes; torch: bucket_cap_mb.
BUCKETS = tuple(f"xla_gpu_{op}_combine_threshold_bytes" for op in OPS)
MOST = 2**40  # bytes, more than any device has
# Collectives are begun early and awaited late, across iterations of a loop too; torch: DDP's hooks, FSDP2's prefetch.
OVERLAP = ("xla_gpu_enable_latency_hiding_scheduler", *(f"xla_gpu_enable_pipelined_{op}" for op in OPS))


def options(parallel: Parallel) -> dict[str, Any]:
    """Options of the compiler by name, those that the installed version has; none where nothing is asked for."""
    asked: dict[str, Any] = dict.fromkeys(OVERLAP, True) if parallel.overlap else {}
    if parallel.bucket_mb:
        asked |= dict.fromkeys(BUCKETS, min(round(parallel.bucket_mb * 2**20), MOST))
    return {name: value for name, value in asked.items() if known(name, value)}


@cache
def known(name: str, value: Any) -> bool:
    """Whether the compiler of the default device has an option: it refuses others by their name."""
    try:
        jax.jit(lambda x: x, compiler_options={name: value}).lower(0.0).compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
