"""Bytes on the wire: counted from the program that runs, and the least that parameters take in any family.

A family's `exchanges` (`forms.py`) state its other traffic. Bytes are those that one device sends per step with ring
algorithms over n devices: all-gather and reduce-scatter (n-1)/n of the full array, all-reduce twice that. The count is
taken from the jaxpr, not from compiled HLO, because XLA's CPU backend widens bfloat16 collectives to float32; in
float32 both agree to the byte (`traffic_test.py`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from jaxdist.config import Experiment
from jaxdist.config.optimizer import OPTIMIZERS
from jaxdist.config.plugins import optional, running
from jaxdist.parallel.pipeline import Timetable
from jaxdist.parallel.sharding import BLOCKS, TOKENS, ParamSpec, strategy

KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "ppermute": "permute",
    "all_to_all": "all_to_all",
}
SILENT = {"axis_index", "pvary", "pcast"}  # name an axis and send nothing


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind in a step; `bytes` is the number that a device sends. `single`: sums of one number
    each, as of the loss, a count or the norm."""

    op: str
    axis: str
    dtype: str
    single: bool
    count: int
    bytes: float


def ring_bytes(op: str, full: float, n: int) -> float:
    """Bytes a device sends for one collective over n devices; `full` is the unsharded array's size in bytes.

    Of permute and all_to_all, `full` is what one device holds.
    """
    return full if op == "permute" else (2 if op == "all_reduce" else 1) * full * (n - 1) / n


def count(closed: Any) -> list[Collective]:
    """Collectives of a traced program (`jit(f).trace(...).jaxpr`), with scans multiplied out, without groups of one
    device."""
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    sent: dict[tuple[str, str, str, bool], float] = defaultdict(float)
    for equation, times, mesh in equations(closed):
        named = equation.params.get("axes", equation.params.get("axis_name"))
        names = [name for name in (named if isinstance(named, tuple) else (named,)) if mesh.get(name, 1) > 1]
        primitive = equation.primitive.name
        if not names or primitive in SILENT:
            continue
        if primitive not in KINDS:
            raise NotImplementedError(f"{primitive} over {names}: its bytes are not counted yet")
        op, n = KINDS[primitive], math.prod(mesh[name] for name in names)
        for before, after in zip(equation.invars, equation.outvars, strict=True):
            size, dtype = max(v.aval.size for v in (before, after)), before.aval.dtype
            key = op, "+".join(names), str(dtype), op == "all_reduce" and size == 1
            counts[key] += times
            sent[key] += times * ring_bytes(op, size * dtype.itemsize, n)
    return [Collective(*key, counts[key], sent[key]) for key in sorted(counts)]


def equations(closed: Any) -> Iterator[tuple[Any, int, Mapping[str, int]]]:
    """Equations that the results of a traced program depend on, with the number of executions and the mesh."""
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    yield from walk(live, 1, {})


def walk(jaxpr: Any, times: int, mesh: Mapping[str, int]) -> Iterator[tuple[Any, int, Mapping[str, int]]]:
    """All equations of a jaxpr, inner ones first."""
    for equation in jaxpr.eqns:
        parameters, primitive = equation.params, equation.primitive.name
        repeats = times * (parameters["length"] if primitive == "scan" else 1)
        inner = dict(parameters["mesh"].shape) if primitive == "shard_map" else mesh
        for value in parameters.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    yield from walk(getattr(part, "jaxpr", part), repeats, inner)
        yield equation, times, mesh


HEAD = ("norm.", "lm_head.")  # what the names of parameters begin with that come after the blocks
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Passes:
    """Passes of a device through its blocks in a step, `layers` of them at a time: the number of forward and backward
    passes together (`both`), and of forward passes alone (`forward`), which include the head where `through_head`."""

    layers: int
    both: int
    forward: int
    through_head: bool

    @property
    def losses(self) -> int:
        """Number of passes through the head."""
        return self.both + self.forward * self.through_head


def passes(experiment: Experiment, mesh: Mapping[str, int]) -> Passes:
    """Passes of a step: without a pipeline both together per microbatch; in a pipeline (`parallel/pipeline.py`) one of
    either kind per tick, since its backward pass computes a stage again."""
    e, stages = experiment, mesh["pipeline"]
    if stages == 1:
        return Passes(e.model.layers, e.train.accumulation, 0, through_head=False)
    table = Timetable(stages, e.parallel.virtual_stages, e.train.accumulation)
    layers = e.model.layers // (stages * table.chunks)
    return Passes(layers, table.ticks, table.ticks, through_head=e.parallel.pipeline_schedule == "GPipe")


def tokens_of(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """Number of tokens or images of a microbatch on one device."""
    e = experiment
    return e.train.batch * e.per_row / math.prod(mesh[axis] for axis in TOKENS) / e.train.accumulation


def first(mesh: Mapping[str, int], axes: Sequence[str]) -> str:
    """The axis under which a collective over several axes is counted."""
    return next((axis for axis in axes if mesh[axis] > 1), axes[0])


def recomputed(experiment: Experiment) -> float:
    """Share of the blocks that the backward pass recomputes."""
    memory = experiment.memory
    return 1 / memory.remat_every if memory.remat != "none" else 0.0


def least_of_parameters(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> dict[str, float]:
    """Least bytes a device must send per step for parameters and their gradients, by mesh axis.

    As `config/strategies.py` says, over 1/tensor of the parameters that tensor splits, and 1/expert of experts, which
    go over the other axes alone; what goes over several axes at once counts under the first of them. fsdp gathers each
    block forward and backward (its biases and scales only where it is recomputed) and the rest (embedding, last norm,
    head) once; or, where it does not reshard, all once a step. A replica axis adds one all-reduce of the fsdp pieces;
    of what is outside of the layers `pipeline` is one. A pipeline passes through a chunk of its blocks at a time, and
    through embedding and head with each; GPipe's backward passes gather those again, as `not_before` ties each tick's
    gathers to its tick.
    """
    e, row, p = experiment, strategy(experiment.parallel), passes(experiment, mesh)
    chunks = e.parallel.virtual_stages if mesh["pipeline"] > 1 else 1
    compute, reduced = ITEMSIZE[str(e.precision.compute)], ITEMSIZE[str(e.precision.reduce)]
    param_itemsize = ITEMSIZE[str(e.precision.parameters)]
    total: dict[str, float] = defaultdict(float)
    for spec in (spec for spec in param_specs.values() if not spec.statistic):
        cut, stacked = spec.shard_dim, "layers" in spec.axes
        sums = spec.reduce_axes, cut.replicas, cut.axes or cut.replicas
        everywhere, alike, shards = (first(mesh, axes) for axes in sums)
        replicas, n = (math.prod(mesh[axis] for axis in axes) for axes in (cut.replicas, cut.axes))
        size = math.prod(spec.shape) / math.prod(mesh[axis] for axis in spec.model_axes)
        if not row.optimizer:
            total[everywhere] += ring_bytes("all_reduce", size * reduced, replicas * n)
            continue
        total[alike] += ring_bytes("all_reduce", size / n * reduced, replicas)
        part = size / chunks if stacked else size  # of a pass
        scattered = part * p.both if row.gradients else size
        total[shards] += ring_bytes("reduce_scatter", scattered * reduced, n)
        if row.parameters:
            # For the backward pass; a bias or scale, once spread over the tokens, is kept until then.
            again = 0.0 if not spec.name.startswith(BLOCKS) else 1.0 if spec.decays else recomputed(e)
            forward = p.forward if p.through_head or stacked or not spec.name.startswith(HEAD) else 0
            gathered = part * ((1 + again) * p.both + forward) if row.reshards else size
            total[shards] += ring_bytes("all_gather", gathered * compute, n)
        else:
            total[shards] += ring_bytes("all_gather", size * param_itemsize, n)
    return {axis: size for axis, size in total.items() if size}


def update_is_known(experiment: Experiment, mesh: Mapping[str, int]) -> bool:
    """Whether the traffic of the update rule is known: of an elementwise one, by its closed form, or on one device."""
    o = experiment.optimizer
    return o.elementwise or OPTIMIZERS[o.name].traffic is not None or math.prod(mesh.values()) == 1


def least_of_update(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> dict[str, float]:
    """Bytes that a device sends per step for the update rule, by mesh axis."""
    total: Counter[str] = Counter()
    for op, axes, size in update_traffic(experiment, param_specs, mesh):
        total[first(mesh, axes)] += ring_bytes(op, size, math.prod(mesh[axis] for axis in axes))  # type: ignore[assignment]
    return {axis: size for axis, size in total.items() if size}


def update_traffic(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Collectives of each parameter in an update (`jaxdist/training/matrices.py`): name, axes and bytes."""
    if (of_rule := optional(OPTIMIZERS, experiment.optimizer.name, "traffic")) is None:
        return
    with running(OPTIMIZERS, experiment.optimizer.name, "traffic"):
        for spec in (spec for spec in param_specs.values() if not spec.statistic):
            yield from of_rule(experiment, spec, mesh)


Sent = Iterator[tuple[str, tuple[str, ...], float]]


def muon_traffic(e: Experiment, spec: ParamSpec, mesh: Mapping[str, int]) -> Sent:
    """Each matrix of a block goes to one device and back, their number rounded up to a multiple of the devices."""
    split, own = _pieces(e, spec, mesh)
    if spec.role.inner:
        ways = math.prod(mesh[axis] for axes in split[-2:] for axis in axes)
        matrices = -(-math.prod(own[:-2]) // ways) * ways
        size = matrices * math.prod(own[-2:]) * ITEMSIZE[str(e.precision.compute)]
        yield from (("all_to_all", axes, size) for axes in split[-2:] * 2 if axes)


def adafactor_traffic(e: Experiment, spec: ParamSpec, mesh: Mapping[str, int]) -> Sent:
    """Means of squares over columns and rows, mean of the former over rows, and sizes of the parameter and of its
    update."""
    split, own = _pieces(e, spec, mesh)
    every = [dim for dim, axis in enumerate(spec.axes) if axis != "layers"]
    rows, columns = (dim % len(own) for dim in spec.matrix)
    # Dimensions that a mean is taken over, and dimensions of a matrix that are reduced by then.
    factors = [([columns], []), ([rows], []), ([rows], [columns])] if spec.decays else []
    for dims, one in [(every, []), (every, []), *factors]:
        left = math.prod(size for dim, size in enumerate(own) if dim not in (*dims, *one))
        if axes := tuple(axis for dim in dims for axis in split[dim]):
            yield "all_reduce", axes, left * ITEMSIZE[str(e.precision.parameters)]


def _pieces(
    e: Experiment, spec: ParamSpec, mesh: Mapping[str, int]
) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """The mesh axes that split each dimension of an optimizer's state, and the shape of one device's piece."""
    sharded = strategy(e.parallel).optimizer
    return spec.split(sharded), spec.local_shape(mesh, sharded)
