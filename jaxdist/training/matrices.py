"""Operations of update rules on a sharded parameter: means over dimensions, and functions of its unsharded matrices.

| operation | sends, of n devices |
|---|---|
| `mean` | all-reduce of the result, over the axes that split the dimensions of the mean |
| `by_matrix` | two all-to-alls of the piece, x(n-1)/n each: a device receives 1/n of the matrices and sends them back |
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.sharding import ParamSpec

QUINTIC = 3.4445, -4.7750, 2.0315  # steepest at 0: singular values end near 1, and not at it (torch.optim.Muon)
LEAST = 1e-7  # a norm that is divided by


@dataclass(frozen=True)
class ShardedParam:
    """A parameter as an update rule sees it: `weights` is this device's shard, also over fsdp if `sharded`. Products of
    its matrices are computed in `dtype`."""

    spec: ParamSpec
    sharded: bool
    weights: jax.Array
    dtype: Any

    @cached_property
    def split(self) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that split each dimension."""
        return self.spec.split(self.sharded)

    def mean(self, x: jax.Array, *dims: int) -> jax.Array:
        """Mean along `dims`, kept as size 1; by default along all except the layer axis."""
        dims = dims or tuple(dim for dim, axis in enumerate(self.spec.axes) if axis != "layers")
        axes = tuple(axis for dim in dims for axis in self.split[dim])
        total, count = jnp.sum(x, dims, keepdims=True), math.prod(x.shape[dim] for dim in dims)
        return lax.psum(total, axes) / (count * lax.axis_size(axes)) if axes else total / count

    def rms(self, x: jax.Array) -> jax.Array:
        """Root mean square of the unsharded parameter, per layer if stacked."""
        return jnp.sqrt(self.mean(x * x))

    def by_matrix(self, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Apply `function` to unsharded matrices [N, I, O] of all layers and experts; returns this device's shard of
        the result."""
        matrices = x.reshape(-1, *x.shape[-2:])
        split = [(dim, axes) for dim, axes in enumerate(self.split[-2:], start=1) if axes]
        ways = math.prod(lax.axis_size(axes) for _, axes in split)
        share = jnp.pad(matrices, ((0, -len(matrices) % ways), (0, 0), (0, 0)))
        for dim, axes in split:
            share = lax.all_to_all(share, axes, split_axis=0, concat_axis=dim, tiled=True)
        share = function(share)
        for dim, axes in reversed(split):
            share = lax.all_to_all(share, axes, split_axis=dim, concat_axis=0, tiled=True)
        return share[: len(matrices)].reshape(x.shape)


def orthogonal(x: jax.Array, steps: int) -> jax.Array:
    """U·Vᵀ of each matrix U·S·Vᵀ, its singular values from about 0.7 to 1.2: Newton-Schulz iterations of
    a·X + (b·X·Xᵀ + c·(X·Xᵀ)²)·X (https://kellerjordan.github.io/posts/muon, torch.optim.Muon)."""
    a, b, c = QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), LEAST).astype(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
