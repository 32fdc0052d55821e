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
from jaxdist.families.loss import chunked, cross_entropy, mask_padded_vocab
from jaxdist.families.models import bind, check_output, config_of, masks_padding
from jaxdist.ops.varying import at_least_f32, mark_varying, varying_axes
from jaxdist.parallel.collectives import Parallel, Stages, all_gather_shard, one_stage, reduce_scatter_shard
from jaxdist.parallel.pipeline import Schedule
from jaxdist.parallel.rematerialization import Rematerialize, on_device
from jaxdist.parallel.sharding import LOSS_AXES, TOKENS, ParamSpec, ShardDim
from jaxdist.training import loss_scale
from jaxdist.training.optim import steps_done, sum_of_squares

Arrays = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that training carries from step to step, sharded as the strategy says."""

    parameters: Any
    optimizer: Any
    scaling: loss_scale.LossScale | None = None


class ModelOutput(NamedTuple):
    """A model's output for a microbatch on one device."""

    output: jax.Array
    """Logits [B, T, V] of tokens or [B, V] of images; with targets, the sum of their cross-entropy [], nats."""
    added: jax.Array | int = 0
    """This device's part of the auxiliary loss [] (a mixture's balance)."""
    statistics: Arrays = {}  # noqa: RUF012 - never written to
    """The updated running statistics, by name."""


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
        """Loss of the global batch [], its gradient in the optimizer's layout, and the new running statistics."""
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
        not_skipped = ~jnp.isin(steps_done(state.optimizer) + 1, jnp.array(self.skip, jnp.int32))
        taken = finite & not_skipped
        trained = {name: state.parameters[name] for name in gradients}
        shards, before = self.shard_params(on_device(trained)), on_device(state.optimizer, after=norm)
        updates, optimizer = self.optimizer.update(gradients, before, shards, norm=norm, taken=taken)
        after = jax.tree.map(partial(jnp.where, taken), optax.apply_updates(shards, updates), shards)
        scaling = loss_scale.after(state.scaling, finite, self.parallel.precision)
        counts = not_skipped & jnp.isfinite(loss)
        new_statistics = {name: jnp.where(counts, s, state.parameters[name]) for name, s in statistics.items()}
        return TrainState(self.unshard_params(after) | new_statistics, optimizer, scaling)

    def loss(
        self, accumulators: Arrays | None, weights: Arrays, batch: Batches, stages: Stages = one_stage
    ) -> tuple[jax.Array, ModelOutput]:
        """Sum of this device's cross-entropy, nats, and the model's output. `weights`: parameters as
        `unsharded_params` returns them; `stages`: which of the blocks they are."""
        inputs, targets = batch
        extra = {"valid_BT": targets != IGNORED} if masks_padding(self.model) else {}
        if self.loss_chunks > 1:
            extra["targets_SN"] = chunked(targets, self.loss_chunks)
            found = self.forward(accumulators, weights, inputs, stages, **extra)
            return found.output, found
        found = self.forward(accumulators, weights, inputs, stages, **extra)
        return cross_entropy(mask_padded_vocab(found.output, config_of(self.model)), targets), found

    def forward(
        self,
        accumulators: Arrays | None,
        weights: Arrays,
        inputs: jax.Array,
        stages: Stages = one_stage,
        **extra: jax.Array,
    ) -> ModelOutput:
        """The model's output for this device's rows. `extra`: further arguments of its call, such as targets in chunks.
        Raises ConfigError for errors of a plugin's family."""
        parallel = replace(self.parallel, stages=stages)
        with running(FAMILIES, self.family, "model"):
            output = bind(self.model, weights, accumulators)(parallel, inputs, self.rematerialize, **extra)
            found = ModelOutput(*output) if isinstance(output, tuple) else ModelOutput(output)
        if config := config_of(self.model):
            rows = inputs.shape if config.input_kind == "tokens" else inputs.shape[:1]
            logits = (*rows, config.vocab_rows // lax.axis_size("tensor"))
            check_output(self.family, found.output, () if "targets_SN" in extra else logits)
        return found

    def unsharded_params(self, parameters: Arrays) -> Arrays:
        """Parameters as microbatches read them: all-gathered here if the strategy gathers once per step."""
        strategy, dtype = self.parallel.strategy, self.parallel.precision.compute
        if strategy.reshards or not strategy.parameters:
            return parameters

        def unsharded(spec: ParamSpec, w: jax.Array) -> jax.Array:
            return w if spec.statistic else all_gather_shard(w.astype(dtype), spec.shard_dim, to="invarying")

        return {name: unsharded(self.param_specs[name], w) for name, w in on_device(parameters).items()}

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
            total, found = self.loss(accumulators, weights, part, stages)
            return (total / count + found.added / self.accumulation) * scale, (total / count, found.statistics)

        accumulators = self.grad_accumulators()
        before = self.parallel.local_statistics({n: w for n, w in parameters.items() if n not in accumulators})
        parts = self.microbatches(batch)
        nothing = mark_varying(
            jnp.zeros((), jnp.promote_types(self.parallel.precision.compute, jnp.float32)), LOSS_AXES
        )
        start = accumulators, nothing, before
        gradients, loss, after = self.schedule.accumulate(scaled, start, self.unsharded_params(parameters), parts)
        return lax.psum(loss, LOSS_AXES), gradients, self.parallel.from_first_replica(after)

    def microbatches(self, batch: Batches) -> Batches:
        """This device's rows by microbatch: [microbatches, rows, ...]."""
        parts: Batches = jax.tree.map(lambda x: x.reshape(self.accumulation, -1, *x.shape[1:]), batch)
        return parts

    def grad_accumulators(self) -> Arrays:
        """Zeros in the layout of the gradients, to accumulate into."""
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
                g = g if strategy.gradients else reduce_scatter_shard(g, spec.shard_dim)
                g = lax.psum(g, spec.shard_dim.replicas)
            return g.astype(precision.parameters)

        return {name: one(self.param_specs[name], g) for name, g in gradients.items()}

    def norm(self, gradients: Arrays) -> jax.Array:
        """Global L2 norm []: each sum of squares is added over exactly the axes that split the gradient."""
        alike: dict[frozenset[str], list[jax.Array]] = {}
        for g in gradients.values():  # without axes of one device: fewer sums are fewer kernels to compile
            split = frozenset(axis for axis in varying_axes(g) if lax.axis_size(axis) > 1)
            alike.setdefault(split, []).append(at_least_f32(g))
        sums = [sum_of_squares(arrays) for arrays in alike.values()]
        return jnp.sqrt(sum(lax.psum(total, tuple(sorted(varying_axes(total)))) for total in sums))

    def shard_params(self, parameters: Arrays) -> Arrays:
        """Parameters in the optimizer's layout: this device's shard over fsdp, if they are not sharded already."""
        if self.parallel.strategy.parameters or not self.parallel.strategy.optimizer:
            return parameters

        def own(shard: ShardDim, w: jax.Array) -> jax.Array:
            size = w.shape[shard.dim] // lax.axis_size(shard.axes)
            return lax.dynamic_slice_in_dim(w, lax.axis_index(shard.axes) * size, size, w.ndim + shard.dim)

        return {name: own(self.param_specs[name].shard_dim, w) for name, w in parameters.items()}

    def unshard_params(self, shards: Arrays) -> Arrays:
        """Inverse of `shard_params`: zero1 and zero2 all-gather the updated parameters."""
        if self.parallel.strategy.parameters or not self.parallel.strategy.optimizer:
            return shards

        def unsharded(shard: ShardDim, w: jax.Array) -> jax.Array:
            return all_gather_shard(w, shard, to="invarying")

        return {name: unsharded(self.param_specs[name].shard_dim, w) for name, w in shards.items()}
