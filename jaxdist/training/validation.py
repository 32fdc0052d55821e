"""The loss of a model over a split of the data: used at the end of a run and by `jaxdist.evaluate`."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxdist.data import Dataset, Split
from jaxdist.training.program import Program
from jaxdist.training.step import Arrays


class Scores(NamedTuple):
    """Sums over a pass: the loss in nats, valid tokens or images, and images whose class has the largest logit."""

    loss: float
    counted: float
    correct: float

    @property
    def mean(self) -> float:
        """Nats per valid token or image."""
        return self.loss / self.counted


def pass_over(program: Program, parameters: Arrays, dataset: Dataset, split: Split, steps: Iterable[int]) -> Scores:
    """Scores of `parameters` over the batches `steps`, from 1, of a pass over the split. No row counts twice."""
    total = Scores(0.0, 0.0, 0.0)
    for step in steps:
        batch: Any = dataset.pass_over(split, step, program.experiment.train.batch, program.placement.rows)
        found = program.evaluate(parameters, program.placement.put(batch))
        total = Scores(*(float(a) + float(b) for a, b in zip(total, found, strict=True)))
    return total
