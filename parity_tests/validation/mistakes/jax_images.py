"""Mistakes in jaxdist's batch norms."""

from functools import partial
from typing import Any

import jax

from jaxdist.families.resnet.model import BatchNorm
from jaxdist.parallel.collectives import Parallel
from parity_tests.validation.mistakes import mistake, plant

planted = partial(mistake, "jaxdist")
RUNNING = "weights/stem.norm.running_*"


@planted("images", "mathematics", RUNNING, "weights/stem.norm.num_batches_tracked")
def running_statistics_never_moved() -> None:
    """The new running statistics are not returned: evaluation goes by those of the start."""
    plant(BatchNorm, "track", lambda self, *batch: None)


@planted("images", "mathematics", RUNNING)
def running_variance_biased() -> None:
    """The running variance is the biased one, by which the batch is normalized, as in flax."""
    right = BatchNorm.track

    def track(self: BatchNorm, mean_C: jax.Array, var_C: jax.Array, count: int) -> None:
        right(self, mean_C, var_C * ((count - 1) / count), count)

    plant(BatchNorm, "track", track)


@planted("images", "mathematics", RUNNING)
def momentum_of_flax() -> None:
    """A momentum of 0.1 keeps 0.1 of the old statistics, where torch keeps 0.9."""
    right = BatchNorm.__init__

    def init(self: BatchNorm, c: Any, size: int) -> None:
        right(self, c, size)
        self.momentum = 1 - c.momentum

    plant(BatchNorm, "__init__", init)


@planted("images on a mesh", "distribution", "activation/stem.norm")
def statistics_of_each_device() -> None:
    """Each device normalizes by its own rows, where the config says all."""
    right = Parallel.__init__

    def init(self: Parallel, *inputs: Any, **named: Any) -> None:
        right(self, *inputs, **named)
        object.__setattr__(self, "batch_norm", "replica")

    plant(Parallel, "__init__", init)
