"""Closed form of the traffic of torch's pipelines per step, for the first rank, which counts.

FSDP2 below a schedule gathers a stage's blocks for each forward pass, and for a backward pass once, or as often as a
forward pass comes between, in all M + 1 times. It reduces gradients once a step, over tensor too where they are
partial. A tied embedding's are summed over the first and the last rank.
"""

import math
from collections.abc import Mapping

from jaxdist.accounting.exchanges import partial_over_tensor
from jaxdist.accounting.traffic import HEAD, ITEMSIZE, first, ring_bytes, tokens_of
from jaxdist.config import Experiment
from jaxdist.parallel.sharding import SHARDS, TOKENS, ParamSpec

Range = tuple[int, int]  # the fewest and the most


def own(param_specs: Mapping[str, ParamSpec], stages: int) -> dict[str, float]:
    """Numbers of each parameter that the first rank has, unsharded over all other axes."""
    here = {n: spec for n, spec in param_specs.items() if not n.startswith(HEAD)}
    return {n: math.prod(x.shape) / (stages if "layers" in x.axes else 1) for n, x in here.items()}


def gathers(e: Experiment) -> int:
    """Number of times that a block is gathered."""
    if e.parallel.row.replicates:
        return 0
    return e.train.accumulation + 1 if e.parallel.reshards else 1


def sums(e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]) -> tuple[int, list[ParamSpec]]:
    """All-reduces of activations over tensor in a microbatch, and the parameters that all tensor ranks use in part."""
    blocks, parts = e.model.layers // mesh["pipeline"], e.parallel.virtual_stages
    again = parts * math.ceil(blocks // parts / e.memory.remat_every) if e.memory.remat == "full" else 0
    shared = [x for x in param_specs.values() if partial_over_tensor(e, x) and not x.name.startswith(HEAD)]
    return 4 * blocks + 1 + again, shared


def least(e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]) -> dict[str, float]:
    """Bytes by axis."""
    m, stages, v, tensor = e.train.accumulation, mesh["pipeline"], e.parallel.virtual_stages, mesh["tensor"]
    compute, reduced, param_itemsize = (
        ITEMSIZE[str(d)] for d in (e.precision.compute, e.precision.reduce, e.precision.parameters)
    )
    replicated = e.parallel.row.replicates
    n, x = math.prod(mesh[axis] for axis in SHARDS), tokens_of(e, mesh) * e.model.dim * compute
    found = dict.fromkeys(mesh, 0.0)
    found["pipeline"] = m * x * (2 * v - 1)
    activations, shared = sums(e, param_specs, mesh)
    partial = sum(math.prod(spec.shape) / (stages if "layers" in spec.axes else 1) for spec in shared)
    found["tensor"] = ring_bytes("all_reduce", m * activations * x + partial * max(compute, 4), tensor)
    for name, numbers in own(param_specs, stages).items():
        size = numbers / (tensor if "tensor" in param_specs[name].mesh_axes(False) else 1)
        if replicated:
            found[first(mesh, TOKENS)] += ring_bytes("all_reduce", size * reduced, n * mesh["data"])
            if e.parallel.row.optimizer:
                found[first(mesh, SHARDS)] += ring_bytes("broadcast", size * param_itemsize, n)
            continue
        times = gathers(e) if "layers" in param_specs[name].axes else 1
        found[first(mesh, SHARDS)] += ring_bytes("all_gather", times * size * compute, n)
        found[first(mesh, SHARDS)] += ring_bytes("reduce_scatter", size * reduced, n)
        found["data"] += ring_bytes("all_reduce", size / n * reduced, mesh["data"])
    if e.model.tied:
        embed = math.prod(param_specs["embed.embedding"].shape) / tensor / (1 if replicated else n)
        found["pipeline"] += ring_bytes("all_reduce", embed * param_itemsize, 2)
    return found


def expected(
    e: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> dict[str, dict[str, Range]]:
    """Collectives by axis and kind."""
    m, v, blocks = e.train.accumulation, e.parallel.virtual_stages, e.model.layers // mesh["pipeline"]
    found: dict[str, dict[str, Range]] = {axis: {} for axis, n in mesh.items() if n > 1}

    def add(axis: str, op: str, least: int, most: int) -> None:
        if axis in found:
            fewest, more = found[axis].get(op, (0, 0))
            found[axis][op] = fewest + least, more + most

    add("pipeline", "permute", m * (2 * v - 1), m * (2 * v - 1))
    add("pipeline", "all_reduce", e.model.tied, e.model.tied)
    activations, shared = sums(e, param_specs, mesh)
    count = m * activations + sum(blocks if "layers" in spec.axes else 1 for spec in shared)
    add("tensor", "all_reduce", count, count)
    roots = 1  # the embedding's part alone has parameters outside of its blocks
    if e.parallel.row.replicates:
        add(first(mesh, TOKENS), "all_reduce", blocks + roots, blocks + roots)
        tensors = sum(blocks if "layers" in x.axes else 1 for n, x in param_specs.items() if not n.startswith(HEAD))
        zero1 = tensors * e.parallel.row.optimizer
        add(first(mesh, SHARDS), "broadcast", zero1, zero1)
        return found
    most = gathers(e) * blocks + roots
    fewest = most if v == 1 else blocks + roots
    # How often an interleaved schedule gathers follows from its actions: at most before each of them.
    add(first(mesh, SHARDS), "all_gather", fewest, most if v == 1 else 2 * m * blocks + v * m * roots)
    add(first(mesh, SHARDS), "reduce_scatter", blocks + roots, blocks + roots)
    add("data", "all_reduce", blocks + roots, blocks + roots)
    return found
