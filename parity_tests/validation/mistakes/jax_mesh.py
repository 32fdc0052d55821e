"""Mistakes in how jaxdist spreads a step over devices, and in the precision of what it sends and keeps."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxdist.config import STRATEGIES, Experiment
from jaxdist.data import Batch, Dataset
from jaxdist.families import layers
from jaxdist.ops import linear
from jaxdist.ops.varying import mark_varying
from jaxdist.parallel import collectives, mesh, ring_attention, sharding
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.context import Ring
from jaxdist.parallel.rematerialization import Rematerialize, on_device
from jaxdist.parallel.sharding import TOKENS, ShardDim
from jaxdist.training import optim, program, step
from jaxdist.training.step import Step
from parity_tests.validation.mistakes import everywhere, mistake, plant

planted = partial(mistake, "jaxdist")


@planted("hybrid", "distribution", "batch/tokens")
def the_same_rows_twice() -> None:
    """Both replicas are fed the first replica's rows."""
    right = Dataset.batch

    def batch(*inputs: Any, **more: Any) -> Batch:
        return Batch(*(np.concatenate([x[: len(x) // 2]] * 2) for x in right(*inputs, **more)))

    plant(Dataset, "batch", batch)


@planted("2x2", "distribution", "distribution/jaxdist, mesh matches the request*")
def all_on_one_device() -> None:
    """Whatever mesh is asked for, one device does it all: the same numbers, and none of its memory is saved."""
    right = mesh.make_mesh

    def make_mesh(e: Experiment, device: str) -> Any:
        alone = e.parallel.model_copy(update={"mesh": "1x1"})
        return right(e.model_copy(update={"parallel": alone}), device)

    everywhere(right, make_mesh)


# ---- reductions


def reduced(change: Any) -> None:
    """Plant `change(name, gradient)` of what is about to be reduced."""
    right = Step.reduce
    plant(Step, "reduce", lambda self, g: right(self, {name: change(name, a) for name, a in g.items()}))


@planted("hybrid", "distribution", "gradient/layers.*.attention.q_proj.weight")
def one_gradient_not_summed_over_data() -> None:
    """The query projections have the gradient of the first replica alone, as its own optimizer would see it."""

    def change(name: str, g: jax.Array) -> jax.Array:
        return g * (lax.axis_index("data") == 0) if name == "layers.attention.q_proj.kernel" else g

    reduced(change)


@planted("hybrid", "distribution", "gradient/lm_head.weight")
def one_gradient_not_summed_over_fsdp() -> None:
    """The head's gradient is cut to the device's piece where it should be reduce-scattered."""
    right = collectives.reduce_scatter_shard

    def reduce_scatter_shard(full: jax.Array, shard: ShardDim) -> jax.Array:
        if full.shape != (40, 256):
            return right(full, shard)
        size = full.shape[shard.dim] // lax.axis_size("fsdp")
        return lax.dynamic_slice_in_dim(full, lax.axis_index("fsdp") * size, size, full.ndim + shard.dim)

    everywhere(right, reduce_scatter_shard)


@planted("hybrid", "distribution", "gradient/*")
def mean_over_replicas() -> None:
    """Gradients of a loss that is divided by the global count are averaged over replicas."""
    reduced(lambda name, g: g / lax.axis_size("data"))


@planted("ddp", "distribution", "gradient/lm_head.weight")
def one_gradient_summed_twice() -> None:
    """The head's gradient is summed by its backward pass and again with all others."""
    reduced(lambda name, g: mark_varying(lax.psum(g, TOKENS), TOKENS) if name == "lm_head.kernel" else g)


@planted("ddp", "distribution", "loss")
def mean_of_device_means() -> None:
    """Each device divides by its own number of tokens, and their mean is taken."""

    class Own:
        """`lax` whose first sum, that of the tokens, is this device's times the devices."""

        def __getattr__(self, name: str) -> Any:
            return getattr(lax, name)

        def psum(self, x: Any, axes: Any) -> Any:
            return x * 4 if jnp.issubdtype(jnp.result_type(x), jnp.integer) else lax.psum(x, axes)

    plant(step, "lax", Own())


@planted("2x2", "distribution", "activation_gradient/norm")
def column_inputs_not_summed_backward() -> None:
    """The input of column-parallel products has the gradient of the first tensor device alone."""

    def enter(self: Parallel, x: jax.Array) -> jax.Array:
        return jnp.where(lax.axis_index("tensor") == 0, x, lax.stop_gradient(x))

    plant(Parallel, "enter", enter)


@planted("2x2", "distribution", "activation/layers.0.attention.o_proj")
def bias_added_on_every_device() -> None:
    """A row-parallel product adds its bias before the sum, once per device."""

    def call(self: Any, par: Parallel, x: jax.Array) -> jax.Array:
        return par.leave(self.biased(linear.dot(x, self.kernel[...])))

    plant(layers.RowLinear, "__call__", call)


@planted("2x2", "distribution", "activation/embed")
def vocabulary_without_offset() -> None:
    """Each device looks tokens up as if it held the first rows of the vocabulary."""

    def lookup(self: Parallel, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = embedding.shape[0]
        return jnp.where((tokens < rows)[..., None], embedding[jnp.minimum(tokens, rows - 1)], 0)

    plant(Parallel, "lookup", lookup)


@planted("2x2", "distribution", "loss")
def loss_of_own_columns() -> None:
    """The softmax of the loss is normalized over each device's own part of the vocabulary."""

    def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
        columns = logits.shape[-1]
        index = targets - lax.axis_index("tensor") * columns
        mine = (index >= 0) & (index < columns)
        of_target = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.where(mine, index, 0)[..., None], -1)[..., 0]
        return -jnp.sum(lax.psum(jnp.where(mine, of_target, 0), "tensor"))

    plant(step, "cross_entropy", cross_entropy)


@planted("2x2", "distribution", "activation/embed")
def pieces_gathered_in_another_order() -> None:
    """The pieces of weights are put together in another order than they were cut."""
    right = collectives.all_gather_shard

    def all_gather_shard(piece: jax.Array, shard: ShardDim, to: str = "varying") -> jax.Array:
        return jnp.roll(right(piece, shard, to), piece.shape[shard.dim], shard.dim)

    everywhere(right, all_gather_shard)


@planted("2x2", "distribution", "grad_norm")
def norm_counts_copies() -> None:
    """The global norm sums squares over all axes, also of what is the same on all devices of one."""

    def norm(self: Step, gradients: Any) -> jax.Array:
        total = jnp.zeros(())
        for name, g in gradients.items():
            axes = self.param_specs[name].mesh_axes(self.parallel.strategy.optimizer)
            copies = 1 if "tensor" in axes else lax.axis_size("tensor")
            squares = jnp.sum(g**2) * copies
            total = total + (lax.psum(squares, axes) if axes else squares)
        return jnp.sqrt(total)

    plant(Step, "norm", norm)


@planted("zero1", "distribution", "weights/*")
def piece_of_the_neighbour() -> None:
    """Each device updates its piece of the optimizer state with its neighbour's piece of the weights."""
    right = Step.shard_params

    def pieces(self: Step, parameters: Any) -> Any:
        found = right(self, parameters)
        ring = [(i, (i + 1) % 4) for i in range(4)]
        return {name: lax.ppermute(vary_fsdp(w), "fsdp", ring) for name, w in found.items()}

    plant(Step, "shard_params", pieces)
    from jaxdist.accounting import traffic

    traffic.KINDS["ppermute"] = "all_gather"


def vary_fsdp(x: jax.Array) -> jax.Array:
    """`x`, typed as differing over fsdp."""
    return x if "fsdp" in jax.typeof(x).manual_axis_type.varying else mark_varying(x, ("fsdp",))


# ---- sequence parallelism


@planted("sequence", "distribution", "activation/layers.0.attention_norm")
def positions_of_the_first_times() -> None:
    """Every device adds the learned positions of the first device's times."""
    right = Parallel.slice_sequence
    plant(Parallel, "slice_sequence", lambda self, table: table[: right(self, table).shape[0]])


@planted("sequence", "distribution", "gradient/*norm.*")
def norms_learn_from_the_first_times() -> None:
    """The gradients of the norms' scales are those of the first device's times, not summed over tensor."""
    right = layers.LayerNorm.__call__

    def call(self: Any, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        first = lax.axis_index("tensor") == 0
        self.scale = nnx.Param(jnp.where(first, scale, lax.stop_gradient(scale)))
        return right(self, x)

    plant(layers.LayerNorm, "__call__", call)


@planted("sequence", "distribution", "activation/layers.0.attention.q_proj")
def times_gathered_in_another_order() -> None:
    """The devices' times are put together beginning with the last device's."""
    right = Parallel.enter

    def enter(self: Parallel, x: jax.Array) -> jax.Array:
        whole = right(self, x)
        return jnp.roll(whole, x.shape[1], axis=1) if whole.shape[1] > x.shape[1] else whole

    plant(Parallel, "enter", enter)


# ---- context parallelism


@planted("context", "distribution", "activation/layers.0.attention.attended")
def ring_masked_wrongly() -> None:
    """The mask of another device's two chunks is inverted: hidden ones are seen, and the others not."""
    plant(ring_attention, "_others", lambda step: ((1, 0), (0, 0)))


@planted("context", "distribution", "activation/layers.0.attention.q_rotated")
def rotated_as_the_first_times() -> None:
    """Every device rotates by the positions 0 to T/n, as if its tokens were the first."""
    plant(Ring, "rows", lambda self, table_TD: table_TD[: table_TD.shape[0] // lax.axis_size("context")])


@planted("context", "distribution", "activation_gradient/layers.1.attention.k_rotated")
def gradients_of_keys_not_sent_home() -> None:
    """The gradients of keys and values that a device ends with are its neighbour's."""
    plant(ring_attention, "_home", lambda gradients: gradients)


@planted("context", "distribution", "activation/layers.0.attention.q_rotated")
def times_in_order() -> None:
    """The batch is dealt out in the order of time, where the ring has chunks from both ends."""
    plant(Ring, "order", lambda self, length, n: np.arange(length))


# ---- precision


@planted("fp32", "precision", "gradient/*")
def gradients_reduced_in_bfloat16() -> None:
    """Under the fp32 policy gradients cross devices in bfloat16."""

    def parallel(strategy: Any, precision: Any, *rest: Any, **more: Any) -> Parallel:
        return Parallel(strategy, precision.model_copy(update={"reduce": "bfloat16"}), *rest, **more)

    plant(program, "Parallel", parallel)


@planted("bf16", "precision", "weights/*")
def weights_rounded_after_the_update() -> None:
    """The master weights of the bf16 policy are kept in bfloat16."""
    right = Step.update

    def update(self: Step, *inputs: Any) -> Any:
        after = right(self, *inputs)
        rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), after.parameters)
        return after._replace(parameters=rounded)

    plant(Step, "update", update)


# ---- memory and traffic


@planted("hybrid", "traffic", "traffic/jaxdist, data:*")
def gradients_sent_twice() -> None:
    """Gradients are averaged over replicas, then summed: the same numbers for twice the bytes."""
    reduced(lambda name, g: mark_varying(lax.pmean(g, "data"), ("data",)))


@planted("bf16", "traffic", "traffic/jaxdist, fsdp:*")
def weights_gathered_before_the_cast() -> None:
    """Weights cross devices in float32 and are cast to bfloat16 after it."""
    right = collectives.all_gather_shard

    def whole(parallel: Parallel, shard: ShardDim, piece: jax.Array, grad_slot: Any) -> jax.Array:
        return right(mark_varying(piece, shard.replicas), shard).astype(parallel.precision.compute)

    bare = jax.custom_vjp(whole, nondiff_argnums=(0, 1))
    bare.defvjp(lambda *inputs: (whole(*inputs), None), collectives._unshard_backward)
    everywhere(collectives._unshard, bare)


@planted("zero1", "memory", "memory/optimizer_state*")
def moments_not_sharded() -> None:
    """Under zero1 every device keeps all of Adam's moments."""
    row = replace(STRATEGIES["zero1"], optimizer=False)
    plant(sharding, "STRATEGIES", {**STRATEGIES, "zero1": row})


@planted("kept", "distribution", "activation/embed")
def gathered_in_bfloat16() -> None:
    """Weights that are kept for the step are gathered in bfloat16, whatever the policy."""
    right = Step.unsharded_params

    def unsharded_params(self: Step, parameters: step.Arrays) -> step.Arrays:
        return right(self, {name: w.astype(jnp.bfloat16).astype(w.dtype) for name, w in parameters.items()})

    plant(Step, "unsharded_params", unsharded_params)


@planted("offload", "memory", "memory/jaxdist, host*")
def left_on_the_device() -> None:
    """Weights and moments stay on the device between steps, whatever memory.offload says."""
    plant(program, "offloaded", lambda shardings: shardings)


@planted("offload", "distribution", "exp_avg/*")
def moments_not_written_back() -> None:
    """The host keeps the moments that a step was given; their counts, which stay on the device, go on."""
    right = Step.update

    def update(self: Step, state: step.TrainState, *inputs: Any) -> step.TrainState:
        after = right(self, state, *inputs)
        kept = jax.tree.map(lambda new, old: old if new.ndim else new, after.optimizer, on_device(state.optimizer))
        return after._replace(optimizer=kept)

    plant(Step, "update", update)


@planted("hybrid", "memory", "memory/gradients*")
def gradients_kept_whole() -> None:
    """Every device adds up whole gradients and gives away its share's sum at the end: the same numbers and bytes."""
    right = Step.accumulate

    def accumulate(self: Step, *inputs: Any) -> tuple[jax.Array, step.Arrays, step.Arrays]:
        row = replace(self.parallel.strategy, gradients=False)
        loss, gradients, rest = right(replace(self, parallel=replace(self.parallel, strategy=row)), *inputs)
        return (
            loss,
            {n: collectives.reduce_scatter_shard(g, self.param_specs[n].shard_dim) for n, g in gradients.items()},
            rest,
        )

    plant(Step, "accumulate", accumulate)


@planted("2x2", "traffic", "traffic/jaxdist, *")
def blocks_recomputed_unasked() -> None:
    """Blocks are computed again in the backward pass, their all-reduces and gathers with them."""
    plant(Rematerialize, "from_config", classmethod(lambda cls, memory: cls("full", 1)))


@planted("zero1", "distribution", "clipped/*")
def clip_of_each_piece() -> None:
    """Each device scales its pieces by the norm of these pieces."""
    right = optim.clip_by_norm

    def clip_by_norm(largest: float) -> Any:
        clip = right(largest)

        def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
            squares = sum(jnp.sum(g**2) for g in updates.values())
            return clip.update(updates, state, norm=jnp.sqrt(lax.psum(squares, ("pipeline", "tensor"))))

        return clip._replace(update=update)

    everywhere(right, clip_by_norm)
