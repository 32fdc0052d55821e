"""Number of a step's collectives, by mesh axis and kind: the closed form of either side, besides that of their bytes.

JAX sends each parameter by itself, within the scan once a layer; FSDP2 a block at once, its experts by themselves where
the mesh splits them, and with one more what lies outside of the blocks; DDP full parameters up to a bucket's size;
ZeroRedundancyOptimizer each updated parameter.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from jaxdist.accounting import traffic
from jaxdist.accounting.exchanges import partial_over_tensor
from jaxdist.accounting.forms import accounting_of, least_bytes
from jaxdist.accounting.traffic import HEAD, ITEMSIZE, first, passes, ring_bytes
from jaxdist.config import Experiment
from jaxdist.parallel.sharding import BATCH, SHARDS, TOKENS, ParamSpec, strategy
from parity_tests.expected import pipeline_traffic
from parity_tests.expected.pipeline_traffic import Range
from parity_tests.runs.run import JAX, REFERENCES
from torch_ref.parallel.context import rings
from torch_ref.training.registry import OPTIMIZERS

TORCH, TRANSFORMERS = REFERENCES["torch"], REFERENCES["transformers"]
# torch's update rules that need full matrices: kind and most of the collectives over an axis per tensor.
UPDATES = {"muon": ("all_gather", 1), "adafactor": ("all_reduce", 5)}
SETTLED = 8  # broadcasts by which DDP settles what its buckets are
BUCKET = 25 * 2**20  # bytes of DDP's buckets, the first of which is smaller
LAST = "layers.mlp.down_proj.bias"  # the end of a block, whose output is not computed again
Sent = tuple[str, dict[str, Range]]  # an axis, and by op how many
Counts = dict[str, dict[str, Range]]


class Step(NamedTuple):
    """A step of a side, as its collectives depend on it."""

    side: str
    experiment: Experiment
    param_specs: Mapping[str, ParamSpec]
    mesh: Mapping[str, int]
    platform: str

    @property
    def ring(self) -> bool:
        """Whether torch's own ring attends."""
        return self.side == TORCH and rings(self.experiment, self.platform)

    @property
    def statistics(self) -> int:
        """Number of parameters that are not trained."""
        return sum(spec.statistic for spec in self.param_specs.values())


def lacking(e: Experiment, mesh: Mapping[str, int]) -> str:
    """The family or optimizer without a closed form of what a step sends, in words; empty where both have theirs."""
    if accounting_of(e.model).exchanges is None:
        return f"family {e.model.family}"
    return "" if traffic.update_is_known(e, mesh) else f"optimizer {e.optimizer.name}"


def uncounted(side: str, e: Experiment, mesh: Mapping[str, int]) -> str:
    """The optimizer whose rule needs full parameters on torch's side, in collectives of unknown number, in words;
    empty where they are known."""
    name = e.optimizer.name
    by_matrix = not e.optimizer.elementwise or (name in OPTIMIZERS and OPTIMIZERS[name].pieces)
    known = side == JAX or not by_matrix or name in UPDATES or math.prod(mesh.values()) == 1
    return "" if known else f"optimizer {name}"


def expected(
    side: str, e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int], platform: str = "cpu"
) -> Counts | None:
    """Collectives of a step by each axis of several devices. A collective over several at once counts as the first's.

    None where the family or the optimizer has no closed form, or the family one with an exchange that is not in
    EXCHANGES, or torch's side of the optimizer is not in UPDATES.
    """
    exchanges = accounting_of(e.model).exchanges
    if exchanges is None or not exchanges.keys() <= EXCHANGES.keys() or not traffic.update_is_known(e, mesh):
        return None
    if uncounted(side, e, mesh):
        return None
    step = Step(side, e, param_specs, mesh, platform)
    trained = {name: spec for name, spec in param_specs.items() if not spec.statistic}
    update = update_traffic(side, e, trained, mesh)
    if side != JAX and mesh["pipeline"] > 1:
        return together(pipeline_traffic.expected(e, param_specs, mesh), (*attention_traffic(step), *update))
    parameters = by_parameter(e, trained, mesh) if side == JAX else by_block(e, trained, mesh)
    activations = (sent for name in exchanges for sent in EXCHANGES[name](step))
    empty: Counts = {axis: {} for axis, size in mesh.items() if size > 1}
    return together(empty, (*activations, *norm_traffic(side, e, mesh), *update, *parameters))


def together(found: Counts, sent: Iterable[Sent]) -> Counts:
    """Counts with those that are `sent` over the same axes added."""
    for axis, ops in sent:
        for op, (least, most) in ops.items() if axis in found else ():
            fewest, more = found[axis].get(op, (0, 0))
            found[axis][op] = fewest + least, more + most
    return found


def least(
    side: str, e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int], platform: str = "cpu"
) -> dict[str, float] | None:
    """The least bytes that a side could send, by axis; None where the family or the optimizer has no closed form.

    torch: keys and values are gathered, their gradients reduce-scattered, or by its ring on GPUs keys and values
    gathered once more and gradients sent on in float32, n times; gathered are the logits of the routers too in mixtures
    of transformers, for the balance of all ranks. Chunks of the loss, which are checkpointed, send all once more. For
    zero1 DDP all-reduces full gradients over all axes at once, then ZeroRedundancyOptimizer broadcasts each parameter.
    How many rows torch sends to experts hangs on what the router chooses: see `unknown`.
    """
    exchanges, total = accounting_of(e.model).exchanges, least_bytes(e, param_specs, mesh)
    if exchanges is None or total is None:
        return None
    found, step = defaultdict(float, total), Step(side, e, param_specs, mesh, platform)
    m: Any = e.model
    if side != JAX and mesh["pipeline"] > 1:
        found = defaultdict(float, pipeline_traffic.least(e, param_specs, mesh))
        found["context"] += keys_and_values(step)
        return {axis: size for axis, size in found.items() if size > 1 and axis not in unknown(side, mesh, e)}
    if checkpointed(side, e):
        numbers = 3 * e.train.accumulation * traffic.tokens_of(e, mesh)
        size = numbers * max(ITEMSIZE[str(e.precision.compute)], 4)
        found["tensor"] += ring_bytes("all_reduce", size, mesh["tensor"])
    if side != JAX and mesh["context"] > 1 and "attention" in exchanges:
        found["context"] -= exchanges["attention"](e, param_specs, mesh)["context"]
        found["context"] += keys_and_values(step)
        if "choices" in exchanges:  # in 8 bytes each
            found["context"] += exchanges["choices"](e, param_specs, mesh).get("context", 0.0)
    if side == TRANSFORMERS and "experts" in exchanges and m.balance:
        tokens, ranks = e.train.batch * e.data.sequence, math.prod(mesh[axis] for axis in TOKENS)
        logits = tokens * m.experts * ITEMSIZE[str(e.precision.compute)]
        found[first(mesh, TOKENS)] += m.layers * 2 * ring_bytes("all_gather", logits, ranks)
        found[first(mesh, TOKENS)] += ring_bytes("all_gather", tokens, ranks)  # the mask, a byte each
    if side != JAX and e.parallel.row.splits_update:
        for axis, size in traffic.least_of_parameters(e, param_specs, mesh).items():
            found[axis] -= size
        shards = mesh["fsdp"] * mesh["context"]
        for spec in (spec for spec in param_specs.values() if not spec.statistic):
            numbers = math.prod(spec.shape) / (mesh["tensor"] if "tensor" in spec.mesh_axes(False) else 1)
            reduced, stored = (numbers * ITEMSIZE[str(d)] for d in (e.precision.reduce, e.precision.parameters))
            found[first(mesh, TOKENS)] += ring_bytes("all_reduce", reduced, shards * mesh["data"])
            found[first(mesh, SHARDS)] += ring_bytes("broadcast", stored, shards)
    return {axis: size for axis, size in found.items() if size > 1 and axis not in unknown(side, mesh, e)}


def unknown(side: str, mesh: Mapping[str, int], e: Experiment) -> dict[str, str]:
    """The axes of which no closed form has the bytes that a side sends, and why."""
    if side == JAX:
        return {}
    shards, found = first(mesh, SHARDS), dict[str, str]()
    if not e.optimizer.elementwise:
        found |= dict.fromkeys((shards, "tensor"), "as its update asks for matrices by the pieces that it has of them")
    if mesh["pipeline"] > 1 and e.parallel.virtual_stages > 1:
        found[shards] = "as an interleaved schedule gathers what its actions ask for"
    if mesh["expert"] > 1:
        found["expert"] = "as it sends the rows that the router chooses"
    return {axis: why for axis, why in found.items() if mesh[axis] > 1}


def update_traffic(
    side: str, e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> Iterator[Sent]:
    """Collectives of an update rule on full parameters."""
    if side == JAX:
        number = ITEMSIZE[str(e.precision.parameters)]  # the mean of all of a tensor is one, and not counted
        asked = traffic.update_traffic(e, param_specs, mesh)
        yield from ((first(mesh, axes), {op: exactly(1)}) for op, axes, size in asked if size > number)
    elif e.optimizer.name in UPDATES:
        tensors = sum(e.model.layers if "layers" in spec.axes else 1 for spec in param_specs.values())
        op, most = UPDATES[e.optimizer.name]
        yield from ((axis, {op: (0, most * tensors)}) for axis in ("tensor", first(mesh, SHARDS)))


def exactly(count: int) -> Range:
    return count, count


def stage_traffic(step: Step) -> Iterator[Sent]:
    """JAX: activations, and a mixture's tally, each tick of a pass."""
    _, e, _, mesh, _ = step
    p, arrays = passes(e, mesh), 2 if "experts" in (accounting_of(e.model).exchanges or ()) else 1
    yield "pipeline", {"permute": exactly(arrays * (p.both + p.forward) * (mesh["pipeline"] > 1))}


def activation_traffic(step: Step) -> Iterator[Sent]:
    """Over tensor: two sums a block forward and backward, one for embedding and head each, and three for the loss.

    Each chunk of the loss has its own three, and once more where it is checkpointed. Beside them the gradients of
    parameters that every tensor device has and uses in part. Under sequence parallelism a sum is a scatter and a
    gather, which a block that is computed again repeats where it enters a product.
    """
    side, e, param_specs, mesh, _ = step
    p, memory = passes(e, mesh), e.memory
    m, blocks = p.both, p.layers
    again = math.ceil(blocks / memory.remat_every) if memory.remat != "none" else 0
    losses = p.losses * (1 + checkpointed(side, e))
    sums, again_full = 4 * blocks + 2, again if memory.remat == "full" else 0
    alone = p.forward * (2 * blocks + 1)  # of forward passes by themselves
    shared = [spec for spec in param_specs.values() if partial_over_tensor(e, spec)]
    gathered = 0
    if side != JAX and e.parallel.sequence:
        # RowwiseParallel adds its bias before it scatters; the gradient of learned positions is gathered.
        shared = [x for x in shared if not x.name.endswith("_proj.bias") and "positions" not in x.axes]
        gathered = sum("positions" in spec.axes for spec in param_specs.values())
    reduced = m * sum(blocks if "layers" in spec.axes else 1 for spec in shared)
    reduced += memory.loss_chunks * (3 * losses - m * p.through_head)
    if not e.parallel.sequence:
        yield "tensor", {"all_reduce": exactly(m * (sums + again_full) + alone + reduced)}
        return
    yield (
        "tensor",
        {
            "all_gather": exactly(m * (sums + 2 * again + gathered) + p.forward * (2 * blocks + p.through_head)),
            "reduce_scatter": exactly(m * (sums + again_full) + alone),
            "all_reduce": exactly(reduced),
        },
    )


def checkpointed(side: str, e: Experiment) -> bool:
    """Whether the loss goes in chunks that are computed again with all that they send, as torch's."""
    return side != JAX and e.memory.loss_chunks > 1


def attention_traffic(step: Step) -> Iterator[Sent]:
    """Over context, for keys and values, and what is computed again once more: JAX's ring sends them on n-1 times, then
    again beside their gradients, which it sends home too; Ulysses exchanges four arrays, torch gathers two. torch's
    ring gathers both at once, also backward, where it sends their gradients on n times.
    """
    side, e, _, mesh, _ = step
    p, memory, n = passes(e, mesh), e.memory, mesh["context"]
    if side != JAX:
        m, (blocks, again) = e.train.accumulation, attended(step)
        if step.ring:
            found = {"all_gather": exactly(m * (2 * blocks + again)), "all_to_all": exactly(m * n * blocks)}
        else:
            found = {"all_gather": exactly(2 * m * (blocks + again)), "reduce_scatter": exactly(2 * m * blocks)}
        yield "context", found
        return
    blocks = p.both * p.layers
    again = p.both * math.ceil(p.layers / memory.remat_every) if memory.remat != "none" else 0
    forward = blocks + again + p.forward * p.layers
    if e.parallel.context == "ulysses":
        yield "context", {"all_to_all": exactly(4 * (forward + blocks))}
    else:
        yield "context", {"permute": exactly(2 * (n - 1) * forward + (4 * (n - 1) + 2) * blocks)}


def attended(step: Step) -> tuple[int, int]:
    """A torch rank's blocks, and those whose attention it computes again: every `remat_every`-th of each of its parts;
    none for the ring, which `selective` keeps."""
    _, e, _, mesh, _ = step
    parts = e.parallel.virtual_stages if mesh["pipeline"] > 1 else 1
    each = e.model.layers // mesh["pipeline"] // parts
    kept = e.memory.remat == "none" or (step.ring and e.memory.remat == "selective")
    return parts * each, 0 if kept else parts * math.ceil(each / e.memory.remat_every)


def keys_and_values(step: Step) -> float:
    """Bytes of keys and values that a torch rank sends over context in a step, and of their gradients, which a ring has
    in float32."""
    _, e, _, mesh, _ = step
    m: Any = e.model
    tokens, (blocks, again) = e.train.batch * e.data.sequence, attended(step)
    own = math.prod(mesh[axis] for axis in (*BATCH, "tensor"))
    numbers, item = tokens * 2 * m.kv_heads * m.head_dim / own, ITEMSIZE[str(e.precision.compute)]
    gathered = (2 * blocks + again) * ring_bytes("all_gather", numbers * item, mesh["context"])
    return gathered + step.ring * blocks * numbers * ITEMSIZE["float32"]


def batch_norm_traffic(step: Step) -> Iterator[Sent]:
    """Collectives of batch norms, with three statistics each: mean and variance, and backward their gradients; for
    replicas' own statistics those of the first replica, in JAX all at once."""
    side, e, _, mesh, _ = step
    if e.parallel.batch_norm == "global":
        yield first(mesh, TOKENS), {"all_reduce": exactly(4 * step.statistics // 3 * e.train.accumulation)}
    else:
        yield (
            first(mesh, TOKENS),
            {"all_reduce": exactly(1)} if side == JAX else {"broadcast": exactly(step.statistics)},
        )


def expert_traffic(step: Step) -> Iterator[Sent]:
    """JAX gathers tokens, weights and choices, and scatters results, or sends boxes there and back; torch sends
    rows, beside how many. Over tensor gradients of the weights are summed, or under sequence parallelism weights
    and choices gathered. Tallies cross all axes that tokens differ over, in torch one by one; of transformers'
    experts, which each rank has, the routers' logits and a mask of the valid tokens do.
    """
    side, e, _, mesh, _ = step
    p, model = passes(e, mesh), cast(Any, e.model)
    if side == TRANSFORMERS:
        masks = p.losses * bool(model.balance)
        logits = masks * model.layers
        yield first(mesh, TOKENS), {"all_gather": exactly(logits + masks), "reduce_scatter": exactly(logits)}
        return
    m, blocks, alone, forward = p.losses, p.both * p.layers, p.forward * p.layers, routed(step)
    sequence = e.parallel.sequence
    if side != JAX:
        yield "expert", {"all_to_all": exactly(3 * forward + 2 * blocks)}
        yield from ((axis, {"all_reduce": (0, m)}) for axis in (*TOKENS, *["tensor"] * sequence))
    elif model.capacity:
        yield "expert", {"all_to_all": exactly(2 * (forward + blocks))}
    else:
        scattered = 3 * blocks + alone
        yield "expert", {"all_gather": exactly(3 * forward + blocks), "reduce_scatter": exactly(scattered)}
    if side == JAX:
        yield first(mesh, TOKENS), {"all_reduce": exactly(m)}
        yield "tensor", {"all_reduce": exactly(m * sequence)}
    if sequence:
        yield "tensor", {"all_gather": exactly(2 * forward), "reduce_scatter": exactly(blocks)}
    else:
        yield "tensor", {"all_reduce": exactly(blocks)}


def routing_traffic(step: Step) -> Iterator[Sent]:
    """Over context the choices of all times are gathered where experts have a capacity, as transformers' have not."""
    model: Any = step.experiment.model
    if step.side != TRANSFORMERS:
        yield "context", {"all_gather": exactly(routed(step) * bool(model.capacity))}


def routed(step: Step) -> int:
    """Number of times that tokens are sent to experts in a step: in each block, and where it is computed again."""
    p, memory = passes(step.experiment, step.mesh), step.experiment.memory
    again = p.both * math.ceil(p.layers / memory.remat_every) if memory.remat != "none" else 0
    return p.both * p.layers + again + p.forward * p.layers


# Name of an exchange, as a family's `exchanges` have it -> how many collectives it takes.
EXCHANGES: Mapping[str, Callable[[Step], Iterable[Sent]]] = {
    "sums": activation_traffic,
    "attention": attention_traffic,
    "stages": stage_traffic,
    "experts": expert_traffic,
    "choices": routing_traffic,
    "statistics": batch_norm_traffic,
}


def norm_traffic(side: str, e: Experiment, mesh: Mapping[str, int]) -> Iterator[Sent]:
    """torch's own clip, which trains transformers' models, has the squares of all tensors in one array; all else adds
    single numbers, which are not counted."""
    if side == TRANSFORMERS and e.parallel.row.optimizer:
        yield first(mesh, SHARDS), {"all_reduce": exactly(1)}


def cut_alike(param_specs: Mapping[str, ParamSpec]) -> dict[tuple[str, ...], list[ParamSpec]]:
    """The parameters by the mesh axes that a strategy cuts them over: experts go over one less."""
    found: dict[tuple[str, ...], list[ParamSpec]] = {}
    for spec in param_specs.values():
        found.setdefault(spec.shard_dim.axes, []).append(spec)
    return found


def by_parameter(e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]) -> Iterator[Sent]:
    """JAX: within the scan a parameter is sent once a layer, outside of it all layers at once."""
    row, p = strategy(e.parallel), passes(e, mesh)
    blocks = p.layers
    recomputed = math.ceil(blocks / e.memory.remat_every) if e.memory.remat != "none" else 0
    for spec in param_specs.values():
        # Gathered once more for the backward pass: matrices always, scales and biases where they are recomputed.
        stacked, last = "layers" in spec.axes, spec.name == LAST
        times = blocks if stacked else 1
        again = (blocks if spec.decays else recomputed) if stacked and not last else 0
        again += spec.name.startswith("stages.") and spec.decays
        alone = p.forward if p.through_head or not spec.name.startswith(HEAD) else 0
        gathers = p.both * (times + again) + alone * times if row.reshards else 1
        scatters = p.both * times if row.gradients else 1
        yield (
            first(mesh, spec.shard_dim.replicas if row.optimizer else spec.reduce_axes),
            {"all_reduce": exactly(1)},
        )
        if row.optimizer and spec.shard_dim.axes:
            yield (
                first(mesh, spec.shard_dim.axes),
                {"all_gather": exactly(gathers), "reduce_scatter": exactly(scatters)},
            )


def by_block(e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]) -> Iterator[Sent]:
    """torch: by block, and the root, under FSDP2; by bucket under DDP."""
    m, blocks, row = e.train.accumulation, e.model.layers, e.parallel.row
    tensors = sum(blocks if "layers" in spec.axes else 1 for spec in param_specs.values())
    if row.replicates:
        size = sum(math.prod(spec.shape) for spec in param_specs.values()) * np.dtype(e.precision.parameters).itemsize
        bucket = e.parallel.bucket_mb * 2**20 or BUCKET
        buckets = max(2 + int(size // bucket), blocks + 1)  # `replicate`, where DDP cannot, sums block by block
        updated = tensors if row.optimizer else 0
        # In its second step DDP sends all ranks, in a few numbers, which parameters share a bucket from then on.
        for axes in filter(None, cut_alike(param_specs)):
            least = int(axes == SHARDS)  # experts are summed with all else, or where the mesh splits them by themselves
            yield first(mesh, ("data", *axes)), {"all_reduce": (least, buckets), "broadcast": (0, SETTLED)}
        if updated:
            yield first(mesh, SHARDS), {"broadcast": exactly(updated)}
        return
    alike = list(cut_alike(param_specs)) if mesh["expert"] > 1 else [SHARDS]
    for axes in alike:
        root = int(axes == SHARDS)  # experts are of blocks alone
        gathers = m * (2 * blocks + root) if e.parallel.reshards else blocks + root
        scatters = (blocks + root) * (1 if e.parallel.once else m)
        yield "data", {"all_reduce": exactly(blocks + root)}
        yield first(mesh, axes), {"all_gather": exactly(gathers), "reduce_scatter": exactly(scatters)}
