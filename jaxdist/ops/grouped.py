"""Products of rows, sorted by group, with the kernel of their group.

`lax.ragged_dot` says so in one word, and on TPUs is a kernel of its own. On CPUs and GPUs XLA makes it products of all
rows with the kernel of every group, E times the arithmetic and the memory. There a block of rows is multiplied at a
time, all of one group; rows that are in none cost nothing.

Shape letters: N rows, E groups, I inputs, O outputs, M rows of a block.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.linear import transposed
from jaxdist.ops.varying import at_least_f32, match_varying

WORTH = 512  # rows: products of fewer take a GPU less time than their start
Kernel = Callable[[jax.Array, jax.Array], jax.Array]  # a block's rows and its group's kernel -> its results


def grouped(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """y[n] = x[n] · kernel[group of n], of which the first `counts_E[0]` rows are in group 0, and so on; of rows that
    are in none y is anything."""
    y_NO: jax.Array = lax.platform_dependent(x_NI, kernel_EIO, counts_E, tpu=lax.ragged_dot, default=by_blocks)
    kept: jax.Array = checkpoint_name(y_NO, "grouped")  # what comes out of a custom_vjp is not
    return kept


class Block(NamedTuple):
    """Rows from `start` on of `group`: `own` of them; as many more as make it M are those of others."""

    group: jax.Array
    start: jax.Array
    own: jax.Array


def blocks(counts_E: jax.Array, rows: int, most: int) -> tuple[Block, jax.Array]:
    """The blocks of up to `rows` rows that hold all groups, in order, as arrays of `most`; and how many there are."""
    each_E = -(-counts_E // rows)
    ends_E, index = jnp.cumsum(each_E), jnp.arange(most)
    group = jnp.minimum(jnp.searchsorted(ends_E, index, side="right"), len(counts_E) - 1)
    before = (index - (ends_E - each_E)[group]) * rows  # rows of the group in blocks before this
    start = (jnp.cumsum(counts_E) - counts_E)[group] + before
    return Block(group, start, jnp.minimum(counts_E[group] - before, rows)), ends_E[-1]


def rows_of(rows: int, groups: int) -> int:
    """Rows per block for a total number of rows: enough to amortize a block's start, few enough that the groups' partly
    filled last blocks cost little."""
    return max(1, rows // (16 * groups), min(WORTH, rows // (2 * groups)))


def by_block(
    rows: Sequence[jax.Array], counts_E: jax.Array, start: jax.Array, step: Callable[..., jax.Array]
) -> jax.Array:
    """`step(carry, block, rows ...)` of each block, `start` being the first carry; of all `rows` [N, ...] those M that
    a block begins with."""
    N, E = len(rows[0]), len(counts_E)
    M = rows_of(N, E)
    found, many = blocks(counts_E, M, N // M + E)
    padded = [jnp.pad(a, ((0, M), (0, 0))) for a in rows]

    def one(index: jax.Array, carry: jax.Array) -> jax.Array:
        block = Block(*(a[index] for a in found))
        return step(carry, block, *(lax.dynamic_slice_in_dim(a, block.start, M) for a in padded))

    end: jax.Array = lax.fori_loop(0, many, one, match_varying(start, counts_E, *rows))
    return end


def each(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array, outputs: int, product: Kernel) -> jax.Array:
    """`product` of each block and its kernel, in their places [N, outputs].

    What a block makes of rows that are not its own lies where the next one writes, or behind all groups.
    """
    N = len(x_NI)

    def place(y: jax.Array, block: Block, x_MI: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(y, product(x_MI, kernel_EIO[block.group]), block.start, 0)

    room = jnp.zeros((N + rows_of(N, len(counts_E)), outputs), x_NI.dtype)
    return by_block([x_NI], counts_E, match_varying(room, kernel_EIO), place)[:N]


@jax.custom_vjp
def by_blocks(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """`grouped`, a block at a time."""
    return each(x_NI, kernel_EIO, counts_E, kernel_EIO.shape[2], jnp.matmul)


def _forward(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> Any:
    return by_blocks(x_NI, kernel_EIO, counts_E), (x_NI, kernel_EIO, counts_E)


def _backward(kept: Any, outer_NO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_NI, kernel_EIO, counts_E = kept
    x_bar = each(outer_NO, kernel_EIO, counts_E, kernel_EIO.shape[1], partial(jnp.einsum, "MO,IO->MI"))

    def add(total: jax.Array, block: Block, x_MI: jax.Array, outer_MO: jax.Array) -> jax.Array:
        mine = (jnp.arange(len(x_MI)) < block.own)[:, None]
        own_IM = transposed(jnp.where(mine, x_MI, 0))
        product = jnp.matmul(own_IM, outer_MO, preferred_element_type=total.dtype)
        return total.at[block.group].add(product)

    zeros = jnp.zeros(kernel_EIO.shape, at_least_f32(x_NI).dtype)
    kernel_bar = by_block([x_NI, outer_NO], counts_E, zeros, add)
    return x_bar, kernel_bar.astype(kernel_EIO.dtype), None


by_blocks.defvjp(_forward, _backward)
