"""Closed forms of both sides' scratch memory in a step, beside parameters and moments, cause by cause.

JAX's is the planner's, that of its family; torch's, of the same causes, is read off `torch_ref/families/`, of whose row
it has the arrays that a block keeps.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from jaxdist.accounting.decoder import NORM, DecoderFootprint
from jaxdist.accounting.forms import footprint
from jaxdist.accounting.memory import (
    AGAIN_ONE,
    BATCH,
    BLOCKS,
    ENDS,
    FETCHED,
    FRESH,
    GRADIENTS,
    INSIDE,
    LAST,
    LOGITS,
    NAMES,
    TAKEN_ONE,
    UPDATE,
    WEIGHTS,
    WORKSPACE,
    Arrays,
    Footprint,
)
from jaxdist.accounting.traffic import ITEMSIZE
from jaxdist.config import Experiment
from jaxdist.parallel.sharding import ParamSpec
from parity_tests.expected.memory_causes import UNEXPLAINED, Cause
from torch_ref.families.accounting import accounting_of

JAX, TORCH = SIDES = "jaxdist", "torch_ref"

AT_WORK = (WEIGHTS, TAKEN_ONE, INSIDE, LOGITS, UPDATE, FETCHED)
SLACK = 0.05  # of constants, numbers a token and padding that the closed form leaves out


@dataclass(frozen=True)
class TorchFootprint(DecoderFootprint):
    """The closed form of torch_ref's step. `workspaces`: bytes of cuBLAS, the one part that is measured."""

    workspaces: float = 0.0

    @property
    def compute(self) -> int:
        return ITEMSIZE[str(self.experiment.precision.compute)]

    @property
    def gradients(self) -> float:
        """A device's share of the gradients, as FSDP2 shards them."""
        parallel = self.experiment.parallel
        sharded = not parallel.row.replicates
        sharded &= not parallel.once or self.experiment.train.accumulation == 1
        return self.elements(sharded) * self.param_itemsize

    @property
    def windowed(self) -> bool:
        """Whether attention has a window, for which `torch_ref` asks no kernel of torch's."""
        return bool(self.experiment.model.window)

    @property
    def scores(self) -> bool:
        """torch has a kernel for grouped queries in 16 bits alone."""
        grouped = self.sizes["K"] != self.sizes["Q"]
        return not self.gpu or self.windowed or (grouped and self.compute > 2)

    @property
    def without_remat(self) -> Arrays:
        arrays = dict(self.attending(self.tables.kept))
        if self.scores and self.gpu and not self.windowed:  # keys and values once for each head of queries
            arrays |= {"S": (0, 1), "Q": (arrays["Q"][0] + 2, arrays["Q"][1])}
        n = self.mesh["context"]  # keys and values of all times
        return arrays | {"K": (n * arrays["K"][0], n * arrays["K"][1])}

    def _moments(self) -> Iterator[dict[str, float]]:
        e, n, layers = self.experiment, self.shards, self.experiment.model.layers
        compute, gradients = self.compute, self.gradients
        none, again = self.arrays(self.without_remat), self.arrays(self.least)
        p, replicates = e.precision, e.parallel.row.replicates
        mixed = len({p.parameters, p.compute, p.reduce}) > 1
        ddp = replicates and not mixed and self.mesh["tensor"] == 1
        stand = gradients * (ddp or e.train.accumulation > 1)  # DDP's buckets outlive the step
        accumulated = gradients * (ddp and e.train.accumulation > 1)  # it accumulates outside of them
        block, ends = self.weights(True) / layers * compute, self.weights(False) * compute
        stay = not replicates and not e.parallel.reshards
        gathered_blocks = layers if stay else 2 if n > 1 else 1  # blocks: this one and the next, or all
        always = {
            BATCH: 2 * self.tokens * e.train.accumulation * 8.0,
            ENDS: ends * (not ddp),
            WORKSPACE: self.workspaces,
        }
        inside = max(
            self.arrays({"D": (2, 0), "F": (2, 0)}),
            self.arrays({"D": (1, 0), "S": (0, self.scores), "F": (-4, 0)}),
        )
        during = {
            AGAIN_ONE: none - again,
            INSIDE: inside,
            WEIGHTS: block * (0 if ddp else gathered_blocks + (2 if n > 1 else 1)),
        }
        yield always | {
            GRADIENTS: stand,
            FRESH: accumulated,
            BLOCKS: self.kept,
            LAST: self.arrays(NORM),
            LOGITS: self.arrays({"V": (mixed, 3)}) / e.memory.loss_chunks + self.heads,
            WEIGHTS: block * (layers if stay else 0),
        }
        yield always | {GRADIENTS: stand, FRESH: accumulated, BLOCKS: self.kept} | during
        yield always | {GRADIENTS: gradients, FRESH: accumulated, BLOCKS: again} | during
        update = 2 * self.largest / (1 if ddp else n)
        yield {GRADIENTS: gradients, UPDATE: update, WORKSPACE: self.workspaces}

    @property
    def heads(self) -> float:
        """Bytes of the head's gradient as chunks of the loss are added up; in low precision also of the head as they
        take it, wide and narrow."""
        narrow, wide = self.compute, max(self.compute, 4)
        copies = wide if narrow == wide else 2 * wide + narrow
        return self.multiplying[1] * copies * (self.experiment.memory.loss_chunks > 1)

    @property
    def largest(self) -> float:
        """Bytes of the largest single parameter of torch, unsharded over fsdp."""
        item, t = self.param_itemsize, self.mesh["tensor"]
        return max(
            math.prod(x.shape[1:] if "layers" in x.axes else x.shape)
            * item / (t if "tensor" in x.mesh_axes(False) else 1)
            for x in self.param_specs.values()
        )  # fmt: skip


@dataclass(frozen=True)
class Scratch:
    """Both closed forms of one experiment on one mesh, as the planner and `TorchFootprint` say."""

    experiment: Experiment
    param_specs: Mapping[str, ParamSpec]
    mesh: Mapping[str, int]
    gpu: bool = False
    workspaces: float = 0.0

    @cached_property
    def sides(self) -> Mapping[str, Footprint]:
        """Causes by side; none for a side whose form is unknown."""
        found = {JAX: self.jax, TORCH: self.torch}
        return {side: form for side, form in found.items() if form}

    @property
    def platform(self) -> str:
        return "gpu" if self.gpu else "cpu"

    @cached_property
    def jax(self) -> Footprint | None:
        return footprint(self.experiment, self.param_specs, self.mesh, self.platform)

    @cached_property
    def torch(self) -> TorchFootprint | None:
        kept = accounting_of(self.experiment.model).kept
        if not isinstance(self.jax, DecoderFootprint) or kept is None or self.mesh["pipeline"] > 1:
            return None
        tables = replace(self.jax.tables, kept=kept)
        return TorchFootprint(
            self.experiment, self.param_specs, self.mesh, self.platform, workspaces=self.workspaces, tables=tables
        )

    @property
    def unknown(self) -> str:
        """Why not both forms are there; empty where they are."""
        if not self.jax:
            return f"as that of family {self.experiment.model.family} is unknown"
        why = accounting_of(self.experiment.model).why
        return "" if self.torch else why or "as the closed form of a pipeline's stages is unknown"

    def peak(self, side: str) -> Mapping[str, float]:
        """The causes at the moment that takes the most."""
        return self.sides[side].peak

    def most(self, side: str) -> float:
        """The bound on what a step takes, bytes: at any moment its causes, what is AT_WORK once more, and SLACK.

        What is kept and gathered follows from the formulas. How much of one block or of the logits is at work at once
        is the choice of a scheduler, which may hold inputs and results together: twice as much. Activations of
        all blocks kept against the rules grow with their number, those at work do not.
        """
        moments = self.sides[side].moments
        return (1 + SLACK) * max(sum(m.values()) + sum(m.get(name, 0.0) for name in AT_WORK) for m in moments)

    def causes(self, memory: Mapping[str, Mapping[str, float]]) -> list[Cause]:
        """The causes side by side, and last the rest of what was measured, by side: `memory` of summary.json."""
        jax, torch = self.peak(JAX), self.peak(TORCH)
        found = [Cause(name, jax.get(name, 0.0), torch.get(name, 0.0)) for name in NAMES]
        rest = (beyond_state(memory[side]) - sum(causes.values()) for side, causes in ((JAX, jax), (TORCH, torch)))
        return [cause for cause in found if cause.jax or cause.torch] + [Cause(UNEXPLAINED, *rest)]


def state(memory: Mapping[str, float]) -> float:
    """Bytes of a run's parameters and moments that stand on the device, and so in its peak."""
    return memory["parameters"] + memory["optimizer_state"] - memory.get("host", 0)


def beyond_state(memory: Mapping[str, float]) -> float:
    """Bytes that a run's peak takes beside its parameters and moments: its gradients and all that is temporary."""
    return memory["peak"] - state(memory)
