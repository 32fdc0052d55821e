"""Mistakes in torch_ref's pipelines: which part a rank has, what its loss is of, whose gradients are summed."""

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B

from parity_tests.validation.mistakes import altered, everywhere, mistake, plant
from torch_ref.parallel import pipeline
from torch_ref.parallel.pipeline import Pipeline
from torch_ref.training import step

planted = partial(mistake, "torch_ref")


@planted("stages", "distribution", "gradient/embed.weight")
def tied_embedding_not_summed_over_ranks() -> None:
    """The first and the last rank each keep their own gradient of the tied embedding."""

    def left(tensor: Tensor, **_: Any) -> None:
        """Sums nothing."""

    plant(pipeline, "dist", altered(dist, all_reduce=left))


@planted("stages", "distribution", "loss")
def targets_of_another_microbatch() -> None:
    """The schedule is given the targets in the reverse order of microbatches."""
    right = Pipeline._through

    def through(self: Any, run: Any, loss: Any, tokens: Tensor, targets: Tensor) -> None:
        parts = self.microbatches
        right(self, run, loss, tokens, targets.unflatten(0, (parts, -1)).flip(0).flatten(0, 1))

    plant(Pipeline, "_through", through)


@planted("stages", "distribution", "gradient/*")
def gradients_divided_by_microbatches() -> None:
    """The schedule scales gradients as if the loss were a mean, as it does by default."""
    pipeline.SCHEDULES["1F1B"] = lambda *inputs, **more: Schedule1F1B(*inputs, **more | {"scale_grads": True})


@planted("stages", "distribution", "grad_norm")
def norm_of_each_rank() -> None:
    """The clip takes the norm of a rank's own gradients."""
    everywhere(step.norm_over_stages, lambda model: None)


@planted("stages", "distribution", "grad_norm")
def tied_embedding_counted_twice() -> None:
    """The norm counts the tied embedding on the first rank and on the last."""
    plant(Pipeline, "counted", lambda self: self.parameters())


@planted("interleaved", "distribution", "activation/*")
def parts_in_another_order() -> None:
    """The blocks of a rank's two parts are exchanged."""
    right = Pipeline.__init__

    def init(self: Any, parts: list[Any], *more: Any) -> None:
        first, second = parts
        first.layers, second.layers = second.layers, first.layers
        right(self, parts, *more)

    plant(Pipeline, "__init__", init)
