"""What a device holds within a step: a closed form, cause by cause, from the declared parameters alone.

A cause is there at some moments of a step and not at others; the peak is at the moment with the largest sum. The tables
count the arrays that a block's formulas need for their derivatives, read off `jaxdist/models/`. Where XLA finds places
for these arrays there are gaps, of which a closed form knows nothing.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxdist.config import Experiment, Mixture, ResNet
from jaxdist.models.grouped import rows_of
from jaxdist.models.layers import has_kernel
from jaxdist.sharding import SHARDS, Layout, strategy
from jaxdist.traffic import ITEMSIZE, Attends, passes, tokens_of

# Width -> arrays of so many numbers a token, in the compute dtype and in float32 or wider. D model, Q heads · C,
# K kv heads · C, S scores: heads · T, P those of a pair of the ring's chunks, F hidden; of a mixture F and d, hidden
# and D of the rows that a device's experts have room for. The mesh axis `tensor` splits all but D and d, and R under
# sequence parallelism alone: D between the products.
Arrays = Mapping[str, tuple[float, float]]
Sizes = Mapping[str, float]

# What a block keeps from forward to backward where nothing is computed again.
KEPT: Mapping[str, Arrays] = {
    # R: the input, and what attention adds to it. Q, K: queries and keys as their products leave them, values, the
    # result. S: probabilities. F: gate and up.
    "llama": {"R": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (2, 0)},
    # F: what goes into GELU.
    "gpt2": {"R": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (1, 0)},
    # d: an expert's rows, and the result.
    "mixture": {"R": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (2, 0), "d": (2, 0)},
}
# What a block keeps that is computed again: its input, or also the results of matrix products.
AGAIN: Mapping[tuple[str, str], Arrays] = {
    ("full", "llama"): {"R": (1, 0)},
    ("full", "gpt2"): {"R": (1, 0)},
    ("selective", "llama"): {"R": (2, 0), "Q": (1, 0), "K": (2, 0), "F": (2, 0)},
    ("selective", "gpt2"): {"R": (2, 0), "Q": (1, 0), "K": (2, 0), "F": (1, 0)},
    ("full", "mixture"): {"R": (1, 0)},
    ("selective", "mixture"): {"R": (2, 0), "Q": (1, 0), "K": (2, 0)},  # grouped products are none of those
}
# What is there of a block that is computed again while its backward pass is.
WORKING: Mapping[str, Arrays] = {
    # R: the input and the sum after attention; each norm before its scale. D: and after it. Q, K: queries and keys as
    # rotated, values, the result. S: probabilities. F: gate, its sigmoid s, 1 - s, gate · s, up, the product.
    "llama": {"R": (2, 2), "D": (0, 2), "Q": (1, 1), "K": (1, 1), "S": (0, 1), "F": (6, 0)},
    # F: what goes into GELU by tanh, and what its formula makes of that on the way.
    "gpt2": {"R": (0, 4), "D": (0, 2), "Q": (1, 1), "K": (0, 2), "S": (0, 1), "F": (5, 1)},
    # d: an expert's rows and results, and both with zeros for those of others.
    "mixture": {"R": (2, 2), "D": (0, 2), "Q": (1, 1), "K": (1, 1), "S": (0, 1), "F": (6, 0), "d": (4, 0)},
}
# What JAX takes out of the stacks of all blocks to work on one: XLA copies a slice that a matrix product reads.
TAKEN: Arrays = {"R": (2, 0), "D": (2, 0), "S": (0, 2.25), "F": (2, 0)}
# What products by blocks of rows have beside these: rows and results with room for one block more.
PADDED: Arrays = {"d": (2, 0), "F": (2, 0)}
NORM: Arrays = {"R": (0, 2), "D": (1, 0)}  # what the last norm keeps
COUNT = 4  # bytes of a count: of updates, of steps, of an average's updates
XLA_WORKSPACE = 2**25  # bytes that XLA lets cuBLAS have on Hopper; 2**22 on GPUs before it

NAMES = (
    BATCH := "tokens and targets",
    GRADIENTS := "gradients",
    FRESH := "gradients once more: fresh beside accumulated, or reduced",
    ENDS := "embedding, last norm and head, whole",
    WHOLE := "parameters, whole for all of the step",
    WEIGHTS := "blocks at work: weights whole, and their gradients",
    BLOCKS := "activations that the blocks keep",
    WAITING := "inputs of a stage's microbatches",
    AGAIN_ONE := "activations of the block computed again",
    TAKEN_ONE := "activations of one block, taken out of the stack of all",
    INSIDE := "gradients within one block",
    GROUPED := "grouped products, by blocks of rows",
    LAST := "activations of the last norm",
    LOGITS := "logits and their gradient",
    WORKSPACE := "workspaces of cuBLAS",
    UPDATE := "the update of one parameter",
    FETCHED := "parameters and moments that are fetched from the host for the update",
)


def amount(arrays: Arrays, sizes: Sizes, compute: int) -> float:
    """Bytes a token of `arrays`, whose compute dtype has `compute` bytes."""
    return sum(sizes[w] * (narrow * compute + wide * max(compute, 4)) for w, (narrow, wide) in arrays.items())


@dataclass(frozen=True)
class Footprint:
    """The closed form for one experiment on one mesh, bytes on one device of a `platform`, JAX's name for it: cpu, gpu,
    whose fused attention keeps no scores, or tpu."""

    experiment: Experiment
    layouts: Mapping[str, Layout]
    mesh: Mapping[str, int]
    platform: str = "cpu"

    kept_by_family = KEPT

    @property
    def unknown(self) -> str:
        """Why there is none; empty where there is."""
        resnet = isinstance(self.experiment.model, ResNet)
        return "which the images of a ResNet would need, stage by stage" if resnet else ""

    # ---- sizes

    @property
    def decoder(self) -> Attends:
        """The model. Raises ValueError for a ResNet, whose activations and arithmetic no closed form knows."""
        if isinstance(self.experiment.model, ResNet):
            raise ValueError("no closed form knows a ResNet")
        return self.experiment.model

    @property
    def tokens(self) -> float:
        """Of a microbatch on one device."""
        return tokens_of(self.experiment, self.mesh)

    @property
    def shards(self) -> int:
        """Devices over which a strategy shards."""
        return math.prod(self.mesh[axis] for axis in SHARDS)

    @property
    def ring(self) -> bool:
        """Whether attention is the ring, which keeps no scores and has those of two chunks at a time."""
        return self.mesh["context"] > 1 and self.experiment.parallel.context == "ring"

    @cached_property
    def sizes(self) -> Sizes:
        m, t, n = self.decoder, self.mesh["tensor"], self.mesh["context"]
        heads, kv_heads = m.heads // t, m.kv_heads // t
        times = t if self.experiment.parallel.sequence else 1
        return {
            "D": m.dim, "R": m.dim / times, "Q": heads * m.head_dim, "K": kv_heads * m.head_dim,
            "S": heads * self.experiment.data.sequence, "P": heads * self.experiment.data.sequence / 4 / n,
            "F": self.rows * m.hidden / t, "d": self.rows * m.dim, "V": m.vocab // t,
        }  # fmt: skip

    @property
    def rows(self) -> float:
        """Rows of an MLP for each token of a device: one, or of a mixture what its experts have room for: of all tokens
        of the group the k chosen, or an equal part of all experts' boxes."""
        m, times = self.experiment.model, self.experiment.data.sequence
        if not isinstance(m, Mixture):
            return 1.0
        return m.experts * m.room(times) / times if m.capacity else m.top_k * self.mesh["expert"]

    @property
    def at_rest(self) -> int:
        """Bytes of a parameter's number."""
        return ITEMSIZE[str(self.experiment.precision.parameters)]

    @property
    def compute(self) -> int:
        """Bytes of a number of the compute dtype: XLA on the CPU holds bfloat16 as float32."""
        size = ITEMSIZE[str(self.experiment.precision.compute)]
        return max(size, 4) if self.platform == "cpu" else size

    @property
    def gpu(self) -> bool:
        return self.platform == "gpu"

    @property
    def scores(self) -> bool:
        """Whether attention keeps its scores, as no fused kernel does, nor the ring."""
        fused = self.gpu and has_kernel(self.experiment.precision.compute, self.experiment.model.head_dim)
        return not self.ring and not fused

    @cached_property
    def numbers(self) -> Mapping[tuple[bool, bool], int]:
        """(of blocks, sharded as a strategy may) -> the trained parameters' numbers that a device has then."""
        found = {(blocks, sharded): 0 for blocks in (False, True) for sharded in (False, True)}
        for layout in (layout for layout in self.layouts.values() if not layout.statistic):
            for sharded in (False, True):
                size = math.prod(layout.local_shape(self.mesh, sharded))
                found["layers" in layout.axes, sharded] += size
        return found

    def weights(self, layers: bool) -> int:
        """Numbers of all blocks of a stage, or of what is no block, whole over what a strategy shards."""
        return self.numbers[layers, False]

    def held(self, sharded: bool) -> int:
        """Numbers of all parameters that a device has, sharded or whole."""
        return self.numbers[True, sharded] + self.numbers[False, sharded]

    @cached_property
    def multiplying(self) -> tuple[float, float]:
        """Numbers of a block, and of the head, that each token is multiplied by on a device; where experts go by blocks
        of rows, with those that are no token's."""
        m, t = self.experiment.model, self.mesh["tensor"]
        block = head = 0.0
        spare = 1.0
        if isinstance(m, Mixture) and self.platform != "tpu":
            experts = m.experts // self.mesh["expert"]
            own = self.tokens * (self.rows if m.capacity else m.top_k)
            spare += experts * rows_of(int(self.tokens * self.rows), experts) / 2 / own  # half of each last block
        for name, layout in self.layouts.items():
            chosen = spare * m.top_k / m.experts if isinstance(m, Mixture) and "experts" in layout.axes else 1.0
            share = chosen / (t if "tensor" in layout.given else 1)
            if "layers" in layout.axes:
                block += math.prod(layout.shape) * share / m.layers
            elif name.startswith("lm_head") or (m.tied and name.startswith("embed.")):
                head += math.prod(layout.shape) * share
        return block, head

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention forward, of one token in one block: two products with half of all keys, or a window."""
        m = self.decoder
        keys = self.experiment.data.sequence / 2
        if window := getattr(m, "window", 0):
            keys = min(keys, window)
        return 4.0 * m.heads * m.head_dim / self.mesh["tensor"] * keys

    @property
    def update(self) -> float:
        """Bytes that the update moves: gradients read, weights and what the optimizer keeps read and written."""
        local = self.held(strategy(self.experiment.parallel).optimizer) * self.at_rest
        return 3 * local + 2 * self.optimizer_state

    @property
    def parameters(self) -> int:
        """Bytes of the parameters at rest, running statistics apart."""
        return self.held(strategy(self.experiment.parallel).parameters) * self.at_rest

    @cached_property
    def optimizer_state(self) -> int:
        """Bytes of what the optimizer keeps, its counts of updates and of steps included."""
        return self.optimizer_states(strategy(self.experiment.parallel).optimizer)

    def optimizer_states(self, sharded: bool) -> int:
        """The same, sharded or whole."""
        trained = [layout for layout in self.layouts.values() if not layout.statistic]
        kept = (
            math.prod(layout.local_shape(self.mesh, sharded, layout.kept(kind)))
            for kind, of in self.experiment.optimizer.states.items() for layout in trained if of(layout.stands)
        )  # fmt: skip
        return sum(kept) * self.at_rest + COUNT * (2 + bool(self.experiment.optimizer.ema))

    @property
    def gradients(self) -> float:
        """A device's share of the gradients, as their accumulators are laid out."""
        return self.held(strategy(self.experiment.parallel).gradients) * self.at_rest

    def arrays(self, arrays: Arrays) -> float:
        """Bytes of `arrays` over the tokens of a microbatch."""
        return self.tokens * amount(arrays, self.sizes, self.compute)

    # ---- blocks

    @property
    def whole(self) -> Arrays:
        """What a block keeps where nothing is computed again."""
        return self.gathered(self.attending(self.kept_by_family[self.family]))

    @property
    def working(self) -> Arrays:
        """What is there of a block that is computed again."""
        return self.gathered(self.attending(WORKING[self.family]))

    def attending(self, arrays: Arrays) -> Arrays:
        """`arrays` of a family with norms of queries and keys, where the model has such, and without scores where
        attention keeps none."""
        if getattr(self.experiment.model, "qk_norm", False):
            arrays = {**arrays, **{w: (arrays[w][0], arrays[w][1] + 2) for w in "QK"}}
        return arrays if self.scores else {**arrays, "S": (0, 0)}

    def gathered(self, arrays: Arrays) -> Arrays:
        """`arrays` with what sequence parallelism gathers to all times, for attention and for the MLP."""
        narrow, wide = arrays.get("D", (0, 0))
        return {**arrays, "D": (narrow + 2, wide)} if self.experiment.parallel.sequence else arrays

    @property
    def least(self) -> Arrays:
        """What a block keeps that is computed again; all, where none is."""
        memory = self.experiment.memory
        return AGAIN.get((memory.remat, self.family), self.whole)

    @property
    def family(self) -> str:
        m = self.experiment.model
        return "mixture" if isinstance(m, Mixture) else m.family

    @property
    def kept(self) -> float:
        """What the blocks keep that a microbatch passes through at once, from forward to backward."""
        layers = passes(self.experiment, self.mesh).layers
        recomputed = layers / self.experiment.memory.remat_every
        return recomputed * self.arrays(self.least) + (layers - recomputed) * self.arrays(self.whole)

    @property
    def at_once(self) -> int:
        """Passes whose activations there are at once: XLA unrolls a warm-up of one tick, and begins the next early."""
        parallel, stages = self.experiment.parallel, self.mesh["pipeline"]
        single = stages * parallel.virtual_stages == 2 and stages > 1 and parallel.pipeline_schedule != "GPipe"
        return 1 + single

    @property
    def waiting(self) -> float:
        """Inputs that a stage of a pipeline keeps of microbatches whose backward pass is to come, and what it receives
        and sends."""
        stages, parallel = self.mesh["pipeline"], self.experiment.parallel
        if stages == 1:
            return 0.0
        chunks = parallel.virtual_stages
        inputs = 2 * stages - 1 if chunks == 1 else 2 * stages * chunks
        if parallel.pipeline_schedule == "GPipe":
            inputs = self.experiment.train.accumulation + stages - 1
        return (inputs + 2) * self.arrays({"R": (1, 0)})

    # ---- moments

    @property
    def moments(self) -> list[dict[str, float]]:
        """Each moment of a step that may be its peak, as bytes by cause."""
        return list(self._moments())

    def _moments(self) -> Iterator[dict[str, float]]:
        e, n, row = self.experiment, self.shards, strategy(self.experiment.parallel)
        recomputed = self.arrays(self.working) - self.arrays(self.least)
        again, stages = self.at_once * recomputed * (e.memory.remat != "none"), self.mesh["pipeline"]
        always = {
            BATCH: 2 * self.tokens * e.train.accumulation * 4.0,
            GRADIENTS: self.gradients,
            WORKSPACE: XLA_WORKSPACE * self.gpu,
        }
        during = always | {
            FRESH: self.fresh,
            WAITING: self.waiting,
            ENDS: self.weights(False) * self.compute * (row.reshards and n > 1),
            WHOLE: self.held(False) * self.compute * (row.parameters and not row.reshards and n > 1),
            BLOCKS: self.at_once * self.kept,
        }
        yield during | {LOGITS: self.logits, LAST: self.arrays(NORM)}
        block = during | {
            WEIGHTS: self.weights(True) * stages / e.model.layers * self.compute,
            AGAIN_ONE: again,
            GROUPED: self.grouped,
        }
        taken = e.model.layers > 1 and (e.memory.remat == "none" or e.memory.remat_every > 1)
        if taken:
            arrays = {w: a for w, a in TAKEN.items() if w != "S" or self.scores}
            yield block | {TAKEN_ONE: self.arrays(arrays), INSIDE: self.attention}
        elif self.ring:
            yield block | {INSIDE: self.attention}
        else:
            cast = ITEMSIZE[str(e.precision.compute)] < 4  # probabilities, as values are multiplied by them
            inside = self.scores * self.arrays({"S": (cast, 1.75)})
            yield block | {INSIDE: max(inside, self.arrays({"R": (1, 0)}))}
        crosses = self.mesh["data"] > 1 or (n > 1 and not row.gradients)
        reduced = self.gradients / (n if row.optimizer and not row.gradients else 1)
        gathered = self.largest_stack * (row.optimizer and not row.parameters and n > 1)
        yield always | {FRESH: reduced * crosses, FETCHED: self.fetched, UPDATE: gathered}

    @property
    def logits(self) -> float:
        """Logits and their gradient, and the head's gradient where it stands beside GRADIENTS: as chunks are added up,
        that of one chunk on CPUs, and whole until it is scattered."""
        e, head, cpu = self.experiment, self.multiplying[1], self.platform == "cpu"
        chunks, sharded = e.memory.loss_chunks, self.shards > 1 and strategy(e.parallel).gradients
        kept = cpu and chunks == 1  # XLA makes the gradient in the place of logits that it need not keep
        apart = sharded or e.precision.compute != e.precision.parameters
        added = (chunks > 1) * (cpu + apart) * head * max(self.compute, 4)
        scattered = (sharded and not cpu) * head * ITEMSIZE[str(e.precision.reduce)]
        return self.arrays({"V": (0, 1 + kept) if cpu else (1, 0)}) / chunks + added + scattered

    @property
    def fresh(self) -> float:
        """Gradients of a microbatch beside those that are added up: of a pipeline, of the blocks that it passes through
        at once."""
        chunks = self.experiment.parallel.virtual_stages if self.mesh["pipeline"] > 1 else 1
        sharded = strategy(self.experiment.parallel).gradients
        numbers = self.numbers[True, sharded] / chunks + self.numbers[False, sharded]
        return numbers * self.at_rest * (self.experiment.train.accumulation > 1)

    @property
    def attention(self) -> float:
        """Bytes at work within attention's backward pass: scores and the mask, a byte each.

        Of the ring scores of a pair of chunks, and gradients as they are collected, of keys and values as they travel.
        """
        if self.ring:
            return self.arrays({"P": (0, 4), "Q": (0, 2), "K": (4, 4)})
        if not self.scores:
            return self.arrays({"D": (2, 0), "F": (2, 0)})
        return self.arrays({"S": (0, 1)}) + self.tokens * self.sizes["S"]

    @property
    def largest_stack(self) -> int:
        """Bytes of the largest parameter of a stage, all of its blocks together, whole over what a strategy shards."""
        shapes = (layout.local_shape(self.mesh, False) for layout in self.layouts.values())
        return max(map(math.prod, shapes)) * self.at_rest

    @property
    def grouped(self) -> float:
        """Bytes at work in products by blocks of rows: PADDED, and gradients of two kernels of all of a device's
        experts."""
        m, mesh = self.experiment.model, self.mesh
        if not isinstance(m, Mixture) or self.platform == "tpu":
            return 0.0
        kernel = m.dim * m.hidden * m.experts / mesh["expert"] / mesh["tensor"]
        return self.arrays(PADDED) + 2 * kernel * max(self.compute, 4)

    @property
    def fetched(self) -> float:
        """Bytes that are copied to a device for an update; on CPUs XLA leaves such copies out."""
        row, offload = strategy(self.experiment.parallel), self.experiment.memory.offload
        copies = [("parameters" in offload, 1, row.parameters), ("optimizer" in offload, 2, row.optimizer)]
        return sum(
            (self.platform != "cpu") * there * n * self.held(sharded) * self.at_rest for there, n, sharded in copies
        )

    @property
    def fetched_and_returned(self) -> float:
        """Bytes between a device and its host in a step: moments there and back; weights there forward and backward and
        to be updated, and back; what blocks keep there and back."""
        offload, p = self.experiment.memory.offload, passes(self.experiment, self.mesh)
        moved = 2 * self.optimizer_state * ("optimizer" in offload)
        moved += (2 * p.both + 2) * self.parameters * ("parameters" in offload)
        return moved + 2 * p.both * self.kept * ("activations" in offload)

    @property
    def peak(self) -> Mapping[str, float]:
        """The causes at the moment that takes the most."""
        return max(self.moments, key=lambda moment: sum(moment.values()))
