"""Time of a step: computation, memory accesses and communication of a device, at the rates of its hardware.

A roofline with a model of the links. Products, attention and everything else are kernels one after the other, each as
fast as what bounds it; collectives of parameters may run beside them, those of activations wait for each other. The
shares of the data sheets' rates that kernels reach were measured on one H200; none is fitted to runs of others.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxdist.accounting import traffic
from jaxdist.accounting.memory import Footprint
from jaxdist.config import AXES
from jaxdist.config.hardware import Hardware, rate
from jaxdist.parallel.sharding import strategy

PRODUCTS, MOVED = 0.80, 0.90  # of the data sheet: 790 TFLOP/s of large bf16 products, 4.3 TB/s
ATTENTION = 0.53  # 523 TFLOP/s: what llama-1b takes longer a token at T 8192 than at 4096, with heads of 64 alone


@dataclass(frozen=True)
class Link:
    """Bytes that a device sends over a mesh axis in a step, for parameters and activations, and the link's rate."""

    axis: str
    parameters: float
    activations: float
    bandwidth: float
    latency: float


def reach(mesh: Mapping[str, int], axis: str, hardware: Hardware) -> tuple[float, float]:
    """Bytes a second that a device sends along an axis, and seconds that a collective takes at least.

    The last axes of the mesh are neighbours. Where an axis leaves the group of the fast links, each device of a group
    that is along it brings its own link to the others, and the ring is as fast as these together.
    """
    stride = math.prod(mesh[other] for other in AXES[AXES.index(axis) + 1 :])
    near = min(mesh[axis], max(1, hardware.group // stride))
    if near == mesh[axis]:
        return hardware.inside, hardware.latency[0]
    return min(hardware.inside, near * hardware.between), hardware.latency[1]


def links(f: Footprint, total: Mapping[str, float], hardware: Hardware) -> list[Link]:
    """Each axis of several devices, which send `total` bytes in all."""
    mesh, own = f.mesh, traffic.least_of_parameters(f.experiment, f.param_specs, f.mesh)
    return [
        Link(axis, own.get(axis, 0.0), total.get(axis, 0.0) - own.get(axis, 0.0), *reach(mesh, axis, hardware))
        for axis in AXES if mesh[axis] > 1
    ]  # fmt: skip


@dataclass(frozen=True)
class Time:
    """Seconds of one step, by what they go into; `hidden` is what of `parameters` runs beside computation."""

    products: float
    attention: float
    moved: float
    parameters: float
    activations: float
    latency: float
    host: float
    hidden: float

    @property
    def computing(self) -> float:
        return self.products + self.attention + self.moved

    @property
    def step(self) -> float:
        return self.computing + self.parameters + self.activations + self.latency + self.host - self.hidden


def predict(f: Footprint, total: Mapping[str, float], hardware: Hardware) -> Time:
    """Time of a step on a device that sends `total` bytes, by mesh axis. Raises ConfigError for a dtype without a
    rate."""
    done, flops, sent = f.work, rate(hardware, f.experiment.precision.compute), links(f, total, hardware)
    products, attention = done.products / flops / PRODUCTS, done.attention / flops / ATTENTION
    moved = done.moved / hardware.bandwidth / MOVED
    parameters = sum(link.parameters / link.bandwidth for link in sent)
    activations = sum(link.activations / link.bandwidth for link in sent)
    latency = sum(collectives * link.latency for link, collectives in rounds(f, sent))
    hidden = min(parameters, products + attention + moved) * f.experiment.parallel.overlap
    host = f.fetched_and_returned / hardware.host
    return Time(products, attention, moved, parameters, activations, latency, host, hidden)


def rounds(f: Footprint, sent: list[Link]) -> Iterator[tuple[Link, float]]:
    """Number of collectives that a step begins on each link, each waiting for its own latency: of activations, and of
    parameters, of what lies outside of the blocks as of one; a stage of a pipeline sends once a tick of either pass.

    Over tensor the loss finds the highest logits and then its sums; each of its chunks more does so once more.
    """
    e, p, row = f.experiment, traffic.passes(f.experiment, f.mesh), strategy(f.experiment.parallel)
    # For each block of a pass gradients once and weights twice, or in a step once each; an all-reduce counts as both.
    often, once = row.gradients + 2 * row.reshards, (not row.gradients) + (not row.reshards)
    own = (often * p.both * (p.layers + 1) + once) * (not e.parallel.overlap)
    for link in sent:
        if link.axis == "pipeline":
            yield link, p.both + p.forward
        else:
            more = 2 * (e.memory.loss_chunks - 1) * p.losses * (link.axis == "tensor")
            yield link, (link.activations > 0) * (f.sums + more) + (link.parameters > 0) * own
