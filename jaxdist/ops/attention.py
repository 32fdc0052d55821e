"""Causal softmax attention on one device, and cuDNN's fused kernel for it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.linear import transposed
from jaxdist.ops.varying import at_least_f32


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def attend(q_BTHC: jax.Array, k_BSKC: jax.Array, v_BSKC: jax.Array, window: int = 0) -> jax.Array:
    """Causal softmax attention; token t sees s with t - window < s <= t (all s <= t without a window).

    Query head h reads key/value head h // (H/K). Scores are scaled by 1/sqrt(C), in float32 or wider.
    """
    y_BTHC: jax.Array = _attend_forward(q_BTHC, k_BSKC, v_BSKC, window)[0]
    return y_BTHC


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
    q_bar = jnp.einsum("BKNS,BKSC->BKNC", s_bar, at_least_f32(k_BKSC)).astype(q_BKNC.dtype)
    k_bar_BKCS = (transposed(at_least_f32(q_BKNC)) @ s_bar).astype(k_BKSC.dtype)
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
