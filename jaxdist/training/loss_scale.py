"""Dynamic loss scaling (arXiv:1710.03740) as a pure pytree, by the rules of `torch.amp.GradScaler`.

Gradients of the loss times `scale` are too large to vanish in float16. They are divided by it before anything looks at
them. A step whose gradients overflow is not taken, and the scale backs off; after enough good ones in a row it grows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxdist.config import Precision


class LossScale(NamedTuple):
    """Loss scale of the next step, and number of consecutive finite steps since it last changed."""

    scale: jax.Array  # float32
    good: jax.Array  # int32


def start(precision: Precision) -> LossScale | None:
    """Initial loss-scale state; None if the policy does not scale."""
    if not precision.loss_scale:
        return None
    return state_of(precision.loss_scale, 0)


def state_of(scale: ArrayLike, good: ArrayLike) -> LossScale:
    """Build the state from a scale and a count of good steps."""
    return LossScale(jnp.asarray(scale, jnp.float32), jnp.asarray(good, jnp.int32))


def factor(state: LossScale | None) -> jax.Array | int:
    """Factor on the loss, 1 without scaling."""
    return 1 if state is None else state.scale


def after(state: LossScale | None, finite: jax.Array, precision: Precision) -> LossScale | None:
    """The state after a step whose gradients were `finite`, or were not. A scale does not grow beyond float32.

    torch multiplies by its factors in float64: equal up to rounding of factors that float32 can't hold.
    """
    if state is None:
        return None
    good = jnp.where(finite, state.good + 1, 0)
    grows = good == precision.growth_interval
    larger = state.scale * precision.growth_factor
    larger = jnp.where(grows & jnp.isfinite(larger), larger, state.scale)
    scale = jnp.where(finite, larger, state.scale * precision.backoff_factor)
    return LossScale(scale, jnp.where(grows, 0, good))
