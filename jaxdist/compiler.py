"""What XLA's compiler is told of communication: DDP's buckets and the overlap with computation, under its own names.

GPUs heed these options; the compilers of CPUs and TPUs take them and go by their own rules, or do not know them.

On CPUs each collective of a program gets a number of its own. JAX gives all the number 1, by which and by their kind
the devices of a process find each other. XLA begins collectives in one order on all devices, but takes a loop for begun
as soon as it waits for its first iteration: on a busy machine a collective after a loop, or another loop's, may be in
flight together with those within, and devices would take one's numbers for the other's, or wait for each other forever.
"""

from collections.abc import Callable
from functools import cache, wraps
from itertools import count
from typing import Any

import jax
from jax._src import compiler as jax_compiler
from jax._src.lib.mlir import ir

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


CHANNEL = "channel_handle"


def number_collectives(module: ir.Module) -> None:
    """Give each collective of a program, in StableHLO, a number of its own, in their order."""
    numbers = count(1)

    def number(operation: ir.Operation) -> ir.WalkResult:
        if CHANNEL in operation.attributes:
            channel = f"#stablehlo.channel_handle<handle = {next(numbers)}, type = 1>"  # 1: between devices
            operation.attributes[CHANNEL] = ir.Attribute.parse(channel, module.context)
        return ir.WalkResult.ADVANCE

    module.operation.walk(number)


def numbering(right: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's own function that compiles a program, with its collectives numbered where that is for CPUs."""

    @wraps(right)
    def compile_numbered(backend: Any, computation: ir.Module, *rest: Any, **named: Any) -> Any:
        if backend.platform == "cpu":
            number_collectives(computation)
        return right(backend, computation, *rest, **named)

    return compile_numbered


jax_compiler.compile_or_get_cached = numbering(jax_compiler.compile_or_get_cached)
