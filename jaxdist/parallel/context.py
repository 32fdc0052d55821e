"""Split of a sequence over the mesh axis `context`: the times of each device, and their attention.

| row | a device has | attention sends, forward (backward) |
|---|---|---|
| `NoContextParallel` | all times: the axis has size 1 | nothing |
| `Ring` | chunks i and 2n-1-i of 2n | keys and values n-1 times around (2n-1) |
| `Ulysses` | chunk i of n | q, k, v and the result by all-to-all, (n-1)/n of each (the same) |

x being the bytes of keys and values of all times, the ring sends x(n-1)/n (x(2n-1)/n); with A those of the queries,
Ulysses sends (2A + x)(n-1)/n² each way. Other operations over all times all-gather their inputs.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.config import Parallel
from jaxdist.ops.attention import attend, fused_attend
from jaxdist.parallel.collectives import TIME, Context
from jaxdist.parallel.ring_attention import AXIS, order, ring_attention


@dataclass(frozen=True)
class NoContextParallel:
    """All times on every device; `fused`: attention by a GPU's kernel."""

    fused: bool = False

    def order(self, length: int, n: int) -> np.ndarray:
        """All times [T], in order."""
        return np.arange(length)

    def rows(self, table_TD: jax.Array) -> jax.Array:
        """The table itself."""
        return table_TD

    def gather_sequence(self, x_BT: jax.Array) -> jax.Array:
        """x itself: this device has all times."""
        return x_BT

    def attend(self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int) -> jax.Array:
        """Attention on this device, [B, T, H, C]."""
        return (fused_attend if self.fused else attend)(q_BTHC, k_BTKC, v_BTKC, window)


class Ring:
    """Ring attention over "zig-zag" chunks (arXiv:2310.01889), which balance the work of devices."""

    def order(self, length: int, n: int) -> np.ndarray:
        """For each device i of n chunk i, then chunk 2n-1-i, [T]."""
        return order(length, n)

    def rows(self, table_TD: jax.Array) -> jax.Array:
        """The rows of both chunks, [T/n, ...]."""
        i, n = lax.axis_index(AXIS), lax.axis_size(AXIS)
        size = table_TD.shape[0] // (2 * n)
        return jnp.concatenate([lax.dynamic_slice_in_dim(table_TD, j * size, size) for j in (i, 2 * n - 1 - i)])

    def gather_sequence(self, x_BT: jax.Array) -> jax.Array:
        """All-gather over `context`, then sort by time: [B, T, ...]."""
        x_BT = lax.all_gather(x_BT, AXIS, axis=TIME, tiled=True)
        return x_BT[:, np.argsort(self.order(x_BT.shape[TIME], lax.axis_size(AXIS)))]

    def attend(self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int) -> jax.Array:
        """`ring_attention` of this device's times, [B, T/n, H, C]."""
        return ring_attention(q_BTHC, k_BTKC, v_BTKC, window)


@dataclass(frozen=True)
class Ulysses(NoContextParallel):
    """Each device attends for its own heads over all times (arXiv:2309.14509)."""

    def rows(self, table_TD: jax.Array) -> jax.Array:
        """The rows of chunk i of n, [T/n, ...]."""
        size = table_TD.shape[0] // lax.axis_size(AXIS)
        return lax.dynamic_slice_in_dim(table_TD, lax.axis_index(AXIS) * size, size)

    def gather_sequence(self, x_BT: jax.Array) -> jax.Array:
        """All-gather over `context`: [B, T, ...]."""
        full_BT: jax.Array = lax.all_gather(x_BT, AXIS, axis=TIME, tiled=True)
        return full_BT

    def attend(self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int) -> jax.Array:
        """All-to-all to H/n heads of all times, attention, and all-to-all back to [B, T/n, H, C]."""
        q, k, v = (lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True) for x in (q_BTHC, k_BTKC, v_BTKC))
        y = super().attend(q, k, v, window)
        y_BTHC: jax.Array = lax.all_to_all(y, AXIS, split_axis=1, concat_axis=2, tiled=True)
        return y_BTHC


def context(parallel: Parallel, size: int, fused: bool) -> Context:
    """Context-parallel implementation for `parallel.context` and an axis of this size; `fused`: use GPU kernels."""
    rows: dict[str, Context] = {"ring": Ring(), "ulysses": Ulysses(fused)}
    return rows[parallel.context] if size > 1 else NoContextParallel(fused)
