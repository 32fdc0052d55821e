"""Closed forms of a ResNet's FLOPs, memory and traffic, from the outputs of its convolutions and relus.

Its blocks are not stacked. XLA sees all of them at once, and merges what the backward pass of a block would gather or
compute again with what the forward pass did: gathered weights are there for all of the step.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from jaxdist.accounting.forms import Accounting
from jaxdist.accounting.memory import (
    BATCH,
    BLOCKS,
    FRESH,
    GRADIENTS,
    INSIDE,
    POOLING,
    TURNED,
    UNSHARDED,
    Arrays,
    Footprint,
    Sizes,
    Work,
    amount,
)
from jaxdist.accounting.traffic import ITEMSIZE, first, ring_bytes, tokens_of
from jaxdist.config import Experiment
from jaxdist.families.resnet.config import ResNet, halved
from jaxdist.parallel.sharding import TOKENS, ParamSpec, strategy

# The tables are of numbers an image, height · width · channels each. In the stem or a block: C the outputs of all
# convolutions, A what of that goes through relu, the stem's through max-pooling too, O the largest output of a
# convolution. Sizes of max-pooling: P its output, W its padded input.

# Arrays that a block keeps from forward to backward: the inputs of batch norms and convolutions.
SAVED: Arrays = {"C": (1, 0), "A": (1, 0)}
# On one CPU reductions, which there are YNNPACK's, also keep differences from the mean, and these normalized.
SAVED_ON_CPU: Arrays = {**SAVED, "C": (1, 2)}
WORKING: Arrays = {"O": (2, 0)}  # gradients of what a block puts out, and of what one of its convolutions does
# Arrays of max-pooling until its backward pass: zeros to which gradients are added, and four indices of each maximum.
# XLA has both early on CPUs and where it schedules around collectives, else when they are needed.
POOLED: Arrays = {"W": (1, 0), "P": (0, 4)}
# Working arrays of max-pooling, on CPUs while it looks for maxima: each value, padded, and its four indices go through
# a reduction together; on GPUs while its gradients become those of the stem's batch norm.
SEARCHED: Mapping[str, Arrays] = {
    "gpu": {"W": (1, 0), "O": (1, 1)},
    "tpu": {"W": (1, 0), "O": (1, 1)},
    "cpu": {"W": (2, 4), "O": (1, 0), "P": (1, 4)},
}
# How often what convolutions put out, C, goes through memory: written, read for its mean, its variance and to be
# normalized; backward read for sums and for the gradient, as is the gradient of what batch norm puts out, and the
# gradient written and read by two products. And of what continues, A: written and read forward, read backward, its
# gradient written.
MOVED: Arrays = {"C": (11, 0), "A": (4, 0)}
BUCKET = 30 * 2**20  # bytes of gradients that XLA sends together on GPUs (xla_gpu_all_reduce_combine_threshold_bytes)

BLOCK = re.compile(r"stages\.(\d+)\.(\d+)\.")  # of a parameter's name
STEM, HEAD = (-1, 0), (math.inf, 0)  # before the first block, and after the last


def block_of(name: str) -> tuple[float, ...]:
    """The stage of a parameter and the block in it; or STEM, or HEAD."""
    if found := BLOCK.match(name):
        return tuple(map(int, found.groups()))
    return STEM if name.startswith("stem.") else HEAD


@dataclass(frozen=True)
class ImageFootprint(Footprint):
    """The closed form of a ResNet, which is split by rows of the batch alone."""

    @property
    def model(self) -> ResNet:
        return cast(ResNet, self.experiment.model)

    @property
    def images(self) -> float:
        """Images of a microbatch on one device."""
        return tokens_of(self.experiment, self.mesh)

    # ---- sizes

    @cached_property
    def kernels(self) -> Mapping[str, ParamSpec]:
        """Kernels of convolutions, by name."""
        return {name: spec for name, spec in self.param_specs.items() if name.endswith(".conv.kernel")}

    @cached_property
    def blocks(self) -> list[Sizes]:
        """Sizes that the tables count, for the stem and each block, in order."""
        m = self.model
        found: dict[tuple[float, ...], dict[str, float]] = {}
        for name, spec in self.kernels.items():
            sizes = found.setdefault(block_of(name), dict.fromkeys("CAO", 0.0))
            outputs = spec.shape[-1] * m.places(name)
            sizes["C"] += outputs
            sizes["A"] += outputs * (".shortcut." not in name)
            sizes["O"] = max(sizes["O"], outputs)
        pooled = m.stem * m.sizes[0] ** 2
        found[STEM] |= {"A": pooled, "P": pooled, "W": m.stem * (halved(m.image) + 2) ** 2}
        return [found[block] for block in sorted(found)]

    @cached_property
    def gradients_by_block(self) -> list[tuple[float, float]]:
        """Bytes of the gradients of the stem, of each block and of the head, as stored until the update, and unsharded.
        Without a loop over microbatches they are scattered at once."""
        row, many = strategy(self.experiment.parallel), self.experiment.train.accumulation > 1
        sharded = row.gradients if many else row.optimizer
        own: Counter[tuple[float, ...]] = Counter()
        unsharded: Counter[tuple[float, ...]] = Counter()
        for name, spec in self.param_specs.items():
            if not spec.statistic:
                own[block_of(name)] += math.prod(spec.local_shape(self.mesh, sharded)) * self.param_itemsize
                unsharded[block_of(name)] += math.prod(spec.shape) * self.param_itemsize
        return [(own[block], unsharded[block]) for block in sorted(own)]

    def arrays(self, arrays: Arrays, sizes: Sizes) -> float:
        """Bytes of `arrays` over the images of a microbatch."""
        return self.images * amount(arrays, sizes, self.compute)

    @cached_property
    def kept_by_block(self) -> list[float]:
        """Bytes that the stem and each block keep."""
        kept = SAVED_ON_CPU if self.platform == "cpu" and not self.several else SAVED
        return [self.arrays(kept, sizes) for sizes in self.blocks]

    @property
    def kept(self) -> float:
        return sum(self.kept_by_block)

    @property
    def batch(self) -> float:
        """Bytes of images, in float32, and targets; and of a microbatch's images once more where they are cast or taken
        out of the batch."""
        e, m = self.experiment, self.model
        pixels, many = m.image**2 * m.channels, e.train.accumulation > 1
        again = self.compute * pixels * (many or e.precision.compute != "float32")
        return self.images * (e.train.accumulation * 4 * (pixels + 1) + again)

    @property
    def materialized(self) -> float:
        """Bytes of the parameters where they are gathered or cast. CPUs have 16 bits as 32 too; and where a loop over
        microbatches reads what was made before it, once more what was gathered, or was cast to be turned."""
        e = self.experiment
        gathered = strategy(e.parallel).parameters and self.shards > 1
        if not gathered and e.precision.compute == e.precision.parameters:
            return 0.0
        narrow = ITEMSIZE[str(e.precision.compute)]
        if self.platform != "cpu":
            return narrow * self.elements(False)
        widened = narrow * self.elements(False) * (narrow < self.compute)
        looped = (self.elements(False) * self.compute if gathered else self.turned) * (e.train.accumulation > 1)
        return self.elements(False) * self.compute + widened + looped

    @property
    def turned(self) -> float:
        """Bytes of kernels turned round, on CPUs: gradients of their inputs are convolutions with these. None for the
        stem, as images have no gradients, and a kernel of one place is as it was."""
        numbers = sum(math.prod(k.shape) for name, k in self.kernels.items() if k.shape[0] > 1 and BLOCK.match(name))
        return numbers * self.compute * (self.platform == "cpu")

    @property
    def early(self) -> bool:
        """Whether what waits for nothing is made long before it is needed."""
        return self.platform == "cpu" or (self.gpu and self.several)

    # ---- arithmetic

    @cached_property
    def multiplying(self) -> float:
        """Multiply-adds of an image's forward pass: numbers of kernels, at each place of what they put out."""
        kernels = {**self.kernels, "head.kernel": self.param_specs["head.kernel"]}
        return sum(map(self.applied, kernels))

    def applied(self, name: str) -> float:
        """FLOPs of one kernel."""
        return math.prod(self.param_specs[name].shape) * self.model.places(name.removesuffix(".kernel"))

    @property
    def work(self) -> Work:
        """There is no gradient of images, so the stem has but one product backward."""
        microbatches = self.experiment.train.accumulation
        products = self.images * 2 * (3 * self.multiplying - self.applied("stem.conv.kernel"))
        moved = sum(self.arrays(MOVED, sizes) for sizes in self.blocks)
        moved += self.elements(False) * (2 * self.compute + 3 * self.param_itemsize)  # as a decoder's
        return Work(microbatches * products, 0.0, microbatches * moved + self.update)

    @property
    def sums(self) -> int:
        """Mean and variance of each batch norm, and their gradients; or what the first device's have become."""
        e = self.experiment
        return 4 * len(self.kernels) * e.train.accumulation if e.parallel.batch_norm == "global" else 1

    # ---- moments

    def _moments(self) -> Iterator[dict[str, float]]:
        many, stem = self.experiment.train.accumulation > 1, self.blocks[0]
        during = {BATCH: self.batch, UNSHARDED: self.materialized, TURNED: self.turned}
        accumulators = self.gradients * many
        searched = self.arrays(SEARCHED[self.platform], stem)
        yield during | {GRADIENTS: accumulators, BLOCKS: self.kept_by_block[0], POOLING: searched}
        pooled = self.arrays(POOLED, stem) * self.early
        for i, sizes in enumerate(self.blocks):
            own, unsharded = (sum(each) for each in zip(*self.gradients_by_block[i:], strict=True))
            yield (
                during
                | {
                    GRADIENTS: accumulators or own,
                    FRESH: min(2 * BUCKET, unsharded)
                    * (self.gpu and self.early),  # one that is filled, and one under way
                    BLOCKS: sum(self.kept_by_block[: i + 1]),
                    POOLING: pooled,
                    INSIDE: self.arrays(WORKING, sizes),
                }
            )
        own = sum(own for own, _ in self.gradients_by_block)
        yield {BATCH: self.batch, GRADIENTS: accumulators or own} | self.updating


def flops(experiment: Experiment, param_specs: Mapping[str, ParamSpec]) -> float:
    """FLOPs of a step per image: 6 a kernel's number at every place of what it puts out."""
    m = cast(ResNet, experiment.model)
    kernels = {name.removesuffix(".kernel"): k for name, k in param_specs.items() if name.endswith(".kernel")}
    return 6.0 * sum(math.prod(k.shape) * m.places(path) for path, k in kernels.items())


def statistics(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> Mapping[str, float]:
    """Least bytes a device must send per step for batch norms, the only activations that meet, by mesh axis.

    Global: of each microbatch mean and variance, and backward their gradients, 4C numbers a batch norm. Per replica,
    the first's running statistics are sent to the others, once a step.
    """
    e, wide = experiment, max(ITEMSIZE[str(experiment.precision.compute)], 4)
    running = max(ITEMSIZE[str(e.precision.parameters)], 4)
    sizes = [math.prod(spec.shape) for spec in param_specs.values() if spec.statistic]
    counts = sizes.count(1)
    sums = 2 * (sum(sizes) - counts) * wide * e.train.accumulation
    kept = (sum(sizes) - counts) * running + counts * 4
    size = sums if e.parallel.batch_norm == "global" else kept
    return {first(mesh, TOKENS): ring_bytes("all_reduce", size, math.prod(mesh[axis] for axis in TOKENS))}


ACCOUNTING = Accounting(flops, ImageFootprint, {"statistics": statistics})
