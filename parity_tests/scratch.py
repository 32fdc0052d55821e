"""What a step takes beside parameters and moments: a closed form of both sides' scratch memory, cause by cause.

Bytes on one device, from the experiment, the mesh and the declared parameters alone. A cause is there at some moments
of a step and not at others; the peak is at the moment with the largest sum. The tables count the arrays that a block's
formulas need for their derivatives, read off `jaxdist/models/` and `torch_ref/models/`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxdist.config import Experiment, Mixture, ResNet
from jaxdist.models.layers import has_kernel
from jaxdist.sharding import SHARDS, TOKENS, Layout, strategy
from parity_tests.verdict import UNEXPLAINED, Cause

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
JAX, TORCH = SIDES = "jaxdist", "torch_ref"

# Width -> arrays of so many numbers a token, in the compute dtype and in float32 or wider. D model, Q heads · C,
# K kv heads · C, S scores: heads · T, P those of a pair of the ring's chunks, F hidden. The mesh axis `tensor` splits
# all but D, and R under sequence parallelism alone: D between the products.
Arrays = Mapping[str, tuple[float, float]]
Sizes = Mapping[str, float]

# What a block keeps from forward to backward where nothing is computed again.
KEPT: Mapping[tuple[str, str], Arrays] = {
    # R: the input and the sum after attention; each norm before its scale. D: and after it. Q, K: queries and keys as
    # rotated, values, the result. S: exp and its quotient. F: gate, its sigmoid s, 1 - s, gate · s, up, the product.
    (JAX, "llama"): {"R": (2, 2), "D": (0, 2), "Q": (1, 1), "K": (1, 1), "S": (0, 2), "F": (6, 0)},
    # Of S the softmax, and once more in the order that its product with the values wants; of F the products alone.
    (TORCH, "llama"): {"R": (0, 4), "D": (2, 0), "Q": (1, 1), "K": (1, 1), "S": (1, 1), "F": (4, 0)},
    # F: what goes into GELU by tanh, and what its formula makes of that on the way.
    (JAX, "gpt2"): {"R": (0, 4), "D": (0, 2), "Q": (1, 1), "K": (0, 2), "S": (0, 2), "F": (5, 1)},
    (TORCH, "gpt2"): {"R": (0, 4), "D": (2, 0), "Q": (1, 1), "K": (1, 1), "S": (1, 1), "F": (2, 0)},
}
# What a block keeps that is computed again: its input, or also the results of matrix products.
AGAIN: Mapping[tuple[str, str], Arrays] = {
    ("full", "llama"): {"R": (1, 0)},
    ("full", "gpt2"): {"R": (1, 0)},
    ("selective", "llama"): {"R": (3, 0), "Q": (1, 0), "K": (2, 0), "F": (2, 0)},
    ("selective", "gpt2"): {"R": (3, 0), "Q": (1, 0), "K": (2, 0), "F": (1, 0)},
}
# What JAX takes out of the stacks of all blocks to work on one: XLA copies a slice that a matrix product reads.
TAKEN: Arrays = {"R": (4, 0), "D": (2, 0), "S": (0, 1.25), "F": (4, 0)}
NORM: Arrays = {"R": (0, 2), "D": (1, 0)}  # what the last norm keeps
XLA_WORKSPACE = 2**25  # bytes that XLA lets cuBLAS have on Hopper; 2**22 on GPUs before it


NAMES = (
    BATCH := "tokens and targets",
    GRADIENTS := "gradients",
    FRESH := "gradients once more: fresh beside accumulated, or reduced",
    ENDS := "embedding, last norm and head, whole",
    WHOLE := "parameters, whole for all of the step",
    WEIGHTS := "blocks at work: weights whole, and their gradients",
    BLOCKS := "activations that the blocks keep",
    AGAIN_ONE := "activations of the block computed again",
    TAKEN_ONE := "activations of one block, taken out of the stack of all",
    INSIDE := "gradients within one block",
    LAST := "activations of the last norm",
    LOGITS := "logits, their softmax and gradient",
    WORKSPACE := "workspaces of cuBLAS",
    UPDATE := "the update of one parameter",
    FETCHED := "parameters and moments that are fetched from the host for the update",
)
AT_WORK = (WEIGHTS, TAKEN_ONE, INSIDE, LOGITS, UPDATE, FETCHED)
SLACK = 0.05  # of constants, numbers a token and padding that the closed form leaves out


def amount(arrays: Arrays, sizes: Sizes, compute: int) -> float:
    """Bytes a token of `arrays`, whose compute dtype has `compute` bytes."""
    return sum(sizes[w] * (narrow * compute + wide * max(compute, 4)) for w, (narrow, wide) in arrays.items())


@dataclass(frozen=True)
class Scratch:
    """The closed form for one experiment on one mesh. `gpu`: fused attention keeps no scores, and cuBLAS has
    `workspaces`, bytes: the one part that is measured, of torch's run."""

    experiment: Experiment
    layouts: Mapping[str, Layout]
    mesh: Mapping[str, int]
    gpu: bool = False
    workspaces: float = 0.0

    @property
    def unknown(self) -> str:
        """Why there is none; empty where there is."""
        if isinstance(self.experiment.model, Mixture):
            return "as experts have many or few rows, as the router chooses"
        if isinstance(self.experiment.model, ResNet):
            return "which the images of a ResNet would need, stage by stage"
        return "as none is told yet of a pipeline's stages" if self.mesh["pipeline"] > 1 else ""

    @property
    def tokens(self) -> int:
        """Of a microbatch on one device."""
        e = self.experiment
        return e.train.batch * e.data.sequence // (math.prod(self.mesh[a] for a in TOKENS) * e.train.accumulation)

    @property
    def shards(self) -> int:
        """Devices over which a strategy shards."""
        return math.prod(self.mesh[axis] for axis in SHARDS)

    @property
    def ring(self) -> bool:
        """Whether JAX's attention is the ring, which keeps no scores and has those of two chunks at a time."""
        return self.mesh["context"] > 1 and self.experiment.parallel.context == "ring"

    @property
    def sizes(self) -> Sizes:
        m, t, n = self.experiment.model, self.mesh["tensor"], self.mesh["context"]
        if isinstance(m, ResNet):
            raise ValueError("no closed form knows the activations of a ResNet")
        heads = m.heads // t
        kv_heads = getattr(m, "kv_heads", m.heads) // t
        times = t if self.experiment.parallel.sequence else 1
        return {
            "D": m.dim, "R": m.dim / times, "Q": heads * m.head_dim, "K": kv_heads * m.head_dim,
            "S": heads * self.experiment.data.sequence, "P": heads * self.experiment.data.sequence / 4 / n,
            "F": m.hidden // t, "V": m.vocab // t,
        }  # fmt: skip

    def compute(self, side: str) -> int:
        """Bytes of a number of the compute dtype: XLA on the CPU holds bfloat16 as float32."""
        size = ITEMSIZE[str(self.experiment.precision.compute)]
        return max(size, 4) if side == JAX and not self.gpu else size

    def weights(self, layers: bool) -> float:
        """Numbers of all blocks, or of what is none, whole over fsdp."""
        t = self.mesh["tensor"]
        return sum(
            math.prod(layout.shape) / (t if "tensor" in layout.mesh_axes(False) else 1)
            for layout in self.layouts.values() if ("layers" in layout.axes) == layers
        )  # fmt: skip

    def gradients(self, side: str) -> float:
        """A device's share of the gradients: as the JAX accumulators are laid out, or as FSDP2 shards them."""
        row, parallel = strategy(self.experiment.parallel), self.experiment.parallel
        sharded = row.gradients
        if side == TORCH and parallel.strategy in ("zero2", "fsdp"):
            sharded = parallel.reduce != "step" or self.experiment.train.accumulation == 1
        item = ITEMSIZE[str(self.experiment.precision.parameters)]
        return (self.weights(True) + self.weights(False)) * item / (self.shards if sharded else 1)

    def block(self, side: str) -> tuple[float, float]:
        """Bytes that a block keeps for its backward pass: where nothing is computed again, and where it is."""
        m, memory = self.experiment.model, self.experiment.memory
        arrays = dict(KEPT[side, m.family])
        if getattr(m, "qk_norm", False):
            arrays |= {w: (arrays[w][0], arrays[w][1] + 2) for w in "QK"}
        if not self.scores(side):
            arrays["S"] = (0, 0)
        elif side == TORCH and self.gpu and not self.windowed:  # keys and values once for each head of queries
            arrays |= {"S": (0, 1), "Q": (arrays["Q"][0] + 2, arrays["Q"][1])}
        if side == TORCH:  # keys and values of all times
            arrays["K"] = self.mesh["context"] * arrays["K"][0], self.mesh["context"] * arrays["K"][1]
        none = self.tokens * amount(arrays, self.sizes, self.compute(side))
        again = AGAIN.get((memory.remat, m.family))
        return none, none if again is None else self.tokens * amount(again, self.sizes, self.compute(side))

    def moments(self, side: str) -> list[dict[str, float]]:
        """Each moment of a step that may be its peak, as bytes by cause."""
        return list(self._jax() if side == JAX else self._torch())

    def kept(self, side: str) -> float:
        """What all blocks keep from forward to backward."""
        none, again = self.block(side)
        layers = self.experiment.model.layers
        recomputed = layers / self.experiment.memory.remat_every
        return recomputed * again + (layers - recomputed) * none

    def arrays(self, arrays: Arrays, side: str) -> float:
        """Bytes of `arrays` over the tokens of a microbatch."""
        return self.tokens * amount(arrays, self.sizes, self.compute(side))

    def _jax(self) -> Iterator[dict[str, float]]:
        e, n, row = self.experiment, self.shards, strategy(self.experiment.parallel)
        compute, (none, again), gradients = self.compute(JAX), self.block(JAX), self.gradients(JAX)
        stacked = e.model.layers > 1 and (e.memory.remat == "none" or e.memory.remat_every > 1)
        crosses = self.mesh["data"] > 1 or (n > 1 and not row.gradients)
        always = {
            BATCH: 2 * self.tokens * e.train.accumulation * 4.0,
            GRADIENTS: gradients,
            WORKSPACE: XLA_WORKSPACE * self.gpu,
        }
        kept = row.parameters and not row.reshards and n > 1
        during = always | {
            FRESH: gradients * (e.train.accumulation > 1),
            ENDS: self.weights(False) * compute * (row.reshards and n > 1),
            WHOLE: (self.weights(True) + self.weights(False)) * compute * kept,
            BLOCKS: self.kept(JAX),
        }
        yield during | {LOGITS: self.arrays({"V": (0, 2)}, JAX), LAST: self.arrays(NORM, JAX)}
        yield during | {
            AGAIN_ONE: none - again,
            TAKEN_ONE: self.arrays({w: a for w, a in TAKEN.items() if w != "S" or self.scores(JAX)}, JAX) * stacked,
            INSIDE: self.inside,
            WEIGHTS: self.weights(True) / e.model.layers * compute,
        }
        yield always | {FRESH: gradients * crosses, FETCHED: self.fetched}

    @property
    def fetched(self) -> float:
        """Bytes that JAX copies to a device for an update, on GPUs; on CPUs XLA leaves such copies out."""
        row, offload = strategy(self.experiment.parallel), self.experiment.memory.offload
        copies = [("parameters" in offload, 1, row.parameters), ("optimizer" in offload, 2, row.optimizer)]
        one = (self.weights(True) + self.weights(False)) * ITEMSIZE[str(self.experiment.precision.parameters)]
        return sum(self.gpu * there * n * one / (self.shards if sharded else 1) for there, n, sharded in copies)

    @property
    def inside(self) -> float:
        """Bytes at work within a block's backward pass: scores and the mask, a byte each.

        Of the ring scores of a pair of chunks, and gradients as they are collected, of keys and values as they travel.
        """
        if self.ring:
            return self.arrays({"P": (0, 4), "Q": (0, 2), "K": (4, 4)}, JAX)
        if not self.scores(JAX):
            return self.arrays({"D": (2, 0), "F": (2, 0)}, JAX)
        return self.arrays({"S": (0, 1)}, JAX) + self.tokens * self.sizes["S"]

    def _torch(self) -> Iterator[dict[str, float]]:
        e, n, layers = self.experiment, self.shards, self.experiment.model.layers
        compute, (none, again), gradients = self.compute(TORCH), self.block(TORCH), self.gradients(TORCH)
        p, strategy_ = e.precision, e.parallel.strategy
        mixed = len({p.parameters, p.compute, p.reduce}) > 1
        ddp = strategy_ in ("ddp", "zero1") and not mixed and self.mesh["tensor"] == 1
        stand = gradients * (ddp or e.train.accumulation > 1)  # DDP's buckets outlive the step
        beside = gradients * (ddp and e.train.accumulation > 1)  # it accumulates outside of them
        block, ends = self.weights(True) / layers * compute, self.weights(False) * compute
        stay = strategy_ in ("zero2", "fsdp") and not e.parallel.reshards
        whole = layers if stay else 2 if n > 1 else 1  # blocks: this one and the next, or all
        always = {
            BATCH: 2 * self.tokens * e.train.accumulation * 8.0,
            ENDS: ends * (not ddp),
            WORKSPACE: self.workspaces,
        }
        inside = max(
            self.arrays({"D": (2, 0), "F": (2, 0)}, TORCH),
            self.arrays({"D": (1, 0), "S": (0, self.scores(TORCH)), "F": (-4, 0)}, TORCH),
        )
        during = {
            AGAIN_ONE: none - again,
            INSIDE: inside,
            WEIGHTS: block * (0 if ddp else whole + (2 if n > 1 else 1)),
        }
        yield always | {
            GRADIENTS: stand,
            FRESH: beside,
            BLOCKS: self.kept(TORCH),
            LAST: self.arrays(NORM, TORCH),
            LOGITS: self.arrays({"V": (mixed, 3)}, TORCH),
            WEIGHTS: block * (layers if stay else 0),
        }
        yield always | {GRADIENTS: stand, FRESH: beside, BLOCKS: self.kept(TORCH)} | during
        yield always | {GRADIENTS: gradients, FRESH: beside, BLOCKS: again} | during
        update = 2 * self.largest / (1 if ddp else n)
        yield {GRADIENTS: gradients, UPDATE: update, WORKSPACE: self.workspaces}

    @property
    def windowed(self) -> bool:
        """Whether attention has a window, for which `torch_ref` asks no kernel of torch's."""
        return bool(getattr(self.experiment.model, "window", 0))

    def scores(self, side: str) -> bool:
        """Whether a side's attention keeps its scores, as no fused kernel does, nor the ring.

        torch has a kernel for grouped queries in 16 bits alone.
        """
        m, compute = self.experiment.model, self.experiment.precision.compute
        if side == JAX:
            return not self.ring and not (self.gpu and has_kernel(compute, m.head_dim))
        grouped = self.sizes["K"] != self.sizes["Q"]
        return not self.gpu or self.windowed or (grouped and ITEMSIZE[str(compute)] > 2)

    @property
    def largest(self) -> float:
        """Bytes of the largest single parameter of torch, whole over fsdp."""
        item, t = ITEMSIZE[str(self.experiment.precision.parameters)], self.mesh["tensor"]
        return max(
            math.prod(x.shape[1:] if "layers" in x.axes else x.shape)
            * item / (t if "tensor" in x.mesh_axes(False) else 1)
            for x in self.layouts.values()
        )  # fmt: skip

    def peak(self, side: str) -> Mapping[str, float]:
        """The causes at the moment that takes the most."""
        return max(self.moments(side), key=lambda moment: sum(moment.values()))

    def most(self, side: str) -> float:
        """The bound on what a step takes, bytes: at any moment its causes, what is AT_WORK once more, and SLACK.

        What is kept and gathered follows from the formulas. How much of one block or of the logits is at work at once
        is the choice of a scheduler, which may hold inputs and results together: twice as much. What is kept of all
        blocks against the rules grows with their number, what is at work does not.
        """
        twice = [sum(m.values()) + sum(m.get(name, 0.0) for name in AT_WORK) for m in self.moments(side)]
        return (1 + SLACK) * max(twice)

    def causes(self, memory: Mapping[str, Mapping[str, float]]) -> list[Cause]:
        """The causes side by side, and last the rest of what was measured, by side: `memory` of summary.json."""
        jax, torch = self.peak(JAX), self.peak(TORCH)
        found = [Cause(name, jax.get(name, 0.0), torch.get(name, 0.0)) for name in NAMES]
        rest = (beside(memory[side]) - sum(causes.values()) for side, causes in ((JAX, jax), (TORCH, torch)))
        return [cause for cause in found if cause.jax or cause.torch] + [Cause(UNEXPLAINED, *rest)]


def state(memory: Mapping[str, float]) -> float:
    """Bytes of a run's parameters and moments that stand on the device, and so in its peak."""
    return memory["parameters"] + memory["optimizer_state"] - memory.get("host", 0)


def beside(memory: Mapping[str, float]) -> float:
    """Bytes that a run's peak takes beside its parameters and moments: its gradients and all that is temporary."""
    return memory["peak"] - state(memory)
