"""Least bytes of a decoder's exchanges other than parameters, by mesh axis.

Bytes are those that one device sends with ring algorithms, as in `traffic.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxdist.accounting.traffic import ITEMSIZE, passes, recomputed, ring_bytes, tokens_of
from jaxdist.config import Experiment
from jaxdist.parallel.sharding import ParamSpec

ParamSpecs = Mapping[str, ParamSpec]
Mesh = Mapping[str, int]  # sizes of the mesh axes
Sent = Mapping[str, float]  # mesh axis -> bytes


def sums(experiment: Experiment, param_specs: ParamSpecs, mesh: Mesh) -> Sent:
    """Least bytes over tensor for activations.

    Per microbatch, A = B·T·D: two all-reduces a block forward and two backward, one more with full rematerialization,
    one for the embedding, one for the head, and three numbers a token for the loss. Under sequence parallelism each is
    a reduce-scatter and an all-gather, 2A(n-1)/n as before, and a block computed again gathers two more, A(n-1)/n each.
    A stage's forward pass by itself has two a block, and the embedding's; the loss computed again takes two numbers.
    Gradients of parameters that are replicated over tensor are summed too.
    """
    e, tensor, p = experiment, mesh["tensor"], passes(experiment, mesh)
    compute = ITEMSIZE[str(e.precision.compute)]
    tokens = tokens_of(e, mesh)
    again = recomputed(e) * p.layers
    summed_again = again if e.memory.remat == "full" else 0
    activation = tokens * e.model.dim * compute
    sums = p.both * (4 * p.layers + summed_again + 2) + p.forward * (2 * p.layers + 1)
    if not e.parallel.sequence:
        total = ring_bytes("all_reduce", activation * sums, tensor)
    else:
        entered = p.both * (4 * p.layers + 2 * again + 2) + p.forward * (2 * p.layers + p.through_head)
        total = ring_bytes("reduce_scatter", activation * sums, tensor)
        total += ring_bytes("all_gather", activation * entered, tensor)
    numbers = 3 * p.losses - p.both * p.through_head
    total += ring_bytes("all_reduce", numbers * tokens * max(compute, 4), tensor)
    used = {"positions": e.data.sequence, "layers": p.layers}  # all of any other axis
    summed = sum(
        math.prod(used.get(axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True))
        for spec in param_specs.values()
        if partial_over_tensor(e, spec)
    )
    return {"tensor": total + ring_bytes("all_reduce", summed * max(compute, 4) * p.both, tensor)}


def partial_over_tensor(experiment: Experiment, spec: ParamSpec) -> bool:
    """Whether the parameter is replicated over tensor and each device uses it for its own heads or times alone."""
    sequence = experiment.parallel.sequence and "tensor" not in spec.mesh_axes(False)
    return sequence or "head_dim" in spec.axes


def attention(experiment: Experiment, param_specs: ParamSpecs, mesh: Mesh) -> Sent:
    """Least bytes over context for all times to meet, as `parallel/context.py` says of each block.

    What is computed again sends again; the ring's gradients of keys and values travel in float32 or wider.
    """
    m: Any = experiment.model
    e, n, p = experiment, mesh["context"], passes(experiment, mesh)
    if n == 1:
        return {}
    compute, again = ITEMSIZE[str(e.precision.compute)], recomputed(e) * p.layers
    tokens = tokens_of(e, mesh) * n
    queries, keys = (tokens * heads * m.head_dim / mesh["tensor"] for heads in (m.heads, 2 * m.kv_heads))
    times = p.both * (2 * p.layers + again) + p.forward * p.layers
    if e.parallel.context == "ulysses":
        return {"context": times * ring_bytes("all_to_all", (2 * queries + keys) / n * compute, n)}
    size = times * ring_bytes("all_gather", keys * compute, n) + p.both * p.layers * keys * max(compute, 4)
    return {"context": size}


def stages(experiment: Experiment, param_specs: ParamSpecs, mesh: Mesh, tally: int = 0) -> Sent:
    """Least bytes over pipeline for microbatches to go through the stages, and their gradients back: those of the
    residual once a tick of either pass, 2(Mv + S-1)·B·T·D; `tally` numbers of float32 or wider go along."""
    e = experiment
    if mesh["pipeline"] == 1:
        return {}
    compute, p = ITEMSIZE[str(e.precision.compute)], passes(experiment, mesh)
    numbers = tokens_of(e, mesh) * e.model.dim / (mesh["tensor"] if e.parallel.sequence else 1)
    return {"pipeline": (p.both + p.forward) * (numbers * compute + tally * max(compute, 4))}


EXCHANGES = {"sums": sums, "attention": attention, "stages": stages}
