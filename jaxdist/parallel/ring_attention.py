"""Causal attention over times that are split over the mesh axis `context` (Ring Attention, arXiv:2310.01889).

Device i of n has the chunks i and 2n-1-i of 2n chunks of times ("zig-zag"). So every step costs each device
the same, without a branch: its late queries see all early keys of another device, and exactly one of the pairs early
with early and late with late: the one whose queries are later in time. Keys and values travel n-1 times forward;
backward they do so again, beside their gradients, which travel n times, the last time home. Only the result and
the logarithm of the softmax' sum are kept for the backward pass.

Bytes that a device sends, x those of keys and values of all times: x(n-1)/n forward, x(2n-1)/n backward.

Shape letters as in `families/layers.py`, and L: the times of a chunk. A leading 2 counts a device's chunks.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.ops.varying import at_least_f32

AXIS = "context"
OWN = ((0, 0), (1, 0), (1, 1))  # chunks of queries and of keys that meet on the device that has both

Pairs = Iterable[tuple[Any, Any]]


class Softmax(NamedTuple):
    """Running softmax of a chunk's queries over the keys received so far, with weights relative to the highest
    score."""

    weighted_BLKGC: jax.Array
    highest_BKGL: jax.Array
    total_BKGL: jax.Array


def order(length: int, n: int) -> np.ndarray:
    """Indices of the times [T] in the order in which n devices hold them, T/n each."""
    chunks = np.arange(length).reshape(2 * n, -1)
    return np.concatenate([chunks[[i, 2 * n - 1 - i]].ravel() for i in range(n)])


def times(device: jax.Array | int, count: int) -> jax.Array:
    """Indices [2, L] of the times of one device of the ring, which holds `count` = 2L."""
    first = jnp.stack([jnp.asarray(device), 2 * lax.axis_size(AXIS) - 1 - device])
    return first[:, None] * (count // 2) + jnp.arange(count // 2)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def ring_attention(q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int = 0) -> jax.Array:
    """`ops.attention.attend` for each device's own times of queries, keys and values."""
    return _forward(q_BTHC, k_BTKC, v_BTKC, window)[0]


def _forward(q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int) -> tuple[jax.Array, Any]:
    q, keys = _queries(q_BTHC, k_BTKC.shape[2]), (_chunks(k_BTKC), _chunks(v_BTKC))

    def meet(found: Softmax, keys: tuple[jax.Array, jax.Array], step: Any, pairs: Pairs) -> Softmax:
        k, v = keys
        for a, b in pairs:
            so_far = Softmax(*(x[a] for x in found))
            scores = _scores(q, k, (a, b), step, window)
            highest = jnp.maximum(so_far.highest_BKGL, scores.max(-1))
            shrink, weights = jnp.exp(so_far.highest_BKGL - highest), jnp.exp(scores - highest[..., None])
            added = jnp.einsum("BKGLM,BMKC->BLKGC", weights.astype(v.dtype), v[b], preferred_element_type=scores.dtype)
            weighted = so_far.weighted_BLKGC * _per_query(shrink) + added
            now = Softmax(weighted, highest, so_far.total_BKGL * shrink + weights.sum(-1))
            found = Softmax(*(x.at[a].set(y) for x, y in zip(found, now, strict=True)))
        return found

    def step(carry: tuple[Softmax, Any], j: jax.Array) -> tuple[tuple[Softmax, Any], None]:
        found, keys = carry
        keys = _on(keys)
        return (meet(found, keys, j, _others(j)), keys), None

    nothing = jnp.zeros_like(at_least_f32(q))
    lowest = jnp.moveaxis(nothing[..., 0], 2, -1)
    start = Softmax(nothing, lowest + jnp.finfo(nothing.dtype).min, lowest)
    (found, _), _ = lax.scan(step, (meet(start, keys, 0, OWN), keys), jnp.arange(1, lax.axis_size(AXIS)))
    y = (found.weighted_BLKGC / _per_query(found.total_BKGL)).astype(q_BTHC.dtype)
    logarithm = found.highest_BKGL + jnp.log(found.total_BKGL)
    y_BTHC = _joined(y).reshape(q_BTHC.shape)
    return y_BTHC, (q_BTHC, k_BTKC, v_BTKC, y_BTHC, logarithm)


def _backward(window: int, kept: Any, dy_BTHC: jax.Array) -> tuple[jax.Array, ...]:
    q_BTHC, k_BTKC, v_BTKC, y_BTHC, logarithm = kept
    K = k_BTKC.shape[2]
    q, dy, keys = _queries(q_BTHC, K), _queries(dy_BTHC, K), (_chunks(k_BTKC), _chunks(v_BTKC))
    inner = jnp.moveaxis(
        (at_least_f32(dy) * at_least_f32(_queries(y_BTHC, K))).sum(-1), 2, -1
    )  # of a query's result and gradient

    def meet(gradients: Any, keys: tuple[jax.Array, jax.Array], step: Any, pairs: Pairs) -> Any:
        (k, v), (dq, dk, dv) = keys, gradients
        for a, b in pairs:
            weights = jnp.exp(_scores(q, k, (a, b), step, window) - logarithm[a][..., None])
            product = partial(jnp.einsum, preferred_element_type=weights.dtype)
            towards = product("BLKGC,BMKC->BKGLM", dy[a], v[b]) - inner[a][..., None]
            low, dscores = weights.astype(v.dtype), (weights * towards * q.shape[-1] ** -0.5).astype(q.dtype)
            dq = dq.at[a].add(product("BKGLM,BMKC->BLKGC", dscores, k[b]))
            dk = dk.at[b].add(product("BKGLM,BLKGC->BMKC", dscores, q[a]))
            dv = dv.at[b].add(product("BKGLM,BLKGC->BMKC", low, dy[a]))
        return dq, dk, dv

    def step(carry: Any, j: jax.Array) -> tuple[Any, None]:
        dq, keys, dkeys = carry
        keys, dkeys = _on(keys), _on(dkeys)
        dq, *dkeys = meet((dq, *dkeys), keys, j, _others(j))
        return (dq, keys, tuple(dkeys)), None

    start = jax.tree.map(lambda x: jnp.zeros_like(at_least_f32(x)), (q, *keys))
    dq, *dkeys = meet(start, keys, 0, OWN)
    (dq, _, dkeys), _ = lax.scan(step, (dq, keys, tuple(dkeys)), jnp.arange(1, lax.axis_size(AXIS)))
    gradients = (dq, *_home(dkeys))
    return tuple(_joined(d).reshape(x.shape).astype(x.dtype) for d, x in zip(gradients, kept, strict=False))


ring_attention.defvjp(_forward, _backward)


def _others(step: jax.Array) -> Pairs:
    """Pairs of chunks that attend: this device's queries, and the keys from `step` devices behind."""
    same = jnp.where(step <= lax.axis_index(AXIS), 0, 1)  # keys of an earlier device: both early ones, else both late
    return ((1, 0), (same, same))


def _scores(q: jax.Array, k: jax.Array, pair: tuple[Any, Any], step: Any, window: int) -> jax.Array:
    """Scores of a pair of chunks: this device's queries, and the keys from `step` devices behind; masked ones are the
    dtype's lowest number."""
    (a, b), i, count = pair, lax.axis_index(AXIS), 2 * q.shape[2]
    behind = times(i, count)[a][:, None] - times((i - step) % lax.axis_size(AXIS), count)[b]
    seen = (behind >= 0) & (behind < window) if window else behind >= 0
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("BLKGC,BMKC->BKGLM", q[a], k[b], preferred_element_type=dtype) * q.shape[-1] ** -0.5
    return jnp.where(seen, scores, jnp.finfo(dtype).min)


def _on(arrays: Any) -> Any:
    """Receive the previous device's value."""
    n = lax.axis_size(AXIS)
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)]), arrays)


def _home(gradients: Any) -> Any:
    """Send gradients of keys to the device that holds the keys: the next one."""
    return _on(gradients)


def _chunks(x_BTKC: jax.Array) -> jax.Array:
    """Split times into the two chunks: [2, B, L, ...]."""
    B, T, *rest = x_BTKC.shape
    return jnp.moveaxis(x_BTKC.reshape(B, 2, T // 2, *rest), 1, 0)


def _queries(x_BTHC: jax.Array, K: int) -> jax.Array:
    """Split times into the two chunks, and heads into groups: [2, B, L, K, G, C]."""
    B, T, H, C = x_BTHC.shape
    return _chunks(x_BTHC.reshape(B, T, K, H // K, C))


def _joined(x: jax.Array) -> jax.Array:
    """The inverse of `_chunks`."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _per_query(x: jax.Array) -> jax.Array:
    """Numbers per query [..., K, G, L] as factors of vectors [..., L, K, G, C]."""
    return jnp.moveaxis(x, -1, -3)[..., None]
