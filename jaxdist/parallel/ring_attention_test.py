"""Attention over times on several devices against attention on one: values, gradients and bytes."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdist.accounting import traffic
from jaxdist.conftest import often
from jaxdist.ops.attention import attend, fused_attend, has_kernel
from jaxdist.parallel import ring_attention
from jaxdist.parallel.collectives import Context
from jaxdist.parallel.context import NoContextParallel, Ring, Ulysses
from jaxdist.runtime.xla import Jitted

pytestmark = pytest.mark.long

B, H, K, C = 2, 8, 4, 3
SPEC = P(None, "context")
BOUND = 1e-14  # relative, for sums of at most 48 terms in float64


@pytest.fixture(autouse=True)
def float64() -> Any:
    with jax.enable_x64(True):
        yield


def inputs(length: int) -> list[np.ndarray]:
    """q, k, v and the gradient of the result."""
    random = np.random.default_rng(0)
    return [random.standard_normal((B, length, heads, C)) for heads in (H, K, K, H)]


def meet(context: Context, n: int, window: int) -> Any:
    """(q, k, v, dy) in the order of the devices -> the result and gradients, on n devices."""
    mesh = jax.make_mesh((n,), ("context",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))

    def function(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(lambda q, k, v: context.attend(q, k, v, window), q, k, v)
        return y, *backward(dy)

    mapped = jax.shard_map(function, mesh=mesh, in_specs=(SPEC,) * 4, out_specs=(SPEC,) * 4)
    return Jitted(jax.jit(mapped), mesh)


def error(context: Context, n: int, window: int, length: int = 48) -> float:
    """Largest relative difference from one device's, of the result and each gradient."""
    *x, dy = inputs(length)
    y, backward = jax.vjp(lambda q, k, v: attend(q, k, v, window), *map(jnp.asarray, x))
    order = context.order(length, n)
    found = meet(context, n, window)(*(a[:, order] for a in (*x, dy)))
    pairs = zip(found, (y, *backward(jnp.asarray(dy))), strict=True)
    return max(float(np.linalg.norm(a - b[:, order]) / np.linalg.norm([*b.ravel(), *y.ravel()])) for a, b in pairs)


# An odd number of devices, and windows across several and within one.
QUICK = [(3, 13), (4, 0), (4, 5)]


@pytest.mark.parametrize("case", often(product([1, 2, 3, 4, 8], [0, 1, 5, 13, 40]), QUICK))
def test_a_ring_attends_as_one_device(case: tuple[int, int]) -> None:
    n, window = case
    assert error(Ring(), n, window) <= BOUND


@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize("n", often([1, 2, 4], [4]))
def test_ulysses_attends_as_one_device(n: int, window: int) -> None:
    assert error(Ulysses(), n, window) <= BOUND


def test_a_step_masked_wrongly_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the wrong pair is masked for two late or two early chunks."""
    monkeypatch.setattr(ring_attention, "_others", lambda step: ((1, 0), (0, 0)))
    assert error(Ring(), 4, 0) > 1e-3


def test_gradients_that_stay_away_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: key gradients stay with the neighbour, without their last exchange."""
    monkeypatch.setattr(ring_attention, "_home", lambda gradients: gradients)
    assert error(Ring(), 4, 0) > 1e-3


@pytest.mark.parametrize("context", [Ring(), Ulysses()], ids=["ring", "ulysses"])
@pytest.mark.parametrize("n", [2, 4])
def test_rows_are_in_the_order_of_the_devices(context: Context, n: int) -> None:
    table = np.arange(48.0)[:, None]
    mesh = jax.make_mesh((n,), ("context",), devices=jax.devices()[:n], axis_types=(AxisType.Auto,))
    rows = jax.jit(jax.shard_map(context.rows, mesh=mesh, in_specs=P(), out_specs=P("context")))(table)
    np.testing.assert_array_equal(rows[:, 0], context.order(48, n))
    assert sorted(context.order(48, n)) == list(range(48))
    assert (NoContextParallel().order(48, 1) == range(48)).all() and NoContextParallel().rows(
        jnp.asarray(table)
    ).shape == (48, 1)


def test_a_ring_costs_every_device_alike() -> None:
    """Number of unmasked pairs of query and key, by device."""
    order = Ring().order(48, 4).reshape(4, -1)
    seen = [sum(int(t) + 1 for t in times) for times in order]
    assert len(set(seen)) == 1


@pytest.mark.parametrize("n", [2, 4])
def test_bytes(n: int) -> None:
    """The counts documented in `parallel/context.py`, forward and backward."""
    keys, queries = (B * 48 * heads * C * 8 for heads in (2 * K, H))

    def sent(context: Context) -> float:
        return sum(c.bytes for c in traffic.count(meet(context, n, 0).trace(*inputs(48)).jaxpr))

    assert sent(Ring()) == pytest.approx(keys * (n - 1) / n + keys * (2 * n - 1) / n)
    assert sent(Ulysses()) == pytest.approx(2 * (2 * queries + keys) * (n - 1) / n**2)


def test_a_ring_keeps_no_scores() -> None:
    """The backward pass saves the inputs, the result, and one number per query."""
    q, k, v, _ = map(jnp.asarray, inputs(48))
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    sizes = []

    def kept(*x: jax.Array) -> jax.Array:
        y, backward = jax.vjp(lambda q, k, v: Ring().attend(q, k, v, 0), *x)
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(backward)))
        return y

    jax.eval_shape(jax.shard_map(kept, mesh=mesh, in_specs=SPEC, out_specs=SPEC), q, k, v)
    assert sizes[-1] <= (2 * q.size + k.size + v.size + q.size // C) // 2


@pytest.mark.parametrize("window", [0, 1, 13])
def test_a_fused_kernel_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Arguments for cuDNN, evaluated by XLA's own attention."""
    asked = []

    def by_xla(*x: jax.Array, implementation: str, **options: Any) -> Any:
        asked.append(implementation)
        return dot_product_attention(*x, **options)

    dot_product_attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.standard_normal((B, 48, heads, 8)), jnp.bfloat16) for heads in (H, K, K))
    wide_q, wide_k, wide_v = (a.astype(jnp.float64) for a in (q, k, v))
    want = attend(wide_q, wide_k, wide_v, window)

    def error(window: int) -> float:
        found = NoContextParallel(fused=True).attend(q, k, v, window)
        return float(jnp.linalg.norm(found - want) / jnp.linalg.norm(want))

    assert error(window) < 1e-2 < error(window + 1 if window else 47)
    assert asked == ["cudnn"] * 2


def test_attention_without_a_fused_kernel_is_ours() -> None:
    q, k, v, _ = map(jnp.asarray, inputs(48))
    np.testing.assert_array_equal(fused_attend(q, k, v, 5), attend(q, k, v, 5))
    kernels = {(dtype, size): has_kernel(dtype, size) for dtype in ("float32", "bfloat16") for size in (64, 12, 256)}
    assert [case for case, there in kernels.items() if there] == [("bfloat16", 64)]
