"""One optimizer step, from a rank's rows of the global batch to updated parameters."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

from jaxdist.config import Experiment
from jaxdist.data import IGNORED
from torch_ref.mesh import TOKENS
from torch_ref.models.layers import wide
from torch_ref.optim import Optimizer, clip, global_norm
from torch_ref.parallelize import microbatch, reshard
from torch_ref.pipeline import Pipeline


class Tokens(NamedTuple):
    """This rank's rows and times: tokens and targets, int64 [B, T]; IGNORED targets have no loss."""

    tokens: Tensor
    targets: Tensor


class Values(NamedTuple):
    """loss: mean nats per token of the global batch before the update; grad_norm: global, before the clip;
    loss_scale: of the step, None where the loss is not scaled."""

    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float | None

    @property
    def finite(self) -> bool:
        """Whether the step could be taken."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


Watch = Callable[[str], None]


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Tokens,
    experiment: Experiment,
    mesh: DeviceMesh,
    step: int,
    watch: Watch,
) -> Values:
    """Accumulate -> unscale -> clip -> update, if loss and norm are finite and the step is not to be skipped.

    `watch` is called when every `.grad` is the whole `gradient`, and when `clipped`.

    The loss is the sum of cross-entropy over the global batch divided by its number of valid tokens, known
    before the first microbatch: uneven microbatches and ranks weigh as their tokens do. A mean per rank,
    averaged over ranks, would be another loss (pytorch/torchtitan#1842). What a model adds is trained on as the mean
    over microbatches, and is no part of the loss that is told.
    """
    model.zero_grad(set_to_none=True)
    count = sum_over_batch((batch.targets != IGNORED).sum(), mesh)
    parts = experiment.train.accumulation
    total = torch.zeros((), dtype=torch.float64, device=count.device)

    def scaled(logits: Tensor, targets: Tensor, added: Tensor | int = 0) -> Tensor:
        loss = cross_entropy(logits, targets) / count
        total.add_(loss.detach())
        return optimizer.scaler.scale(loss + added / parts)

    if isinstance(model, Pipeline):
        model.accumulate(scaled, batch.tokens, batch.targets)
    else:
        for i, (tokens, targets) in enumerate(zip(batch.tokens.chunk(parts), batch.targets.chunk(parts), strict=True)):
            with microbatch(model, experiment.parallel, last=i == parts - 1):
                logits, added = forward(model, tokens)
                scaled(logits, targets, added).backward()
    scale = optimizer.unscale()
    watch("gradient")
    norm = clip(model.parameters(), experiment.optimizer.clip, of_all_stages(model))
    watch("clipped")
    values = Values(sum_over_parts(total, mesh).item(), norm.item(), learning_rate=0.0, loss_scale=scale)
    taken = values.finite and step not in experiment.train.skip
    return values._replace(learning_rate=optimizer.step(step, taken))


def forward(model: nn.Module, tokens_BT: Tensor) -> tuple[Tensor, Tensor | int]:
    """Logits, and this rank's part of what the model adds to the loss: a mixture its balance, others 0."""
    made = model(tokens_BT)
    return made if isinstance(made, tuple) else (made, 0)


def of_all_stages(model: nn.Module) -> Tensor | None:
    """The gradients' norm over all stages of a pipeline; None without one."""
    if not isinstance(model, Pipeline):
        return None
    square = global_norm(p.grad for p in model.counted() if p.grad is not None).square()
    dist.all_reduce(square, group=model.group)
    return square.sqrt()


def cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum of cross-entropy over this rank's valid tokens, nats, in float32 or wider.

    Logits split over the vocabulary stay split: the caller is within `loss_parallel`.
    """
    logits, targets = wide(logits_BTV).flatten(0, 1), targets_BT.flatten()
    loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


def sum_over_batch(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """`value` summed over the axes that split rows and times of the batch, in place."""
    for axis in TOKENS:
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value


def sum_over_parts(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """Parts of a loss summed over the batch and over stages, of which the last has them, in place."""
    dist.all_reduce(loss, group=mesh.get_group("pipeline"))
    return sum_over_batch(loss, mesh)


@torch.no_grad()
def evaluate(model: nn.Module, batch: Tokens, mesh: DeviceMesh) -> tuple[float, float]:
    """Sum of cross-entropy over the global batch in nats, and its number of valid tokens."""
    count = (batch.targets != IGNORED).sum()
    total = torch.zeros((), dtype=torch.float64, device=count.device)

    def told(logits: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(logits, targets)
        total.add_(loss)
        return loss

    if isinstance(model, Pipeline):
        model.evaluate(told, batch.tokens, batch.targets)
    else:
        with loss_parallel():
            told(forward(model, batch.tokens)[0], batch.targets)
    reshard(model)
    return sum_over_parts(total, mesh).item(), sum_over_batch(count, mesh).item()
