"""Memory and work of a decoder's step: activations, logits, and buffers of a ring or a pipeline."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxdist.accounting.memory import (
    AGAIN_ONE,
    BATCH,
    BLOCKS,
    COPIED,
    ENDS,
    FRESH,
    GRADIENTS,
    GROUPED,
    INSIDE,
    LAST,
    LOGITS,
    TAKEN_ONE,
    UNSHARDED,
    WAITING,
    WEIGHTS,
    WORKSPACE,
    XLA_WORKSPACE,
    Arrays,
    Footprint,
    Sizes,
    Work,
    amount,
)
from jaxdist.accounting.traffic import ITEMSIZE, passes, recomputed, tokens_of
from jaxdist.ops.attention import has_kernel
from jaxdist.parallel.sharding import ParamSpec, strategy

# The tables are of numbers a token. D model, Q heads · C, K kv heads · C, S scores: heads · T, P those of a pair of the
# ring's chunks, F hidden; of a mixture F and d, hidden and D of the rows that a device's experts have room for. The
# mesh axis `tensor` splits all but D and d, and R under sequence parallelism alone: D between the products.


@dataclass(frozen=True)
class Tables:
    """Arrays of a family's block, as counts of the sizes above.

    Those in the MLP are F and, of experts, d; R, D, Q, K and S are much the same in all blocks that attend.
    """

    kept: Arrays
    """From forward to backward, where nothing is computed again."""
    selective: Arrays
    """Under rematerialization `selective`, which keeps results of matrix products; `full` keeps the block's INPUT."""
    working: Arrays
    """In the backward pass of a block that is computed again: what its formulas read and write, one by one."""
    on_cpus: Arrays
    """Arrays live during the MLP on several CPUs, whose reductions compute their own inputs, under any `remat`."""
    on_gpus: Arrays | None = None
    """On GPUs, where XLA makes formulas of one number at a time where they are read; None: as `working`."""


INPUT: Arrays = {"R": (1, 0)}
# While attention is, backward: R, D, Q, K as above. S: probabilities, their gradient and that of scores.
ATTENTION_ON_CPUS: Arrays = {"R": (2, 0), "D": (0, 1), "Q": (1, 1), "K": (1, 1), "S": (0, 3)}
# And forward. R: the input. K: values. S: scores, exponentials, probabilities and the mask, a byte each.
FORWARD_ON_CPUS: Arrays = {"R": (1, 0), "K": (1, 0), "S": (0, 3.25)}
IN_STACKS = ("F", "S", "d")  # what a block has of these it reads where it is kept; of all else XLA copies what it reads
# Sums over tensor, backward before attention and before the MLP, that are under way: what goes in, and what comes out.
UNDER_WAY: Arrays = {"D": (2, 0), "R": (2, 0)}
# Slices of the stacks of all blocks for the block at work: XLA copies a slice that a matrix product reads.
TAKEN: Arrays = {"R": (2, 0), "D": (2, 0), "S": (0, 2.25), "F": (2, 0)}
# Pairs of the ring's chunks: of a device's own, and with what it has received in one turn.
OWN, RECEIVED = 3, 2
# Scores of these where XLA schedules around collectives, all at once: of each scores and the gradient of probabilities,
# and as the products after them take both.
PAIRS = ((OWN + RECEIVED) * 2, (OWN + RECEIVED) * 2)
PADS = 16  # XLA pads a product's sizes to multiples of it for the tensor cores
NORM: Arrays = {"R": (0, 2), "D": (1, 0)}  # what the last norm keeps
# How often what a block keeps goes through memory: written and read forward, read backward, its gradient written and
# read; and what is computed again written and read once more. Logits are passed over so often in all.
PASSES, AGAIN, OVER_LOGITS = 5, 2, 7
BACKWARD = 2.5  # FLOPs of attention's backward pass, its forward pass being 1: five products to two


@dataclass(frozen=True)
class DecoderFootprint(Footprint):
    """The closed form of a decoder of equal blocks, by the `tables` of its family. Fused attention on GPUs keeps no
    scores."""

    tables: Tables = field(kw_only=True)

    # ---- sizes

    @property
    def decoder(self) -> Any:
        """The config of the model."""
        return self.experiment.model

    @property
    def tokens(self) -> float:
        """Tokens of a microbatch on one device."""
        return tokens_of(self.experiment, self.mesh)

    @property
    def ring(self) -> bool:
        """Whether attention is the ring, which keeps no scores and computes those of a few pairs of chunks at a
        time."""
        return self.mesh["context"] > 1 and self.experiment.parallel.context == "ring"

    @property
    def looping(self) -> bool:
        """Whether the ring is a loop: XLA unrolls a loop of one turn."""
        return self.mesh["context"] > 2

    @cached_property
    def sizes(self) -> Sizes:
        """Numbers per token of each kind of activation on one device, by letter."""
        m, t, n = self.decoder, self.mesh["tensor"], self.mesh["context"]
        heads, kv_heads = m.heads // t, m.kv_heads // t
        times = t if self.experiment.parallel.sequence else 1
        return {
            "D": m.dim, "R": m.dim / times, "Q": heads * m.head_dim, "K": kv_heads * m.head_dim,
            "S": heads * self.experiment.data.sequence, "P": heads * self.experiment.data.sequence / 4 / n,
            "F": self.rows * m.hidden / t, "d": self.rows * m.dim, "V": m.vocab_rows // t,
        }  # fmt: skip

    @property
    def rows(self) -> float:
        """Rows of the MLP per token on a device."""
        return 1.0

    @property
    def scores(self) -> bool:
        """Whether attention keeps its scores: neither a fused kernel nor the ring does."""
        fused = self.gpu and has_kernel(self.experiment.precision.compute, self.experiment.model.head_dim)
        return not self.ring and not fused

    def applied(self, spec: ParamSpec) -> float:
        """Number of multiplications of a token by each element of a parameter."""
        return 1.0

    @cached_property
    def multiplying(self) -> tuple[float, float]:
        """Number of elements of a block, and of the head, that each token is multiplied by on a device."""
        m, t = self.experiment.model, self.mesh["tensor"]
        block = head = 0.0
        for name, spec in self.param_specs.items():
            share = self.applied(spec) / (t if "tensor" in spec.model_axes else 1)
            if "layers" in spec.axes:
                block += math.prod(spec.shape) * share / m.layers
            elif name.startswith("lm_head") or (m.tied and name.startswith("embed.")):
                head += math.prod(spec.shape) * share
        return block, head

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's forward pass per token and block: two products with the keys that it sees."""
        m = self.decoder
        return 4.0 * m.heads * m.head_dim / self.mesh["tensor"] * m.keys(self.experiment.data.sequence)

    @property
    def unwidened(self) -> int:
        """Bytes of an element of the compute dtype before XLA on a CPU widens it to float32."""
        return ITEMSIZE[str(self.experiment.precision.compute)]

    def arrays(self, arrays: Arrays, compute: int | None = None) -> float:
        """Bytes of `arrays` for the tokens of a microbatch, with a compute dtype of that many bytes."""
        return self.tokens * amount(arrays, self.sizes, compute or self.compute)

    # ---- blocks

    @property
    def without_remat(self) -> Arrays:
        """Arrays that a block keeps without rematerialization."""
        return self.gathered(self.attending(self.tables.kept))

    @property
    def formulas(self) -> Arrays:
        """Arrays that a block's formulas read and write."""
        return self.gathered(self.attending(self.tables.working))

    @property
    def working(self) -> Arrays:
        """Arrays of a rematerialized block; on several CPUs of any block, while its MLP is computed."""
        if self.several_cpus:
            return self.gathered(self.attending(self.tables.on_cpus))
        if not self.gpu or self.tables.on_gpus is None:
            return self.formulas
        table = self.tables.on_gpus
        if self.mesh["tensor"] > 1:
            table = {w: (n + UNDER_WAY.get(w, (0, 0))[0], wide) for w, (n, wide) in table.items()}
        return self.gathered(self.attending(table))

    def attending(self, arrays: Arrays) -> Arrays:
        """`arrays`, plus norms of queries and keys if the model has them, without scores if attention keeps none."""
        if self.experiment.model.qk_norm:
            arrays = {**arrays, **{w: (arrays[w][0], arrays[w][1] + 2) for w in "QK" if w in arrays}}
        return arrays if self.scores else {**arrays, "S": (0, 0)}

    def gathered(self, arrays: Arrays) -> Arrays:
        """`arrays`, plus what sequence parallelism all-gathers for attention and for the MLP."""
        narrow, wide = arrays.get("D", (0, 0))
        return {**arrays, "D": (narrow + 2, wide)} if self.experiment.parallel.sequence else arrays

    @property
    def least(self) -> Arrays:
        """Arrays that a rematerialized block keeps; without rematerialization, all."""
        return {"full": INPUT, "selective": self.tables.selective}.get(self.experiment.memory.remat, self.without_remat)

    @property
    def grouped(self) -> float:
        """Bytes at work in grouped products, if a family has them."""
        return 0.0

    @property
    def kept(self) -> float:
        """Bytes that the blocks keep from forward to backward pass of a microbatch."""
        return self.kept_in(self.compute)

    def kept_in(self, compute: int) -> float:
        """The same, for a compute dtype of that many bytes."""
        layers = passes(self.experiment, self.mesh).layers
        recomputed = layers / self.experiment.memory.remat_every
        kept = layers - recomputed
        return recomputed * self.arrays(self.least, compute) + kept * self.arrays(self.without_remat, compute)

    @property
    def at_once(self) -> int:
        """Number of passes whose activations are live at once: XLA unrolls a warm-up of one tick, and starts the next
        early."""
        parallel, stages = self.experiment.parallel, self.mesh["pipeline"]
        single = stages * parallel.virtual_stages == 2 and stages > 1 and parallel.pipeline_schedule != "GPipe"
        return 1 + single

    @property
    def waiting(self) -> float:
        """Inputs that a pipeline stage keeps of microbatches before their backward pass, and its receive and send
        buffers."""
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
    def sums(self) -> int:
        """Number of exchanges of activations in a step: four per block for both passes, and as many as one more block
        outside."""
        p = passes(self.experiment, self.mesh)
        return (p.both * 4 + p.forward * 2) * (p.layers + 1)

    def _moments(self) -> Iterator[dict[str, float]]:
        e, n, row = self.experiment, self.shards, strategy(self.experiment.parallel)
        always = {
            BATCH: 2 * self.tokens * e.train.accumulation * 4.0,
            GRADIENTS: self.gradients,
            COPIED: self.copied_moments,
            WORKSPACE: XLA_WORKSPACE * self.gpu,
        }
        during = always | {
            COPIED: self.copied_moments + self.widened,
            FRESH: self.fresh,
            WAITING: self.waiting,
            ENDS: self.weights(False) * self.compute * (row.reshards and n > 1),
            UNSHARDED: self.elements(False) * self.compute * (row.parameters and not row.reshards and n > 1),
            BLOCKS: self.at_once * self.kept,
        }
        yield during | {LOGITS: self.logits, LAST: self.arrays(NORM)}
        block = during | {
            WEIGHTS: self.weights(True) * self.mesh["pipeline"] / e.model.layers * self.compute,
            GROUPED: self.grouped,
        }
        yield from self._on_cpus(block) if self.several_cpus else [block | self._in_a_block()]
        yield always | self.updating

    def _in_a_block(self) -> dict[str, float]:
        """Working arrays of a block's backward pass; on several CPUs separate moments count them."""
        memory = self.experiment.memory
        again = (self.arrays(self.working) - self.arrays(self.least)) * (memory.remat != "none")
        block = {AGAIN_ONE: self.at_once * again}
        if self.experiment.model.layers > 1 and (memory.remat == "none" or memory.remat_every > 1):
            arrays = {w: a for w, a in TAKEN.items() if w != "S" or self.scores}
            return block | {TAKEN_ONE: self.arrays(arrays), INSIDE: self.attention}
        if self.ring:
            return block | {INSIDE: self.attention}
        inside = self.scores * self.arrays({"S": self.beside_probabilities})
        # XLA takes the last block out of the loop over blocks on several GPUs. Where the head's gradient is cast to no
        # wider dtype its product comes after that block's, and the logits' gradient waits for it.
        waits = self.gpu and self.several and self.param_itemsize < 4 and memory.loss_chunks == 1
        held_logits = {LOGITS: waits * self.arrays({"V": (1, 0)})}
        return block | held_logits | {INSIDE: max(inside, self.arrays({"R": (1, 0)}))}

    def _on_cpus(self, block: Mapping[str, float]) -> Iterator[dict[str, float]]:
        """Moments of a block on several CPUs: forward, while what is kept in 16 bits is not yet widened; backward in
        attention; and in the MLP, when the ring has scores already."""
        cause = TAKEN_ONE if self.experiment.memory.remat == "none" else AGAIN_ONE
        if cause == TAKEN_ONE:
            kept = self.at_once * self.kept_in(self.unwidened)
            forward = self.arrays(self.attending(FORWARD_ON_CPUS))
            yield {**block, BLOCKS: kept, cause: forward, GROUPED: 0.0}
        attention = self.outside_stacks(self.attending(ATTENTION_ON_CPUS))
        yield {**block, cause: attention, GROUPED: 0.0, INSIDE: self.attention if self.ring else 0.0}
        yield {**block, cause: self.outside_stacks(self.working), INSIDE: self.paired(False)}

    def outside_stacks(self, arrays: Arrays) -> float:
        """Bytes of `arrays`, without what a block reads IN_STACKS of all blocks."""
        kept = {w: a for w, a in self.least.items() if w in IN_STACKS and w in arrays}
        return self.arrays(arrays) - self.arrays(kept)

    @property
    def logits(self) -> float:
        """Logits and their gradient, and the head's gradient where GRADIENTS lacks it: as chunks are added up, that of
        one chunk on CPUs, and unsharded until it is scattered."""
        e, head, cpu = self.experiment, self.multiplying[1], self.platform == "cpu"
        chunks, sharded = e.memory.loss_chunks, self.shards > 1 and strategy(e.parallel).gradients
        kept = cpu and chunks == 1  # XLA makes the gradient in the place of logits that it need not keep
        padded = self.gpu and self.compute < 4 and self.sizes["V"] % PADS  # which copies them
        apart = sharded or e.precision.compute != e.precision.parameters
        added = (chunks > 1) * (cpu + apart) * head * max(self.compute, 4)
        scattered = (sharded and not cpu) * head * ITEMSIZE[str(e.precision.reduce)]
        copies = 2 if kept or padded else 1
        return self.arrays({"V": (0, copies) if cpu else (copies, 0)}) / chunks + added + scattered

    @property
    def widens(self) -> bool:
        """Whether XLA on CPUs computes sums and products of bfloat16 parameters in float32; of float16 it widens only
        inputs of products."""
        return self.platform == "cpu" and str(self.experiment.precision.parameters) == "bfloat16"

    @property
    def widened(self) -> float:
        """Weights of all blocks in float32, converted before the loops over them."""
        return self.widens * self.numbers[True, strategy(self.experiment.parallel).parameters] * self.compute

    @property
    def copied_moments(self) -> float:
        """Moments that XLA copies at the start of a step where it widens. Gradients that are laid out as they are, are
        added up in their place."""
        row = strategy(self.experiment.parallel)
        placed = self.gradients * (self.elements(row.gradients) == self.elements(row.optimizer))
        return self.widens * max(self.optimizer_state - placed, 0)

    @property
    def fresh(self) -> float:
        """Gradients of a microbatch beside those that are added up: of a pipeline, of the blocks that it passes through
        at once."""
        chunks = self.experiment.parallel.virtual_stages if self.mesh["pipeline"] > 1 else 1
        sharded = strategy(self.experiment.parallel).gradients
        numbers = self.numbers[True, sharded] / chunks + self.numbers[False, sharded]
        return numbers * self.param_itemsize * (self.experiment.train.accumulation > 1)

    @property
    def attention(self) -> float:
        """Bytes at work within attention's backward pass: scores and the mask, a byte each.

        Of the ring scores of pairs of chunks, and gradients as they are collected, of keys and values as they travel;
        on CPUs in a loop alone, outside of which they are made where they are read.
        """
        if self.ring:
            collected = self.arrays({"Q": (0, 2), "K": (4, 4)})
            if self.platform == "cpu":
                return self.paired(True) + self.looping * collected
            return self.arrays({"P": PAIRS}) + collected
        if not self.scores:
            return self.arrays({"D": (2, 0), "F": (2, 0)})
        return self.arrays({"S": (0, 1)}) + self.tokens * self.sizes["S"]

    def paired(self, attending: bool) -> float:
        """Bytes of scores of the ring's pairs of chunks on CPUs: of all OWN at once, and of those RECEIVED where that
        is one turn, with no loop.

        While the MLP is at work these are weights, and in 16 bits as values are multiplied by them; in attention also
        gradients, of two of which there are copies for the products. Under `selective` the MLP waits for nothing of
        attention: scores are there while it is at work, and of all pairs such copies.
        """
        if not self.ring:
            return 0.0
        pairs = OWN if self.looping else OWN + RECEIVED
        selective = self.experiment.memory.remat == "selective"
        narrow = pairs * (self.unwidened < 4)
        if attending:
            narrow = pairs if selective else 2
        arrays = {"P": (narrow, pairs * (1 + (attending or selective)))}
        return self.arrays(arrays, self.unwidened)

    @property
    def beside_probabilities(self) -> tuple[float, float]:
        """Arrays of scores in a block's backward pass beside its probabilities. On GPUs these in 16 bits, as values are
        multiplied by them, and 1.75 of their gradient and what is made of it. On one CPU, while the MLP is at
        work, exponentials; in 16 bits, and under `selective`, where the MLP waits for nothing of attention, one more.
        """
        narrow = self.unwidened < 4
        if self.platform == "cpu":
            return 0, 1 + (narrow or self.experiment.memory.remat == "selective")
        return narrow, 1.75

    # ---- arithmetic

    @property
    def work(self) -> Work:
        """Work of a step, with rematerialization and the idle ticks of a pipeline."""
        e, p, again = self.experiment, passes(self.experiment, self.mesh), recomputed(self.experiment)
        full = again * (e.memory.remat == "full")
        blocks = p.layers * (p.both * (3 + full) + p.forward)  # forward passes' worth, of one block
        chunks = e.memory.loss_chunks
        chunked = chunks > 1
        heads = p.both * (3 + chunked) + p.forward * p.through_head
        block, head = self.multiplying
        attended = p.layers * (p.both * (1 + BACKWARD + again) + p.forward)
        kept, least = self.arrays(self.formulas), self.arrays(self.least)
        moved = p.layers * (p.both * (PASSES * kept + AGAIN * again * (kept - least)) + p.forward * AGAIN * kept)
        if chunked:  # each reads the head for its logits, for them again and for their gradient, and adds to its own
            moved += p.both * chunks * head * (2 * max(self.compute, 4) + 3 * self.compute)
        moved += (p.both * (OVER_LOGITS + AGAIN * chunked) + p.forward * p.through_head * OVER_LOGITS) * self.arrays(
            {"V": (0, 1)}
        )
        # Each pass reads the weights forward and backward, writes their gradients, and adds them to the accumulators.
        weights = p.layers / self.decoder.layers * self.weights(True) + self.weights(False)
        moved += p.both * weights * (2 * self.compute + 3 * self.param_itemsize) + p.forward * weights * self.compute
        moved += self.update
        products = 2 * self.tokens * (blocks * block + heads * head)
        return Work(products, self.tokens * attended * self.attention_flops, moved)
