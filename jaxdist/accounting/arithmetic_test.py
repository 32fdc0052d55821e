"""Precision-sensitive operations in narrow dtypes are found, also in a scan over blocks and in the backward pass."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxdist.accounting.arithmetic import narrowest
from jaxdist.conftest import tiny
from jaxdist.families import layers
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training.program import Program

pytestmark = pytest.mark.long


def found(policy: str) -> dict[str, str]:
    experiment = tiny(precision={"policy": policy}, parallel={"mesh": "2x2"})
    p = Program(experiment, make_mesh(experiment, "cpu")[0])
    return narrowest(p.step.trace(p.abstract, p.abstract_batch).jaxpr)


@pytest.mark.parametrize(("policy", "dtype"), [("fp64", "float64"), ("fp32", "float32"), ("bf16", "float32")])
def test_a_step_computes_them_in_float32_at_least(policy: str, dtype: str) -> None:
    assert found(policy).keys() >= {"exp", "log", "rsqrt", "cos", "sin"}
    assert set(found(policy).values()) == {dtype}


def test_a_norm_in_bfloat16_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.RMSNorm.__call__

    def call(self: Any, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.bfloat16)
        return right(self, (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True))).astype(x.dtype))

    monkeypatch.setattr(layers.RMSNorm, "__call__", call)
    seen = found("bf16")
    assert seen.pop("rsqrt") == "bfloat16" and set(seen.values()) == {"float32"}


def test_the_narrowest_counts_and_unused_results_do_not() -> None:
    def f(x: jax.Array) -> jax.Array:
        jnp.log(x.astype(jnp.float16))
        return jnp.exp(x) + jnp.exp(x.astype(jnp.float16)) + jnp.tanh(x.astype(jnp.bfloat16))

    assert narrowest(jax.jit(f).trace(jnp.ones(3)).jaxpr) == {"exp": "float16"}
