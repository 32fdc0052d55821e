"""How many collectives a step may take, by mesh axis: the closed form of either side, where bytes say how large.

JAX sends each parameter by itself, within the scan once a layer; FSDP2 a block at once, and with one more what lies
outside of the blocks; DDP whole parameters up to a bucket's size; ZeroRedundancyOptimizer each updated parameter.
"""

import math
from collections.abc import Mapping

import numpy as np

from jaxdist.config import Experiment
from jaxdist.sharding import Layout, strategy
from parity_tests.run import JAX

BUCKET = 25 * 2**20  # bytes of DDP's buckets, the first of which is smaller
SCALARS = 8  # collectives of single numbers: the loss, the count of tokens, and the norm's sums


def most(side: str, e: Experiment, layouts: Mapping[str, Layout], mesh: Mapping[str, int]) -> dict[str, int]:
    """Collectives of a step by each axis of several devices. What crosses data and fsdp at once counts as data."""
    found = {"tensor": of_activations(e)} | (by_parameter if side == JAX else by_block)(e, layouts)
    return {axis: count + SCALARS for axis, count in found.items() if mesh[axis] > 1}


def of_activations(e: Experiment) -> int:
    """Over tensor: two a block forward and backward, one for embedding and head each, three for the loss."""
    model, blocks = e.model, e.model.layers
    again = math.ceil(blocks / e.memory.remat_every) if e.memory.remat == "full" else 0
    norms = 2 * blocks if model.qk_norm else 0  # gradients of scales that every tensor device has
    return e.train.accumulation * (4 * blocks + again + 2 + 3 + norms)


def by_parameter(e: Experiment, layouts: Mapping[str, Layout]) -> dict[str, int]:
    """JAX: within the scan a parameter is sent once a layer, outside of it all layers at once."""
    row, m, blocks = strategy(e.parallel), e.train.accumulation, e.model.layers
    stacked = [layout for layout in layouts.values() if "layers" in layout.axes]
    outside, every = len(layouts), len(layouts) + (blocks - 1) * len(stacked)
    if not row.optimizer:
        return {"data": outside}
    again = 0  # gathered once more for the backward pass: matrices always, scales where they are recomputed
    for layout in stacked:
        recomputed = math.ceil(blocks / e.memory.remat_every) if e.memory.remat != "none" else 0
        again += blocks if layout.decays else recomputed
    gathers = m * (every + again) if row.parameters else outside
    return {"data": outside, "fsdp": gathers + (m * every if row.gradients else outside)}


def by_block(e: Experiment, layouts: Mapping[str, Layout]) -> dict[str, int]:
    """torch: by block, and the root, under FSDP2; by bucket under DDP."""
    m, blocks, name = e.train.accumulation, e.model.layers, e.parallel.strategy
    tensors = sum(blocks if "layers" in layout.axes else 1 for layout in layouts.values())
    if name in ("ddp", "zero1"):
        size = sum(math.prod(layout.shape) for layout in layouts.values()) * np.dtype(e.precision.parameters).itemsize
        buckets = max(2 + size // BUCKET, blocks + 1)  # `replicate`, where DDP cannot, sums block by block
        return {"data": buckets, "fsdp": buckets + tensors if name == "zero1" else 0}
    gathers = m * (2 * blocks + 1) if name == "fsdp" else blocks + 1
    return {"data": blocks + 1, "fsdp": gathers + (blocks + 1) * (1 if e.parallel.reduce == "step" else m)}
