"""Bytes on the wire: counted from the program that runs, and the least that its strategy could send.

Both are bytes that one device sends per step with ring algorithms over n devices: all-gather and reduce-scatter
(n-1)/n of the whole array, all-reduce twice that. The count is taken from the jaxpr, not from compiled HLO, because
XLA's CPU backend widens bfloat16 collectives to float32; in float32 both agree to the byte (`traffic_test.py`).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval

from jaxdist.config import Experiment, Mixture, ResNet
from jaxdist.parallel.pipeline import Timetable
from jaxdist.parallel.sharding import BLOCKS, TOKENS, Layout, strategy

Attends = Any  # a decoder's config
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
    """All collectives of a step of one kind; `bytes` is what a device sends. `single`: sums of one number each, as of
    the loss, a count or the norm."""

    op: str
    axis: str
    dtype: str
    single: bool
    count: int
    bytes: float


def ring_bytes(op: str, whole: float, n: int) -> float:
    """Bytes a device sends for one collective over n devices; `whole` is the unsharded array's size in bytes.

    Of permute and all_to_all `whole` is what one device holds.
    """
    return whole if op == "permute" else (2 if op == "all_reduce" else 1) * whole * (n - 1) / n


def count(closed: Any) -> list[Collective]:
    """The collectives of a traced program (`jit(f).trace(...).jaxpr`), scans multiplied out, groups of one left out."""
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    sent: dict[tuple[str, str, str, bool], float] = defaultdict(float)
    for equation, times, mesh in equations(closed):
        named = equation.params.get("axes", equation.params.get("axis_name"))
        names = [name for name in (named if isinstance(named, tuple) else (named,)) if mesh.get(name, 1) > 1]
        primitive = equation.primitive.name
        if not names or primitive in SILENT:
            continue
        if primitive not in KINDS:
            raise NotImplementedError(f"{primitive} over {names}: what it sends is not counted yet")
        op, n = KINDS[primitive], math.prod(mesh[name] for name in names)
        for before, after in zip(equation.invars, equation.outvars, strict=True):
            size, dtype = max(v.aval.size for v in (before, after)), before.aval.dtype
            key = op, "+".join(names), str(dtype), op == "all_reduce" and size == 1
            counts[key] += times
            sent[key] += times * ring_bytes(op, size * dtype.itemsize, n)
    return [Collective(*key, counts[key], sent[key]) for key in sorted(counts)]


def equations(closed: Any) -> Iterator[tuple[Any, int, Mapping[str, int]]]:
    """Each equation of a traced program that its results need: with how often it runs, and over which mesh."""
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    yield from walk(live, 1, {})


def walk(jaxpr: Any, times: int, mesh: Mapping[str, int]) -> Iterator[tuple[Any, int, Mapping[str, int]]]:
    """Each equation of a jaxpr, needed or not, those within it first."""
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
    """How often in a step a device goes through its blocks, `layers` of them at a time: so many times for `both` passes
    of a microbatch, and so many times `forward` alone, `told` if also through the head."""

    layers: int
    both: int
    forward: int
    told: bool

    @property
    def losses(self) -> int:
        """How often it goes through the head."""
        return self.both + self.forward * self.told


def passes(experiment: Experiment, mesh: Mapping[str, int]) -> Passes:
    """Of a pipeline one of either kind a tick (`parallel/pipeline.py`), since its backward pass computes a stage again;
    without one, both together a microbatch."""
    e, stages = experiment, mesh["pipeline"]
    if stages == 1:
        return Passes(e.model.layers, e.train.accumulation, 0, told=False)
    table = Timetable(stages, e.parallel.virtual_stages, e.train.accumulation)
    layers = e.model.layers // (stages * table.chunks)
    return Passes(layers, table.ticks, table.ticks, told=e.parallel.pipeline_schedule == "GPipe")


def least(experiment: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]) -> dict[str, float]:
    """Least bytes a device must send per step, by mesh axis: for parameters, and over tensor for activations.

    What all times need of each other is told at `least_of_attention`, what experts need at `least_of_experts`, what
    stages send each other at `least_of_stages`, what an update rule needs of whole parameters at `least_of_update`, and
    what batch norms do, the only activations of a ResNet that meet, at `least_of_statistics`.

    Per microbatch, A = B·T·D: two all-reduces a block forward and two backward, one more with full rematerialization,
    one for the embedding, one for the head, and three numbers a token for the loss. Under sequence parallelism each is
    a reduce-scatter and an all-gather, 2A(n-1)/n as before, and a block computed again gathers two more, A(n-1)/n each.
    A stage's forward pass by itself has two a block, and the embedding's; the loss computed again takes two numbers.
    """
    e, model, tensor, p = experiment, experiment.model, mesh["tensor"], passes(experiment, mesh)
    always = Counter(least_of_parameters(e, layouts, mesh)) + Counter(least_of_update(e, layouts, mesh))
    if isinstance(model, ResNet):
        return dict(always + Counter(least_of_statistics(e, layouts, mesh)))
    compute = ITEMSIZE[str(e.precision.compute)]
    tokens = tokens_of(e, mesh)
    again = recomputed(e) * p.layers
    summed_again = again if e.memory.remat == "full" else 0
    activation = tokens * model.dim * compute
    sums = p.both * (4 * p.layers + summed_again + 2) + p.forward * (2 * p.layers + 1)
    if not e.parallel.sequence:
        total = ring_bytes("all_reduce", activation * sums, tensor)
    else:
        entered = p.both * (4 * p.layers + 2 * again + 2) + p.forward * (2 * p.layers + p.told)
        total = ring_bytes("reduce_scatter", activation * sums, tensor)
        total += ring_bytes("all_gather", activation * entered, tensor)
    numbers = 3 * p.losses - p.both * p.told
    total += ring_bytes("all_reduce", numbers * tokens * max(compute, 4), tensor)
    used = {"positions": e.data.sequence, "layers": p.layers}  # all of any other axis
    summed = sum(
        math.prod(used.get(axis, size) for axis, size in zip(layout.axes, layout.shape, strict=True))
        for layout in layouts.values()
        if partial_over_tensor(e, layout)
    )
    total += ring_bytes("all_reduce", summed * max(compute, 4) * p.both, tensor)
    found = always + Counter({"tensor": total})
    found += Counter({"context": least_of_attention(e, model, mesh)})
    found += Counter({"pipeline": least_of_stages(e, model, mesh)})
    return dict(found + Counter(least_of_experts(e, mesh)))


def tokens_of(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """Tokens of a microbatch on one device, or images."""
    e = experiment
    return e.train.batch * e.per_row / math.prod(mesh[axis] for axis in TOKENS) / e.train.accumulation


def least_of_stages(experiment: Experiment, model: Attends, mesh: Mapping[str, int]) -> float:
    """Least bytes a device must send per step for microbatches to go through the stages, and their gradients back:
    those of the residual once a tick of either pass, 2(Mv + S-1)·B·T·D; a mixture's tally goes along."""
    e, m = experiment, model
    if mesh["pipeline"] == 1:
        return 0.0
    compute, p = ITEMSIZE[str(e.precision.compute)], passes(experiment, mesh)
    numbers = tokens_of(e, mesh) * m.dim / (mesh["tensor"] if e.parallel.sequence else 1)
    tally = 2 * m.experts * max(compute, 4) if isinstance(m, Mixture) else 0
    return (p.both + p.forward) * (numbers * compute + tally)


def least_of_statistics(
    experiment: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]
) -> dict[str, float]:
    """Least bytes a device must send per step for batch norms, by mesh axis.

    Global: of each microbatch mean and variance, and backward their gradients, 4C numbers a batch norm. Of a replica's
    own the first's running statistics are sent to the others, once a step.
    """
    e, wide = experiment, max(ITEMSIZE[str(experiment.precision.compute)], 4)
    running = max(ITEMSIZE[str(e.precision.parameters)], 4)
    statistics = [math.prod(layout.shape) for layout in layouts.values() if layout.statistic]
    counts = statistics.count(1)
    sums = 2 * (sum(statistics) - counts) * wide * e.train.accumulation
    kept = (sum(statistics) - counts) * running + counts * 4
    size = sums if e.parallel.batch_norm == "global" else kept
    return {first(mesh, TOKENS): ring_bytes("all_reduce", size, math.prod(mesh[axis] for axis in TOKENS))}


def first(mesh: Mapping[str, int], axes: Sequence[str]) -> str:
    """Of axes that are crossed at once, the one that it counts as."""
    return next((axis for axis in axes if mesh[axis] > 1), axes[0])


def least_of_attention(experiment: Experiment, model: Attends, mesh: Mapping[str, int]) -> float:
    """Least bytes a device must send per step for all times to meet, as `parallel/context.py` says of each block.

    What is computed again sends again; the ring's gradients of keys and values travel in float32 or wider.
    """
    e, m, n, p = experiment, model, mesh["context"], passes(experiment, mesh)
    if n == 1:
        return 0.0
    compute, again = ITEMSIZE[str(e.precision.compute)], recomputed(e) * p.layers
    tokens = tokens_of(e, mesh) * n
    queries, keys = (tokens * heads * m.head_dim / mesh["tensor"] for heads in (m.heads, 2 * m.kv_heads))
    times = p.both * (2 * p.layers + again) + p.forward * p.layers
    if e.parallel.context == "ulysses":
        return times * ring_bytes("all_to_all", (2 * queries + keys) / n * compute, n)
    return times * ring_bytes("all_gather", keys * compute, n) + p.both * p.layers * keys * max(compute, 4)


def least_of_experts(experiment: Experiment, mesh: Mapping[str, int]) -> dict[str, float]:
    """Least bytes a device must send per step for tokens and experts to meet, by mesh axis.

    Over expert, n devices, what `parallel/experts.py` says of each block: x of the group's tokens and their k weights
    and choices are gathered, results scattered; backward x, weights and results again. Where it is computed again, x,
    weights and choices are gathered once more. With a capacity, boxes there and back, forward, backward and again, and
    over context the choices of all times.

    Over tensor the gradients of the k weights are summed, or under sequence parallelism weights and choices gathered
    and gradients scattered. A microbatch's tallies cross all axes: E counts, and over tensor 2E sums under sequence.
    """
    e, m, n, tensor, p = experiment, experiment.model, mesh["expert"], mesh["tensor"], passes(experiment, mesh)
    if not isinstance(m, Mixture):
        return {}
    compute, tokens = ITEMSIZE[str(e.precision.compute)], tokens_of(e, mesh)
    wide, blocks, forward = max(compute, 4), p.both * p.layers, p.forward * p.layers
    again = recomputed(e) * blocks + forward
    x, weights, chosen = tokens * m.dim * compute, tokens * m.top_k * wide, tokens * m.top_k * 4
    if m.capacity:
        times = e.data.sequence // mesh["context"]
        boxes = tokens / times * m.experts * min(m.room(e.data.sequence), times) * m.dim * compute
        dispatched = ring_bytes("all_to_all", (4 * blocks + 2 * again) * boxes, n)
    else:
        gathered = (blocks + again) * (x + weights + chosen) + (blocks + forward) * x
        dispatched = ring_bytes("all_gather", (gathered + blocks * (2 * x + weights)) * n, n)
    tallies = 2 * m.experts * wide * p.losses
    everywhere = ring_bytes("all_reduce", tallies / 2, math.prod(mesh[axis] for axis in TOKENS))
    if e.parallel.sequence:
        entered = ring_bytes("all_gather", (blocks + again) * (weights + chosen) + blocks * weights, tensor)
        entered += ring_bytes("all_reduce", tallies, tensor)
    else:
        entered = ring_bytes("all_reduce", blocks * weights, tensor)
    found = Counter({"expert": dispatched}) + Counter({"tensor": entered}) + Counter({first(mesh, TOKENS): everywhere})
    return dict(found + Counter({"context": least_of_choices(e, mesh)}))


def least_of_choices(experiment: Experiment, mesh: Mapping[str, int]) -> float:
    """Least bytes a device must send per step over context where an expert has room for so many of a whole sequence:
    a number of 4 bytes for each of a token's experts, forward and where it is computed again."""
    m, n, p = experiment.model, mesh["context"], passes(experiment, mesh)
    if not isinstance(m, Mixture) or not m.capacity:
        return 0.0
    times = p.both * p.layers * (1 + recomputed(experiment)) + p.forward * p.layers
    return times * ring_bytes("all_gather", tokens_of(experiment, mesh) * n * m.top_k * 4, n)


def partial_over_tensor(experiment: Experiment, layout: Layout) -> bool:
    """Whether a parameter is whole on each tensor device, which uses it for its own heads or times alone."""
    sequence = experiment.parallel.sequence and "tensor" not in layout.mesh_axes(False)
    return sequence or "head_dim" in layout.axes


def recomputed(experiment: Experiment) -> float:
    """The share of the blocks that the backward pass computes again."""
    memory = experiment.memory
    return 1 / memory.remat_every if memory.remat != "none" else 0.0


def least_of_parameters(
    experiment: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]
) -> dict[str, float]:
    """Least bytes a device must send per step for parameters and their gradients, by mesh axis.

    As `sharding.STRATEGIES` says, over 1/tensor of the parameters that tensor splits, and 1/expert of experts, which go
    over the other axes alone; what goes over several axes at once counts under the first of them. fsdp gathers each
    block forward and backward (its biases and scales only where it is recomputed) and the rest (embedding, last norm,
    head) once; or, where it does not reshard, all once a step. A replica axis adds one all-reduce of the fsdp pieces;
    of what is outside of the layers `pipeline` is one. A pipeline passes through a chunk of its blocks at a time, and
    through embedding and head with each; GPipe's backward passes, a derivative, gather those once.
    """
    e, row, p = experiment, strategy(experiment.parallel), passes(experiment, mesh)
    chunks = e.parallel.virtual_stages if mesh["pipeline"] > 1 else 1
    compute, reduced = ITEMSIZE[str(e.precision.compute)], ITEMSIZE[str(e.precision.reduce)]
    at_rest = ITEMSIZE[str(e.precision.parameters)]
    total: dict[str, float] = defaultdict(float)
    for layout in (layout for layout in layouts.values() if not layout.statistic):
        cut, stacked = layout.shard_dim, "layers" in layout.axes
        sums = layout.reduce_axes, cut.replicas, cut.axes or cut.replicas
        everywhere, alike, shards = (first(mesh, axes) for axes in sums)
        replicas, n = (math.prod(mesh[axis] for axis in axes) for axes in (cut.replicas, cut.axes))
        size = math.prod(layout.shape) / math.prod(mesh[axis] for axis in layout.model_axes)
        if not row.optimizer:
            total[everywhere] += ring_bytes("all_reduce", size * reduced, replicas * n)
            continue
        total[alike] += ring_bytes("all_reduce", size / n * reduced, replicas)
        part = size / chunks if stacked else size  # of a pass
        scattered = part * p.both if row.gradients else size
        total[shards] += ring_bytes("reduce_scatter", scattered * reduced, n)
        if row.parameters:
            # For the backward pass; a bias or scale, once spread over the tokens, is kept until then.
            again = 0.0 if not layout.name.startswith(BLOCKS) else 1.0 if layout.decays else recomputed(e)
            forward = p.forward if p.told or stacked or not layout.name.startswith(HEAD) else 0
            both = 1 if p.told and not stacked else p.both
            gathered = part * ((1 + again) * both + forward) if row.reshards else size
            total[shards] += ring_bytes("all_gather", gathered * compute, n)
        else:
            total[shards] += ring_bytes("all_gather", size * at_rest, n)
    return {axis: size for axis, size in total.items() if size}


def least_of_update(experiment: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes that a device sends per step for what an update rule asks of whole parameters, by mesh axis."""
    total: Counter[str] = Counter()
    for op, axes, size in of_update(experiment, layouts, mesh):
        total[first(mesh, axes)] += ring_bytes(op, size, math.prod(mesh[axis] for axis in axes))  # type: ignore[assignment]
    return {axis: size for axis, size in total.items() if size}


def of_update(
    experiment: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Each parameter's collectives in an update (`jaxdist/training/matrices.py`): name, axes and bytes.

    adafactor: means of squares over columns and rows, and of the former over rows, and the size of the parameter and of
    its update. muon: each matrix of a block to one device and back, as many as the devices divide.
    """
    e, sharded = experiment, strategy(experiment.parallel).optimizer
    for layout in (layout for layout in layouts.values() if not layout.statistic):
        split, own = layout.split(sharded), layout.local_shape(mesh, sharded)
        if e.optimizer.name == "muon" and layout.role.inner:
            ways = math.prod(mesh[axis] for axes in split[-2:] for axis in axes)
            matrices = -(-math.prod(own[:-2]) // ways) * ways
            size = matrices * math.prod(own[-2:]) * ITEMSIZE[str(e.precision.compute)]
            yield from (("all_to_all", axes, size) for axes in split[-2:] * 2 if axes)
        if e.optimizer.name == "adafactor":
            every = [dim for dim, axis in enumerate(layout.axes) if axis != "layers"]
            rows, columns = (dim % len(own) for dim in layout.matrix)
            # What a mean is taken over, and what of a matrix is one number by then.
            factors = [([columns], []), ([rows], []), ([rows], [columns])] if layout.decays else []
            for dims, one in [(every, []), (every, []), *factors]:
                left = math.prod(size for dim, size in enumerate(own) if dim not in (*dims, *one))
                if axes := tuple(axis for dim in dims for axis in split[dim]):
                    yield "all_reduce", axes, left * ITEMSIZE[str(e.precision.parameters)]
