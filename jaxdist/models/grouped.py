"""Products of rows, sorted by group, with the kernel of their group.

`lax.ragged_dot` says so in one word, and on TPUs is a kernel of its own. On CPUs and GPUs XLA makes it products of all
rows with the kernel of every group, E times the arithmetic and the memory. There a block of rows is multiplied at a
time, all of one group; rows that are in none cost nothing.

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


def block_of(counts_E: jax.Array, rows: int, index: jax.Array) -> Block:
    """The `index`-th of the blocks of up to `rows` rows that hold all groups, in order."""
    each_E = blocks_of(counts_E, rows)
    ends_E = jnp.cumsum(each_E)
    group = jnp.searchsorted(ends_E, index, side="right")
    before = (index - (ends_E - each_E)[group]) * rows  # rows of the group in blocks before this
    start = (jnp.cumsum(counts_E) - counts_E)[group] + before
    return Block(group, start, jnp.minimum(counts_E[group] - before, rows))


def blocks_of(counts_E: jax.Array, rows: int) -> jax.Array:
    """How many blocks each group has."""
    return -(-counts_E // rows)


def rows_of(rows: int, groups: int) -> int:
    """Of a block, where there are so many rows in all: so many that it is worth its start, and so few that the last
    ones of groups, which are not full, are little more work."""
    return max(1, rows // (16 * groups), min(WORTH, rows // (2 * groups)))


def each(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array, outputs: int, product: Kernel) -> jax.Array:
    """`product` of each block and its kernel, in their places [N, outputs].

    What a block makes of rows that are not its own lies where the next one writes, or behind all groups.
    """
    M = rows_of(len(x_NI), len(counts_E))
    padded = jnp.pad(x_NI, ((0, M), (0, 0)))

    def one(index: jax.Array, y: jax.Array) -> jax.Array:
        block = block_of(counts_E, M, index)
        made = product(lax.dynamic_slice_in_dim(padded, block.start, M), kernel_EIO[block.group])
        return lax.dynamic_update_slice_in_dim(y, made, block.start, 0)

    zeros = vary_like(jnp.zeros((len(padded), outputs), x_NI.dtype), x_NI, kernel_EIO, counts_E)
    return lax.fori_loop(0, blocks_of(counts_E, M).sum(), one, zeros)[: len(x_NI)]


@jax.custom_vjp
def by_blocks(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """`grouped`, a block at a time."""
    return each(x_NI, kernel_EIO, counts_E, kernel_EIO.shape[2], jnp.matmul)


def _forward(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> Any:
    return by_blocks(x_NI, kernel_EIO, counts_E), (x_NI, kernel_EIO, counts_E)


def _backward(kept: Any, outer_NO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_NI, kernel_EIO, counts_E = kept
    M = rows_of(len(x_NI), len(counts_E))
    x_bar = each(outer_NO, kernel_EIO, counts_E, kernel_EIO.shape[1], partial(jnp.einsum, "MO,IO->MI"))
    rows = [jnp.pad(a, ((0, M), (0, 0))) for a in (x_NI, outer_NO)]

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        block = block_of(counts_E, M, index)
        x_MI, outer_MO = (lax.dynamic_slice_in_dim(a, block.start, M) for a in rows)
        mine = (jnp.arange(M) < block.own)[:, None]
        product = jnp.einsum("MI,MO->IO", jnp.where(mine, x_MI, 0), outer_MO, preferred_element_type=total.dtype)
        return total.at[block.group].add(product)

    zeros = vary_like(jnp.zeros(kernel_EIO.shape, wide(x_NI).dtype), x_NI, outer_NO, counts_E)
    kernel_bar = lax.fori_loop(0, blocks_of(counts_E, M).sum(), one, zeros)
    return x_bar, kernel_bar.astype(kernel_EIO.dtype), None


by_blocks.defvjp(_forward, _backward)
