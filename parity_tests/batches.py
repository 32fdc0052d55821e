"""Which batch of the data has a given loss under given weights: how a loop that was fed another one is recognized."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from jaxdist.config import Experiment
from jaxdist.data import IGNORED, Batch, dataset_of
from torch_ref.models import build

SEEDS = range(10)
NEAR = 1e-9  # of two float64 losses of one batch; those of other batches are 1e-3 apart


def found(
    experiment: Experiment, weights: Mapping[str, np.ndarray], step: int, losses: tuple[float, float], near: float
) -> str:
    """The batch that has the second of the `losses`, to `near` relative, in words; empty where none of those tried has.

    weights: by torch's names, as they are before `step`. losses: ours and theirs, in mean nats per token. Ours is made
    first, and nothing is found where that fails, as for a model with more in its loss.
    """
    if not weights or experiment.model.takes != "tokens" or getattr(experiment.model, "balance", None):
        return ""
    tried = candidates(experiment, step)
    model = build(experiment.model).double()
    if model.state_dict().keys() != weights.keys():
        return ""
    model.load_state_dict({name: torch.from_numpy(w.astype(np.float64)) for name, w in weights.items()})
    ours, theirs = losses
    near = max(near, NEAR)
    _, right = next(tried)
    if abs(mean_loss(model, right) - ours) > near * ours:
        return ""
    return next((name for name, batch in tried if abs(mean_loss(model, batch) - theirs) <= near * theirs), "")


def candidates(experiment: Experiment, step: int) -> Iterator[tuple[str, Batch]]:
    """Batches by name: that of the step first, then those that a loop gets by a wrong step, order, seed or split."""
    data, train = dataset_of(experiment), experiment.train
    size, seed = train.batch, train.seed
    own = data.batch(step, size, seed)
    yield "the batch of this step", own
    for other in sorted(range(1, 2 * train.steps + 1), key=lambda other: abs(other - step)):
        if other != step:
            yield f"the batch of step {other}", data.batch(other, size, seed)
    for name, rows in (("first", slice(size // 2)), ("second", slice(size // 2, None))):
        if size > 1:
            yield f"the {name} half of the batch", Batch(own.tokens[rows], own.targets[rows])
    shuffle = not experiment.data.shuffle
    turned = dataset_of(experiment.model_copy(update={"data": experiment.data.model_copy(update={"shuffle": shuffle})}))
    for other in (step, step - 1, step + 1):
        if other >= 1:
            name = f"batch {other} with data.shuffle = {str(shuffle).lower()}"
            yield name, turned.batch(other, size, seed)
    for other in SEEDS:
        if other != seed:
            yield f"the batch of train.seed = {other}", data.batch(step, size, other)
    if data.sequences("validation"):
        yield "a batch of the validation split", data.batch(step, size, seed, "validation")


@torch.no_grad()
def mean_loss(model: torch.nn.Module, batch: Batch) -> float:
    """Mean nats per valid token; NaN for a batch without any."""
    tokens, targets = (torch.from_numpy(part).long() for part in batch)
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED).item()
