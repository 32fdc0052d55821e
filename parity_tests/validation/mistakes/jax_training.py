"""Mistakes in what jaxdist does around its models: data, starting weights, loss, clip, Adam, schedule."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxdist import train
from jaxdist.config import Optimizer
from jaxdist.config.optimizer import OPTIMIZERS
from jaxdist.convert import weights
from jaxdist.data import Batch, Dataset, dataset
from jaxdist.families import loss
from jaxdist.parallel import pipeline
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.training import loss_scale, matrices, optim, step
from jaxdist.training.matrices import ShardedParam
from jaxdist.training.step import Step, TrainState
from parity_tests.validation.mistakes import altered, everywhere, mistake, plant

planted = partial(mistake, "jaxdist")


# ---- data and starting weights


@planted("llama", "mathematics", "batch/tokens")
def batch_of_the_step_before() -> None:
    """Steps are counted from 0 in one place and from 1 in another: the first batch is met twice."""
    right = Dataset.batch
    plant(Dataset, "batch", lambda self, step, *rest, **more: right(self, max(1, step - 1), *rest, **more))


@planted("llama", "mathematics", "batch/tokens")
def data_not_shuffled() -> None:
    """Sequences come in the order of the file."""
    plant(dataset, "permute", lambda place, *_: place)


@planted("llama", "mathematics", "batch/targets")
def padding_is_a_target() -> None:
    """The padding token is to be predicted like any other."""
    right = Dataset.batch

    def batch(*inputs: Any, **more: Any) -> Batch:
        tokens, targets = right(*inputs, **more)
        return Batch(tokens, np.maximum(targets, 0))

    plant(Dataset, "batch", batch)


def loaded(change: Any) -> None:
    """Plant `change` of the weights that a run starts from."""
    right = weights.load_weights
    everywhere(right, lambda program, path: change(right(program, path)))


@planted("llama", "mathematics", "start/layers.0.mlp.gate_proj.weight")
def gate_and_up_swapped_in_the_file() -> None:
    """The conversion table exchanges gate and up."""
    a, b = "layers.mlp.gate_proj.kernel", "layers.mlp.up_proj.kernel"
    loaded(lambda w: w | {a: w[b], b: w[a]})


@planted("llama", "mathematics", "start/layers.0.attention_norm.weight")
def layers_swapped_in_the_file() -> None:
    """The layers' weights are stacked from the last to the first."""
    loaded(lambda w: {n: jnp.flip(a, 0) if n.startswith("layers.") else a for n, a in w.items()})


@planted("gpt2", "mathematics", "start/positions.weight")
def positions_not_loaded() -> None:
    """The table of positions keeps what it was allocated with."""
    loaded(lambda w: w | {"positions.embedding": jnp.zeros_like(w["positions.embedding"])})


# ---- loss and accumulation


@planted("llama", "mathematics", "loss")
def padding_counted() -> None:
    """The loss is divided by all tokens, not by those that have a target."""
    plant(step, "IGNORED", -1)


@planted("llama", "mathematics", "loss")
def targets_shifted_twice() -> None:
    """Both the data and the loss shift the targets."""
    right = loss.cross_entropy
    plant(step, "cross_entropy", lambda logits, y: right(logits, jnp.roll(y, -1, 1)))


@planted("llama", "mathematics", "loss")
def loss_in_float32() -> None:
    """A float64 run takes the cross-entropy in float32."""
    right = loss.cross_entropy
    plant(step, "cross_entropy", lambda logits, y: right(logits.astype(jnp.float32), y))


@planted("chunks", "mathematics", "loss")
def what_fills_the_last_chunk_counted() -> None:
    """The padding of the last chunk of the loss is predicted too, as token 0."""
    right = loss.chunked

    def chunked(targets: jax.Array, chunks: int) -> jax.Array:
        found = right(targets, chunks)
        return jnp.where(jnp.arange(found.size).reshape(found.shape) < targets.size, found, 0)

    plant(step, "chunked", chunked)


@planted("chunks", "mathematics", "gradient/lm_head.weight")
def head_gradient_of_one_chunk() -> None:
    """The head's gradient is that of the last of the loss's chunks: each is put in the place of what there was."""
    right = lax.scan

    def scan(body: Any, start: Any, parts: Any) -> Any:
        return right(lambda total, part: body(jax.tree.map(jnp.zeros_like, total), part), start, parts)

    plant(loss, "lax", altered(lax, scan=scan))


@planted("accumulation", "mathematics", "loss")
def mean_of_microbatch_means() -> None:
    """Each microbatch is divided by its own number of tokens, and their mean is taken."""
    right = Step.accumulate

    def accumulate(self: Any, parameters: Any, batch: Batch, *scale: Any) -> Any:
        parts = [Batch(*part) for part in zip(*(jnp.split(x, self.accumulation) for x in batch), strict=True)]
        found = [right(replace(self, accumulation=1), parameters, part, *scale) for part in parts]
        return jax.tree.map(lambda *values: sum(values) / len(values), *found)

    plant(Step, "accumulate", accumulate)


@planted("accumulation", "mathematics", "loss")
def last_microbatch_dropped() -> None:
    """The loop over microbatches ends one early."""
    right = lax.scan

    def scan(body: Any, start: Any, parts: Any) -> Any:
        return right(body, start, jax.tree.map(lambda x: x[:-1], parts))

    plant(pipeline, "lax", altered(lax, scan=scan))


@planted("accumulation", "mathematics", "gradient/*")
def gradients_divided_twice() -> None:
    """Gradients, of a loss that is a mean already, are divided by the number of microbatches."""
    right = Step.accumulate

    def accumulate(self: Any, parameters: Any, batch: Batch, *scale: Any) -> Any:
        loss, gradients, rest = right(self, parameters, batch, *scale)
        return loss, jax.tree.map(lambda g: g / self.accumulation, gradients), rest

    plant(Step, "accumulate", accumulate)


# ---- loss scale


@planted("scaled", "mathematics", "gradient/*")
def loss_scale_left_in_for_the_clip() -> None:
    """Gradients are divided by the loss scale after the clip."""
    right = Step.update

    def gradient(self: Step, state: TrainState, batch: Batch) -> Any:
        loss, gradients, rest = self.accumulate(state.parameters, batch, loss_scale.factor(state.scaling))
        return loss, self.reduce(gradients), rest

    def update(self: Step, state: TrainState, gradients: Any, rest: Any, loss: Any, norm: Any) -> TrainState:
        factor = jnp.minimum(1, 0.5 / (norm + 1e-6)) / loss_scale.factor(state.scaling)
        return right(self, state, jax.tree.map(lambda g: (g * factor).astype(g.dtype), gradients), rest, loss, 0 * norm)

    plant(Step, "gradient", gradient)
    plant(Step, "update", update)


@planted("scaled", "mathematics", "mathematics/loss scale*")
def loss_scale_that_does_not_grow() -> None:
    """Good steps are not counted."""
    right = loss_scale.after
    plant(loss_scale, "after", lambda state, *rest: right(state._replace(good=0 * state.good), *rest))


@planted("fp16", "precision", "exp_avg/*")
def moments_take_an_overflow_as_zero() -> None:
    """In a step whose gradients overflow, the weights stay and the moments decay."""
    right = optim.stateful

    def with_zeros(*inputs: Any) -> optax.GradientTransformationExtraArgs:
        kept = right(*inputs)

        def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
            zeroed = jax.tree.map(lambda g: jnp.where(jnp.isfinite(g), g, 0), updates)
            return kept.update(zeroed, state, params, **(more | {"taken": True}))

        return optax.GradientTransformationExtraArgs(kept.init, update)

    plant(optim, "stateful", with_zeros)


# ---- clip


@planted("llama", "mathematics", "clipped/*")
def clip_without_its_epsilon() -> None:
    """The clip divides by the norm, where torch divides by the norm + 1e-6."""

    def clip_by_norm(largest: float) -> optax.GradientTransformationExtraArgs:
        def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array, **_: Any) -> Any:
            return jax.tree.map(lambda g: g * jnp.minimum(1, largest / norm), updates), state

        return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)

    everywhere(optim.clip_by_norm, clip_by_norm)


@planted("llama", "mathematics", "exp_avg/*")
def clip_after_adam() -> None:
    """The clip applies to Adam's update, not to the gradient."""
    right = optax.chain
    plant(optim, "optax", altered(optax, chain=lambda clip, adam, *rest: right(adam, clip, *rest)))


@planted("llama", "mathematics", "grad_norm")
def norm_without_the_embedding() -> None:
    """The global norm leaves the embedding out."""
    right = Step.norm
    plant(Step, "norm", lambda self, g: right(self, {n: a for n, a in g.items() if n != "embed.embedding"}))


# ---- update rules


def plant_rule(name: str, change: Any) -> None:
    """Plant an update rule of `change(right, o, g, kept, step, param)`."""
    rule_of = optim.rule_of
    changed = partial(change, rule_of(Optimizer(name=name)))
    plant(optim, "rule_of", lambda o: changed if o.name == name else rule_of(o))


@planted("llama", "mathematics", "exp_avg/*")
def betas_swapped() -> None:
    """beta2 decays the first moment, beta1 the second."""
    swapped = lambda o: o.model_copy(update={"beta1": o.beta2, "beta2": o.beta1})  # noqa: E731
    plant_rule("adamw", lambda right, o, *rest: right(swapped(o), *rest))


@planted("llama", "mathematics", "weights/*")
def eps_ten_times() -> None:
    """Adam's eps is 1e-7."""
    plant_rule("adamw", lambda right, o, *rest: right(o.model_copy(update={"eps": 10 * o.eps}), *rest))


def scaling(formula: Any) -> None:
    """Plant an Adam that updates by `formula(m, v, left1, left2, eps)`; `left` is 1 - βᵗ."""

    def change(right: Any, o: Optimizer, g: Any, kept: Any, step: Any, param: Any) -> Any:
        _, new = right(o, g, kept, step, param)
        left1, left2 = (1 - beta**step.t for beta in (o.beta1, o.beta2))
        return formula(new["exp_avg"], new["exp_avg_sq"], left1, left2, o.eps), new

    plant_rule("adamw", change)


@planted("llama", "mathematics", "weights/*")
def eps_inside_the_root_of_adam() -> None:
    """m / sqrt(v + eps)."""
    scaling(lambda m, v, left1, left2, eps: m / left1 / jnp.sqrt(v / left2 + eps))


@planted("llama", "mathematics", "weights/*")
def no_bias_correction() -> None:
    """m / (sqrt(v) + eps)."""
    scaling(lambda m, v, left1, left2, eps: m / (jnp.sqrt(v) + eps))


@planted("llama", "mathematics", "weights/*")
def eps_before_the_correction() -> None:
    """eps is added to the root of v before its bias is corrected, as TensorFlow's Adam does."""
    scaling(lambda m, v, left1, left2, eps: m / left1 * jnp.sqrt(left2) / (jnp.sqrt(v) + eps))


@planted("llama", "mathematics", "exp_avg/*")
def moments_in_float32() -> None:
    """A float64 run keeps Adam's moments in float32."""

    def change(right: Any, *inputs: Any) -> Any:
        update, new = right(*inputs)
        return update, {kind: a.astype(jnp.float32).astype(a.dtype) for kind, a in new.items()}

    plant_rule("adamw", change)


@planted("llama", "mathematics", "exp_avg_sq/*")
def second_moment_of_the_unclipped() -> None:
    """Adam's second moment takes the gradient as it was before the clip."""
    right, largest = optim.rule, 0.5

    def rule(*inputs: Any) -> optax.GradientTransformationExtraArgs:
        adam = right(*inputs)

        def update(updates: Any, state: Any, params: Any = None, *, norm: jax.Array, **extra: Any) -> Any:
            unclipped = jax.tree.map(lambda g: g / jnp.minimum(1, largest / (norm + 1e-6)), updates)
            scaled, after = adam.update(updates, state, params, **extra)
            _, other = adam.update(unclipped, state, params, **extra)
            return scaled, after._replace(kept=after.kept | {"exp_avg_sq": other.kept["exp_avg_sq"]})

        return optax.GradientTransformationExtraArgs(adam.init, update)

    plant(optim, "rule", rule)


@planted("adam", "mathematics", "exp_avg/*")
def decay_beside_the_gradient() -> None:
    """Adam's decay is taken off the weights, as AdamW's is."""
    row = replace(OPTIMIZERS["adam"], coupled=False)
    plant(OPTIMIZERS, "_rows", {**OPTIMIZERS, "adam": row})


@planted("adam", "mathematics", "ema/*")
def average_of_the_weights_before() -> None:
    """The average takes the weights as they were before the update."""
    plant(optim, "optax", altered(optax, apply_updates=lambda parameters, updates: parameters))


@planted("sgd", "mathematics", "momentum_buffer/*")
def momentum_that_is_dampened() -> None:
    """The momentum takes 1 - mu of the gradient, as Adam's first moment does."""

    def change(right: Any, o: Optimizer, g: Any, *rest: Any) -> Any:
        return right(o, (1 - o.momentum) * g, *rest)

    plant_rule("sgd", change)


@planted("lion", "mathematics", "weights/*")
def lion_by_its_new_moment() -> None:
    """The sign is that of the moment that is kept, which decays by beta2."""

    def change(right: Any, *inputs: Any) -> Any:
        _, new = right(*inputs)
        return jnp.sign(new["exp_avg"]), new

    plant_rule("lion", change)


@planted("adafactor", "distribution", "weights/*")
def factors_without_their_mean() -> None:
    """The second moment of a matrix is the product of its rows' and columns', not divided by the mean of both."""

    def change(right: Any, o: Optimizer, g: Any, *rest: Any) -> Any:
        (update, new), param = right(o, g, *rest), rest[-1]
        if "variance" in new:
            return update, new
        update = g * lax.rsqrt(new["row_var"] * new["col_var"] + jnp.finfo(g.dtype).eps ** 2)
        return update * param.rms(param.weights) / jnp.maximum(param.rms(update), 1), new

    plant_rule("adafactor", change)


@planted("adafactor", "distribution", "row_var/*", "col_var/*")
def means_of_the_first_piece() -> None:
    """adafactor's means are of the first device's piece, and not of the whole."""

    def first(x: Any, axes: Any) -> Any:
        return lax.psum(jnp.where(lax.axis_index(axes) == 0, x, 0), axes) * lax.axis_size(axes)

    plant(matrices, "lax", altered(lax, psum=first))


@planted("adafactor", "distribution", "weights/*")
def step_without_the_size() -> None:
    """adafactor's update is not scaled by the size of the parameter."""

    def change(right: Any, o: Optimizer, g: Any, *rest: Any) -> Any:
        (update, new), param = right(o, g, *rest), rest[-1]
        return update / jnp.maximum(param.rms(param.weights), o.eps2), new

    plant_rule("adafactor", change)


@planted("muon", "distribution", "weights/layers.*")
def orthogonal_by_pieces() -> None:
    """muon makes each device's piece of a matrix orthogonal."""
    plant(ShardedParam, "by_matrix", lambda self, function, x: function(x))


@planted("muon", "distribution", "weights/layers.*")
def one_iteration_less() -> None:
    """muon's matrices are made orthogonal by four iterations."""
    plant_rule("muon", lambda right, o, *rest: right(o.model_copy(update={"ns_steps": 4}), *rest))


@planted("muon", "distribution", "momentum_buffer/layers.*", "distribution/momentum_buffer at the end: layers.*")
def momentum_as_of_sgd() -> None:
    """muon's momentum takes all of the gradient."""

    def change(right: Any, o: Optimizer, g: Any, kept: Any, *rest: Any) -> Any:
        return right(o, g / (1 - o.momentum) if "momentum_buffer" in kept else g, kept, *rest)

    plant_rule("muon", change)


# ---- decay and schedule


@planted("llama", "mathematics", "weights/*norm.weight")
def decay_on_norms() -> None:
    """Weight decay applies to norms and biases as well."""
    plant(ParamSpec, "decays", property(lambda self: True))


@planted("llama", "mathematics", "weights/*")
def decay_not_scaled_by_the_rate() -> None:
    """Weight decay is taken off whole at each step, not times the learning rate."""

    def chain(o: Optimizer, steps: int, decays: Any, update_rule: Any) -> optax.GradientTransformationExtraArgs:
        return optax.chain(
            optim.clip_by_norm(o.clip),
            update_rule,
            optax.scale_by_learning_rate(lambda count: optim.learning_rate(o, steps, count + 1)),
            optax.add_decayed_weights(-o.weight_decay * o.learning_rate, mask=dict(decays)),
        )

    plant(optim, "chain", chain)


@planted("llama", "mathematics", "weights/*")
def rate_of_the_step_before() -> None:
    """The optimizer counts steps from 0; the learning rate that is logged is right."""
    right = optim.learning_rate
    plant(optim, "learning_rate", lambda o, steps, step: right(o, steps, step - 1))


@planted("llama", "mathematics", "learning_rate")
def cosine_to_zero() -> None:
    """The cosine ends at zero, not at the share that the config says."""
    right = optim.learning_rate
    everywhere(right, lambda o, *rest: right(o.model_copy(update={"final": 0.0}), *rest))
    assert train.learning_rate is not right


@planted("llama", "mathematics", "learning_rate")
def decay_from_the_first_step() -> None:
    """The cosine's way is counted from step 0, not from the end of the warm-up."""
    right = optim.learning_rate

    def learning_rate(o: Optimizer, steps: int, step: jax.Array) -> jax.Array:
        whole = right(o.model_copy(update={"warmup": 0}), steps, step)
        return jnp.where(step <= o.warmup, right(o, steps, step), whole)

    everywhere(right, learning_rate)
