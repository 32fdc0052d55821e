"""The loss in chunks equals the loss at once, its gradients are as accurate, and one chunk's logits exist at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.accounting.traffic import walk
from jaxdist.conftest import tiny
from jaxdist.data import IGNORED
from jaxdist.families.llama.config import Llama
from jaxdist.families.loss import chunked, cross_entropy, cross_entropy_of_chunks
from jaxdist.ops.linear import dot
from jaxdist.parallel.mesh import make_mesh

B, T, D, V = 4, 64, 24, 96
MODEL = Llama(vocab=V)


def inputs(dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, a head's kernel and targets, some ignored; representable in bfloat16."""
    random = np.random.default_rng(0)
    x_BTD, kernel_DV = (jnp.asarray(random.normal(size=s), jnp.bfloat16) for s in ((B, T, D), (D, V)))
    targets_BT = random.integers(0, V, (B, T))
    targets_BT[0, 5:40] = IGNORED
    return x_BTD.astype(dtype), (kernel_DV / 4).astype(dtype), jnp.asarray(targets_BT, jnp.int32)


def loss(chunks: int) -> Any:
    """(x, kernel, targets) -> the loss on one device; computed at once where `chunks` is 1."""
    mesh = make_mesh(tiny(parallel={"mesh": "1x1"}), "cpu")[0]

    def function(x_BTD: jax.Array, kernel_DV: jax.Array, targets_BT: jax.Array) -> jax.Array:
        if chunks == 1:
            return cross_entropy(dot(x_BTD, kernel_DV), targets_BT)
        return cross_entropy_of_chunks(x_BTD, kernel_DV, chunked(targets_BT, chunks), MODEL)

    return jax.shard_map(function, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())


def graded(dtype: Any, chunks: int) -> list[np.ndarray]:
    """The loss and its gradients with respect to x and the kernel."""
    found, gradients = jax.jit(jax.value_and_grad(loss(chunks), argnums=(0, 1)))(*inputs(dtype))
    return [np.asarray(a, np.float64) for a in (found, *gradients)]


def error(a: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(a - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("chunks", [2, 7, B * T])  # even, padded, and one token each
def test_chunks_are_the_whole(chunks: int) -> None:
    for found, right in zip(graded(jnp.float64, chunks), graded(jnp.float64, 1), strict=True):
        assert error(found, right) < 1e-14


@pytest.mark.long
def test_the_head_s_gradient_is_rounded_once() -> None:
    """Any number of chunks is as accurate as one in bfloat16; a sum in bfloat16 is not."""
    exact, at_once = graded(jnp.float64, 1)[2], graded(jnp.bfloat16, 1)[2]
    assert error(graded(jnp.bfloat16, B * T)[2], exact) <= 2 * error(at_once, exact)
    x_BTD, kernel_DV, targets_BT = inputs(jnp.bfloat16)
    one = jax.jit(jax.grad(loss(1), argnums=1))
    rounded = jnp.zeros_like(kernel_DV)
    for x_D, target in zip(x_BTD.reshape(-1, D), targets_BT.reshape(-1), strict=True):
        rounded += one(x_D[None, None], kernel_DV, target[None, None])
    assert error(np.asarray(rounded, np.float64), exact) > 2 * error(at_once, exact)


@pytest.mark.parametrize("chunks", [1, 8])
def test_no_array_has_all_logits(chunks: int) -> None:
    """Forward and backward; the loss at once has many such arrays."""
    traced = jax.jit(jax.value_and_grad(loss(chunks), argnums=(0, 1))).trace(*inputs(jnp.float32))
    sizes = {out.aval.size for equation, *_ in walk(traced.jaxpr.jaxpr, 1, {}) for out in equation.outvars}
    assert (B * T * V in sizes) == (chunks == 1) and (B * T // 8 * V in sizes) == (chunks == 8)
