"""Options of XLA's compiler, and what is changed in programs for CPUs before they are compiled.

Options of communication (DDP's buckets, overlap with computation) take effect on GPUs; the compilers of CPUs and TPUs
ignore them, or do not have them.

On CPUs each collective of a program gets a number of its own. JAX numbers all of them 1, and the devices of a process
find each other by this number and the kind of collective. XLA starts collectives in one order on all devices, but
counts a loop as started as soon as it waits for its first iteration: on a busy machine a collective after a loop may be
in flight together with those inside it, and devices would mix up their numbers, or wait for each other forever.
Collectives within groups of one device are removed with jax 0.10, where XLA copies their input.

Nothing here changes JAX: `Jitted` rewrites the program that it compiles.
"""

import os
from functools import cache
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.sharding import Mesh
from jax.stages import Lowered, Traced

from jaxdist.config import Parallel

OPS = ("all_reduce", "reduce_scatter", "all_gather")
# Size in bytes up to which collectives of one kind are combined; torch: bucket_cap_mb.
BUCKETS = tuple(f"xla_gpu_{op}_combine_threshold_bytes" for op in OPS)
MOST = 2**40  # bytes, more than any device has
# Collectives are begun early and awaited late, across iterations of a loop too; torch: DDP's hooks, FSDP2's prefetch.
OVERLAP = ("xla_gpu_enable_latency_hiding_scheduler", *(f"xla_gpu_enable_pipelined_{op}" for op in OPS))

# XLA's default fusions by YNNPACK in jax 0.10 to 0.12, without reductions: each device would plan each of them in its
# first step.
YNN = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}


def options(parallel: Parallel) -> dict[str, Any]:
    """Options of the compiler by name, those that the installed version has; none where nothing is asked for."""
    asked: dict[str, Any] = dict.fromkeys(OVERLAP, True) if parallel.overlap else {}
    if parallel.bucket_mb:
        asked |= dict.fromkeys(BUCKETS, min(round(parallel.bucket_mb * 2**20), MOST))
    return {name: value for name, value in asked.items() if known(name, value)}


def on_cpus(mesh: Mesh) -> dict[str, Any]:
    """Disable YNNPACK reductions on several CPU devices. Every supported version has the option; one of XLA_FLAGS goes
    before it."""
    if mesh.devices.flat[0].platform != "cpu" or mesh.devices.size == 1:
        return {}
    return {name: value for name, value in YNN.items() if name not in os.environ.get("XLA_FLAGS", "")}


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


CHANNEL, GROUPS = "channel_handle", "replica_groups"


def collectives(module: ir.Module) -> list[ir.Operation]:
    """Operations of a program, in StableHLO, in their order."""
    found = []

    def look(operation: ir.Operation) -> ir.WalkResult:
        if CHANNEL in operation.attributes:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return found


def leave_out_idle(module: ir.Module) -> None:
    """Remove collectives over groups of one device, which are identities: XLA copies their input on CPUs."""
    for operation in collectives(module):
        if GROUPS in operation.attributes and one_device_each(operation.attributes[GROUPS]):
            for result, operand in zip(operation.results, operation.operands, strict=True):
                result.replace_all_uses_with(operand)
            operation.erase()


def one_device_each(groups: ir.Attribute) -> bool:
    """Whether each group is one device, as jax 0.10 lists them; later ones name mesh axes in their place."""
    return isinstance(groups, ir.DenseIntElementsAttr) and ir.ShapedType(groups.type).shape[1] == 1


def number_collectives(module: ir.Module) -> None:
    """Give each collective of a program a number of its own."""
    for number, operation in enumerate(collectives(module), start=1):
        channel = f"#stablehlo.channel_handle<handle = {number}, type = 1>"  # 1: between devices
        operation.attributes[CHANNEL] = ir.Attribute.parse(channel, module.context)


class Jitted:
    """A function of `jax.jit` on a mesh, compiled once for each type of its arguments.

    On CPUs its programs are rewritten between lowering and compilation; other programs of the process are not.
    """

    def __init__(self, function: Any, mesh: Mesh) -> None:
        self.trace, self.platform = function.trace, mesh.devices.flat[0].platform
        self.compiled: dict[Any, Any] = {}

    def lowered(self, traced: Traced) -> Lowered:
        """The program that is compiled, of what `trace` returned."""
        lowered: Lowered = traced.lower()
        if self.platform == "cpu":
            module: Any = lowered.compiler_ir()
            leave_out_idle(module)
            number_collectives(module)
        return lowered

    def lower(self, *arguments: Any) -> Lowered:
        """The program for these arguments, arrays or ShapeDtypeStructs."""
        return self.lowered(self.trace(*arguments))

    def __call__(self, *arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        key = structure, *((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
        if key not in self.compiled:
            self.compiled[key] = self.lower(*arguments).compile()
        return self.compiled[key](*arguments)
