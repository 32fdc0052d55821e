"""How many collectives a step takes, by mesh axis and kind: the closed form of either side, where bytes say how large.

JAX sends each parameter by itself, within the scan once a layer; FSDP2 a block at once, and with one more what lies
outside of the blocks; DDP whole parameters up to a bucket's size; ZeroRedundancyOptimizer each updated parameter.
"""

import math
from collections.abc import Mapping

import numpy as np

from jaxdist.config import Experiment
from jaxdist.sharding import Layout, strategy
from jaxdist.traffic import partial_over_tensor
from parity_tests.run import JAX

BUCKET = 25 * 2**20  # bytes of DDP's buckets, the first of which is smaller
LAST = "layers.mlp.down_proj.bias"  # the end of a block, whose output is not computed again
SCALARS = 8  # collectives of single numbers: the loss, the count of tokens, and the norm's sums

Range = tuple[int, int]  # the fewest and the most
Counts = dict[str, dict[str, Range]]  # axis -> op -> how many


def expected(side: str, e: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]) -> Counts:
    """Collectives of a step by each axis of several devices. What crosses data and fsdp at once counts as data."""
    found = {"tensor": of_activations(side, e, layouts)} | (
        by_parameter(e, layouts) if side == JAX else by_block(e, layouts, mesh)
    )
    for ops in found.values():
        least, most = ops.get("all_reduce", (0, 0))
        ops["all_reduce"] = least, most + SCALARS
    return {axis: ops for axis, ops in found.items() if mesh[axis] > 1}


def exactly(count: int) -> Range:
    return count, count


def of_activations(side: str, e: Experiment, layouts: Mapping[str, Layout]) -> dict[str, Range]:
    """Over tensor: two sums a block forward and backward, one for embedding and head each, and three for the loss.

    Beside them the gradients of parameters that every tensor device has and uses in part. Under sequence parallelism a
    sum is a scatter and a gather, which a block that is computed again repeats where it enters a product.
    """
    m, blocks, memory = e.train.accumulation, e.model.layers, e.memory
    again = math.ceil(blocks / memory.remat_every) if memory.remat != "none" else 0
    sums, again_full = 4 * blocks + 2, again if memory.remat == "full" else 0
    shared = [layout for layout in layouts.values() if partial_over_tensor(e, layout)]
    gathered = 0
    if side != JAX and e.parallel.sequence:
        # RowwiseParallel adds its bias before it scatters; the gradient of learned positions is gathered.
        shared = [x for x in shared if not x.name.endswith("_proj.bias") and "positions" not in x.axes]
        gathered = sum("positions" in layout.axes for layout in layouts.values())
    reduced = 3 + sum(blocks if "layers" in layout.axes else 1 for layout in shared)
    if not e.parallel.sequence:
        return {"all_reduce": exactly(m * (sums + again_full + reduced))}
    return {
        "all_gather": exactly(m * (sums + 2 * again + gathered)),
        "reduce_scatter": exactly(m * (sums + again_full)),
        "all_reduce": exactly(m * reduced),
    }


def by_parameter(e: Experiment, layouts: Mapping[str, Layout]) -> Counts:
    """JAX: within the scan a parameter is sent once a layer, outside of it all layers at once."""
    row, m, blocks = strategy(e.parallel), e.train.accumulation, e.model.layers
    stacked = [layout for layout in layouts.values() if "layers" in layout.axes]
    outside, every = len(layouts), len(layouts) + (blocks - 1) * len(stacked)
    replicas = {"data": {"all_reduce": exactly(outside)}}
    if not row.optimizer:
        return replicas
    # Gathered once more for the backward pass: matrices always, scales and biases where they are recomputed.
    recomputed = math.ceil(blocks / e.memory.remat_every) if e.memory.remat != "none" else 0
    again = sum(blocks if x.decays else recomputed for x in stacked if x.name != LAST)
    gathers = m * (every + again) if row.parameters else outside
    scatters = m * every if row.gradients else outside
    return replicas | {"fsdp": {"all_gather": exactly(gathers), "reduce_scatter": exactly(scatters)}}


def by_block(e: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]) -> Counts:
    """torch: by block, and the root, under FSDP2; by bucket under DDP."""
    m, blocks, name = e.train.accumulation, e.model.layers, e.parallel.strategy
    tensors = sum(blocks if "layers" in layout.axes else 1 for layout in layouts.values())
    if name in ("ddp", "zero1"):
        size = sum(math.prod(layout.shape) for layout in layouts.values()) * np.dtype(e.precision.parameters).itemsize
        buckets = max(2 + size // BUCKET, blocks + 1)  # `replicate`, where DDP cannot, sums block by block
        updated = tensors if name == "zero1" else 0
        summed = 1 if mesh["data"] == 1 else 0  # over fsdp, unless over both axes at once, which is data's
        # In its second step DDP tells all ranks, in a few numbers, which parameters share a bucket from then on.
        return {
            "data": {"all_reduce": (1, buckets), "broadcast": (0, SCALARS)},
            "fsdp": {"all_reduce": (summed, buckets), "broadcast": (updated, updated + SCALARS)},
        }
    gathers = m * (2 * blocks + 1) if name == "fsdp" else blocks + 1
    scatters = (blocks + 1) * (1 if e.parallel.reduce == "step" else m)
    sharded = {"all_gather": exactly(gathers), "reduce_scatter": exactly(scatters)}
    return {"data": {"all_reduce": exactly(blocks + 1)}, "fsdp": sharded}
