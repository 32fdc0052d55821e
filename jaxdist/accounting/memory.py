"""Memory of a device within a step: a closed form by cause, from the declared parameters alone.

A cause takes memory at some moments of a step; the peak is the moment with the largest sum. This module has the parts
common to all models, parameters and optimizer state; activations come from the family's own form, for decoders through
`decoder.py`. Their tables count the arrays that a block's formulas need for their derivatives, as written in
`jaxdist/families/`. XLA leaves gaps between the arrays that it places; a closed form counts none.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxdist.accounting.traffic import ITEMSIZE, passes
from jaxdist.config import Experiment
from jaxdist.parallel.sharding import SHARDS, ParamSpec, strategy

# Size -> number of arrays of that size in the compute dtype, and in float32 or wider.
Arrays = Mapping[str, tuple[float, float]]
Sizes = Mapping[str, float]

COUNT = 4  # bytes of a count: of updates, of steps, of an average's updates
XLA_WORKSPACE = 2**25  # bytes that XLA lets cuBLAS have on Hopper; 2**22 on GPUs before it

NAMES = (
    BATCH := "tokens or images, and targets",
    GRADIENTS := "gradients",
    FRESH := "gradients a second time: fresh next to accumulated, or reduced",
    ENDS := "embedding, last norm and head, unsharded",
    UNSHARDED := "parameters, unsharded for all of the step",
    WEIGHTS := "blocks at work: unsharded weights, and their gradients",
    BLOCKS := "activations that the blocks keep",
    WAITING := "inputs of a stage's microbatches",
    AGAIN_ONE := "activations of the block computed again",
    TAKEN_ONE := "activations of one block, taken out of the stack of all",
    INSIDE := "gradients within one block",
    POOLING := "max-pooling: where the largest are, and gradients there",
    TURNED := "kernels as gradients of inputs take them",
    GROUPED := "grouped products, by blocks of rows",
    LAST := "activations of the last norm",
    LOGITS := "logits and their gradient",
    WORKSPACE := "workspaces of cuBLAS",
    COPIED := "moments in bfloat16 once more, and weights of blocks as float32: XLA on CPUs",
    UPDATE := "the update of one parameter",
    FETCHED := "parameters and moments that are fetched from the host for the update",
)


def amount(arrays: Arrays, sizes: Sizes, compute: int) -> float:
    """Bytes of `arrays` per token or image, for a compute dtype of `compute` bytes."""
    return sum(sizes[w] * (narrow * compute + wide * max(compute, 4)) for w, (narrow, wide) in arrays.items())


@dataclass(frozen=True)
class Work:
    """Work of one device in a step: FLOPs of matrix products and of attention, bytes moved by everything else."""

    products: float
    attention: float
    moved: float


@dataclass(frozen=True)
class State:
    """Memory of any model on a device, for one experiment on one mesh: parameters and their state, in bytes on a
    `platform` (JAX's name: cpu, gpu or tpu)."""

    experiment: Experiment
    param_specs: Mapping[str, ParamSpec]
    mesh: Mapping[str, int]
    platform: str = "cpu"

    @property
    def shards(self) -> int:
        """Devices over which a strategy shards."""
        return math.prod(self.mesh[axis] for axis in SHARDS)

    @property
    def param_itemsize(self) -> int:
        """Bytes of one element of a parameter, as it is stored between steps."""
        return ITEMSIZE[str(self.experiment.precision.parameters)]

    @property
    def compute(self) -> int:
        """Bytes of an element of the compute dtype: XLA on the CPU holds bfloat16 as float32."""
        size = ITEMSIZE[str(self.experiment.precision.compute)]
        return max(size, 4) if self.platform == "cpu" else size

    @property
    def gpu(self) -> bool:
        """Whether devices are GPUs."""
        return self.platform == "gpu"

    @property
    def several(self) -> bool:
        """Whether the mesh has more than one device."""
        return math.prod(self.mesh.values()) > 1

    @property
    def several_cpus(self) -> bool:
        """Whether the mesh has several CPUs, whose reductions recompute their inputs (`jaxdist/runtime/xla.py`)."""
        return self.platform == "cpu" and self.several

    @cached_property
    def numbers(self) -> Mapping[tuple[bool, bool], int]:
        """(in blocks, sharded by a strategy) -> number of trained elements on a device."""
        found = {(blocks, sharded): 0 for blocks in (False, True) for sharded in (False, True)}
        for spec in (spec for spec in self.param_specs.values() if not spec.statistic):
            for sharded in (False, True):
                size = math.prod(spec.local_shape(self.mesh, sharded))
                found["layers" in spec.axes, sharded] += size
        return found

    def weights(self, layers: bool) -> int:
        """Number of elements of all blocks of a stage, or of the parameters outside of blocks, unsharded over fsdp."""
        return self.numbers[layers, False]

    def elements(self, sharded: bool) -> int:
        """Number of elements of all parameters on a device, sharded or unsharded."""
        return self.numbers[True, sharded] + self.numbers[False, sharded]

    @property
    def update(self) -> float:
        """Bytes that the update moves: gradients read; weights and optimizer state read and written."""
        local = self.elements(strategy(self.experiment.parallel).optimizer) * self.param_itemsize
        return 3 * local + 2 * self.optimizer_state

    @property
    def parameters(self) -> int:
        """Bytes of the parameters between steps, without running statistics."""
        return self.elements(strategy(self.experiment.parallel).parameters) * self.param_itemsize

    @cached_property
    def optimizer_state(self) -> int:
        """Bytes of the optimizer state, including its counts of updates and of steps."""
        return self.optimizer_states(strategy(self.experiment.parallel).optimizer)

    def optimizer_states(self, sharded: bool) -> int:
        """Bytes of the optimizer state, sharded or unsharded."""
        trained = [spec for spec in self.param_specs.values() if not spec.statistic]
        kept = (
            math.prod(spec.local_shape(self.mesh, sharded, spec.state_shape(kind)))
            for kind, applies_to in self.experiment.optimizer.states.items()
            for spec in trained
            if applies_to(spec.role)
        )
        return sum(kept) * self.param_itemsize + COUNT * (2 + bool(self.experiment.optimizer.ema))

    @property
    def gradients(self) -> float:
        """Bytes of a device's gradient accumulators."""
        return self.elements(strategy(self.experiment.parallel).gradients) * self.param_itemsize


@dataclass(frozen=True)
class Footprint(State, ABC):
    """The closed form of a step: bytes on a device at each moment, and its work."""

    @property
    @abstractmethod
    def work(self) -> Work:
        """Work of one device in a step."""

    @property
    @abstractmethod
    def kept(self) -> float:
        """Bytes kept from forward to backward pass of a microbatch."""

    @property
    @abstractmethod
    def sums(self) -> int:
        """Number of collectives of activations in a step on a mesh axis that has any."""

    @abstractmethod
    def _moments(self) -> Iterator[dict[str, float]]: ...

    @property
    def moments(self) -> list[dict[str, float]]:
        """Bytes by cause at each moment of a step that may be its peak."""
        return list(self._moments())

    @property
    def updating(self) -> dict[str, float]:
        """Bytes during the update beside gradients: reduced gradients, state fetched from the host, a gathered
        parameter."""
        row, n = strategy(self.experiment.parallel), self.shards
        crosses = self.mesh["data"] > 1 or (n > 1 and not row.gradients)
        reduced = self.gradients / (n if row.optimizer and not row.gradients else 1)
        gathered = self.largest_stack * (row.optimizer and not row.parameters and n > 1)
        return {FRESH: reduced * crosses, FETCHED: self.fetched, UPDATE: gathered}

    @property
    def largest_stack(self) -> int:
        """Bytes of the largest parameter of a stage, of all its blocks, unsharded over fsdp."""
        shapes = (spec.local_shape(self.mesh, False) for spec in self.param_specs.values())
        return max(map(math.prod, shapes)) * self.param_itemsize

    @property
    def fetched(self) -> float:
        """Bytes copied from the host to a device for an update; XLA omits these copies on CPUs."""
        row, offload = strategy(self.experiment.parallel), self.experiment.memory.offload
        copies = [("parameters" in offload, 1, row.parameters), ("optimizer" in offload, 2, row.optimizer)]
        return sum(
            (self.platform != "cpu") * there * n * self.elements(sharded) * self.param_itemsize
            for there, n, sharded in copies
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
        """Bytes by cause at the moment with the most."""
        return max(self.moments, key=lambda moment: sum(moment.values()))

    @property
    def total(self) -> float:
        """Peak bytes, including state in host memory."""
        return self.parameters + self.optimizer_state + sum(self.peak.values())
