"""Mistakes in torch_ref's batch norms."""

from functools import partial
from typing import Any

from torch import Tensor

from parity_tests.validation.mistakes import mistake, plant
from torch_ref.families.resnet import BatchNorm
from torch_ref.parallel import images

planted = partial(mistake, "torch_ref")
RUNNING = "weights/stem.norm.running_*"


@planted("images", "mathematics", RUNNING, "weights/stem.norm.num_batches_tracked")
def running_statistics_never_moved() -> None:
    """The running statistics stay those of the start."""
    plant(BatchNorm, "track", lambda self, *batch: None)


@planted("images", "mathematics", RUNNING)
def running_variance_biased() -> None:
    """The running variance is the biased one, by which the batch is normalized."""
    right = BatchNorm.track

    def track(self: BatchNorm, mean_C: Tensor, var_C: Tensor, count: int) -> None:
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
def statistics_of_each_rank() -> None:
    """Each rank normalizes by its own rows, as BatchNorm2d does under DDP, where the config says all."""
    plant(images.AllImages, "sum_over_images", lambda self, sums: sums)
    plant(images.AllImages, "normalized_together", lambda self, own: own)
