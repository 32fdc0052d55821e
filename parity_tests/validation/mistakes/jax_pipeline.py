"""Mistakes in jaxdist's pipelines: what a stage works on, what it sends on, whose gradients are summed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.parallel import pipeline
from jaxdist.parallel.pipeline import AXIS, OneFOneB, Pipeline, Stage, Timetable
from jaxdist.training.step import Step
from parity_tests.validation.mistakes import mistake, plant

planted = partial(mistake, "jaxdist")


@planted("stages", "distribution", "loss")
def another_microbatch_on_the_last_stage() -> None:
    """The last stage takes the targets of the microbatch after the one that it receives."""
    right = pipeline.pick

    def pick(parts: Any, m: Any) -> Any:
        last = lax.axis_index(AXIS) == lax.axis_size(AXIS) - 1
        return right(parts, jnp.where(last, (m + 1) % len(parts.targets), m))

    plant(pipeline, "pick", pick)


@planted("stages", "distribution", "loss")
def each_stage_begins_anew() -> None:
    """A stage ignores its input: each begins with the embedding."""
    right = Stage.__init__

    def init(self: Any, received: Any, first: Any, last: Any) -> None:
        right(self, received, first | True, last)

    plant(Stage, "__init__", init)


@planted("stages", "distribution", "loss")
def idle_slots_counted() -> None:
    """Outputs of a stage's idle ticks count too."""
    right = Timetable.at

    def at(self: Any, slot: Any) -> Any:
        m, c, busy = right(self, slot)
        return m, c, busy | True

    plant(Timetable, "at", at)


@planted("stages", "distribution", "gradient/*")
def tied_embedding_not_summed_over_stages() -> None:
    """The first stage's gradient of the embedding goes for that of the head's stage as well."""
    right = Step.reduce

    def reduce(self: Step, gradients: Any) -> Any:
        name = "embed.embedding"
        own = gradients[name] * (lax.axis_index(AXIS) == 0)
        return right(self, gradients | {name: own})

    plant(Step, "reduce", reduce)


@planted("stages", "distribution", "loss")
def computed_again_from_another_input() -> None:
    """A stage recomputes, for gradients and the reported loss, from an input shifted by one time."""
    right = OneFOneB.accumulate

    def accumulate(self: Any, *inputs: Any) -> Any:
        vjp = jax.vjp

        def a_time_off(function: Any, accumulators: Any, x: Any, **more: Any) -> Any:
            return vjp(function, accumulators, jax.tree.map(lambda a: jnp.roll(a, 1, axis=1), x), **more)

        jax.vjp = a_time_off  # type: ignore[assignment]
        try:
            return right(self, *inputs)
        finally:
            jax.vjp = vjp

    plant(OneFOneB, "accumulate", accumulate)


@planted("interleaved", "distribution", "loss")
def chunks_in_the_order_of_devices() -> None:
    """A device holds layers that follow each other, and works on them as if they were apart."""
    plant(Pipeline, "order", lambda self, layers: np.arange(layers))


@planted("stages", "distribution", "grad_norm")
def norm_of_each_stage() -> None:
    """The clip takes the norm of a stage's own gradients."""
    right = Step.norm

    def norm(self: Step, gradients: Any) -> jax.Array:
        shares = {n: g for n, g in gradients.items() if not n.startswith("layers.")}
        stacked = {n: g for n, g in gradients.items() if n.startswith("layers.")}
        squares = [right(self, part) ** 2 for part in (shares, stacked)]
        return jnp.sqrt(squares[0] + squares[1] / lax.axis_size(AXIS))

    plant(Step, "norm", norm)


@planted("stages", "traffic", "traffic/jaxdist, pipeline:*")
def all_stages_sent_everything() -> None:
    """Each stage is sent what all have made, and picks what it is to have: the same for more bytes."""

    def gathered(tree: Any, by: int) -> Any:
        n, i = lax.axis_size(AXIS), lax.axis_index(AXIS)

        def own(a: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(lax.all_gather(a, AXIS), (i - by) % n, 0, keepdims=False)

        return jax.tree.map(own, tree)

    plant(pipeline, "shift", gathered)
