"""The parts that decoders are made of, each parameter declared once with its shape, axes and initial distribution.

A module built from a config is abstract: it holds declarations. Bound to Weights (`families/models.py`) and passed
through `par.use`, it holds this device's arrays: unsharded over `fsdp`, a slice of heads, hidden or vocabulary over
`tensor`. The modules never ask which; local sizes come from the arrays.

Shape letters: B batch, T time (S for keys), D model, H heads, K kv heads, G = H/K, C head_dim, F hidden, V vocabulary,
E experts, k those that a token goes to, N rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.config import Rotary
from jaxdist.ops.linear import add_bias, dot
from jaxdist.ops.varying import at_least_f32
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.rematerialization import Rematerialize
from jaxdist.parallel.sharding import ParamSpec

M = TypeVar("M", bound=nnx.Module)
X = TypeVar("X", bound=jax.Array | tuple[jax.Array, jax.Array])


def parameter(shape: tuple[int, ...], axes: tuple[str, ...], std: float = 0.0, mean: float = 0.0) -> nnx.Param[Any]:
    """Declare a parameter: drawn from N(mean, std²), with one logical axis (`sharding.RULES`) per dimension."""
    shard_dim = ParamSpec("", shape, axes, mean, std).shard_dim
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, mean=mean, std=std, shard_dim=shard_dim)


def statistic(shape: tuple[int, ...], value: float = 0.0) -> nnx.BatchStat[Any]:
    """Declare a running statistic that begins as `value`, or a count of steps, which has no dimension."""
    declared = jax.ShapeDtypeStruct(shape, jnp.float32 if shape else jnp.int32)
    return nnx.BatchStat(declared, axes=("statistic",) * len(shape), mean=value, std=0.0)


def stacked(count: int, module: M) -> M:
    """`module` with a leading axis `layers` on every parameter: `count` of them, to be scanned over."""
    graph, state = nnx.split(module)

    def stack(p: nnx.Param[Any]) -> Any:
        return parameter((count, *p.shape), ("layers", *p.axes), p.std, p.mean)

    return nnx.merge(graph, jax.tree.map(stack, state, is_leaf=lambda x: isinstance(x, nnx.Param)))


def scan_layers(par: Parallel, layers: nnx.Module, x_BTD: X, rematerialize: Rematerialize, *rest: Any) -> X:
    """Apply a stack of blocks in order: one block is compiled, however many there are. A mixture's pass on a pair.

    Of a pipeline's stages each has its own blocks, and all go through here. Each block's weights are gathered at its
    own start, and again in its backward pass, so that one block at a time is unsharded on a device. `rest` is passed on
    to every block.
    """
    graph, weights = nnx.split(layers)

    def block(i: int, x_BTD: X, group: nnx.State[Any, Any]) -> X:
        # Sliced in here: the backward pass then refers to the weights that the scan has, and keeps no copy of them.
        weights = jax.tree.map(lambda w: w[i], group) if rematerialize.every > 1 else group
        y_BTD: X = par.use(nnx.merge(graph, weights))(par, x_BTD, *rest)
        return y_BTD

    if par.taps:
        return par.taps.scan(partial(block, 0), x_BTD, weights)

    def body(x_BTD: X, group: nnx.State[Any, Any]) -> tuple[X, None]:
        for i in range(rematerialize.every):
            apply = rematerialize.keep if i else rematerialize.block
            x_BTD = apply(partial(block, i))(x_BTD, group)
        return x_BTD, None

    if rematerialize.every > 1:
        weights = jax.tree.map(lambda w: w.reshape(-1, rematerialize.every, *w.shape[1:]), weights)
    return par.stages(lambda x_BTD: lax.scan(body, x_BTD, weights)[0], x_BTD)


class Linear(nnx.Module):
    """A kernel [inputs, outputs] and, where asked for, a bias [outputs]."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], std: float, bias: bool = False):
        self.kernel = parameter((inputs, outputs), axes, std)
        self.bias = parameter((outputs,), axes[1:]) if bias else None

    def biased(self, y: jax.Array) -> jax.Array:
        return y if self.bias is None else add_bias(y, self.bias[...])


class ColumnLinear(Linear):
    """y = x·kernel + bias with the outputs split over tensor (torch: ColwiseParallel). x must have been entered."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.biased(dot(x, self.kernel[...]))


class RowLinear(Linear):
    """y = x·kernel + bias with the inputs split over tensor (torch: RowwiseParallel). The sum leaves, then the bias."""

    def __call__(self, par: Parallel, x: jax.Array) -> jax.Array:
        return self.biased(par.leave(dot(x, self.kernel[...])))


class Embedding(nnx.Module):
    """A table of vectors, one a row."""

    def __init__(self, rows: int, dim: int, axis: str, std: float):
        self.embedding = parameter((rows, dim), (axis, "embed"), std)

    def __call__(self, par: Parallel, tokens: jax.Array) -> jax.Array:
        return par.leave(par.lookup(self.embedding[...], tokens))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · scale (arXiv:1910.07467), in float32 or wider, rounded once at the end."""

    def __init__(self, size: int, eps: float, axis: str = "embed"):
        self.scale, self.eps = parameter((size,), (axis,), mean=1.0), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = at_least_f32(x)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * at_least_f32(self.scale[...])).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) · scale + bias (arXiv:1607.06450), in float32 or wider, rounded once at the end."""

    def __init__(self, size: int, eps: float, bias: bool = True):
        self.scale = parameter((size,), ("embed",), mean=1.0)
        self.bias = parameter((size,), ("embed",)) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = at_least_f32(x)
        y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        y = y * at_least_f32(self.scale[...])
        return (y if self.bias is None else y + at_least_f32(self.bias[...])).astype(x.dtype)


class RotaryDecoder(nnx.Module):
    """The modules of a decoder with rotary positions: embedding, blocks, norm, head. A family adds its `__call__`."""

    def __init__(self, c: Rotary, block: Callable[[Any], nnx.Module]):
        self.embed = Embedding(c.vocab_rows, c.dim, "vocab", c.init_std)
        self.layers = stacked(c.layers, block(c))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = None if c.tied else ColumnLinear(c.dim, c.vocab_rows, ("embed", "vocab"), c.init_std)
        self.config: Any = c
