"""Learning rate, clip, AdamW and decay mask as one optax chain, by torch's formulas.

Differences pinned here: the clip divides by norm + 1e-6 as `torch.nn.utils.clip_grad_norm_` does (optax does not);
every AdamW hyperparameter is passed, since the defaults differ; weight decay applies to matrices only; the bias
correction 1 - βᵗ is exact, where optax loses half of its digits in float32 at the first steps.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import Optimizer
from jaxdist.sharding import Layout


def learning_rate(o: Optimizer, steps: int, step: jax.Array) -> jax.Array:
    """The learning rate of `step`, counted from 1.

    Warm-up: peak · s / warmup. Then, with p the share of the way from `warmup` to `decay_steps` (or `steps`), capped
    at 1: cosine peak · (f + (1-f)(1 + cos πp)/2), linear peak · (1 - (1-f)p), constant peak; f is `final`.
    """
    end = o.decay_steps or steps
    step = step.astype(jnp.result_type(float))  # an int32 divided by a number would be float32, also in float64 runs
    p = jnp.clip((step - o.warmup) / max(1, end - o.warmup), 0, 1)
    decayed = {
        "cosine": o.final + (1 - o.final) * (1 + jnp.cos(jnp.pi * p)) / 2,
        "linear": 1 - (1 - o.final) * p,
        "constant": jnp.ones_like(p),
    }[o.decay]
    return o.learning_rate * jnp.where(step < o.warmup, step / max(1, o.warmup), decayed)


def clip_by_norm(largest: float) -> optax.GradientTransformationExtraArgs:
    """Scale updates by min(1, largest / (norm + 1e-6)); 0 leaves them alone. `norm` comes in as an extra argument."""

    def update(updates: Any, state: optax.EmptyState, params: Any = None, *, norm: jax.Array, **_: Any) -> Any:
        factor = jnp.minimum(1, largest / (norm + 1e-6)) if largest else 1
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def scale_by_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformationExtraArgs:
    """m̂ / (√v̂ + ε) with Adam's moments (arXiv:1412.6980); the state is that of `optax.scale_by_adam`.

    The state of a step that is not `taken`, an extra argument, stays what it was: chosen here, where each moment is
    made, so that no second copy of them is.
    """

    def update(updates: Any, state: optax.ScaleByAdamState, params: Any = None, *, taken: Any = True, **_: Any) -> Any:
        def kept(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(taken, new.astype(old.dtype), old)

        count = kept(state.count + 1, state.count)
        step = count.astype(jnp.result_type(float))
        # 1 - βᵗ; of β = 0 it is 1
        left1, left2 = (-jnp.expm1(step * (math.log(b) if b else -math.inf)) for b in (b1, b2))
        mu = jax.tree.map(lambda g, m: kept(b1 * m + (1 - b1) * g, m), updates, state.mu)
        nu = jax.tree.map(lambda g, v: kept(b2 * v + (1 - b2) * g * g, v), updates, state.nu)
        scaled = jax.tree.map(lambda m, v: m / left1 / (jnp.sqrt(v / left2) + eps), mu, nu)
        return scaled, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def steps_done(state: Any) -> jax.Array:
    """How many steps the schedule of an AdamW state has made, those that were passed over too."""
    return next(part.count for part in state if isinstance(part, optax.ScaleByScheduleState))


def adamw(o: Optimizer, steps: int, layouts: Mapping[str, Layout]) -> optax.GradientTransformationExtraArgs:
    """Clip -> Adam moments -> decoupled decay -> learning rate (arXiv:1711.05101, torch.optim.AdamW)."""
    return optax.chain(
        clip_by_norm(o.clip),
        scale_by_adam(o.beta1, o.beta2, o.eps),
        optax.add_decayed_weights(o.weight_decay, mask={name: layout.decays for name, layout in layouts.items()}),
        optax.scale_by_learning_rate(lambda count: learning_rate(o, steps, count + 1)),
    )
