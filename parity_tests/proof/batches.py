"""Identifies the batch that a loss belongs to, given the weights: recognizes a loop that was fed other data."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.progress import track

from jaxdist.config import Experiment, Model
from jaxdist.data import IGNORED, Batches, Dataset, dataset_of
from jaxdist.runs.display import console, say
from parity_tests.proof.evidence import ALIKE, Search
from parity_tests.runs import compare
from torch_ref.families.models import build
from torch_ref.training.step import Rows, losses, microbatches

NEIGHBOURS = 8  # steps before and after the own one whose batches are tried
SEEDS = range(10)
NEAR = 1e-9  # of two float64 losses of one batch; those of other batches are 1e-3 apart
OTHERS: dict[str, tuple[Any, ...]] = {  # values of fields of a model that loops have by mistake
    "gelu": ("tanh", "exact"),
    "norm_eps": (1e-5, 1e-6, 1e-8, 1e-12),
    "rope_theta": (1e4, 5e5, 1e6),
}
LONG = 10.0  # seconds from which a search is announced


def identify(
    experiment: Experiment, weights: Mapping[str, np.ndarray], step: int, losses: tuple[float, float], near: float
) -> Search:
    """The batch whose loss under `weights` is the second of `losses`, to `near` relative, or the attempts to find one.

    weights: by torch's names, as they are before `step`. losses: the losses of ours and of theirs, in nats per token or
    image, with or without a mixture's balance loss.

    The first of `losses` is reproduced before anything is tried. Where that fails, the result is empty: a batch norm
    per replica, for one, normalizes over parts of the batch that a single device does not have.
    """
    model = filled(experiment.model, weights)
    if model is None:
        return Search()

    def matches(batch: Batches, loss: float, model: torch.nn.Module = model, least: float = NEAR) -> list[str]:
        loss_by_batch = mean_losses(model, batch, experiment)
        return [how for how, value in loss_by_batch.items() if abs(value - loss) <= max(near, least) * abs(loss)]

    data = dataset_of(experiment)
    own, begin = data.batch(step, experiment.train.batch, experiment.train.seed), time.monotonic()
    if not matches(own, losses[0]):
        return Search()
    pace = time.monotonic() - begin
    if how := "".join(matches(own, losses[1])[:1]):
        return Search(remark=f"it is the loss of this batch {how}", own=True)
    for how, other in other_models(experiment.model):
        changed = filled(other, weights)
        theirs, ours = (changed and matches(own, loss, changed, compare.LOSS) for loss in reversed(losses))
        if theirs and "" in theirs and not ours:
            return Search(remark=f"it is the loss of this batch with {how}", own=True)
    if abs(losses[1] - losses[0]) < ALIKE * abs(losses[0]):
        return Search()
    tried = candidates(experiment, data, step, own)
    if (seconds := pace * len(tried)) > LONG:
        say(f"comparing the loss of step {step} with those of {len(tried)} other batches, about {seconds:.0f} s ...")
    bar = track(tried.items(), "batches", console=console, transient=True, disable=not console.is_terminal)
    for name, read in bar:
        if matches(read(), losses[1]):
            return Search(found=name)
    return Search(
        remark=f"it is the loss of none of {len(tried)} other batches tried: of the {NEIGHBOURS} steps before and after"
        f" and the first, its halves, its targets moved, the other data.shuffle, train.seed 0 to {SEEDS[-1]}, and "
        "validation"
    )


def filled(config: Model, weights: Mapping[str, np.ndarray]) -> torch.nn.Module | None:
    """A model in float64 with these weights; None where they are not all there."""
    model = build(config).double()
    parameters = dict(model.named_parameters())
    if not weights or not parameters.keys() <= weights.keys():
        return None
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(weights[name].astype(np.float64)))
    return model


def other_models(model: Model) -> Iterator[tuple[str, Model]]:
    """The model with another value of one field, by name and value."""
    for field, values in OTHERS.items():
        for value in values:
            if field in type(model).model_fields and getattr(model, field) != value:
                yield f"model.{field} = {value}", model.model_copy(update={field: value})


def candidates(experiment: Experiment, data: Dataset, step: int, own: Batches) -> dict[str, Callable[[], Batches]]:
    """Batches by name that a loop gets by a wrong step, half, order, seed or split, the likeliest first.

    A few dozen, however long the run is: each costs a forward pass.
    """
    size, seed = experiment.train.batch, experiment.train.seed
    opposite = experiment.data.model_copy(update={"shuffle": not experiment.data.shuffle})
    shuffled = f"data.shuffle = {str(opposite.shuffle).lower()}"
    reordered = dataset_of(experiment.model_copy(update={"data": opposite}))
    steps = sorted(range(max(1, step - NEIGHBOURS), step + NEIGHBOURS + 1), key=lambda other: abs(other - step))

    def half(rows: slice) -> Batches:
        return type(own)(own[0][rows], own[1][rows])

    found: dict[str, Callable[[], Batches]] = {}
    for other in dict.fromkeys([*steps, 1]):
        found[f"the batch of step {other}"] = partial(data.batch, other, size, seed)
    del found[f"the batch of step {step}"]
    if size > 1:
        found["the first half of the batch"] = partial(half, slice(size // 2))
        found["the second half of the batch"] = partial(half, slice(size // 2, None))
    if experiment.model.input_kind == "tokens":
        found |= {how: partial(type(own), own[0], targets) for how, targets in other_targets(*own)}
    for other in (step, step - 1, step + 1):
        if other >= 1:
            found[f"the batch of step {other} with {shuffled}"] = partial(reordered.batch, other, size, seed)
    for other in SEEDS:
        if other != seed:
            found[f"the batch of train.seed = {other}"] = partial(data.batch, step, size, other)
    if data.sequences("validation"):
        found["a batch of the validation split"] = partial(data.batch, step, size, seed, "validation")
    return found


def other_targets(tokens: np.ndarray, targets: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Targets [B, T] that loops give a batch by mistake, by name."""
    valid = targets != IGNORED
    padding = np.bincount(tokens[~valid], minlength=1).argmax()
    further = np.full_like(targets, IGNORED)
    further[:, :-1] = targets[:, 1:]
    yield "the batch with its targets one token too far", further
    yield "the batch with its inputs as targets", np.where(valid, tokens, targets).astype(targets.dtype)
    yield "the batch with its padding as targets too", np.where(valid, targets, padding).astype(targets.dtype)


def parts_of(batch: Batches, experiment: Experiment) -> list[Rows]:
    """The microbatches of a batch, as torch_ref trains on them."""
    rows = Rows(torch.from_numpy(batch[0]), torch.from_numpy(batch[1]).long())
    if experiment.model.input_kind == "tokens":
        rows = rows._replace(inputs=rows.inputs.long())
    return list(microbatches(rows, experiment.train.accumulation))


@torch.no_grad()
def mean_losses(model: torch.nn.Module, batch: Batches, experiment: Experiment) -> dict[str, float]:
    """Losses that loops report of a batch, in nats per valid token or image, by how they are computed.

    The first is the right one, by microbatches as in training. NaN for a batch without a valid token.
    """
    parts = parts_of(batch, experiment)
    sums, added = zip(*(losses(model, part, 1) for part in parts), strict=True)
    counts = [(part.targets != IGNORED).sum() for part in parts]
    mean, balance = float(sum(sums) / sum(counts)), float(sum(added) / len(parts))
    found = {"": mean}
    if sum(counts) < (every := sum(part.targets.numel() for part in parts)):
        found["as a mean over all its tokens, padding counted"] = float(sum(sums)) / every
    if balance:
        found["with the balance loss of the experts added"] = mean + balance
    if len(parts) > 1:
        means = sum(total / count for total, count in zip(sums, counts, strict=True)) / len(parts)
        found["as the mean of its microbatches' means, which counts tokens unequally"] = float(means)
    return found
