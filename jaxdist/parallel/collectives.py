"""The operations by which a model communicates over the mesh, and the bytes that each sends.

Everything runs inside one fully manual `jax.shard_map` with `check_vma=True`: the type of a value says over which mesh
axes it differs, and the transpose of each operation is the communication of the backward pass. Costs are bytes that a
device sends with ring algorithms; n is the size of the axis, w and x the bytes of the full weight or activation. What
a strategy shards over fsdp it shards over expert and context too; experts are split over `expert` already.

| verb | forward | backward |
|---|---|---|
| `use` | fsdp, if it reshards: all-gather, w(n-1)/n | zero2, fsdp: reduce-scatter, w(n-1)/n |
| `enter` | nothing | all-reduce over tensor, 2x(n-1)/n |
| `leave` | all-reduce over tensor, 2x(n-1)/n | nothing |
| `enter`, sequence | all-gather over tensor, x(n-1)/n | reduce-scatter over tensor, x(n-1)/n |
| `leave`, sequence | reduce-scatter over tensor, x(n-1)/n | all-gather over tensor, x(n-1)/n |
| `attend` | over context: `parallel/context.py` | the same |
| `experts` | over expert: `parallel/experts.py` | the same |
| `stages` | over pipeline: `parallel/pipeline.py` | the same |
| `sum_over_sequence`, sequence | all-reduce over tensor of 2E numbers a microbatch | nothing |
| `sum_over_images`, but `replica` | all-reduce of 2C numbers a batch norm, over all axes that split images | the same |
| `sum_over_tokens` | all-reduce of E numbers a microbatch, over all axes that split tokens | nothing |
| `slice_sequence` | nothing | nothing, but see below |
| `lookup` | nothing (its caller leaves) | nothing |
| `max_over_vocab`, `sum_over_vocab` | all-reduces of 3 floats a token of the loss over tensor | nothing |

A weight replicated over tensor, which each device uses for its own heads or, under sequence parallelism, times,
has its gradient all-reduced over tensor, 2w(n-1)/n: JAX does so by its type.

No verb asks whether an axis has size 1: a collective over one device costs a copy at most, and one path is one to
test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree

from jaxdist.config import Precision
from jaxdist.config.strategies import Strategy
from jaxdist.ops.varying import at_least_f32, mark_varying
from jaxdist.parallel.rematerialization import on_device
from jaxdist.parallel.sharding import LOSS_AXES, TOKENS, ShardDim

M = TypeVar("M", bound=nnx.Module)
X = TypeVar("X", bound=jax.Array | tuple[jax.Array, jax.Array])
TIME = 1  # the dimension of activations [B, T, D] that sequence parallelism splits


class Weight(NamedTuple):
    """A parameter as `use` takes it: this device's shard, and the slot at which its gradient arrives.

    `grad_slot` has the shape of the gradient accumulator; its value is never read. Differentiating with respect to the
    slots, not the pieces, lets parameters and gradients be laid out independently: all that tells strategies apart.
    """

    piece: jax.Array
    grad_slot: jax.Array | None


def to_local_ids(index: jax.Array, size: int) -> jax.Array:
    """Global vocabulary ids -> ids in this device's shard of `size` rows; outside 0..size-1 for ids of other shards."""
    return index - lax.axis_index("tensor") * size


def mask_local_vocab(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Mask of the local ids `index` that lie in this device's shard of `size` rows, and these ids, 0 where masked."""
    mine = (index >= 0) & (index < size)
    return mine, jnp.where(mine, index, 0)


def sum_over_vocab(sums: X) -> X:
    """All-reduce partial sums over the vocabulary shards (mesh axis `tensor`)."""
    total: X = lax.psum(sums, "tensor")
    return total


def max_over_vocab(highest: jax.Array) -> jax.Array:
    """All-reduce maxima over the vocabulary shards (mesh axis `tensor`). Not differentiable."""
    largest: jax.Array = lax.pmax(highest, "tensor")
    return largest


def all_gather_shard(piece: jax.Array, shard: ShardDim, to: str = "varying") -> jax.Array:
    """All-gather shards along `shard.dim` over `shard.axes`; `to="invarying"` types the result as equal on all
    devices."""
    full: jax.Array = lax.all_gather(piece, shard.axes, axis=piece.ndim + shard.dim, tiled=True, to=to)
    return full


def reduce_scatter_shard(full: jax.Array, shard: ShardDim) -> jax.Array:
    """Reduce-scatter an array along `shard.dim` over `shard.axes`."""
    piece: jax.Array = lax.psum_scatter(full, shard.axes, scatter_dimension=full.ndim + shard.dim, tiled=True)
    return piece


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _unshard(parallel: "Parallel", shard: ShardDim, piece: jax.Array, grad_slot: jax.Array | None) -> jax.Array:
    # Fetched here, where parameters lie on the host, and again for the backward pass: one block's at a time.
    piece = on_device(piece)
    # Cast before the gather, so that the wire carries the compute dtype. Typed as varying over batch and stages before
    # any use, so that nothing below sums its gradient there: the backward rule alone decides.
    piece = mark_varying(piece.astype(parallel.precision.compute), shard.replicas)
    return all_gather_shard(piece, shard) if parallel.strategy.reshards else mark_varying(piece, shard.axes)


def _unshard_forward(parallel: "Parallel", shard: ShardDim, piece: jax.Array, grad_slot: jax.Array | None) -> Any:
    return _unshard(parallel, shard, piece, grad_slot), None


def _unshard_backward(parallel: "Parallel", shard: ShardDim, _: None, gradient: jax.Array) -> tuple[None, jax.Array]:
    if parallel.strategy.gradients:
        gradient = reduce_scatter_shard(gradient.astype(parallel.precision.reduce), shard)
    return None, gradient.astype(parallel.precision.parameters)


_unshard.defvjp(_unshard_forward, _unshard_backward)


class Context(Protocol):
    """Split of a sequence over the mesh axis `context` (`parallel/context.py`). n: the size of the axis."""

    def order(self, length: int, n: int) -> np.ndarray:
        """Indices of the times [T] in the order in which the devices hold them, T/n each."""

    def rows(self, table_TD: jax.Array) -> jax.Array:
        """Rows [T/n, ...] of this device's times, of a table [T, ...]."""

    def gather_sequence(self, x_BT: jax.Array) -> jax.Array:
        """All-gather x [B, T/n, ...] to [B, T, ...], sorted by time. Not differentiable."""

    def attend(self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int) -> jax.Array:
        """`ops.attention.attend` over all T times, for this device's q [B, T/n, H, C], k and v [B, T/n, K, C]."""


Rows = Callable[[jax.Array, jax.Array], jax.Array]


class Stages(Protocol):
    """Split of a stack of blocks over the mesh axis `pipeline` (`parallel/pipeline.py`)."""

    def __call__(self, blocks: Callable[[X], X], x: X) -> X:
        """Apply this device's `blocks` in its turn; returns x after all stages."""


def one_stage(blocks: Callable[[X], X], x: X) -> X:
    """Apply all blocks on this device: no pipeline."""
    return blocks(x)


class Routing(NamedTuple):
    """The router's weights and choices of experts [B, T, k], and which tokens are valid [B, T]."""

    weights_BTk: jax.Array
    chosen_BTk: jax.Array
    valid_BT: jax.Array


class Dispatch(Protocol):
    """Exchange of tokens with the experts on the mesh axis `expert` (`parallel/experts.py`)."""

    def __call__(self, experts: Rows, x_BTD: jax.Array, routing: Routing, context: Context) -> jax.Array:
        """Sum of the outputs of each token's k experts [B, T, D], weighted; `experts` maps rows [N, D], sorted by
        expert, and the number of rows of each to outputs [N, D]."""


class Taps(Protocol):
    """A record of a forward pass (`training/record.py`): arrays and blocks pass through it."""

    def named(self, name: str, x: jax.Array) -> jax.Array:
        """Note `x` as `name` of the module that computes it, and return it."""

    def scan(self, block: Callable[[X, Any], X], x: X, weights: Any) -> X:
        """Apply the `block` of each layer's `weights` in a Python loop, since a scan would hide what is noted
        inside."""


@dataclass(frozen=True)
class Parallel:
    """A model's view of its distribution: the operations; and, while a step is recorded, its taps."""

    strategy: Strategy
    precision: Precision
    context: Context
    dispatch: Dispatch
    sequence: bool = False
    stages: Stages = one_stage
    batch_norm: str = "global"
    taps: Taps | None = None

    def tap(self, name: str, x: jax.Array) -> jax.Array:
        """`x`, recorded under `name` of the module that computes it."""
        return self.taps.named(name, x) if self.taps else x

    def use(self, module: M) -> M:
        """`module` with its Weights unsharded over fsdp and in the compute dtype. Call it where the weights are
        needed."""
        graph, state = nnx.split(module)

        def unshard(v: nnx.Variable[Any]) -> nnx.Variable[Any]:
            return v.replace(_unshard(self, v.shard_dim, *v.get_value())) if isinstance(v, nnx.Param) else v

        return nnx.merge(graph, jax.tree.map(unshard, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))

    def enter(self, x: jax.Array) -> jax.Array:
        """Before a column-parallel product: x [B, T, D], the same on each tensor device; gradients are summed over
        tensor.

        Under sequence parallelism each has had its own times of x [B, T, D], and all of them from here on.
        """
        return lax.all_gather(x, "tensor", axis=TIME, tiled=True) if self.sequence else mark_varying(x, ("tensor",))

    def leave(self, x: jax.Array) -> jax.Array:
        """After a row-parallel product: all-reduce partial results over tensor; under sequence parallelism
        reduce-scatter them over time."""
        total = (
            lax.psum_scatter(x, "tensor", scatter_dimension=TIME, tiled=True)
            if self.sequence
            else lax.psum(x, "tensor")
        )
        named: jax.Array = checkpoint_name(total, "leave")
        return named

    def length(self, tokens_BT: jax.Array) -> int:
        """Length of the full sequence, given this device's part `tokens_BT`."""
        return int(tokens_BT.shape[1] * lax.axis_size("context"))

    def attend(self, q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKC: jax.Array, window: int = 0) -> jax.Array:
        """`ops.attention.attend` over all times, for this device's own queries, keys and values [B, T/n, heads, C]."""
        return self.tap("attended", self.context.attend(q_BTHC, k_BTKC, v_BTKC, window))

    def experts(self, experts: Rows, x_BTD: jax.Array, routing: Routing) -> jax.Array:
        """Weighted sum [B, T, D] over each token's chosen experts; partial over tensor if `experts` is."""
        return self.dispatch(experts, x_BTD, routing, self.context)

    def sum_over_sequence(self, sums: jax.Array) -> jax.Array:
        """All-reduce over tensor of sums over the times that this device has between `leave` and `enter`."""
        return lax.psum(sums, "tensor") if self.sequence else sums

    def sum_over_tokens(self, sums: jax.Array) -> jax.Array:
        """All-reduce sums over the microbatch on all devices. Not differentiable."""
        total: jax.Array = lax.psum(lax.stop_gradient(sums), TOKENS)
        return total

    def sum_over_images(self, sums: jax.Array) -> jax.Array:
        """Sums over the images normalized together: all-reduced over the microbatch, or under `replica` this device's
        own."""
        return lax.psum(sums, LOSS_AXES) if self.batch_norm == "global" else sums

    def normalized_together(self, count: int) -> int:
        """Number of images normalized together, given `count` on this device."""
        return count * int(lax.axis_size(LOSS_AXES)) if self.batch_norm == "global" else count

    def local_statistics(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Running statistics for the microbatches to update: under `replica` typed as differing between devices."""
        if self.batch_norm == "global":
            return statistics
        return {name: mark_varying(s, LOSS_AXES) if s.ndim else s for name, s in statistics.items()}  # all count alike

    def from_first_replica(self, statistics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Running statistics after the step: under `replica` those of the first device, as DDP broadcasts."""
        if self.batch_norm == "global":
            return statistics
        vectors = {name: s for name, s in statistics.items() if s.ndim}
        flat, unravel = ravel_pytree(vectors)
        kept: dict[str, jax.Array] = unravel(lax.psum(jnp.where(lax.axis_index(LOSS_AXES) == 0, flat, 0), LOSS_AXES))
        return statistics | kept

    def slice_sequence(self, table_TD: jax.Array) -> jax.Array:
        """Rows [T/t, D] of a table [T, D] for the times that this device has between `leave` and `enter`."""
        if not self.sequence:
            return table_TD
        size = table_TD.shape[0] // lax.axis_size("tensor")
        return lax.dynamic_slice_in_dim(table_TD, lax.axis_index("tensor") * size, size)

    def lookup(self, embedding_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """Vocabulary-parallel embedding, partial over tensor: rows of other devices are zero.

        The rows are taken in float32 or wider, which changes none of them, because the gradient of a frequent token is
        a sum over all its places: added in bfloat16 it would be off by a third.
        """
        rows = len(embedding_VD)
        mine, index = mask_local_vocab(to_local_ids(tokens_BT, rows), rows)
        found_BTD = jnp.where(mine[..., None], at_least_f32(embedding_VD)[index], 0)
        return found_BTD.astype(embedding_VD.dtype)
