"""Layout of the work over devices: the mesh, the strategy, and settings of each axis."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import model_validator

from jaxdist.config.aliases import AXIS_NAMES, plain
from jaxdist.config.errors import ConfigError, nearest, shown
from jaxdist.config.names import OneOf
from jaxdist.config.section import Count, NotNegative, Section
from jaxdist.config.strategies import STRATEGIES, Strategy

AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def _schedule(value: Any) -> Any:
    """A schedule's name in any case, as torch's `get_schedule_class` takes it, also with - or _ between its words."""
    known = {name.lower(): name for name in ("GPipe", "1F1B", "Interleaved1F1B")}
    plain = value.lower().replace("_", "").replace("-", "") if isinstance(value, str) else value
    return known.get(plain, value) if isinstance(plain, str) else value


class Parallel(Section):
    """Layout of the work over devices."""

    mesh: str = "1x1"
    """Device mesh: data-parallel × tensor-parallel size ('2x4'), or named axes ('data=2,fsdp=2,tensor=2'; -1: all
    remaining devices). `expert` splits the experts of a mixture, and the batch as fsdp does; `pipeline` splits the
    layers into stages; `context` splits sequences."""
    strategy: Annotated[str, OneOf(STRATEGIES)] = "fsdp"
    """State sharded over data-parallel devices. ddp: none; zero1: optimizer state; zero2: also gradients; fsdp: also
    parameters."""
    reduce: Literal["auto", "microbatch", "step"] = "auto"
    """Time of the gradient reduction under accumulation. auto: once per step with ddp and zero1, after each microbatch
    with zero2 and fsdp. step with zero2 or fsdp: once per step, which keeps unsharded gradients on every device."""
    reshard_after_forward: bool = True
    """false, with fsdp: gather parameters once a step and keep them to its end (FSDP2's option of this name). Saves a
    third of the traffic, more under accumulation, and costs the memory of the full model in the compute dtype."""
    bucket_mb: NotNegative = 0.0
    """Size in MB up to which gradients or parameters are sent together: DDP's bucket_cap_mb, XLA's combine thresholds
    on GPUs. FSDP2 sends block by block. 0: the backend's default."""
    overlap: bool = False
    """Overlap communication with computation: XLA's latency-hiding scheduler and pipelined collectives on GPUs, FSDP2's
    prefetch of the next block's weights. DDP always overlaps."""
    sequence: bool = False
    """Sequence parallelism (arXiv:2205.05198): norms and the residual stream are split over time on the axis tensor.
    Sends the bytes of plain tensor parallelism, with less memory."""
    batch_norm: Literal["global", "replica"] = "global"
    """Statistics of a batch norm. global: over the microbatch on all devices (torch's SyncBatchNorm); replica: over
    each device's own rows, as under plain DDP, with the first device's running statistics."""
    context: Literal["ring", "ulysses"] = "ring"
    """Attention on the mesh axis context, which splits sequences. ring: keys and values are passed around
    (arXiv:2310.01889); ulysses: an all-to-all exchanges heads for times (arXiv:2309.14509), and the axis must divide
    the kv heads."""
    pipeline_schedule: Annotated[Literal["GPipe", "1F1B", "Interleaved1F1B"], pydantic.BeforeValidator(_schedule)] = (
        "1F1B"
    )
    """Order of forward and backward passes of train.accumulation microbatches on the mesh axis pipeline, named as in
    torch.distributed.pipelining. GPipe: all forward passes first (arXiv:1811.06965); 1F1B: each backward pass as early
    as possible, so that memory does not grow with the number of microbatches (arXiv:2104.04473); Interleaved1F1B: 1F1B
    over virtual_stages stages per device."""
    virtual_stages: Count = 1
    """Interleaved1F1B: number of stages on each device; divides the pipeline bubble by this number."""

    @model_validator(mode="after")
    def _fit_the_strategy(self) -> "Parallel":
        if self.reduce == "microbatch" and not self.row.gradients:
            raise ValueError(
                f"parallel.reduce = microbatch with parallel.strategy = {self.strategy} would only repeat the "
                "sum; use parallel.reduce = auto, or parallel.strategy = zero2 or fsdp"
            )
        if not self.reshard_after_forward and not self.row.reshards:
            raise ValueError(
                f"parallel.reshard_after_forward = false with parallel.strategy = {self.strategy}: only fsdp gathers "
                "parameters that it could keep; leave it out, or use parallel.strategy = fsdp"
            )
        if (self.virtual_stages > 1) != (self.pipeline_schedule == "Interleaved1F1B"):
            raise ValueError(
                f"parallel.virtual_stages = {self.virtual_stages} with parallel.pipeline_schedule = "
                f"{self.pipeline_schedule}: Interleaved1F1B has several virtual stages, the other schedules have one; "
                "use "
                + (
                    "parallel.pipeline_schedule = Interleaved1F1B"
                    if self.virtual_stages > 1
                    else "parallel.virtual_stages = 2, or parallel.pipeline_schedule = 1F1B"
                )
            )
        return self

    @property
    def row(self) -> Strategy:
        """The strategy's row."""
        return STRATEGIES[self.strategy]

    @property
    def once(self) -> bool:
        """Whether gradients cross devices once a step, unsharded until then."""
        return not self.row.gradients or self.reduce == "step"

    @property
    def reshards(self) -> bool:
        """Whether parameters are gathered each time they are used, and given back after it."""
        return self.row.reshards and self.reshard_after_forward

    @property
    def sized(self) -> bool:
        """Whether the mesh says the size of all axes; else the devices that are there do."""
        return "-1" not in self.mesh

    def mesh_of(self, devices: int) -> str:
        """The mesh of as many devices that split the batch alone, as --mesh takes it."""
        return written({"fsdp" if self.row.optimizer else "data": devices})

    def axes(self, devices: int | None = None) -> dict[str, int]:
        """Sizes of the mesh axes, all of them. `devices` fills an axis of -1.

        Raises ConfigError for a malformed, repeated or unknown axis and for sizes that cannot be.
        """
        sizes = dict.fromkeys(AXES, 1)
        field = f"parallel.mesh = {shown(self.mesh)}"
        if "=" in self.mesh:
            sizes_by_axis = [part.partition("=")[::2] for part in self.mesh.split(",")]
            for axis in (names := [axis.strip() for axis, _ in sizes_by_axis]):
                if axis not in AXES:
                    ours = AXIS_NAMES.get(plain(axis))
                    hint = f"{axis} is {ours} here" if ours else nearest(axis, AXES)
                    raise ConfigError(f"{field}: unknown axis {shown(axis)}; {hint}")
                if names.count(axis) > 1:
                    raise ConfigError(f"{field}: axis {axis!r} is given twice; give it once")
        else:
            batch_axis = "fsdp" if self.row.optimizer else "data"
            parts = self.mesh.split("x")
            if len(parts) > 2:
                raise ConfigError(f"{field}: name the axes of a mesh of three or more, as data=2,fsdp=2,tensor=2")
            sizes_by_axis = list(zip((batch_axis, "tensor"), parts, strict=False))
        for axis, text in sizes_by_axis:
            try:
                size = int(text)
            except ValueError:
                size = 0
            if size < 1 and size != -1:
                raise ConfigError(
                    f"{field}: size {shown(text)} of axis {axis.strip()!r} must be a number from 1, or -1"
                )
            sizes[axis.strip()] = size
        if list(sizes.values()).count(-1) > 1:
            raise ConfigError(
                f"{field}: only one axis can be -1; give the sizes of the others, as --mesh {written(sizes, one=True)}"
            )
        if -1 in sizes.values():
            known = -math.prod(sizes.values())
            if devices is None:
                raise ConfigError(f"{field}: -1 needs a known number of devices; write the size out")
            if devices % known:
                raise ConfigError(
                    f"{field}: {devices} devices are not a multiple of {known}; give sizes that divide {devices}, as "
                    f"--mesh {resized(sizes, [axis for axis in AXES if sizes[axis] > 1], devices)}"
                )
            sizes = {axis: devices // known if size == -1 else size for axis, size in sizes.items()}
        if not self.row.optimizer and sizes["fsdp"] > 1:
            named = written(sizes | {"data": sizes["data"] * sizes["fsdp"], "fsdp": 1})
            raise ConfigError(
                f"{field}: parallel.strategy = {self.strategy} shards nothing; name the axis data, not fsdp: "
                f"--mesh {named}"
            )
        if self.row.optimizer and sizes["fsdp"] * sizes["expert"] * sizes["context"] == 1 and sizes["data"] > 1:
            named = written(sizes | {"fsdp": sizes["data"], "data": 1})
            raise ConfigError(
                f"{field}: parallel.strategy = {self.strategy} shards over the axis fsdp, which has size 1; "
                f"use --mesh {named}, or --strategy ddp"
            )
        return sizes


def written(sizes: Mapping[str, int], one: bool = False) -> str:
    """The axes of a mesh as --mesh takes them. `one`: only the first -1 stays, the others become 1."""
    left = [axis for axis, size in sizes.items() if size == -1][one:]
    kept = {axis: 1 if one and axis in left else size for axis, size in sizes.items() if size != 1}
    return ",".join(f"{axis}={size}" for axis, size in kept.items()) or "1x1"


def resized(sizes: Mapping[str, int], over: Sequence[str], count: int) -> str:
    """The mesh, as --mesh takes it, with axes of `over` made smaller, the last ones first, until they divide `count`
    together."""
    fitting = dict(sizes)
    for axis in reversed(over):
        others = math.prod(fitting[other] for other in over if other != axis)
        divides = [size for size in range(1, fitting[axis] + 1) if count % (others * size) == 0]
        fitting[axis] = max(divides, default=1)
        if divides:
            break
    return written(fitting)
