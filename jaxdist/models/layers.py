"""The parts that decoders are made of, each parameter declared once with its shape, axes and initial distribution.

A module built from a config is abstract: it holds declarations. Bound to Weights (`models/__init__.py`) and passed
through `par.use`, it holds this device's arrays: whole over `fsdp`, a slice of heads, hidden or vocabulary over
`tensor`. The modules never ask which; local sizes come from the arrays.

Shape letters: B batch, T time (S for keys), D model, H heads, K kv heads, G = H/K, C head_dim, F hidden, V vocabulary,
E experts, k those that a token goes to, N rows.
"""

import math
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import Parallel, vary_like, wide
from jaxdist.config import Rotary
from jaxdist.memory import Rematerialize
from jaxdist.sharding import Layout

M = TypeVar("M", bound=nnx.Module)
X = TypeVar("X", bound=jax.Array | tuple[jax.Array, jax.Array])


def parameter(shape: tuple[int, ...], axes: tuple[str, ...], std: float = 0.0, mean: float = 0.0) -> nnx.Param:
    """Declare a parameter: drawn from N(mean, std²), with one logical axis (`sharding.RULES`) per dimension."""
    cut = Layout("", shape, axes, mean, std).cut
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, mean=mean, std=std, cut=cut)


def statistic(shape: tuple[int, ...], value: float = 0.0) -> nnx.BatchStat:
    """Declare a running statistic that begins as `value`, or a count of steps, which has no dimension."""
    declared = jax.ShapeDtypeStruct(shape, jnp.float32 if shape else jnp.int32)
    return nnx.BatchStat(declared, axes=("statistic",) * len(shape), mean=value, std=0.0)


def stacked(count: int, module: M) -> M:
    """`module` with a leading axis `layers` on every parameter: `count` of them, to be scanned over."""
    graph, state = nnx.split(module)

    def stack(p: nnx.Param) -> Any:
        return parameter((count, *p.shape), ("layers", *p.axes), p.std, p.mean)

    return nnx.merge(graph, jax.tree.map(stack, state, is_leaf=lambda x: isinstance(x, nnx.Param)))


def scan_layers(par: Parallel, layers: nnx.Module, x_BTD: X, rematerialize: Rematerialize, *rest: Any) -> X:
    """Apply a stack of blocks in order: one block is compiled, however many there are. A mixture's pass on a pair.

    Of a pipeline's stages each has its own blocks, and all go through here. Each block's weights are gathered at its
    own start, and again in its backward pass, so that one block at a time is whole on a device. `rest` is passed on to
    every block.
    """
    graph, weights = nnx.split(layers)

    def block(i: int, x_BTD: X, group: nnx.State) -> X:
        # Sliced in here: the backward pass then refers to the weights that the scan has, and keeps no copy of them.
        weights = jax.tree.map(lambda w: w[i], group) if rematerialize.every > 1 else group
        return par.use(nnx.merge(graph, weights))(par, x_BTD, *rest)

    def body(x_BTD: X, group: nnx.State) -> tuple[X, None]:
        for i in range(rematerialize.every):
            apply = rematerialize.keep if i else rematerialize.block
            x_BTD = apply(partial(block, i))(x_BTD, group)
        return x_BTD, None

    if rematerialize.every > 1:
        weights = jax.tree.map(lambda w: w.reshape(-1, rematerialize.every, *w.shape[1:]), weights)
    return par.stages(lambda x_BTD: lax.scan(body, x_BTD, weights)[0], x_BTD)


def written(x: jax.Array) -> jax.Array:
    """`x`, which several CPU devices write out as it is, where XLA would rather change the product beside it."""
    mesh = jax.sharding.get_abstract_mesh()
    several = mesh.size > 1 and mesh.abstract_device and mesh.abstract_device.platform == "cpu"
    return lax.optimization_barrier(x) if several else x


def transposed(x: jax.Array) -> jax.Array:
    """x[..., M, N] as [..., N, M], for a product that sums over M.

    XLA leaves a product on CPUs to YNNPACK only if its left side is summed over the last dimension, for which it has to
    be written. Else it is Eigen's, of whose many tasks the threads of several devices wait for each other. To one
    device Eigen's is as fast or faster.
    """
    return written(x.mT)


def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x[..., I] · kernel[I, O]. Tokens are flattened, so that the kernel's gradient sums over one dimension: over two
    XLA is slow on CPUs."""
    x_NI = x.reshape(-1, x.shape[-1])
    # Typed alike out here, where JAX sums gradients over axes that one lacks: a rule of our own must return its types.
    return _product(vary_like(x_NI, kernel), vary_like(kernel, x)).reshape(*x.shape[:-1], kernel.shape[-1])


@jax.custom_vjp
def _product(x_NI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    return x_NI @ kernel_IO


def _product_forward(x_NI: jax.Array, kernel_IO: jax.Array) -> Any:
    return x_NI @ kernel_IO, (x_NI, kernel_IO)


def _product_backward(kept: tuple[jax.Array, jax.Array], outer_NO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NI, kernel_IO = kept
    # Written, or a tied head's would be made as its transpose, with `outer_NO` on the left.
    return outer_NO @ kernel_IO.T, written(transposed(x_NI) @ outer_NO)


_product.defvjp(_product_forward, _product_backward)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias, in float32 or wider: the bias' gradient is a sum over all tokens. Rounded once."""
    return (wide(y) + wide(bias)).astype(y.dtype)


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
        y = wide(x)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * wide(self.scale[...])).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) · scale + bias (arXiv:1607.06450), in float32 or wider, rounded once at the end."""

    def __init__(self, size: int, eps: float, bias: bool = True):
        self.scale = parameter((size,), ("embed",), mean=1.0)
        self.bias = parameter((size,), ("embed",)) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y = wide(x)
        y = y - y.mean(-1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        y = y * wide(self.scale[...])
        return (y if self.bias is None else y + wide(self.bias[...])).astype(x.dtype)


Rotation = tuple[jax.Array, jax.Array]


def rotary_frequencies(c: Rotary, dtype: Any) -> jax.Array:
    """Angle per position of each of the head_dim/2 pairs, radians; llama3 scaling as in Llama 3.1's reference code."""
    frequency = c.rope_theta ** -(jnp.arange(0, c.head_dim, 2, dtype=dtype) / c.head_dim)
    if c.rope_scaling == "none":
        return frequency
    turns = c.rope_original_positions * frequency / (2 * math.pi)  # full turns within the original context
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)  # 1: fast, left alone; 0: slow, stretched in full
    return frequency * (kept + (1 - kept) / c.rope_factor)


def rotary(c: Rotary, length: int, dtype: Any) -> Rotation:
    """cos and sin [T, 1, C/2] of every position (arXiv:2104.09864), in float32 or wider."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    angle = jnp.arange(length, dtype=dtype)[:, None] * rotary_frequencies(c, dtype)
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def rotate(x_BTHC: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the pairs (i, i + C/2), Hugging Face's layout of the halves."""
    cos, sin = rotation
    first, second = jnp.split(wide(x_BTHC), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, window: int = 0) -> jax.Array:
    """Causal softmax attention; token t sees s with t - window < s <= t (all s <= t without a window).

    Query head h reads key/value head h // (H/K). Scores are scaled by 1/sqrt(C), in float32 or wider.
    """
    return _attend_forward(q_BTHC, k_BSKC, v_BSKC, window)[0]


def _by_heads(x_BTHC: jax.Array, K: int) -> jax.Array:
    """[B, K, N, C]: all queries of a kv head, N = T · G, as rows of one matrix."""
    B, T, H, C = x_BTHC.shape
    return x_BTHC.reshape(B, T, K, H // K, C).swapaxes(1, 2).reshape(B, K, -1, C)


def _by_times(x_BKNC: jax.Array, T: int) -> jax.Array:
    """The inverse of `_by_heads`."""
    B, K, N, C = x_BKNC.shape
    return x_BKNC.reshape(B, K, T, N // T, C).swapaxes(1, 2).reshape(B, T, -1, C)


def _attend_forward(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, window: int) -> Any:
    (_, T, H, C), K = q_BTHC.shape, k_BSKC.shape[2]
    q_BKNC, k_BKSC, v_BKSC = (_by_heads(x, K) for x in (q_BTHC, k_BSKC, v_BSKC))
    dtype = jnp.promote_types(q_BTHC.dtype, jnp.float32)
    scores = jnp.einsum("BKNC,BKSC->BKNS", q_BKNC, k_BKSC, preferred_element_type=dtype) * C**-0.5
    behind = jnp.arange(T).repeat(H // K)[:, None] - jnp.arange(T)
    seen = (behind >= 0) & (behind < (window or T))
    probabilities = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
    probabilities = checkpoint_name(probabilities, "probabilities")
    y_BKNC = jnp.einsum("BKNS,BKSC->BKNC", probabilities.astype(v_BSKC.dtype), v_BKSC)
    return _by_times(y_BKNC, T), (q_BKNC, k_BKSC, v_BKSC, probabilities)


def _attend_backward(window: int, kept: Any, outer_BTHC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    # Probabilities are all that is kept of the scores' size.
    q_BKNC, k_BKSC, v_BKSC, probabilities = kept
    T, scale, dtype = outer_BTHC.shape[1], q_BKNC.shape[-1] ** -0.5, probabilities.dtype
    outer_BKNC = _by_heads(outer_BTHC, k_BKSC.shape[1])
    v_bar_BKCS = transposed(outer_BKNC) @ probabilities.astype(v_BKSC.dtype)  # the smaller of the two is transposed
    p_bar = jnp.einsum("BKNC,BKSC->BKNS", outer_BKNC, v_BKSC).astype(dtype)
    s_bar = probabilities * (p_bar - (probabilities * p_bar).sum(-1, keepdims=True)) * scale
    q_bar = jnp.einsum("BKNS,BKSC->BKNC", s_bar, wide(k_BKSC)).astype(q_BKNC.dtype)
    k_bar_BKCS = (transposed(wide(q_BKNC)) @ s_bar).astype(k_BKSC.dtype)
    return _by_times(q_bar, T), jnp.moveaxis(k_bar_BKCS, 3, 1), jnp.moveaxis(v_bar_BKCS, 3, 1)


attend.defvjp(_attend_forward, _attend_backward)


def has_kernel(dtype: Any, head_dim: int) -> bool:
    """Whether cuDNN's fused attention is made for a dtype and a size of heads, on all GPUs that have one."""
    return jnp.dtype(dtype).itemsize == 2 and head_dim <= 128 and head_dim % 8 == 0


def fused_attend(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, window: int = 0) -> jax.Array:
    """`attend` on a GPU: by cuDNN's fused kernel where it has one, which keeps no scores.

    The same mathematics with another rounding, as torch's `scaled_dot_product_attention`.
    """
    if not has_kernel(q_BTHC.dtype, q_BTHC.shape[3]):
        return attend(q_BTHC, k_BSKC, v_BSKC, window)
    local = (window - 1, 0) if window else None  # how many before a token, and after it, are seen
    return jax.nn.dot_product_attention(
        q_BTHC, k_BSKC, v_BSKC, is_causal=True, local_window_size=local, implementation="cudnn"
    )
