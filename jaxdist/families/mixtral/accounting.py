"""Closed forms of FLOPs, memory and traffic of a mixture of experts.

The size F of its tables, and d, are hidden and D of the rows that a device's experts have room for.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import cast

from jaxdist.accounting import exchanges
from jaxdist.accounting.decoder import DecoderFootprint, Tables
from jaxdist.accounting.exchanges import EXCHANGES
from jaxdist.accounting.flops import decoder_flops
from jaxdist.accounting.forms import Accounting
from jaxdist.accounting.memory import Arrays
from jaxdist.accounting.traffic import ITEMSIZE, first, passes, recomputed, ring_bytes, tokens_of
from jaxdist.config import Experiment
from jaxdist.families.mixtral.config import Mixture
from jaxdist.ops.grouped import rows_of
from jaxdist.parallel.sharding import TOKENS, ParamSpec

TABLES = Tables(
    # As Llama's, and d: an expert's rows, and the result.
    kept={"R": (2, 0), "Q": (2, 0), "K": (2, 0), "S": (0, 1), "F": (2, 0), "d": (2, 0)},
    selective={"R": (2, 0), "Q": (1, 0), "K": (2, 0)},  # grouped products are none of those
    # As Llama's, and d: an expert's rows and results, and both with zeros for those of others.
    working={"R": (2, 2), "D": (0, 2), "Q": (1, 1), "K": (1, 1), "S": (0, 1), "F": (6, 0), "d": (4, 0)},
    # F, d: what grouped products read and write, beside BY_BLOCKS.
    on_cpus={"R": (2, 0), "D": (0, 3), "Q": (1, 1), "K": (1, 1), "S": (0, 2), "F": (3, 0), "d": (2, 0)},
)
# Arrays of grouped products in addition to the block's, except on several CPUs: rows and results with room for one more
# block of rows.
PADDED: Arrays = {"d": (2, 0), "F": (2, 0)}
# The same on several CPUs: what the loops over blocks of rows write. These, and what `on_cpus` has of them, have room
# for one block of rows more.
BY_BLOCKS: Arrays = {"d": (3, 0), "F": (3, 0)}


def flops(experiment: Experiment, param_specs: Mapping[str, ParamSpec]) -> float:
    """FLOPs of a step per token: of E experts those k multiply that a token goes to, whatever a capacity leaves out."""
    m = cast(Mixture, experiment.model)
    return decoder_flops(experiment, param_specs, {"experts": m.top_k / m.experts})


@dataclass(frozen=True)
class MixtureFootprint(DecoderFootprint):
    """The closed form of a decoder whose MLPs are experts, which multiply by blocks of rows."""

    @property
    def mixture(self) -> Mixture:
        """The config of the model."""
        return cast(Mixture, self.experiment.model)

    @property
    def rows(self) -> float:
        """Rows that a device's experts have room for: the k choices of all tokens of the group, or an equal part of all
        experts' boxes."""
        m, times = self.mixture, self.experiment.data.sequence
        return m.experts * m.room(times) / times if m.capacity else m.top_k * self.mesh["expert"]

    @property
    def rows_of_a_block(self) -> int:
        """Rows that grouped products multiply at a time."""
        return rows_of(int(self.tokens * self.rows), self.mixture.experts // self.mesh["expert"])

    def applied(self, spec: ParamSpec) -> float:
        """Experts that a token goes to, and the padding rows of blocks."""
        m = self.mixture
        return self.spare * m.top_k / m.experts if "experts" in spec.axes else 1.0

    @cached_property
    def spare(self) -> float:
        """Rows that experts multiply over those that are a token's: half of each one's last block is empty."""
        if self.platform == "tpu":
            return 1.0
        m = self.mixture
        own = self.tokens * (self.rows if m.capacity else m.top_k)
        return 1.0 + m.experts // self.mesh["expert"] * self.rows_of_a_block / 2 / own

    @property
    def grouped(self) -> float:
        """Bytes at work in products by blocks of rows: what these have beside a block's, and gradients of two kernels
        of all of a device's experts. Activations kept in 16 bits are float32 by then, unless they are recomputed."""
        m, mesh = self.mixture, self.mesh
        if self.platform == "tpu":
            return 0.0
        kernels = 2 * m.dim * m.hidden * m.experts / mesh["expert"] / mesh["tensor"] * max(self.compute, 4)
        if not self.several_cpus:
            return self.arrays(PADDED) + kernels
        again = self.experiment.memory.remat != "none"
        written = self.arrays(BY_BLOCKS, self.unwidened if again else self.compute)
        with_room = {w: (self.tables.on_cpus[w][0] + n, 0) for w, (n, _) in BY_BLOCKS.items()}
        return written + self.arrays(with_room) * self.rows_of_a_block / (self.tokens * self.rows) + kernels


def stages(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> Mapping[str, float]:
    """The form of any decoder, with counts and probabilities of the experts."""
    return exchanges.stages(experiment, param_specs, mesh, tally=2 * cast(Mixture, experiment.model).experts)


def experts(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> Mapping[str, float]:
    """Least bytes a device must send per step for tokens and experts to meet, by mesh axis.

    Over expert, n devices, what `parallel/experts.py` says of each block: x of the group's tokens and their k weights
    and choices are gathered, results scattered; backward x, weights and results again. Where it is computed again, x,
    weights and choices are gathered once more. With a capacity, boxes there and back, forward, backward and again.

    Over tensor the gradients of the k weights are summed, or under sequence parallelism weights and choices gathered
    and gradients scattered. A microbatch's tallies cross all axes: E counts, and over tensor 2E sums under sequence.
    """
    e, m, n, tensor = experiment, cast(Mixture, experiment.model), mesh["expert"], mesh["tensor"]
    compute, tokens, p = ITEMSIZE[str(e.precision.compute)], tokens_of(e, mesh), passes(experiment, mesh)
    wide, blocks, forward = max(compute, 4), p.both * p.layers, p.forward * p.layers
    again = recomputed(e) * blocks + forward
    x, weights, chosen = tokens * m.dim * compute, tokens * m.top_k * wide, tokens * m.top_k * 4
    if m.capacity:
        times = e.data.sequence // mesh["context"]
        boxes = tokens / times * m.experts * min(m.room(e.data.sequence), times) * m.dim * compute
        dispatched = ring_bytes("all_to_all", (4 * blocks + 2 * again) * boxes, n)
    else:
        gathered = (blocks + again) * (x + weights + chosen) + (blocks + forward) * x
        dispatched = ring_bytes("all_gather", (gathered + blocks * (2 * x + weights)) * n, n)
    tallies = 2 * m.experts * wide * p.losses
    everywhere = ring_bytes("all_reduce", tallies / 2, math.prod(mesh[axis] for axis in TOKENS))
    if e.parallel.sequence:
        entered = ring_bytes("all_gather", (blocks + again) * (weights + chosen) + blocks * weights, tensor)
        entered += ring_bytes("all_reduce", tallies, tensor)
    else:
        entered = ring_bytes("all_reduce", blocks * weights, tensor)
    return Counter({"expert": dispatched}) + Counter({"tensor": entered}) + Counter({first(mesh, TOKENS): everywhere})


def choices(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], mesh: Mapping[str, int]
) -> Mapping[str, float]:
    """Least bytes a device must send per step over context if experts have a capacity per sequence: 4 bytes for each of
    a token's experts, forward and in rematerialization."""
    m, n, p = cast(Mixture, experiment.model), mesh["context"], passes(experiment, mesh)
    if not m.capacity:
        return {}
    times = p.both * p.layers * (1 + recomputed(experiment)) + p.forward * p.layers
    return {"context": times * ring_bytes("all_gather", tokens_of(experiment, mesh) * n * m.top_k * 4, n)}


ACCOUNTING = Accounting(
    flops,
    partial(MixtureFootprint, tables=TABLES),
    EXCHANGES | {"stages": stages, "experts": experts, "choices": choices},
)
