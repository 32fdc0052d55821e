"""Products by blocks of rows against products of each row with its own kernel, and their derivatives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.conftest import often
from jaxdist.ops import grouped
from jaxdist.ops.grouped import Block, blocks, by_blocks, rows_of

pytestmark = pytest.mark.long

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def plain(x_NI: jax.Array, kernel_EIO: jax.Array, counts_E: jax.Array) -> jax.Array:
    """Each row with a copy of its kernel."""
    group_N = jnp.searchsorted(jnp.cumsum(counts_E), jnp.arange(len(x_NI)), side="right")
    return jnp.einsum("NI,NIO->NO", x_NI, kernel_EIO[jnp.minimum(group_N, len(counts_E) - 1)])


def differs(product: Product, counts: list[int], beyond: int) -> float:
    """Largest difference of results and both gradients, over rows in a group."""
    random, rows = np.random.default_rng(0), sum(counts) + beyond
    with jax.enable_x64(True):
        x, kernel, outer = (
            jnp.array(random.normal(size=shape)) for shape in ((rows, 3), (len(counts), 3, 4), (rows, 4))
        )
        counts_E, own = jnp.array(counts, jnp.int32), (jnp.arange(rows) < sum(counts))[:, None]

        def loss(of: Product, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.where(own, of(jnp.where(own, x, 0), kernel, counts_E), 0)
            return (y * outer).sum(), y

        found, wanted = (jax.grad(loss, (1, 2), has_aux=True)(of, x, kernel) for of in (product, plain))
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        return max(float(jnp.abs(a - b).max(initial=0.0)) for a, b in pairs)


COUNTS = [[5, 0, 7, 1], [0, 0, 0, 9], [30, 1], [1], [4, 4, 4, 4], [0, 13, 0, 0, 2, 1, 0]]


CASES = [(counts, beyond) for counts in COUNTS for beyond in (0, 17)]


@pytest.mark.parametrize("case", often(CASES, [(COUNTS[2], 0), (COUNTS[5], 17)]), ids=str)
def test_all_rows_in_their_groups(case: tuple[list[int], int]) -> None:
    """Groups of any size, empty ones, and rows in none."""
    assert differs(by_blocks, *case) < 1e-14
    assert differs(lax.ragged_dot, *case) < 1e-14


def test_rows_of_another_group_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that counts all its M rows as its own adds the next group's to its kernel's gradient."""
    right = blocks

    def greedy(counts_E: jax.Array, rows: int, most: int) -> tuple[Block, jax.Array]:
        found, many = right(counts_E, rows, most)
        return found._replace(own=jnp.full(most, rows)), many

    monkeypatch.setattr(grouped, "blocks", greedy)
    assert differs(by_blocks, COUNTS[2], 0) > 0.1


def test_blocks_hold_each_row_once() -> None:
    for counts in COUNTS:
        found, many = blocks(jnp.array(counts), rows := 3, sum(counts) // rows + len(counts))
        held = [tuple(map(int, block)) for block in zip(*found, strict=True)][: int(many)]
        rows_in = [(group, row) for group, start, own in held for row in range(start, start + own)]
        assert [row for _, row in rows_in] == list(range(sum(counts)))
        assert [group for group, _ in rows_in] == [group for group, count in enumerate(counts) for _ in range(count)]


def test_rows_per_block() -> None:
    """Half of an even group's rows while these are few; a sixteenth if they are many."""
    assert [rows_of(rows, 8) for rows in (3, 2048, 16 * 4096)] == [1, 128, 512]
    assert rows_of(2**20, 8) == 2**20 // 128
