"""Learning rate, clip, update rule, decay and average of weights as one optax chain, by torch's formulas.

Differences pinned here: the clip divides by norm + 1e-6 as `torch.nn.utils.clip_grad_norm_` does (optax does not);
every hyperparameter is passed, since the defaults differ; weight decay applies to matrices only; the bias correction
1 - βᵗ is exact, where optax loses half of its digits in float32 at the first steps.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxdist.config import EMA, ConfigError, Optimizer
from jaxdist.config.optimizer import COLUMNS, OPTIMIZERS, ROWS, AppliesTo
from jaxdist.config.plugins import function, named
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.training.matrices import ShardedParam, orthogonal

Arrays = dict[str, jax.Array]


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
    """Scale updates by min(1, largest / (norm + 1e-6)); `largest` = 0 disables it. `norm` is an extra argument of an
    update."""

    def update(updates: Any, state: optax.EmptyState, params: Any = None, *, norm: jax.Array, **_: Any) -> Any:
        factor = jnp.minimum(1, largest / (norm + 1e-6)) if largest else 1
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


STEP, LANES = 32, 16  # on CPUs: squares in a sum, and sums side by side


def sum_of_squares(arrays: Sequence[jax.Array]) -> jax.Array:
    """The sum of all squares in `arrays`, of one dtype.

    XLA's CPU compiler adds up more than 32 numbers in steps, and first writes them: all squares. Sums of 32 it makes as
    it reads, 16 side by side as a vector. On CPUs these alone are written, and then added up.
    """

    def in_parts(*arrays: jax.Array) -> jax.Array:
        parts = []
        for x in arrays:
            squares = jnp.square(x.ravel())
            most, rest = jnp.split(squares, [x.size - x.size % (STEP * LANES)])
            parts += [most.reshape(-1, STEP, LANES).sum(1).ravel(), rest]
        return jnp.sum(lax.optimization_barrier(jnp.concatenate(parts)))  # without it XLA would make one sum of both

    def at_once(*arrays: jax.Array) -> jax.Array:
        total: jax.Array = optax.tree.norm(arrays, squared=True)
        return total

    total: jax.Array = lax.platform_dependent(*arrays, cpu=in_parts, default=at_once)
    return total


class UpdateStep(NamedTuple):
    """The step of an update: `t`, the number of updates including this one, in the widest float; the learning rate; and
    `select(new, old)`: new in the dtype of old, or old if the step is not taken."""

    t: jax.Array
    rate: jax.Array
    select: Callable[[jax.Array, jax.Array], jax.Array]


# ---- update rules: (config, gradient, state, step, parameter) -> update before the learning rate, new state


def adam(o: Optimizer, g: jax.Array, kept: Arrays, step: UpdateStep, _: ShardedParam) -> tuple[jax.Array, Arrays]:
    """m̂ / (√v̂ + ε) of update t (arXiv:1412.6980)."""
    # 1 - βᵗ; of β = 0 it is 1
    left1, left2 = (-jnp.expm1(step.t * (math.log(b) if b else -math.inf)) for b in (o.beta1, o.beta2))
    m, v = kept["exp_avg"], kept["exp_avg_sq"]
    m, v = step.select(o.beta1 * m + (1 - o.beta1) * g, m), step.select(o.beta2 * v + (1 - o.beta2) * g * g, v)
    return m / left1 / (jnp.sqrt(v / left2) + o.eps), {"exp_avg": m, "exp_avg_sq": v}


def sgd(o: Optimizer, g: jax.Array, kept: Arrays, step: UpdateStep, _: ShardedParam) -> tuple[jax.Array, Arrays]:
    """torch.optim.SGD without dampening: m = μ·m + g, or g + μ·m of it by Nesterov."""
    if not o.momentum:
        return g, {}
    m = kept["momentum_buffer"]
    m = step.select(o.momentum * m + g, m)
    return (g + o.momentum * m if o.nesterov else m), {"momentum_buffer": m}


def lion(o: Optimizer, g: jax.Array, kept: Arrays, step: UpdateStep, _: ShardedParam) -> tuple[jax.Array, Arrays]:
    """Sign of β1·m + (1-β1)·g; m decays by β2 (arXiv:2302.06675, algorithm 2)."""
    m = kept["exp_avg"]
    return jnp.sign(o.beta1 * m + (1 - o.beta1) * g), {"exp_avg": step.select(o.beta2 * m + (1 - o.beta2) * g, m)}


def adafactor(
    o: Optimizer, g: jax.Array, kept: Arrays, step: UpdateStep, param: ShardedParam
) -> tuple[jax.Array, Arrays]:
    """torch.optim.Adafactor: g/√v, v of a matrix by rows and columns (arXiv:1804.04235), scaled by the parameter's
    size; the rate is 1/√t at most."""
    taken, least = step.t**o.beta2_decay, o.eps1 or float(jnp.finfo(g.dtype).eps)

    def moved(kind: str, mean: jax.Array) -> jax.Array:
        return step.select(kept[kind] + taken * (mean - kept[kind]), kept[kind])

    if "variance" in kept:
        v = moved("variance", g * g)
        new = {"variance": v}
    else:
        rows, columns = param.spec.matrix
        new = {ROWS: moved(ROWS, param.mean(g * g, columns)), COLUMNS: moved(COLUMNS, param.mean(g * g, rows))}
        v = new[ROWS] * new[COLUMNS] / jnp.maximum(param.mean(new[ROWS], rows), least)
    update = g * lax.rsqrt(jnp.maximum(v, least**2))
    size = jnp.maximum(param.rms(param.weights), o.eps2) / jnp.maximum(param.rms(update) / o.d, 1)
    return update * size * jnp.minimum(1 / (step.rate * jnp.sqrt(step.t)), 1), new


ADJUSTED: dict[str, Callable[[int, int], float]] = {
    "original": lambda inputs, outputs: math.sqrt(max(1, outputs / inputs)),
    "match_rms_adamw": lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),
}


def muon(o: Optimizer, g: jax.Array, kept: Arrays, step: UpdateStep, param: ShardedParam) -> tuple[jax.Array, Arrays]:
    """torch.optim.Muon for the matrices of blocks, in the compute dtype where torch has bfloat16; Adam for all other
    parameters."""
    if "momentum_buffer" not in kept:
        return adam(o, g, kept, step, param)
    m = kept["momentum_buffer"]
    m = step.select(m + (1 - o.momentum) * (g - m), m)
    along = g + o.momentum * (m - g) if o.nesterov else m
    update = param.by_matrix(partial(orthogonal, steps=o.ns_steps), along.astype(param.dtype))
    return ADJUSTED[o.adjust_lr_fn](*param.spec.shape[-2:]) * update.astype(g.dtype), {"momentum_buffer": m}


Rule = Callable[[Optimizer, jax.Array, Arrays, UpdateStep, ShardedParam], tuple[jax.Array, Arrays]]


def rule_of(o: Optimizer) -> Rule:
    """The update rule of an optimizer. Raises ConfigError if a plugin's cannot be imported, for errors that it raises,
    and if it returns other things than a `Rule`."""
    found: Rule = function(OPTIMIZERS, o.name, "rule", "training in JAX", tuple)

    def checked(o: Optimizer, g: jax.Array, before: Arrays, step: UpdateStep, param: ShardedParam) -> Any:
        result: Any = found(o, g, before, step, param)
        update, *state = map(_described, result)
        if state != [wanted := _described(before)] or update.partition("[")[2] != _described(g).partition("[")[2]:
            raise ConfigError(
                f"{named(OPTIMIZERS, o.name)}: rule returns {', '.join([update, *state])} for the gradient "
                f"{_described(g)} and the state {wanted}; return (update, state), an update of this shape and the same "
                "arrays of state, as step.select(new, old) makes them"
            )
        return result

    return found if OPTIMIZERS.built_in(o.name) else checked


def _described(tree: Any) -> str:
    """Names, dtypes and shapes of arrays in words."""
    if isinstance(tree, Mapping):
        return f"{{{', '.join(f'{name}: {_described(tree[name])}' for name in sorted(tree))}}}"
    return f"{tree.dtype}{[*tree.shape]}" if isinstance(tree, jax.Array) else reprlib.repr(tree)


class State(NamedTuple):
    """State of a part of the chain: arrays by kind, under torch's names, and parameter; `updates` is the number of
    steps taken."""

    updates: jax.Array
    kept: dict[str, Arrays]


Kept = Mapping[str, Arrays]


def stateful(
    begin: Callable[[Arrays], dict[str, Arrays]],
    apply: Callable[[UpdateStep, Arrays, Arrays, Kept], tuple[Arrays, Kept]],
) -> optax.GradientTransformationExtraArgs:
    """The transformation `apply(step, updates, parameters, kept)` -> (updates, new state), which starts as
    `begin(parameters)`.

    `taken` and `rate` are extra arguments of an update. A step that is not taken leaves the state as it was: `apply`
    calls `step.select` on each array before it is used, so that no second copy of the state is held.
    """

    def init(parameters: Arrays) -> State:
        return State(jnp.zeros((), jnp.int32), begin(parameters))

    def update(  # optax's protocol
        updates: Arrays, state: State, params: Any = None, *, taken: Any = True, rate: Any = 1.0, **_: Any
    ) -> tuple[Arrays, State]:
        def select(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(taken, new.astype(old.dtype), old)

        t = (state.updates + 1).astype(jnp.result_type(float))
        after, kept = apply(UpdateStep(t, jnp.asarray(rate), select), updates, params, state.kept)
        return after, State(select(state.updates + 1, state.updates), dict(kept))

    return optax.GradientTransformationExtraArgs(init, update)


def rule(
    o: Optimizer, param_specs: Mapping[str, ParamSpec], sharded: bool = False, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """The update rule of an optimizer, parameter by parameter. `sharded`, `dtype`: see `ShardedParam`."""

    def begin(parameters: Arrays) -> dict[str, Arrays]:
        def zeros(kind: str, applies_to: AppliesTo) -> Arrays:
            there = ((name, w) for name, w in parameters.items() if applies_to(param_specs[name].role))
            return {name: jnp.zeros(param_specs[name].state_shape(kind), w.dtype) for name, w in there}

        return {kind: zeros(kind, applies_to) for kind, applies_to in o.states.items() if kind != EMA}

    def apply(step: UpdateStep, updates: Arrays, parameters: Arrays, kept: Kept) -> tuple[Arrays, Kept]:
        results, update_rule = dict[str, tuple[jax.Array, Arrays]](), rule_of(o)
        for name, g in updates.items():
            own = {kind: arrays[name] for kind, arrays in kept.items() if name in arrays}
            param = ShardedParam(param_specs[name], sharded, parameters[name], dtype)
            results[name] = update_rule(o, g, own, step, param)
        kinds = {kind: {name: results[name][1][kind] for name in arrays} for kind, arrays in kept.items()}
        return {name: update for name, (update, _) in results.items()}, kinds

    return stateful(begin, apply)


def averaged(decay: float) -> optax.GradientTransformationExtraArgs:
    """Keep the moving average of the weights after the update, as `torch.optim.swa_utils.AveragedModel` does with
    `get_ema_multi_avg_fn(decay)`: the first update is copied."""

    def apply(step: UpdateStep, updates: Arrays, parameters: Arrays, kept: Kept) -> tuple[Arrays, Kept]:
        share = jnp.where(step.t == 1, 1.0, 1 - decay)
        after = optax.apply_updates(parameters, updates)
        moved = jax.tree.map(lambda average, w: step.select(average + share * (w - average), average), kept[EMA], after)
        return updates, {EMA: moved}

    return stateful(lambda parameters: {EMA: dict(parameters)}, apply)


def kept_of(state: Any) -> dict[str, Arrays]:
    """Per-parameter arrays in a chain's state, by kind."""
    return {kind: tree for part in state if isinstance(part, State) for kind, tree in part.kept.items()}


def updates_of(state: Any) -> list[jax.Array]:
    """Number of updates in each part of a chain's state, not counting skipped steps."""
    return [part.updates for part in state if isinstance(part, State)]


def steps_done(state: Any) -> jax.Array:
    """Number of steps of a chain's schedule, including skipped ones."""
    count: jax.Array = next(part.count for part in state if isinstance(part, optax.ScaleByScheduleState))
    return count


def chain(
    o: Optimizer, steps: int, decays: Mapping[str, bool], update_rule: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Clip -> update rule, with coupled (L2) or decoupled weight decay -> learning rate -> average of weights.

    `decays`: whether weight decay applies, by parameter.
    """
    decay = optax.add_decayed_weights(o.weight_decay, mask=dict(decays))
    update_and_decay = (decay, update_rule) if OPTIMIZERS[o.name].coupled else (update_rule, decay)

    def rate(count: jax.Array) -> jax.Array:
        return learning_rate(o, steps, count + 1)

    scaled = optax.scale_by_learning_rate(rate)
    parts = optax.chain(clip_by_norm(o.clip), *update_and_decay, scaled, *([averaged(o.ema)] if o.ema else []))

    def update(updates: Arrays, state: Any, params: Any = None, **extra: Any) -> Any:
        return parts.update(updates, state, params, rate=rate(steps_done(state)), **extra)

    return optax.GradientTransformationExtraArgs(parts.init, update)


def optimizer(
    o: Optimizer, steps: int, param_specs: Mapping[str, ParamSpec], sharded: bool = False, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """The chain over the trained parameters among `param_specs`."""
    trained = {name: spec for name, spec in param_specs.items() if not spec.statistic}
    return chain(o, steps, {n: spec.decays for n, spec in trained.items()}, rule(o, trained, sharded, dtype))
