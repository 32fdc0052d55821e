"""The optimizer against torch's formulas written out in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import Optimizer
from jaxdist.conftest import tiny
from jaxdist.mesh import make_mesh
from jaxdist.optim import adamw, clip_by_norm, learning_rate, scale_by_adam
from jaxdist.sharding import Layout


@pytest.fixture(autouse=True)
def double() -> None:
    make_mesh(tiny(), "cpu")


@pytest.mark.parametrize(
    ("decay", "step", "rate"),
    [
        ("cosine", 1, 0.25), ("cosine", 4, 1.0), ("cosine", 8, 0.55), ("cosine", 12, 0.1), ("cosine", 99, 0.1),
        ("linear", 2, 0.5), ("linear", 8, 0.55), ("linear", 12, 0.1), ("constant", 3, 0.75), ("constant", 12, 1.0),
    ],
)  # fmt: skip
def test_learning_rate(decay: Any, step: int, rate: float) -> None:
    o = Optimizer(learning_rate=1.0, warmup=4, decay=decay, final=0.1)
    assert float(learning_rate(o, 12, jnp.asarray(step))) == pytest.approx(rate, rel=1e-12)


def test_no_warmup_starts_at_the_peak() -> None:
    assert float(learning_rate(Optimizer(learning_rate=1.0, warmup=0, decay="constant"), 10, jnp.asarray(1))) == 1.0


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0, 1e6])
def test_clip_is_torchs(norm: float) -> None:
    clip = clip_by_norm(1.0)
    updates, _ = clip.update({"w": jnp.array([3.0])}, clip.init({}), norm=jnp.asarray(norm))
    assert float(updates["w"][0]) == pytest.approx(3.0 * min(1.0, 1.0 / (norm + 1e-6)), rel=1e-15)
    optaxs = optax.clip_by_global_norm(1.0).update({"w": jnp.array([norm])}, optax.EmptyState())[0]["w"][0]
    if norm > 1:  # the 1e-6 is what tells the two apart
        ours, _ = clip.update({"w": jnp.array([norm])}, clip.init({}), norm=jnp.asarray(norm))
        assert float(ours["w"][0]) != float(optaxs)


def first_update(transform: optax.GradientTransformation) -> float:
    """Relative error of the first update in float32 for a gradient of 1: it should be 1 / (1 + eps)."""
    state = transform.init({"w": jnp.ones(1, jnp.float32)})
    with jax.enable_x64(False):
        update, _ = transform.update({"w": jnp.ones(1, jnp.float32)}, state)
        return abs(float(update["w"][0]) - 1)


def test_bias_correction_is_exact_in_float32() -> None:
    """Moments of the first step are corrected to the gradient itself; optax's own correction is caught."""
    assert first_update(scale_by_adam(0.9, 0.999, 1e-30)) <= 4 * 2**-24
    assert first_update(optax.scale_by_adam(0.9, 0.999, 1e-30)) > 4 * 2**-24


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_adam_is_optaxs_in_float64(beta: float) -> None:
    ours, theirs = scale_by_adam(beta, 0.95, 1e-8), optax.scale_by_adam(beta, 0.95, 1e-8)
    states = [t.init({"w": jnp.ones(3)}) for t in (ours, theirs)]
    for number in range(1, 6):
        g = {"w": jnp.arange(3.0) - number}
        (a, states[0]), (b, states[1]) = ours.update(g, states[0]), theirs.update(g, states[1])
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, states[0].count, states[1].count)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12), states[0], states[1])


def test_adamw_is_torchs() -> None:
    """Twenty steps of both a decayed matrix and an undecayed, stacked vector."""
    o = Optimizer(learning_rate=1e-2, warmup=3, weight_decay=0.1, clip=0)
    layouts = {
        "w": Layout("w", (3, 2), ("embed", "hidden"), 0, 1),
        "scale": Layout("scale", (4, 3), ("layers", "embed"), 1, 0),
    }
    random = np.random.default_rng(0)
    p = {name: random.normal(size=layout.shape) for name, layout in layouts.items()}
    tx = adamw(o, 20, layouts)
    ours = jax.tree.map(jnp.asarray, p)
    state = tx.init(ours)
    m, v = ({n: np.zeros_like(w) for n, w in p.items()} for _ in range(2))
    for t in range(1, 21):
        g = {name: random.normal(size=w.shape) for name, w in p.items()}
        updates, state = tx.update(jax.tree.map(jnp.asarray, g), state, ours, norm=jnp.asarray(1.0))
        ours = optax.apply_updates(ours, updates)
        rate = float(learning_rate(o, 20, jnp.asarray(t)))
        for name, w in p.items():
            w = w * (1 - rate * (o.weight_decay if name == "w" else 0.0))
            m[name] = o.beta1 * m[name] + (1 - o.beta1) * g[name]
            v[name] = o.beta2 * v[name] + (1 - o.beta2) * g[name] ** 2
            root = np.sqrt(v[name]) / np.sqrt(1 - o.beta2**t) + o.eps
            p[name] = w - rate / (1 - o.beta1**t) * m[name] / root
    for name in p:
        np.testing.assert_allclose(np.asarray(ours[name]), p[name], rtol=1e-13)
