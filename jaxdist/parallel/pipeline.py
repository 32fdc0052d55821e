"""Schedule of microbatches over the stages of the mesh axis `pipeline`, and the traffic between stages.

S stages of v chunks of L/(Sv) blocks: chunk c of stage s is the (cS + s)-th part of the layers. One formula says when,
for all schedules: stage s runs the forward pass of chunk c on microbatch gS + j at tick s + (gv + c)S + j, and the
backward pass mirrored, from the last stage and chunk to the first, vS - 1 ticks later. With one stage
that is accumulation.

| row | a tick is | a stage keeps | in torch |
|---|---|---|---|
| `Accumulation` | both passes: the axis has size 1 | nothing | a loop |
| `GPipe` (arXiv:1811.06965) | a forward pass; when all are done, a backward pass | M + S - 1 inputs | `ScheduleGPipe` |
| `OneFOneB` (arXiv:2104.04473) | both passes | 2S - 1 inputs, or with chunks 2S for each | `Schedule1F1B`, \
`ScheduleInterleaved1F1B` |

All stages run one program: a tick in which a stage has nothing to do costs as much as others, and is masked. M
microbatches take Mv + S - 1 ticks of each pass, of which S - 1 are idle: the bubble, (S-1)/(Mv + S-1) of the time. What
a stage keeps of a microbatch is its input; the backward pass computes the stage again. So each pass sends the x bytes
of the activations of a microbatch once a tick, in all 2(Mv + S-1)x by `ppermute`; parameters outside of the blocks are
those of all stages, and their gradients one all-reduce over `pipeline` a step. Embedding and head run in every stage,
and count in the first and the last: no collective may stand in a branch that other devices do not take.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.config import ConfigError, Parallel
from jaxdist.ops.varying import mark_varying
from jaxdist.parallel.collectives import Stages, one_stage

AXIS = "pipeline"

Arrays = dict[str, jax.Array]
# (accumulators, weights, part of the batch, stages) -> loss to be differentiated, and what goes with it, of this device
Loss = Callable[[Arrays | None, Arrays, Any, Stages], tuple[jax.Array, Any]]
Sums = tuple[Arrays, jax.Array]  # gradients, and the reported loss
Carry = tuple[Arrays, jax.Array, Arrays]  # the same, and running statistics


class Schedule(Protocol):
    """Order in which microbatches pass through the stages."""

    def accumulate(self, loss: Loss, start: Carry, weights: Arrays, parts: Any) -> Carry:
        """Add up gradients, losses and running statistics of all microbatches `parts` [M, ...], beginning with `start`.

        `loss` returns the loss to differentiate, with the loss to report and the statistics.
        """

    def forward(self, function: Callable[[Arrays, Stages], Any], weights: Arrays) -> Any:
        """Pass one microbatch through all stages: the result of `function` on the last stage, zeros on the others."""

    def order(self, layers: int) -> np.ndarray:
        """Indices of the layers [L] in the order in which devices hold them."""


class Accumulation:
    """One stage, which has all layers."""

    def accumulate(self, loss: Loss, start: Carry, weights: Arrays, parts: Any) -> Carry:
        """A scan over the microbatches."""

        def microbatch(carry: Carry, part: Any) -> tuple[Carry, None]:
            *total, statistics = carry
            own = jax.grad(loss, has_aux=True)(start[0], weights | statistics, part, one_stage)
            gradients, (reported, statistics) = own
            gradients, reported = jax.tree.map(jnp.add, tuple(total), (gradients, reported))
            return (gradients, reported, statistics), None

        return lax.scan(microbatch, start, parts)[0]

    def forward(self, function: Callable[[Arrays, Stages], Any], weights: Arrays) -> Any:
        """`function` with all blocks on this device."""
        return function(weights, one_stage)

    def order(self, layers: int) -> np.ndarray:
        """All layers [L], in order."""
        return np.arange(layers)


@dataclass(frozen=True)
class Timetable:
    """Microbatch and chunk of a stage in its u-th slot: S stages, v chunks each, M microbatches."""

    stages: int
    chunks: int
    microbatches: int

    @property
    def slots(self) -> int:
        """Number of slots up to a stage's last microbatch; some are empty where S does not divide the microbatches of
        chunks."""
        groups, rest = divmod(self.microbatches - 1, self.stages)
        return groups * self.chunks * self.stages + (self.chunks - 1) * self.stages + rest + 1

    @property
    def ticks(self) -> int:
        """Ticks of one pass over all stages."""
        return self.slots + self.stages - 1

    def at(self, slot: Any) -> tuple[Any, Any, Any]:
        """(microbatch, chunk, busy) in a slot, of arrays or numbers; in an empty slot busy is False, and the others
        stay in range."""
        group, place = slot // (self.chunks * self.stages), slot % self.stages
        microbatch, chunk = group * self.stages + place, slot // self.stages % self.chunks
        return microbatch.clip(0, self.microbatches - 1), chunk, (slot >= 0) & (microbatch < self.microbatches)

    @property
    def bubble(self) -> float:
        """Share of a stage's ticks that are idle, counted slot by slot."""
        *_, busy = self.at(np.arange(self.ticks))
        return 1 - float(busy.sum()) / self.ticks


@dataclass(eq=False)
class Stage:
    """One of several stages. `received` is the input of its blocks, except on the first, which embeds; `sent` is their
    output, with which the last stage continues. Other stages continue with zeros, which cannot overflow."""

    received: Any
    first: jax.Array
    last: jax.Array
    sent: Any = None

    def __call__(self, blocks: Callable[[Any], Any], x: Any) -> Any:
        self.sent = blocks(only(self.first, x, self.received))
        return only(self.last, self.sent)


def only(condition: jax.Array, tree: Any, other: Any = None) -> Any:
    """`tree` where the condition holds, else `other` or zeros."""
    if other is None:
        other = jax.tree.map(jnp.zeros_like, tree)
    return jax.tree.map(partial(jnp.where, condition), tree, other)


def from_first_stage(tree: Any) -> Any:
    """Broadcast the first stage's value to all stages."""
    first = lax.axis_index(AXIS) == 0
    return jax.tree.map(lambda a: lax.psum(jnp.where(first, a, jnp.zeros_like(a)), AXIS), tree)


def pick(tree: Any, index: jax.Array) -> Any:
    """Index the first axis of every array of a pytree."""
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)


def not_before(t: jax.Array, weights: Arrays) -> Arrays:
    """Keep operations on `weights` from starting before tick t. Otherwise XLA hoists gathers that are equal in all
    ticks out of the scan, and holds their results until its end."""
    return {name: lax.optimization_barrier((w, t))[0] for name, w in weights.items()}


def shift(tree: Any, by: int) -> Any:
    """Send from each stage to the one `by` further on; the last is followed by the first."""
    n = lax.axis_size(AXIS)
    return jax.tree.map(lambda a: lax.ppermute(a, AXIS, [(i, (i + by) % n) for i in range(n)]), tree)


@dataclass(frozen=True)
class Pipeline:
    """Several stages. `stacked`: names of the parameters [L, ...] of the layers."""

    table: Timetable
    stacked: frozenset[str]

    def accumulate(self, loss: Loss, start: Carry, weights: Arrays, parts: Any) -> Carry:
        """The same by `summed`; statistics pass through unchanged."""

        def reported(*arguments: Any) -> tuple[jax.Array, jax.Array]:
            scaled, (reported, _) = loss(*arguments)
            return scaled, reported

        gradients, total, none = start  # a pipeline's blocks have no statistics
        return (*self.summed(reported, (gradients, total), weights, parts), none)

    def summed(self, loss: Loss, start: Sums, weights: Arrays, parts: Any) -> Sums:
        """`start` plus the gradients and reported losses of all microbatches."""
        raise NotImplementedError

    def order(self, layers: int) -> np.ndarray:
        """For each stage s of S its chunks, of which chunk c is the (cS + s)-th part of the layers, [L]."""
        parts = np.arange(layers).reshape(self.table.chunks, self.table.stages, -1)
        return parts.swapaxes(0, 1).reshape(-1)

    def chunk(self, arrays: Arrays, c: Any) -> Arrays:
        """Weights of chunk c of this stage, and those outside the layers."""

        def own(a: jax.Array) -> jax.Array:
            size = a.shape[0] // self.table.chunks
            return lax.dynamic_slice_in_dim(a, c * size, size)

        return {name: own(a) if name in self.stacked else a for name, a in arrays.items()}

    def add(self, total: Arrays, own: Arrays, c: Any, busy: jax.Array) -> Arrays:
        """Add the gradients `own` of chunk c to `total` where `busy`."""

        def sums(a: jax.Array, b: jax.Array) -> jax.Array:
            return jnp.where(busy, a + b, a)  # zeros in place of b XLA would hold, on GPUs

        def placed(a: jax.Array, b: jax.Array) -> jax.Array:
            size = b.shape[0]
            return lax.dynamic_update_slice_in_dim(a, sums(lax.dynamic_slice_in_dim(a, c * size, size), b), c * size, 0)

        return {n: placed(a, own[n]) if n in self.stacked else sums(a, own[n]) for n, a in total.items()}

    def stage(self, received: Any, c: Any) -> Stage:
        """This device's stage, working on chunk c."""
        i, ends = lax.axis_index(AXIS), (self.table.stages - 1, self.table.chunks - 1)
        return Stage(received, first=(i == 0) & (c == 0), last=(i == ends[0]) & (c == ends[1]))

    def nothing(self, function: Callable[[Arrays, Stages], Any], weights: Arrays) -> Any:
        """Zeros of the shape, dtype and type of the activations that stages exchange."""
        kinds: list[Any] = []

        def look(blocks: Callable[[Any], Any], x: Any) -> Any:
            y = blocks(x)
            kinds.append(jax.tree.map(jax.typeof, y))
            return y

        jax.eval_shape(lambda: function(self.chunk(weights, 0), look))
        if not kinds:
            raise ConfigError(
                f"parallel.mesh: axis pipeline = {self.table.stages} splits a stack of blocks, and the model applies "
                "none by jaxdist.families.layers.scan_layers; use the axis fsdp"
            )

        def zeros(kind: Any) -> jax.Array:
            return mark_varying(jnp.zeros(kind.shape, kind.dtype), tuple(kind.manual_axis_type.varying))

        return jax.tree.map(zeros, kinds[0])

    def forward(self, function: Callable[[Arrays, Stages], Any], weights: Arrays) -> Any:
        """One microbatch, a stage a tick."""
        table = replace(self.table, microbatches=1)

        def tick(x: Any, t: Any) -> tuple[Any, Any]:
            here = self.stage(x, c := table.at(t - lax.axis_index(AXIS))[1])
            output = function(self.chunk(weights, c), here)
            return here.sent, only(here.last, output)

        def on(x: Any, t: jax.Array) -> tuple[Any, None]:
            return shift(tick(x, t)[0], 1), None

        x, _ = lax.scan(on, self.nothing(function, weights), jnp.arange(table.ticks - 1))
        return tick(x, table.ticks - 1)[1]

    def start(self, loss: Loss, weights: Arrays, parts: Any) -> Any:
        """Zero-filled receive buffer for the first tick."""
        return self.nothing(lambda weights, look: loss(None, weights, pick(parts, jnp.int32(0)), look), weights)


def run(loss: Loss, accumulators: Arrays | None, weights: Arrays, part: Any, here: Stage) -> Any:
    """A stage's forward pass on a microbatch -> (activations to send, losses; zeros unless last)."""
    losses = loss(accumulators, weights, part, here)
    return here.sent, only(here.last, losses)


class GPipe(Pipeline):
    """All forward passes, then all backward passes."""

    def summed(self, loss: Loss, start: Sums, weights: Arrays, parts: Any) -> Sums:
        """A scan of forward passes, differentiated at once."""

        def stage(accumulators: Arrays, x: Any, t: jax.Array, m: jax.Array, c: jax.Array) -> Any:
            # Chunk and microbatch are picked in here: picked outside of the checkpoint, each tick would keep its own.
            own = self.chunk(not_before(t, weights), c)
            return run(loss, self.chunk(accumulators, c), own, pick(parts, m), self.stage(x, c))

        def total(accumulators: Arrays) -> tuple[jax.Array, jax.Array]:
            def tick(x: Any, t: jax.Array) -> tuple[Any, Any]:
                m, c, busy = self.table.at(t - lax.axis_index(AXIS))
                sent, losses = jax.checkpoint(stage, prevent_cse=False)(accumulators, x, t, m, c)
                return shift(sent, 1), only(busy, losses)

            losses = lax.scan(tick, self.start(loss, weights, parts), jnp.arange(self.table.ticks))[1]
            scaled, reported = (a.sum() for a in losses)
            return scaled, reported

        sums: Sums = jax.tree.map(jnp.add, start, jax.grad(total, has_aux=True)(start[0]))
        return sums


class OneFOneB(Pipeline):
    """One forward and one backward pass per tick, of different microbatches."""

    def summed(self, loss: Loss, start: Sums, weights: Arrays, parts: Any) -> Sums:
        """Three scans over ticks: forward passes; forward and backward passes; backward passes."""
        S, v, i = self.table.stages, self.table.chunks, lax.axis_index(AXIS)
        behind = v * S - 1  # ticks from a microbatch's first forward pass to its first backward pass
        places = 2 * S - 1 if v == 1 else 2 * S  # microbatches that a chunk has begun and not ended
        accumulators = self.chunk(start[0], 0)

        def forward(x: Any, kept: Any, t: jax.Array) -> tuple[Any, Any]:
            m, c, busy = self.table.at(t - i)
            sent, _ = run(loss, None, self.chunk(not_before(t, weights), c), pick(parts, m), self.stage(x, c))

            def keep(all: jax.Array, a: jax.Array) -> jax.Array:
                return all.at[c, m % places].set(jnp.where(busy, a, all[c, m % places]))

            return shift(sent, 1), jax.tree.map(keep, kept, x)

        def backward(dy: Any, kept: Any, total: Sums, t: jax.Array) -> tuple[Any, Sums]:
            m, c, busy = self.table.at(t - behind - (S - 1 - i))
            c = v - 1 - c

            def stage(accumulators: Arrays, x: Any) -> Any:
                own = self.chunk(not_before(t, weights), c)
                sent, (scaled, reported) = run(loss, accumulators, own, pick(parts, m), self.stage(x, c))
                return (sent, scaled), reported

            x = jax.tree.map(lambda all: all[c, m % places], kept)
            (_, scaled), back, reported = jax.vjp(stage, accumulators, x, has_aux=True)
            d_sent = only(self.stage(x, c).last, jax.tree.map(jnp.zeros_like, dy), dy)
            gradients, dx = back((d_sent, jnp.ones_like(scaled)))
            return shift(only(busy, dx), -1), (self.add(total[0], gradients, c, busy), total[1] + only(busy, reported))

        def tick(carried: Any, t: jax.Array, begins: bool, ends: bool) -> tuple[Any, None]:
            x, dy, kept, total = carried
            if begins:
                x, kept = forward(x, kept, t)
            if ends:
                dy, total = backward(dy, kept, total, t)
            return (x, dy, kept, total), None

        x = self.start(loss, weights, parts)
        kept = jax.tree.map(lambda a: jnp.zeros_like(a, shape=(v, places, *a.shape)), x)
        carried = (x, x, kept, start)
        last = self.table.ticks
        for first, end, begins, ends in (
            (0, behind, True, False),
            (behind, last, True, True),
            (last, last + behind, False, True),
        ):
            carried, _ = lax.scan(partial(tick, begins=begins, ends=ends), carried, jnp.arange(first, end))
        return carried[3]


SCHEDULES: dict[str, type[Pipeline]] = {"GPipe": GPipe, "1F1B": OneFOneB, "Interleaved1F1B": OneFOneB}


def schedule(parallel: Parallel, stages: int, microbatches: int, stacked: frozenset[str]) -> Schedule:
    """The schedule for `parallel.pipeline_schedule` over an axis of this size."""
    if stages == 1:
        return Accumulation()
    table = Timetable(stages, parallel.virtual_stages, microbatches)
    return SCHEDULES[parallel.pipeline_schedule](table, stacked)
