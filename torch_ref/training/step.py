"""One optimizer step, from a rank's rows of the global batch to updated parameters."""

import math
from collections.abc import Callable, Iterator
from itertools import starmap
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from jaxdist.config import Model
from jaxdist.data import IGNORED
from torch_ref.families.loss import chunked, cross_entropy, mask_padded_vocab
from torch_ref.families.models import check_output, computing, config_of, masks_padding
from torch_ref.parallel.images import statistics_from_first_replica
from torch_ref.parallel.mesh import TOKENS, over
from torch_ref.parallel.pipeline import Pipeline, parts_of
from torch_ref.training.optim import clip, global_norm
from torch_ref.training.parallelize import microbatch, reshard
from torch_ref.training.program import Program, TrainState


class Rows(NamedTuple):
    """This rank's rows: tokens and targets, int64 [B, T], of its times; or images, float32 [B, Y, X, C], and classes,
    int64 [B]. IGNORED targets have no loss."""

    inputs: Tensor
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
        """Whether loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


Watch = Callable[[str], None]


def train_step(program: Program, state: TrainState, batch: Rows, step: int, watch: Watch) -> Values:
    """Accumulate -> unscale -> clip -> update, if loss and norm are finite and the step is not to be skipped.

    `watch` is called when every `.grad` is the complete `gradient`, and when `clipped`.

    The loss is the sum of cross-entropy over the global batch divided by its number of valid tokens, known
    before the first microbatch: uneven microbatches and ranks weigh as their tokens do. A mean per rank,
    averaged over ranks, would be another loss (pytorch/torchtitan#1842). A model's auxiliary loss is averaged over
    microbatches, and is not part of the reported loss.
    """
    experiment, mesh, (model, optimizer) = program.experiment, program.mesh, state
    model.zero_grad(set_to_none=True)
    count = sum_over_batch((batch.targets != IGNORED).sum(), mesh)
    parts, config = experiment.train.accumulation, experiment.model
    total = torch.zeros((), dtype=torch.float64, device=count.device)
    before = [buffer.clone() for buffer in model.buffers()]

    def scaled(loss: Tensor, added: Tensor | int = 0) -> Tensor:
        loss = loss / count
        total.add_(loss.detach())
        return optimizer.scaler.scale(loss + added / parts)

    if isinstance(model, Pipeline):
        with computing(parts_of(model)[0]):
            model.accumulate(lambda logits, targets: scaled(nats(logits, targets, config)), batch.inputs, batch.targets)
    else:
        for i, part in enumerate(microbatches(batch, parts)):
            with microbatch(model, experiment.parallel, last=i == parts - 1):
                scaled(*losses(model, part, experiment.memory.loss_chunks)).backward()
    scale = optimizer.unscale()
    watch("gradient")
    norm = clip(model.parameters(), experiment.optimizer.clip, norm_over_stages(model))
    watch("clipped")
    values = Values(sum_over_parts(total, mesh).item(), norm.item(), learning_rate=0.0, loss_scale=scale)
    not_skipped = step not in experiment.train.skip
    taken = values.finite and not_skipped
    keep_statistics(program, model, before, updated=not_skipped and math.isfinite(values.loss))
    return values._replace(learning_rate=optimizer.step(step, taken))


@torch.no_grad()
def keep_statistics(program: Program, model: nn.Module, before: list[Tensor], updated: bool) -> None:
    """Keep running statistics as `updated` by the forward passes, under `batch_norm = "replica"` those of the first
    rank; or restore `before`, where the step is skipped or its loss is not finite."""
    if not updated:
        for buffer, old in zip(model.buffers(), before, strict=True):
            buffer.copy_(old)
    elif before and program.experiment.parallel.batch_norm == "replica":
        statistics_from_first_replica(model, over(program.mesh, *TOKENS).get_group())


def microbatches(batch: Rows, parts: int) -> Iterator[Rows]:
    """This rank's rows by microbatch."""
    return starmap(Rows, zip(batch.inputs.chunk(parts), batch.targets.chunk(parts), strict=True))


def losses(model: nn.Module, rows: Rows, chunks: int) -> tuple[Tensor, Tensor | int]:
    """Sum of cross-entropy over a rank's rows, nats, over chunks of its tokens; and this rank's part of the auxiliary
    loss: a mixture's balance, else 0."""
    extra = {"targets_SN": chunked(rows.targets, chunks)} if chunks > 1 else {}
    first = parts_of(model)[0]
    if masks_padding(first):
        extra["valid_BT"] = rows.targets != IGNORED
    with computing(first):
        output = model(rows.inputs, **extra)
        output, added = output if isinstance(output, tuple) else (output, 0)
    config = config_of(first)
    if chunks > 1 and config:
        check_output(config.family, output, ())
    return output if chunks > 1 else nats(output, rows.targets, config), added


def nats(logits: Tensor, targets: Tensor, model: Model | None) -> Tensor:
    """Sum of cross-entropy over this rank's valid tokens; padding of the vocabulary has no probability. Raises
    ConfigError as `check_output`."""
    if model:
        check_output(model.family, logits, (*targets.shape, model.vocab_rows))
    return cross_entropy(mask_padded_vocab(logits, model), targets)


def norm_over_stages(model: nn.Module) -> Tensor | None:
    """L2 norm of the gradients of all stages of a pipeline; None without one."""
    if not isinstance(model, Pipeline):
        return None
    square = global_norm(p.grad for p in model.counted() if p.grad is not None).square()
    dist.all_reduce(square, group=model.group)
    return square.sqrt()


def sum_over_batch(value: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-reduce `value` in place over the axes that split rows and times of the batch."""
    for axis in TOKENS:
        dist.all_reduce(value, group=mesh.get_group(axis))
    return value


def sum_over_parts(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """All-reduce parts of a loss in place over the batch and over stages, of which the last has them."""
    dist.all_reduce(loss, group=mesh.get_group("pipeline"))
    return sum_over_batch(loss, mesh)


@torch.no_grad()
def evaluate(program: Program, model: nn.Module, batch: Rows) -> tuple[float, float]:
    """Sum of cross-entropy over the global batch in nats, and its number of valid tokens or images. By microbatches, so
    that it takes no more memory than the step."""
    experiment, mesh = program.experiment, program.mesh
    count, config = (batch.targets != IGNORED).sum(), experiment.model
    total = torch.zeros((), dtype=torch.float64, device=count.device)

    def counted(loss: Tensor) -> Tensor:
        total.add_(loss)
        return loss

    model.eval()  # by running statistics
    if isinstance(model, Pipeline):
        with computing(parts_of(model)[0]):
            model.evaluate(lambda logits, targets: counted(nats(logits, targets, config)), batch.inputs, batch.targets)
    else:
        with loss_parallel():
            for part in microbatches(batch, experiment.train.accumulation):
                counted(losses(model, part, experiment.memory.loss_chunks)[0])
    model.train()
    reshard(model)
    return sum_over_parts(total, mesh).item(), sum_over_batch(count, mesh).item()
