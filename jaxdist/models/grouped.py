"""Products of rows, sorted by group, with the kernel of their group.

`lax.ragged_dot` says so in one word, and on TPUs is a kernel of its own. On CPUs and GPUs XLA makes it products of all
rows with the kernel of every group, E times the arithmetic and the memory. There a block of rows is multiplied at a
time, all of one group.

Shape letters: N rows, E groups, I inputs, O outputs, M rows of a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.collectives import vary_like, wide

WORTH = 512  # rows: products of fewer take a GPU less time than their start
Kernel = Callable[[jax.Array, jax.Array], jax.Array]  # a block's rows and its group's kernel -> its results


def grouped(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """y[n] = x[n] · kernel[group of n], of which the first `counts_E[0]` rows are in group 0, and so on; of rows that
    are in none y is anything."""
    y_NO = lax.platform_dependent(x_NI, kernel_EIO, counts_E, tpu=lax.ragged_dot, default=by_blocks)
    return checkpoint_name(y_NO, "grouped")  # which is kept; what comes out of a custom_vjp is not


class Block(NamedTuple):
    """Rows from `start` on of `group`: `own` of them; as many more as make it M are those of others."""

    group: jax.Array
    start: jax.Array
    own: jax.Array


def blocks(counts_E: jax.Array, rows: int, most: int) -> Block:
    """The blocks of up to `rows` rows that hold all groups, in order, `most` of them: the last may be empty."""
    each_E = -(-counts_E // rows)
    ends_E, index = jnp.cumsum(each_E), jnp.arange(most)
    group = jnp.minimum(jnp.searchsorted(ends_E, index, side="right"), len(counts_E) - 1)
    before = (index - (ends_E - each_E)[group]) * rows  # rows of the group in blocks before this
    start = (jnp.cumsum(counts_E) - counts_E)[group] + before
    return Block(group, start, jnp.clip(counts_E[group] - before, 0, rows))


def each(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array, outputs: int, product: Kernel) -> jax.Array:
    """`product` of each block and its kernel, in their places [N, outputs].

    What a block makes of rows that are not its own lies where the next one writes, or behind all groups.
    """
    M, most = shape_of(len(x_NI), len(counts_E))
    padded = jnp.pad(x_NI, ((0, M), (0, 0)))

    def one(y: jax.Array, block: Block) -> tuple[jax.Array, None]:
        made = product(lax.dynamic_slice_in_dim(padded, block.start, M), kernel_EIO[block.group])
        return lax.dynamic_update_slice_in_dim(y, made, block.start, 0), None

    zeros = jnp.zeros((len(padded), outputs), x_NI.dtype)
    return lax.scan(one, vary_like(zeros, x_NI, kernel_EIO), blocks(counts_E, M, most))[0][: len(x_NI)]


def shape_of(rows: float, groups: int) -> tuple[int, int]:
    """Rows of a block, and how many blocks there are at most: so few that each is worth its start, and so many that
    their last ones, which are not full, are an eighth more work; at worst, where groups are small, a half."""
    M = max(1, int(rows / (8 * groups)), int(min(WORTH, rows / (2 * groups))))
    return M, int(rows) // M + groups


@jax.custom_vjp
def by_blocks(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """`grouped`, a block at a time."""
    return each(x_NI, kernel_EIO, counts_E, kernel_EIO.shape[2], jnp.matmul)


def _forward(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> Any:
    return by_blocks(x_NI, kernel_EIO, counts_E), (x_NI, kernel_EIO, counts_E)


def _backward(kept: Any, outer_NO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_NI, kernel_EIO, counts_E = kept
    M, most = shape_of(len(x_NI), len(counts_E))
    x_bar = each(outer_NO, kernel_EIO, counts_E, kernel_EIO.shape[1], partial(jnp.einsum, "MO,IO->MI"))
    rows = [jnp.pad(a, ((0, M), (0, 0))) for a in (x_NI, outer_NO)]

    def one(total: jax.Array, block: Block) -> tuple[jax.Array, None]:
        x_MI, outer_MO = (lax.dynamic_slice_in_dim(a, block.start, M) for a in rows)
        mine = (jnp.arange(M) < block.own)[:, None]
        product = jnp.einsum("MI,MO->IO", jnp.where(mine, x_MI, 0), outer_MO, preferred_element_type=total.dtype)
        return total.at[block.group].add(product), None

    zeros = jnp.zeros(kernel_EIO.shape, wide(x_NI).dtype)
    kernel_bar, _ = lax.scan(one, vary_like(zeros, x_NI, outer_NO), blocks(counts_E, M, most))
    return x_bar, kernel_bar.astype(kernel_EIO.dtype), None


by_blocks.defvjp(_forward, _backward)
