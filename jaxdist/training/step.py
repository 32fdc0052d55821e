"""One training step: a global batch in, updated parameters out. Runs on every device inside `jax.shard_map`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from jaxdist.config import AXES
from jaxdist.config.plugins import running
from jaxdist.config.registry import FAMILIES
from jaxdist.data import IGNORED, Batches
from jaxdist.families.loss import chunked, cross_entropy, of_tokens
from jaxdist.families.models import bind
from jaxdist.ops.varying import at_least_f32, mark_varying, varying_axes
from jaxdist.parallel.collectives import Parallel, Stages, gather, one_stage, scatter
from jaxdist.parallel.pipeline import Schedule
from jaxdist.parallel.rematerialization import Rematerialize, on_device
from jaxdist.parallel.sharding import LOSS_AXES, TOKENS, ParamSpec, ShardDim
from jaxdist.training import loss_scale
from jaxdist.training.optim import steps_done, sum_of_squares

Arrays = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that training carries from step to step, laid out as the strategy says."""

    parameters: Any
    optimizer: Any
    scaling: loss_scale.LossScale | None = None


class ModelOutput(NamedTuple):
    """A model's output for a microbatch: logits, or with targets their cross-entropy; this device's part of the
    auxiliary loss (a mixture's balance); and the updated running statistics, by name."""

    output: jax.Array
    added: jax.Array | int = 0
    statistics: Arrays = {}  # noqa: RUF012 - never written to


@dataclass(frozen=True)
class Step:
    """The step of one model under one strategy."""

    model: nnx.Module
    param_specs: Mapping[str, ParamSpec]
    parallel: Parallel
    optimizer: optax.GradientTransformationExtraArgs
    rematerialize: Rematerialize
    loss_chunks: int
    accumulation: int
    schedule: Schedule
    skip: tuple[int, ...]
    family: str

    def __call__(self, state: TrainState, batch: Batches) -> tuple[TrainState, Arrays]:
        """Accumulate -> reduce -> clip and update. Metrics are `loss` (mean nats per valid token), `grad_norm`, and
        where it is scaled `loss_scale`."""
        loss, gradients, statistics = self.gradient(state, batch)
        norm = self.norm(gradients)
        metrics = {"loss": loss, "grad_norm": norm}
        if state.scaling:
            metrics["loss_scale"] = state.scaling.scale
        return self.update(state, gradients, statistics, loss, norm), metrics

    def gradient(self, state: TrainState, batch: Batches) -> tuple[jax.Array, Arrays, Arrays]:
        """Loss of the global batch, its gradient in the optimizer's layout, and the running statistics after it."""
        scale = loss_scale.factor(state.scaling)
        loss, gradients, statistics = self.accumulate(state.parameters, batch, scale)
        return loss, jax.tree.map(lambda g: (g / scale).astype(g.dtype), self.reduce(gradients)), statistics

    def update(
        self, state: TrainState, gradients: Arrays, statistics: Arrays, loss: jax.Array, norm: jax.Array
    ) -> TrainState:
        """Clip and update. If loss or norm is not finite or the step is skipped, only the schedule advances.

        As in torch, running statistics are updated even when gradients overflow.
        """
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        met = ~jnp.isin(steps_done(state.optimizer) + 1, jnp.array(self.skip, jnp.int32))
        taken = finite & met
        trained = {name: state.parameters[name] for name in gradients}
        pieces, before = self.shard_params(on_device(trained)), on_device(state.optimizer, after=norm)
        updates, optimizer = self.optimizer.update(gradients, before, pieces, norm=norm, taken=taken)
        after = jax.tree.map(partial(jnp.where, taken), optax.apply_updates(pieces, updates), pieces)
        scaling = loss_scale.after(state.scaling, finite, self.parallel.precision)
        moved = {n: jnp.where(met & jnp.isfinite(loss), s, state.parameters[n]) for n, s in statistics.items()}
        return TrainState(self.unshard_params(after) | moved, optimizer, scaling)

    def loss(
        self, accumulators: Arrays | None, weights: Arrays, batch: Batches, stages: Stages = one_stage
    ) -> tuple[jax.Array, ModelOutput]:
        """Sum of this device's cross-entropy, nats, and what the model makes. `weights`: parameters as `gathered`;
        `stages`: which of the blocks they are."""
        inputs, targets = batch
        extra = {"valid_BT": targets != IGNORED} if getattr(self.model, "masks_padding", False) else {}
        if self.loss_chunks > 1:
            made = self.forward(
                accumulators, weights, inputs, stages, targets_SN=chunked(targets, self.loss_chunks), **extra
            )
            return made.output, made
        made = self.forward(accumulators, weights, inputs, stages, **extra)
        return cross_entropy(of_tokens(made.output, getattr(self.model, "config", None)), targets), made

    def forward(
        self,
        accumulators: Arrays | None,
        weights: Arrays,
        inputs: jax.Array,
        stages: Stages = one_stage,
        **extra: jax.Array,
    ) -> ModelOutput:
        """The model's output for this device's rows. `extra`: further arguments of its call, such as targets in
        chunks. Raises ConfigError for what the code of a plugin's family raises."""
        parallel = replace(self.parallel, stages=stages)
        with running(FAMILIES, self.family, "model"):
            made = bind(self.model, weights, accumulators)(parallel, inputs, self.rematerialize, **extra)
        return ModelOutput(*made) if isinstance(made, tuple) else ModelOutput(made)

    def gathered(self, parameters: Arrays) -> Arrays:
        """Parameters as microbatches read them: all-gathered here if the strategy gathers once per step."""
        strategy, dtype = self.parallel.strategy, self.parallel.precision.compute
        if strategy.reshards or not strategy.parameters:
            return parameters
        pieces, param_specs = on_device(parameters), self.param_specs
        return {
            name: w
            if param_specs[name].statistic
            else gather(w.astype(dtype), param_specs[name].shard_dim, to="invarying")
            for name, w in pieces.items()
        }

    def accumulate(
        self, parameters: Arrays, batch: Batches, scale: jax.Array | int = 1
    ) -> tuple[jax.Array, Arrays, Arrays]:
        """Loss of the global batch, the gradient of `scale` times it before its reduction over devices, and the running
        statistics, which microbatches update one after the other.

        The loss is the sum over the global batch divided by its number of valid tokens, known before the first
        microbatch: uneven microbatches and devices weigh as their tokens do. A model's auxiliary loss is averaged over
        microbatches, and is not part of the reported loss.
        """
        count = lax.psum(jnp.sum(batch.targets != IGNORED), TOKENS)

        def scaled(
            accumulators: Arrays | None, weights: Arrays, part: Batches, stages: Stages
        ) -> tuple[jax.Array, tuple[jax.Array, Arrays]]:
            total, made = self.loss(accumulators, weights, part, stages)
            return (total / count + made.added / self.accumulation) * scale, (total / count, made.statistics)

        accumulators = self.grad_accumulators()
        before = self.parallel.own_statistics({n: w for n, w in parameters.items() if n not in accumulators})
        parts = self.microbatches(batch)
        nothing = mark_varying(
            jnp.zeros((), jnp.promote_types(self.parallel.precision.compute, jnp.float32)), LOSS_AXES
        )
        start = accumulators, nothing, before
        gradients, loss, after = self.schedule.accumulate(scaled, start, self.gathered(parameters), parts)
        return lax.psum(loss, LOSS_AXES), gradients, self.parallel.kept_statistics(after)

    def microbatches(self, batch: Batches) -> Batches:
        """This device's rows, those of each microbatch by themselves: [microbatches, rows, ...]."""
        parts: Batches = jax.tree.map(lambda x: x.reshape(self.accumulation, -1, *x.shape[1:]), batch)
        return parts

    def grad_accumulators(self) -> Arrays:
        """Zeros in the layout of the gradients, to be accumulated into."""
        mesh = {axis: lax.axis_size(axis) for axis in AXES}
        sharded, dtype = self.parallel.strategy.gradients, self.parallel.precision.parameters

        def zeros(spec: ParamSpec) -> jax.Array:
            return mark_varying(jnp.zeros(spec.local_shape(mesh, sharded), dtype), spec.reduce_axes + spec.model_axes)

        return {name: zeros(spec) for name, spec in self.param_specs.items() if not spec.statistic}

    def reduce(self, gradients: Arrays) -> Arrays:
        """Sum over devices of the gradients that microbatches left unreduced, in the optimizer's layout: unsharded for
        ddp, else sharded over fsdp."""
        strategy, precision = self.parallel.strategy, self.parallel.precision

        def one(spec: ParamSpec, g: jax.Array) -> jax.Array:
            g = g.astype(precision.reduce)
            if not strategy.optimizer:
                g = lax.psum(g, spec.reduce_axes)
            else:
                g = lax.psum(g if strategy.gradients else scatter(g, spec.shard_dim), spec.shard_dim.replicas)
            return g.astype(precision.parameters)

        return {name: one(self.param_specs[name], g) for name, g in gradients.items()}

    def norm(self, gradients: Arrays) -> jax.Array:
        """Global L2 norm: each sum of squares is added over exactly the axes on which its pieces differ."""
        alike: dict[frozenset[str], list[jax.Array]] = {}
        for g in gradients.values():  # axes of one device aside: fewer sums are fewer kernels to compile
            split = frozenset(axis for axis in varying_axes(g) if lax.axis_size(axis) > 1)
            alike.setdefault(split, []).append(at_least_f32(g))
        sums = [sum_of_squares(of) for of in alike.values()]
        return jnp.sqrt(sum(lax.psum(total, tuple(sorted(varying_axes(total)))) for total in sums))

    def shard_params(self, parameters: Arrays) -> Arrays:
        """Parameters in the optimizer's layout: each fsdp device's own piece, where it is not that already."""
        if self.parallel.strategy.parameters or not self.parallel.strategy.optimizer:
            return parameters

        def piece(cut: ShardDim, w: jax.Array) -> jax.Array:
            size = w.shape[cut.dim] // lax.axis_size(cut.axes)
            return lax.dynamic_slice_in_dim(w, lax.axis_index(cut.axes) * size, size, w.ndim + cut.dim)

        return {name: piece(self.param_specs[name].shard_dim, w) for name, w in parameters.items()}

    def unshard_params(self, pieces: Arrays) -> Arrays:
        """Inverse of `shard_params`: zero1 and zero2 all-gather the updated parameters."""
        if self.parallel.strategy.parameters or not self.parallel.strategy.optimizer:
            return pieces
        return {name: gather(w, self.param_specs[name].shard_dim, to="invarying") for name, w in pieces.items()}
