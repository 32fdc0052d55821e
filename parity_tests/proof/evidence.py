"""Evidence on where and how two runs differ, by which a cause is recognized."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxdist.config.registry import FAMILIES
from parity_tests.proof import digits
from parity_tests.proof.bisect import Divergence
from parity_tests.proof.gradients import Alone, differing, multiples, standing_out
from parity_tests.runs import compare
from parity_tests.runs.run import Run

NEVER = math.inf
ALIKE = 1e-5  # relative difference of losses that those of two batches exceed
HIDES = 1e-9  # from this bound of the loss on a mistake may be below it at step 1
CLEARLY = 1000.0  # times what rounding hides of the loss, from where a difference is not the growth of a hidden one
ROUGH = 0.35  # a difference that is as rough as independent numbers has 1, a smooth one next to 0
LARGE = 0.5  # of what a batch's loss differs from the next one's
UPDATE = "update of the weights"  # the cause of a difference by the update rule
FAR = 0.5  # of the size of the starting weights

Seen = tuple[int, str] | None  # a step, and how a cause is seen there


class Search(NamedTuple):
    """The batch, in words, whose loss theirs is, if one was `found`; else a `remark` on their loss, or nothing.

    own: theirs is a loss of the right batch, computed otherwise.
    """

    found: str = ""
    remark: str = ""
    own: bool = False


class Rules(NamedTuple):
    """Update rules that give their losses and gradient norms: each in words, with the cause that it is.

    tried: how many were; 0 where the search could not be made. near: those that give the loss after one update.
    """

    found: tuple[tuple[str, str], ...] = ()
    tried: int = 0
    near: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """The one that all have; empty where there is none, or several."""
        causes = {cause for _, cause in self.found}
        return causes.pop() if len(causes) == 1 else ""


@dataclass(frozen=True)
class Evidence:
    """Two runs that were to begin with equal weights, and what their curves may differ by per step.

    `batch(step)` looks for the batch that gives their loss at a step under our weights, and `rule(step)` for the rule
    of that step's update. `divergence` is the first tensor that differs, where it was looked for.
    """

    ours: Run
    theirs: Run
    bounds: Mapping[str, np.ndarray]
    start: Mapping[str, np.ndarray]
    batch: Callable[[int], Search] = lambda step: Search()
    rule: Callable[[int], Rules] = lambda step: Rules()
    divergence: Divergence | None = None
    rounded: Run | None = None  # ours in the precision of theirs, where that is less than float64
    other_model: str = ""  # that theirs is a run of a model with another value of one field, in words
    narrow: str = ""  # what theirs computes in a narrower dtype than the policy says
    known_start: bool = False  # whether theirs is a run that began with the given weights
    costly: str = ""  # what the policy costs one side more than the other, where the float64 runs agree

    @property
    def zero_gradients(self) -> tuple[str, ...]:
        """Endings of the names of parameters that rounding alone moves."""
        return FAMILIES[self.ours.experiment.model.family].zero_gradients

    @cached_property
    def apart(self) -> dict[str, np.ndarray]:
        """Relative difference of each curve, per step."""
        found = {name: compare.curve(self.theirs.metrics, self.ours.metrics, name) for name in self.bounds}
        return {name: curve for name, curve in found.items() if curve.shape == self.bounds[name].shape}

    @cached_property
    def first(self) -> dict[str, float]:
        """The first step at which each curve differs; infinity where it never does."""
        found = dict.fromkeys(compare.FLOOR, NEVER)
        for name, curve in self.apart.items():
            found[name] = next((step + 1.0 for step in np.flatnonzero(~(curve <= self.bounds[name]))), NEVER)
        return found

    @property
    def trained(self) -> float:
        """The first step at which the training differs, and not just the rate."""
        return min(self.first["loss"], self.first["grad_norm"])

    @property
    def updates(self) -> int:
        """The step whose update differs: the one before the first that begins otherwise; 0 where that is none.

        An update that differs after the learning rate does is explained by it.
        """
        step = self.trained
        shown = self.first["loss"] == step or self.slightly
        seen = 1 < step < NEVER and shown and self.first["learning_rate"] >= step
        return int(step) - 1 if seen and not self.fed_otherwise else 0

    @property
    def slightly(self) -> bool:
        """Whether the norm differs before the loss, and by so little that rounding may hide that of the loss."""
        step = self.first["grad_norm"]
        return step < self.first["loss"] and self.at("grad_norm", step) < CLEARLY * self.rounding

    def multiples(self, step: int) -> dict[str, float]:
        """Differences of a step's gradients as multiples of what rounding explains; empty where they were not kept."""
        if step > len(self.ours.metrics):
            return {}
        x, y, z = (run.kept("gradient", step) if run else {} for run in (self.theirs, self.ours, self.rounded))
        return multiples(x, y, z, float(self.bounds["grad_norm"][step - 1]))

    @cached_property
    def at_first(self) -> dict[str, float]:
        """The multiples of step 1."""
        return self.multiples(1) if self.bounds else {}

    @property
    def same_at_first(self) -> bool:
        """Whether the gradients of step 1 were kept and agree, so that the forward and backward passes do."""
        return bool(self.at_first) and not differing(self.at_first)

    @cached_property
    def unlike_at_the_start(self) -> dict[str, float]:
        """The weights before their first step that are not the given ones, by relative difference; none if unknown."""
        kept, most = self.theirs.kept("start", 1), 4 * compare.rounding(self.theirs.experiment.precision.parameters)
        pairs = ((name.partition("/")[2], w) for name, w in kept.items())
        found = {name: compare.relative(w, self.start[f"weights/{name}"]) for name, w in pairs if self.knows(name, w)}
        return {name: off for name, off in found.items() if not off <= most}

    def knows(self, name: str, weight: np.ndarray) -> bool:
        """Whether a given weight has this name, and a shape and dtype that can be compared."""
        start = self.start.get(f"weights/{name}")
        return start is not None and compare.comparable(start, weight)

    @cached_property
    def same_start(self) -> bool:
        """Whether their run is known to begin with the given weights."""
        kept = self.theirs.kept("start", 1)
        compared = bool(kept) and all(self.knows(name.partition("/")[2], w) for name, w in kept.items())
        return self.known_start or (compared and not self.unlike_at_the_start)

    @property
    def unless_the_start(self) -> str:
        """The other possibility where it is not known which weights theirs began with, in words; else nothing."""
        if self.same_start:
            return ""
        return (
            f"other starting weights than the given ones are the other possibility, as {self.theirs.side} did not "
            "record those that it began with"
        )

    @cached_property
    def alone(self) -> Alone | None:
        """The tensors whose moments at the end differ far more than all others' do."""
        tensors = {
            kind: [tensor for tensor in self.states(kind) if not tensor[0].endswith(self.zero_gradients)]
            for kind in ("exp_avg", "momentum_buffer", "exp_avg_sq")
        }
        return standing_out({kind: found for kind, found in tensors.items() if found})

    @cached_property
    def recorded(self) -> dict[str, digits.Narrow]:
        """Tensors of theirs that are recorded in a narrower dtype than their config says, by group."""
        found = digits.narrow(self.theirs, self.ours, self.theirs.experiment.precision)
        return {narrow.group: narrow for narrow in found if narrow.kinds}

    @cached_property
    def fed_otherwise(self) -> Seen:
        """Whether a batch differs, with its step and how it is seen."""
        return other_batches(self)

    @cached_property
    def batch_search(self) -> Search:
        """The batch that their loss belongs to at the first step at which it differs: up to dozens of forward
        passes."""
        step = self.first["loss"]
        return Search() if step == NEVER else self.batch(int(step))

    @cached_property
    def rules(self) -> Rules:
        """Update rules that explain their losses; none where rounding may hide that another cause does."""
        step = self.updates
        if not step or self.first["loss"] != step + 1:
            return Rules()
        hidden = self.rounding and not self.same_at_first and self.at("loss", step + 1) < CLEARLY * self.rounding
        return Rules() if hidden else self.rule(step)

    @property
    def rounding(self) -> float:
        """Difference in the loss of step 1 that rounding may hide; 0 in float64."""
        least = float(max(self.bounds.get("loss", np.zeros(1))[:1], default=0.0))
        return least if least > HIDES else 0.0

    def at(self, name: str, step: float) -> float:
        """The relative difference of a curve at a step."""
        return float(self.apart[name][int(step) - 1])

    def curves(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A field of metrics.jsonl of ours and of theirs."""
        x, y = (np.array([record[name] for record in run.metrics], np.float64) for run in (self.ours, self.theirs))
        return x, y

    def states(self, kind: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Name and both sides' tensor of one kind, as they are at the end."""
        x, y = self.ours.kept_states(kind), self.theirs.kept_states(kind)
        for name in x.keys() & y.keys():
            if compare.comparable(x[name], y[name]):
                yield name.partition("/")[2], x[name].astype(np.float64), y[name].astype(np.float64)

    def sizes(self, kind: str) -> dict[str, float]:
        """Logarithm of the factor by which theirs of one kind are larger, by tensor; without those of zeros."""
        norms = ((name, np.linalg.norm(x), np.linalg.norm(y)) for name, x, y in self.states(kind))
        return {name: math.log(y / x) for name, x, y in norms if x and y}

    def difference(self, kind: str) -> float:
        """Relative difference of all tensors of one kind at the end, as one vector; 0 where there are none."""
        kept = [(x, y) for _, x, y in self.states(kind)]
        return compare.length([y - x for x, y in kept]) / (compare.length([x for x, _ in kept]) or 1)

    @cached_property
    def agrees_at_the_end(self) -> bool:
        """Whether the final weights do, to what a curve may differ by."""
        most = max((float(bound.max()) for bound in self.bounds.values() if bound.size), default=compare.STATE / 100)
        return all(compare.relative(y, x) <= 100 * most for _, x, y in self.states("weights"))


def other_batches(e: Evidence) -> Seen:
    """Their loss is that of another batch; or the difference jumps from step to step as far as batches differ."""
    step = e.first["loss"]
    if step == NEVER or step > min(e.first["grad_norm"], e.first["learning_rate"] + (step > 1)):
        return None
    step = int(step)
    if e.at("loss", step) < ALIKE:
        return None
    found, remark, own = e.batch_search
    if found:
        return step, f"{e.theirs.side} has the loss that our weights have on {found}"
    if own or e.unlike_at_the_start or far_from_the_start(e):
        return None
    ours, theirs = (curve[step - 1 :] for curve in e.curves("loss"))
    between = theirs - ours
    if len(between) < 5:
        return None
    jumps, size = np.diff(between, 2), float(np.sqrt(np.mean(between**2)))
    rough = compare.rms(jumps) / math.sqrt(6) / size
    large = compare.rms(jumps) / compare.rms(np.diff(ours, 2))
    if rough > ROUGH and large > LARGE:
        how = "the losses differ from then on, up and down, by as much as the losses of two batches"
        return step, joined(how, remark)
    return None


def joined(*parts: str) -> str:
    """Parts of a sentence, without empty ones."""
    return "; ".join(filter(None, parts))


def far_from_the_start(e: Evidence) -> tuple[float, float] | None:
    """Distance of their final weights, and of ours, from the start, relative to its size; None where theirs are
    near."""

    def away(run: Run) -> float:
        kept = {name: w for name, w in run.kept_states("weights").items() if w.ndim >= 2}
        if any(name not in e.start or e.start[name].shape != w.shape for name, w in kept.items()) or not kept:
            return 0.0
        size = compare.length([e.start[name] for name in kept])
        return compare.length([w.astype(np.float64) - e.start[name] for name, w in kept.items()]) / size

    theirs, ours = away(e.theirs), away(e.ours)
    return (theirs, ours) if theirs > FAR and theirs > 2 * ours else None
