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

from jaxdist.config import GPT2, Experiment, Llama, Mixture, ResNet
from jaxdist.sharding import BATCH, BLOCKS, TOKENS, Layout, strategy

Attends = Llama | GPT2 | Mixture
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
    """All collectives of a step of one kind; `bytes` is what a device sends."""

    op: str
    axis: str
    dtype: str
    count: int
    bytes: float


def ring_bytes(op: str, whole: float, n: int) -> float:
    """Bytes a device sends for one collective over n devices; `whole` is the unsharded array's size in bytes.

    Of permute and all_to_all `whole` is what one device holds.
    """
    return whole if op == "permute" else (2 if op == "all_reduce" else 1) * whole * (n - 1) / n


def count(closed: Any) -> list[Collective]:
    """The collectives of a traced program (`jit(f).trace(...).jaxpr`), scans multiplied out, groups of one left out."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sent: dict[tuple[str, str, str], float] = defaultdict(float)
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
            key = op, "+".join(names), str(before.aval.dtype)
            whole = max(v.aval.size for v in (before, after)) * before.aval.dtype.itemsize
            counts[key] += times
            sent[key] += times * ring_bytes(op, whole, n)
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


ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def least(experiment: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]) -> dict[str, float]:
    """Least bytes a device must send per step, by mesh axis: for parameters, and over tensor for activations.

    What all times need of each other is told at `least_of_attention`, what experts need at `least_of_experts`, and
    what batch norms do, the only activations of a ResNet that meet, at `least_of_statistics`.

    Per microbatch, A = B·T·D: two all-reduces a block forward and two backward, one more with full rematerialization,
    one for the embedding, one for the head, and three numbers a token for the loss. Under sequence parallelism each is
    a reduce-scatter and an all-gather, 2A(n-1)/n as before, and a block computed again gathers two more, A(n-1)/n each.
    """
    e, model, tensor = experiment, experiment.model, mesh["tensor"]
    if isinstance(model, ResNet):
        return dict(Counter(least_of_parameters(e, layouts, mesh)) + Counter(least_of_statistics(e, layouts, mesh)))
    compute = ITEMSIZE[str(e.precision.compute)]
    tokens = e.train.batch * e.data.sequence / math.prod(mesh[axis] for axis in TOKENS)  # all microbatches together
    again = recomputed(e) * model.layers
    summed_again = again if e.memory.remat == "full" else 0
    activation = tokens * model.dim * compute
    if not e.parallel.sequence:
        total = ring_bytes("all_reduce", activation * (4 * model.layers + summed_again + 2), tensor)
    else:
        total = ring_bytes("reduce_scatter", activation * (4 * model.layers + summed_again + 2), tensor)
        total += ring_bytes("all_gather", activation * (4 * model.layers + 2 * again + 2), tensor)
    total += ring_bytes("all_reduce", 3 * tokens * max(compute, 4), tensor)
    used = {"positions": e.data.sequence}  # all of any other axis
    summed = sum(
        math.prod(used.get(axis, size) for axis, size in zip(layout.axes, layout.shape, strict=True))
        for layout in layouts.values()
        if partial_over_tensor(e, layout)
    )
    total += ring_bytes("all_reduce", summed * max(compute, 4) * e.train.accumulation, tensor)
    found = Counter(least_of_parameters(e, layouts, mesh)) + Counter({"tensor": total})
    found += Counter({"context": least_of_attention(e, model, mesh)})
    return dict(found + Counter(least_of_experts(e, mesh)))


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
    e, m, n = experiment, model, mesh["context"]
    if n == 1:
        return 0.0
    compute, again = ITEMSIZE[str(e.precision.compute)], recomputed(e) * m.layers
    tokens = e.train.batch * e.data.sequence / math.prod(mesh[axis] for axis in BATCH)
    queries, keys = (tokens * heads * m.head_dim / mesh["tensor"] for heads in (m.heads, 2 * m.kv_heads))
    if e.parallel.context == "ulysses":
        return (2 * m.layers + again) * ring_bytes("all_to_all", (2 * queries + keys) / n * compute, n)
    around = ring_bytes("all_gather", keys * compute, n)
    return (2 * m.layers + again) * around + m.layers * keys * max(compute, 4)


def least_of_experts(experiment: Experiment, mesh: Mapping[str, int]) -> dict[str, float]:
    """Least bytes a device must send per step for tokens and experts to meet, by mesh axis.

    Over expert, n devices, what `parallel/experts.py` says of each block: x of the group's tokens and their k weights
    and choices are gathered, results scattered; backward x, weights and results again. Where it is computed again, x,
    weights and choices are gathered once more. With a capacity, boxes there and back, forward, backward and again.

    Over tensor the gradients of the k weights are summed, or under sequence parallelism weights and choices gathered
    and gradients scattered. A microbatch's tallies cross all axes: E counts, and over tensor 2E sums under sequence.
    """
    e, m, n, tensor = experiment, experiment.model, mesh["expert"], mesh["tensor"]
    if not isinstance(m, Mixture):
        return {}
    compute, again = ITEMSIZE[str(e.precision.compute)], recomputed(e) * m.layers
    wide, rows = max(compute, 4), e.train.batch / math.prod(mesh[axis] for axis in BATCH)
    tokens = rows * e.data.sequence / mesh["context"]
    x, weights, chosen = tokens * m.dim * compute, tokens * m.top_k * wide, tokens * m.top_k * 4
    if m.capacity:
        boxes = rows * m.experts * m.room(e.data.sequence) * m.dim * compute
        dispatched = ring_bytes("all_to_all", (4 * m.layers + 2 * again) * boxes, n)
    else:
        gathered = (m.layers + again) * (x + weights + chosen) + m.layers * x
        dispatched = ring_bytes("all_gather", (gathered + m.layers * (2 * x + weights)) * n, n)
    tallies = 2 * m.experts * wide * e.train.accumulation
    everywhere = ring_bytes("all_reduce", tallies / 2, math.prod(mesh[axis] for axis in TOKENS))
    if e.parallel.sequence:
        entered = ring_bytes("all_gather", (m.layers + again) * (weights + chosen) + m.layers * weights, tensor)
        entered += ring_bytes("all_reduce", tallies, tensor)
    else:
        entered = ring_bytes("all_reduce", m.layers * weights, tensor)
    return dict(
        Counter({"expert": dispatched}) + Counter({"tensor": entered}) + Counter({first(mesh, TOKENS): everywhere})
    )


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
    head) once; or, where it does not reshard, all once a step. A replica axis adds one all-reduce of the fsdp pieces.
    """
    e, row, m = experiment, strategy(experiment.parallel), experiment.train.accumulation
    compute, reduced = ITEMSIZE[str(e.precision.compute)], ITEMSIZE[str(e.precision.reduce)]
    at_rest = ITEMSIZE[str(e.precision.parameters)]
    total: dict[str, float] = defaultdict(float)
    for layout in layouts.values():
        if layout.statistic:
            continue
        everywhere, shards = first(mesh, layout.tokens), first(mesh, layout.cut.axes or layout.tokens)
        n = math.prod(mesh[axis] for axis in layout.cut.axes)
        size = math.prod(layout.shape) / math.prod(mesh[axis] for axis in layout.given)
        if not row.optimizer:
            total[everywhere] += ring_bytes(
                "all_reduce", size * reduced, math.prod(mesh[axis] for axis in layout.tokens)
            )
            continue
        copies = math.prod(mesh[axis] for axis in layout.cut.copies)
        total[first(mesh, layout.cut.copies)] += ring_bytes("all_reduce", size / n * reduced, copies)
        total[shards] += ring_bytes("reduce_scatter", size * reduced, n) * (m if row.gradients else 1)
        if row.parameters:
            # For the backward pass; a bias or scale, once spread over the tokens, is kept until then.
            again = 0.0 if not layout.name.startswith(BLOCKS) else 1.0 if layout.decays else recomputed(e)
            total[shards] += ring_bytes("all_gather", size * compute, n) * ((1 + again) * m if row.reshards else 1)
        else:
            total[shards] += ring_bytes("all_gather", size * at_rest, n)
    return {axis: size for axis, size in total.items() if size}
