"""Sharding of every array: logical axes -> mesh axes, the table of strategies, and all PartitionSpecs.

A model declares each parameter once, with a logical axis per dimension (`families/layers.py`). The rules below send
tensor-parallel axes to the mesh axis `tensor`, experts to `expert`, layers to `pipeline` and the residual width to
`fsdp`; a strategy says which of parameters, gradients and optimizer state are sharded over `fsdp`, and which are
replicated on each of its devices.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, Parallel
from jaxdist.config.errors import nearest
from jaxdist.config.optimizer import COLUMNS, ROWS, ParamRole
from jaxdist.config.strategies import STRATEGIES, Strategy

BATCH = ("data", "fsdp", "expert")  # the mesh axes that split the global batch
SHARDS = ("fsdp", "expert", "context")  # those that split what a strategy shards: all hold other tokens
MODEL_AXES = ("pipeline", "tensor", "expert")  # those that split parameters under any strategy
TOKENS = ("data", *SHARDS)  # those over which tokens differ, and so gradients are summed
LOSS_AXES = ("pipeline", *TOKENS)  # those over which the parts of the loss differ: its last stage has them all

# Logical axis -> mesh axis. A parameter without an `embed` dimension is split over fsdp along its last one.
RULES: dict[str, str | None] = {
    "layers": "pipeline",
    "positions": None,
    "head_dim": None,
    "embed": "fsdp",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "hidden": "tensor",
    "experts": "expert",
    "choices": None,
    "kernel": None,
    "channels": None,
    "filters": None,
    "classes": None,
    "statistic": None,
}
REPLICATED = ("classes",)  # a vector of these is replicated: there are as many as the data have
BLOCKS = ("layers.", "stages.")  # how the names of parameters begin that are gathered again for the backward pass


class ShardDim(NamedTuple):
    """How a strategy splits a parameter: along dimension `dim`, counted from the end, over the mesh axes `axes`.

    `replicas`: the mesh axes whose devices use the same pieces for other tokens, or in other stages of a pipeline.
    """

    dim: int
    axes: tuple[str, ...]
    replicas: tuple[str, ...]


def strategy(parallel: Parallel) -> Strategy:
    """The row of the table. With `parallel.reduce = step`, gradients stay unsharded until the end of the step."""
    return _strategy(parallel.strategy, parallel.reduce == "step", parallel.reshards)


@cache
def _strategy(name: str, once_a_step: bool, reshards: bool) -> Strategy:
    row = STRATEGIES[name]
    return replace(row, gradients=row.gradients and not once_a_step, reshards=reshards)


@dataclass(frozen=True)
class ParamSpec:
    """One declared parameter: its name, global shape, logical axes, and initial mean and standard deviation.

    A `statistic` is not trained, but counted or averaged in the forward pass; it is replicated.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    mean: float
    std: float
    statistic: bool = False

    @cached_property
    def shard_dim(self) -> ShardDim:
        """The split by a strategy. The dimension counts from the end, so that it holds with and without the layer axis.
        Experts, which `expert` gives to devices already, are cut over the other axes."""
        dim = next((i - len(self.axes) for i, axis in enumerate(self.axes) if RULES.get(axis) == "fsdp"), -1)
        replicated = self.statistic or self.axes in [(axis,) for axis in REPLICATED]
        shards = () if replicated else tuple(axis for axis in SHARDS if axis not in self.model_axes)
        return ShardDim(dim, shards, tuple(axis for axis in LOSS_AXES if axis not in (*shards, *self.model_axes)))

    @cached_property
    def model_axes(self) -> tuple[str, ...]:
        """Mesh axes that split it under any strategy."""
        return tuple(axis for name in self.axes if (axis := RULES.get(name)) in MODEL_AXES)

    @property
    def reduce_axes(self) -> tuple[str, ...]:
        """Mesh axes over which gradients are summed: those of devices with the same weights and other tokens; for
        parameters outside of the layers, the stages too."""
        return (*self.shard_dim.replicas, *self.shard_dim.axes)

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices: two or more dimensions, the layer axis not counted."""
        return len(self.shape) - ("layers" in self.axes) >= 2

    @cached_property
    def role(self) -> ParamRole:
        """Whether it is a matrix and whether in a block, by which Muon and Adafactor choose."""
        return ParamRole(self.decays, self.name.startswith(BLOCKS))

    @property
    def matrix(self) -> tuple[int, int]:
        """Dimensions, from the end, of the rows and columns of the matrix in torch's layout, outputs first; of a
        convolution Y and X."""
        if "kernel" in self.axes:
            return -4, -3
        return (-2, -1) if self.name.endswith(".embedding") else (-1, -2)

    def state_shape(self, kind: str) -> tuple[int, ...]:
        """Shape of optimizer state of this kind: the parameter's, or one number per row or per column."""
        rows, columns = self.matrix
        one = {ROWS: columns, COLUMNS: rows}.get(kind)
        if one is None:
            return self.shape
        return tuple(1 if dim == one else size for dim, size in enumerate(self.shape, start=-len(self.shape)))

    def split(self, sharded: bool) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each dimension, with or without fsdp. Raises ConfigError for an unknown axis."""
        return self._splits[sharded]

    @cached_property
    def _splits(self) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """Without and with fsdp. The planner asks for them thousands of times."""
        for axis in self.axes:
            if axis not in RULES:
                raise ConfigError(f"parameter {self.name}: unknown logical axis {axis!r}; {nearest(axis, RULES)}")
        by_model = [(own,) if (own := RULES[axis]) in MODEL_AXES else () for axis in self.axes]
        sharded = [(*axes, *self.shard_dim.axes) if dim == self.shard_dim.dim else axes
                   for dim, axes in enumerate(by_model, start=-len(by_model))]  # fmt: skip
        return tuple(by_model), tuple(sharded)

    def partition_spec(self, sharded: bool, kept: tuple[int, ...] = ()) -> P:
        """PartitionSpec with or without the split over fsdp; `kept`: the shape of optimizer state of the parameter."""
        split = zip(self.split(sharded), kept or self.shape, self.shape, strict=True)
        return P(*(axes if size == full else () for axes, size, full in split))

    def mesh_axes(self, sharded: bool) -> tuple[str, ...]:
        """Mesh axes over which the shards differ."""
        return tuple(axis for axes in self.split(sharded) for axis in axes)

    def local_shape(self, mesh: Mapping[str, int], sharded: bool, kept: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Shape of one device's shard; `kept`: the shape of optimizer state of the parameter.

        Raises ConfigError when the mesh does not divide the parameter.
        """
        key = (sharded, *mesh.items())
        if key not in self._local_shapes:
            self._local_shapes[key] = tuple(self._divided(mesh, sharded))
        shape = self._local_shapes[key]
        if not kept or kept == self.shape:
            return shape
        return tuple(piece if size == full else size for piece, size, full in zip(shape, kept, self.shape, strict=True))

    @cached_property
    def _local_shapes(self) -> dict[tuple[object, ...], tuple[int, ...]]:
        """Cache of shards' shapes: the planner asks for each several hundred times."""
        return {}

    def _divided(self, mesh: Mapping[str, int], sharded: bool) -> Iterator[int]:
        """Sizes of one device's piece. Raises ConfigError when the mesh does not divide the parameter."""
        for axis, size, entry in zip(self.axes, self.shape, self.split(sharded), strict=True):
            ways = math.prod(mesh[mesh_axis] for mesh_axis in entry)
            if size % ways:
                raise ConfigError(
                    f"parallel.mesh: parameter {self.name} has {size} along its axis {axis}, which mesh axis "
                    f"{' × '.join(a for a in entry if mesh[a] > 1)} = {ways} does not divide; use "
                    f"{math.gcd(size, ways)} there, or a model with a multiple of {ways}"
                )
            yield size // ways


def check(param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int], row: Strategy) -> None:
    """Raises ConfigError naming the first parameter, axis and sizes that the mesh does not divide."""
    for spec in param_specs.values():
        spec.local_shape(mesh, sharded=row.optimizer)
