"""Computations of the plugin in JAX."""

from typing import Any

import jax
import jax.numpy as jnp


def centered(o: Any, g: jax.Array, kept: Any, step: Any, _: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """RMSprop by the variance of the gradient: g / (sqrt(E[g²] - E[g]²) + eps)."""
    m, v = kept["mean_grad"], kept["mean_square"]
    m, v = step.select(o.beta2 * m + (1 - o.beta2) * g, m), step.select(o.beta2 * v + (1 - o.beta2) * g * g, v)
    return g / (jnp.sqrt(jnp.maximum(v - m * m, 0)) + o.eps), {"mean_grad": m, "mean_square": v}
