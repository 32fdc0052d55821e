"""The optimizer against torch's formulas written out in numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.config import Optimizer
from jaxdist.conftest import tiny
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.runtime.xla import on_cpus
from jaxdist.training.optim import averaged, clip_by_norm, kept_of, learning_rate, optimizer, rule, sum_of_squares


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


SIZES = (3, 5), (512,), (7, 1, 512), (4, 100, 37), ()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sum_of_squares(dtype: Any) -> None:
    """Sizes divisible into 32 sums of 16 squares, and others.

    Each square is rounded, goes through 31 additions, and as many in each of the at most three steps in which XLA adds
    up sums: 125 roundings, of half an epsilon.
    """
    arrays = [np.asarray(np.random.default_rng(0).normal(size=size), dtype) for size in SIZES]
    exact = sum(np.square(x.astype(np.longdouble)).sum() for x in arrays)
    total, bound = jax.jit(sum_of_squares)([jnp.asarray(x) for x in arrays]), 62.5 * np.finfo(dtype).eps * exact
    assert total.dtype == dtype and abs(np.longdouble(total) - exact) <= bound
    assert np.square(arrays[0]).sum() > 10 * bound  # so a missing array would show


def plain(arrays: Any) -> Any:
    return optax.tree.norm(arrays, squared=True)


@pytest.mark.parametrize(("which", "written"), [(sum_of_squares, False), (plain, True)])
def test_no_squares_are_written_on_several_devices(which: Any, written: bool) -> None:
    """Sums of 32 are written alone; XLA's own sum writes all squares first."""
    mesh, _ = make_mesh(tiny(parallel={"mesh": "fsdp=2"}), "cpu")
    arrays = [jax.ShapeDtypeStruct((4, 256, 512), jnp.float32)] * 2
    compiled = jax.jit(which, compiler_options=on_cpus(mesh)).lower(arrays).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    share = analysis.temp_size_in_bytes / (2 * 4 * 256 * 512 * 4)
    assert share >= 1 if written else share < 0.1


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0, 1e6])
def test_clip_is_torchs(norm: float) -> None:
    clip = clip_by_norm(1.0)
    updates, _ = clip.update({"w": jnp.array([3.0])}, clip.init({}), norm=jnp.asarray(norm))
    assert float(updates["w"][0]) == pytest.approx(3.0 * min(1.0, 1.0 / (norm + 1e-6)), rel=1e-15)
    optaxs = optax.clip_by_global_norm(1.0).update({"w": jnp.array([norm])}, optax.EmptyState())[0]["w"][0]
    if norm > 1:  # the 1e-6 distinguishes the two
        ours, _ = clip.update({"w": jnp.array([norm])}, clip.init({}), norm=jnp.asarray(norm))
        assert float(ours["w"][0]) != float(optaxs)


VECTOR = {"w": ParamSpec("w", (3,), ("classes",), 0, 0)}


def first_update(transform: optax.GradientTransformation) -> float:
    """Relative error of the first update in float32 for a gradient of 1, which should be 1 / (1 + eps)."""
    ones = {"w": jnp.ones(3, jnp.float32)}
    state = transform.init(ones)
    with jax.enable_x64(False):
        update, _ = transform.update(ones, state, ones)
        return abs(float(update["w"][0]) - 1)


def test_bias_correction_is_exact_in_float32() -> None:
    """The first step's moments are corrected to the gradient itself; optax's own correction fails."""
    assert first_update(rule(Optimizer(beta1=0.9, beta2=0.999, eps=1e-30), VECTOR)) <= 4 * 2**-24
    assert first_update(optax.scale_by_adam(0.9, 0.999, 1e-30)) > 4 * 2**-24


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_adam_is_optaxs_in_float64(beta: float) -> None:
    ours, theirs = rule(Optimizer(beta1=beta), VECTOR), optax.scale_by_adam(beta, 0.95, 1e-8)
    w = {"w": jnp.ones(3)}
    states: list[Any] = [t.init(w) for t in (ours, theirs)]
    for number in range(1, 6):
        g = {"w": jnp.arange(3.0) - number}
        (a, states[0]), (b, states[1]) = ours.update(g, states[0], w), theirs.update(g, states[1])
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-12)
    np.testing.assert_array_equal(states[0].updates, states[1].count)
    for kind, moment in (("exp_avg", states[1].mu), ("exp_avg_sq", states[1].nu)):
        np.testing.assert_allclose(states[0].kept[kind]["w"], moment["w"], rtol=1e-12)


Kept = dict[str, Any]


def adamw(o: Optimizer, w: Any, g: Any, s: Kept, t: int, rate: float, decay: float) -> Any:
    w = w * (1 - rate * decay)
    s["exp_avg"] = o.beta1 * s["exp_avg"] + (1 - o.beta1) * g
    s["exp_avg_sq"] = o.beta2 * s["exp_avg_sq"] + (1 - o.beta2) * g**2
    root = np.sqrt(s["exp_avg_sq"]) / np.sqrt(1 - o.beta2**t) + o.eps
    return w - rate / (1 - o.beta1**t) * s["exp_avg"] / root


def adam(o: Optimizer, w: Any, g: Any, s: Kept, t: int, rate: float, decay: float) -> Any:
    return adamw(o, w, g + decay * w, s, t, rate, 0.0)


def sgd(o: Optimizer, w: Any, g: Any, s: Kept, t: int, rate: float, decay: float) -> Any:
    g = g + decay * w
    s["momentum_buffer"] = g if t == 1 else o.momentum * s["momentum_buffer"] + g
    return w - rate * (g + o.momentum * s["momentum_buffer"] if o.nesterov else s["momentum_buffer"])


def lion(o: Optimizer, w: Any, g: Any, s: Kept, t: int, rate: float, decay: float) -> Any:
    w = w * (1 - rate * decay) - rate * np.sign(o.beta1 * s["exp_avg"] + (1 - o.beta1) * g)
    s["exp_avg"] = o.beta2 * s["exp_avg"] + (1 - o.beta2) * g
    return w


def adafactor(o: Optimizer, w: Any, g: Any, s: Kept, t: int, rate: float, decay: float) -> Any:
    """Adafactor for matrices [L, I, O], whose rows are O in torch, and vectors [L, O]."""
    taken, eps, every = t**o.beta2_decay, np.finfo(g.dtype).eps, tuple(range(1, g.ndim))
    size = np.maximum(o.eps2, np.sqrt(np.mean(w * w, every, keepdims=True))) * min(rate, 1 / np.sqrt(t))
    if g.ndim > 2:
        s["row_var"] = s["row_var"] + taken * (np.mean(g * g, 1, keepdims=True) - s["row_var"])
        s["col_var"] = s["col_var"] + taken * (np.mean(g * g, 2, keepdims=True) - s["col_var"])
        v = s["row_var"] * s["col_var"] / np.maximum(np.mean(s["row_var"], 2, keepdims=True), eps)
    else:
        v = s["variance"] = s["variance"] + taken * (g * g - s["variance"])
    update = g / np.sqrt(np.maximum(v, eps * eps))
    clip = np.maximum(1, np.sqrt(np.mean(update * update, every, keepdims=True)) / o.d)
    return w * (1 - rate * decay) - size / clip * update


def muon(o: Optimizer, w: Any, g: Any, s: Kept, t: int, rate: float, decay: float) -> Any:
    """Muon for matrices [L, I, O], AdamW for vectors."""
    if g.ndim < 3:
        return adamw(o, w, g, s, t, rate, decay)
    s["momentum_buffer"] = o.momentum * s["momentum_buffer"] + (1 - o.momentum) * g
    along = (1 - o.momentum) * g + o.momentum * s["momentum_buffer"] if o.nesterov else s["momentum_buffer"]
    update = np.empty_like(w)
    for layer, x in enumerate(along):
        x = x.T / np.linalg.norm(x)  # [O, I] as in torch
        for _ in range(o.ns_steps):
            x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
        update[layer] = x.T
    inputs, outputs = w.shape[1:]
    factor = np.sqrt(max(1, outputs / inputs)) if o.adjust_lr_fn == "original" else 0.2 * np.sqrt(max(inputs, outputs))
    return w * (1 - rate * decay) - rate * factor * update


FORMULAS: dict[str, Any] = {
    "adamw": adamw, "adam": adam, "sgd": sgd, "lion": lion, "adafactor": adafactor, "muon": muon,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adam with an average": {"name": "adam", "ema": 0.9},
    "sgd": {"name": "sgd", "momentum": 0.8},
    "sgd by Nesterov": {"name": "sgd", "nesterov": True},
    "sgd without momentum": {"name": "sgd", "momentum": 0.0},
    "lion": {"name": "lion", "beta2": 0.99},
    "adafactor": {"name": "adafactor", "beta2_decay": -0.7, "d": 1.5},
    "muon": {"name": "muon", "momentum": 0.95, "nesterov": True},
    "muon by its original rate": {"name": "muon", "adjust_lr_fn": "original", "ns_steps": 3, "ema": 0.9},
}
SPECS = {
    "w": ParamSpec("layers.w", (2, 3, 4), ("layers", "positions", "classes"), 0, 0),
    "scale": ParamSpec("layers.scale", (4, 3), ("layers", "classes"), 0, 0),
}


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_twenty_steps_by_the_papers(settings: dict[str, Any]) -> None:
    """Stacked matrices with decay and stacked vectors without; one step is skipped."""
    o = Optimizer(learning_rate=1e-2, warmup=3, weight_decay=0.1, clip=0, **settings)
    random = np.random.default_rng(0)
    p = {name: random.normal(size=spec.shape) for name, spec in SPECS.items()}
    tx = optimizer(o, 20, SPECS, dtype=jnp.float64)
    ours = jax.tree.map(jnp.asarray, p)
    state = tx.init(ours)
    kinds = (*o.kept, "momentum_buffer")
    kept: dict[str, Kept] = {n: {k: np.zeros(spec.state_shape(k)) for k in kinds} for n, spec in SPECS.items()}
    done = 0
    for t in range(1, 21):
        g = {name: random.normal(size=w.shape) for name, w in p.items()}
        taken = t != 7
        updates, state = tx.update(jax.tree.map(jnp.asarray, g), state, ours, norm=jnp.asarray(1.0), taken=taken)
        if not taken:
            continue
        ours, done = optax.apply_updates(ours, updates), done + 1
        rate = float(learning_rate(o, 20, jnp.asarray(t)))
        for name, w in p.items():
            p[name] = FORMULAS[o.name](o, w, g[name], kept[name], done, rate, 0.1 if name == "w" else 0.0)
            if o.ema:
                average = p[name] if done == 1 else o.ema * kept[name]["ema"] + (1 - o.ema) * p[name]
                kept[name]["ema"] = average
    assert set(kept_of(state)) == set(o.kept)
    for name in p:
        np.testing.assert_allclose(np.asarray(ours[name]), p[name], rtol=1e-13)
        for kind, applies_to in o.states.items():
            assert (name in kept_of(state)[kind]) == applies_to(SPECS[name].role)
            if name in kept_of(state)[kind]:
                np.testing.assert_allclose(np.asarray(kept_of(state)[kind][name]), kept[name][kind], rtol=1e-12)


def test_an_average_begins_with_the_weights() -> None:
    assert float(averaged(0.9).init({"w": jnp.full(1, 3.0)}).kept["ema"]["w"][0]) == 3.0


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optimizer.nesterov = true with optimizer.momentum = 0.0"):
        Optimizer(nesterov=True, momentum=0.0)
