"""The cause of a difference, recognized by the step and the quantity in which two runs first differ.

Within a step the loss is computed before the gradient norm, and both before the update; so where the loss of step 1
differs under equal weights, the forward pass, the loss or the batch differs, and where only later losses do, the
update. What curves can't tell apart, the final weights and moments do. `CAUSES` has a row for each cause, in the order
in which a run meets them.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxdist.config import KEPT
from parity_tests import compare
from parity_tests.bisect import Parting
from parity_tests.run import Run

NEVER = math.inf
FIRST, SECOND = "exp_avg", "exp_avg_sq"
SHIFTS = (1, -1, 2, -2)  # steps by which a schedule is tried to be ahead
FACTORS = range(2, 17)  # times that a schedule is tried to be stepped per step
ROUGH = 0.35  # a difference that is as rough as independent numbers has 1, a smooth one next to 0
LARGE = 0.5  # of what a batch's loss differs from the next one's
ALIKE = 1e-5  # relative difference of losses that those of two batches exceed
FAR = 0.5  # of the size of the starting weights
ALONG = 0.9  # cosine from which a difference of weights is along the weights
UNLIKE = 5.0  # times that one moment differs more than the other
HIDES = 1e-9  # from this bound of the loss on a mistake may be below it at step 1
CLEARLY = 1000.0  # times what rounding hides of the loss, from where a difference is not the growth of a hidden one
LIKE = 0.1  # relative tolerance of a prediction
ROUNDED = 1e-5  # relative error of a sum of squares in float32, or by the 1e-6 that torch adds to the norm it clips by


class Search(NamedTuple):
    """The batch, in words, whose loss theirs is, if one was `found`; else a `remark` on their loss, or nothing.

    own: theirs is a loss of the right batch, computed otherwise.
    """

    found: str = ""
    remark: str = ""
    own: bool = False


@dataclass(frozen=True)
class Evidence:
    """Two runs from equal weights, and what their curves may differ by per step.

    `batch(step)` looks for the batch that gives their loss at a step under our weights. `parting` is the first tensor
    that differs, where it was looked for.
    """

    ours: Run
    theirs: Run
    bounds: Mapping[str, np.ndarray]
    start: Mapping[str, np.ndarray]
    batch: Callable[[int], Search] = lambda step: Search()
    parting: Parting | None = None
    narrow: str = ""  # what of theirs is in a narrower dtype than the policy says
    costly: str = ""  # what the policy costs one side more than the other, where the float64 runs agree

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
        seen = 1 < step < NEVER and self.first["loss"] == step and self.first["learning_rate"] >= step
        return int(step) - 1 if seen and not self.fed_otherwise else 0

    @cached_property
    def fed_otherwise(self) -> "Seen":
        """Whether a batch differs, with its step and how it is seen."""
        return other_batches(self)

    @cached_property
    def batch_search(self) -> Search:
        """Which batch their loss belongs to at the first step at which it differs; empty where it differs too little.

        May take dozens of forward passes.
        """
        step = self.first["loss"]
        return Search() if step == NEVER or self.at("loss", step) < ALIKE else self.batch(int(step))

    @property
    def rounding(self) -> float:
        """What rounding may hide of the loss of step 1; 0 in float64."""
        least = float(self.bounds["loss"][0]) if self.bounds else 0.0
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

    def scale(self, kind: str) -> tuple[float, float]:
        """By which factor theirs of one kind are larger, as a logarithm: the median over tensors, and the spread."""
        sizes = [(np.linalg.norm(x), np.linalg.norm(y)) for _, x, y in self.states(kind)]
        logs = np.array([math.log(y / x) for x, y in sizes if x and y])
        if not logs.size:
            return 0.0, NEVER
        middle = float(np.median(logs))
        return middle, float(np.median(np.abs(logs - middle)))

    @cached_property
    def agrees_at_the_end(self) -> bool:
        """Whether the final weights do, to what a curve may differ by."""
        most = float(max(bound.max() for bound in self.bounds.values()))
        return all(compare.relative(y, x) <= 100 * most for _, x, y in self.states("weights"))


Seen = tuple[int, str] | None  # the step, and how it is seen


class Cause(NamedTuple):
    """A row of the table: `kinds` of tensors that it shows in first, the `checks` that it fails, as a regex."""

    name: str
    kinds: tuple[str, ...]
    checks: str
    seen: Callable[[Evidence], Seen]


@dataclass(frozen=True)
class Diagnosis:
    """A cause that was recognized, with its step."""

    cause: str
    step: int
    how: str
    checks: str

    def __str__(self) -> str:
        return f"{self.cause}, step {self.step}: {self.how}."


def other_batches(e: Evidence) -> Seen:
    """Theirs is the loss of another batch; or the difference jumps from step to step as far as batches differ."""
    step = e.first["loss"]
    if step == NEVER or step > min(e.first["grad_norm"], e.first["learning_rate"] + (step > 1)):
        return None
    step = int(step)
    if e.at("loss", step) < ALIKE:
        return None
    found, remark, own = e.batch_search
    if found:
        return step, f"{e.theirs.side} has the loss that our weights have on {found}"
    if own or far_from_the_start(e):
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
    """How far their weights, and ours, are from the start at the end, by its size; None where theirs are near."""

    def away(run: Run) -> float:
        kept = {name: w for name, w in run.kept_states("weights").items() if w.ndim >= 2}
        if any(name not in e.start or e.start[name].shape != w.shape for name, w in kept.items()) or not kept:
            return 0.0
        size = compare.length([e.start[name] for name in kept])
        return compare.length([w.astype(np.float64) - e.start[name] for name, w in kept.items()]) / size

    theirs, ours = away(e.theirs), away(e.ours)
    return (theirs, ours) if theirs > FAR and theirs > 2 * ours else None


def other_start(e: Evidence) -> Seen:
    if e.first["loss"] > 1 or not (found := far_from_the_start(e)):
        return None
    return 1, (
        f"at the end the weights of {e.theirs.side} are {found[0]:.2g} times the size of the given ones away from them,"
        f" where ours are {found[1]:.2g}"
    )


def learning_rate(e: Evidence) -> Seen:
    step = e.first["learning_rate"]
    if step == NEVER:
        return None
    step = int(step)
    ours, theirs = e.curves("learning_rate")
    how = f"it is {theirs[step - 1]:.6g} in {e.theirs.side}, and {ours[step - 1]:.6g} in {e.ours.side}"
    only = "; what was trained agrees, so it is only logged otherwise" if e.trained == NEVER else ""
    return step, how + schedule(ours, theirs) + only


def schedule(ours: np.ndarray, theirs: np.ndarray) -> str:
    """How another schedule follows from ours, in words; empty where it is no simple change."""

    def same(x: np.ndarray, y: np.ndarray) -> bool:
        return len(x) >= 3 and bool(np.allclose(x, y, rtol=1e-6, atol=0))

    for shift in SHIFTS:
        x, y = (ours[shift:], theirs[:-shift]) if shift > 0 else (ours[:shift], theirs[-shift:])
        if same(x, y):
            steps = f"{abs(shift)} step{'s' * (abs(shift) > 1)}"
            return f": their schedule is {steps} {'ahead' if shift > 0 else 'late'}"
    for factor in FACTORS:
        if same(ours[factor - 1 :: factor], theirs[: len(ours) // factor]):
            return f": their schedule goes {factor} steps a step"
    peak = int(np.argmax(np.abs(ours)))
    if ours[peak] and same(ours * (theirs[peak] / ours[peak]), theirs):
        return f": {theirs[peak] / ours[peak]:.6g} times ours at every step"
    return ""


def forward(e: Evidence) -> Seen:
    if e.first["loss"] > 1 or e.fed_otherwise:
        return None
    how = f"from equal weights and batches the loss differs by {e.at('loss', 1):.2g}"
    if e.first["grad_norm"] == NEVER and e.agrees_at_the_end:
        return 1, f"{how}, and what was trained agrees, so it is only logged otherwise"
    parts = e.ours.experiment.train.accumulation
    if parts > 1 and not e.batch_search.own:
        how += f"; with {parts} microbatches of unequal numbers of tokens, a mean of their means is such a loss"
    return 1, joined(how, e.batch_search.remark)


def gradients(e: Evidence) -> Seen:
    step = e.first["grad_norm"]
    if step >= e.first["loss"] or e.at("grad_norm", step) < CLEARLY * e.rounding:
        return None
    step = int(step)
    how = f"the loss agrees and the gradient norm differs by {e.at('grad_norm', step):.2g}"
    if e.first["loss"] == NEVER and e.agrees_at_the_end:
        return step, f"{how}, and what was trained agrees, so the norm alone is computed or logged otherwise"
    ours, theirs = e.curves("grad_norm")
    ratios = theirs[step - 1 :] / ours[step - 1 :]
    if np.ptp(ratios) < 1e-3 * abs(ratios[0] - 1):
        return step, f"{how}: all are {ratios[0]:.6g} times ours"
    if tensors := list(differing_gradients(e, step)):
        some = f"{', '.join(tensors[:3])}{f' and {len(tensors) - 3} others' if tensors[3:] else ''}"
        return step, f"{how}: gradient of {some}"
    parts = e.ours.experiment.train.accumulation
    several = f", the sum over {parts} microbatches and its dtype" if parts > 1 else ""
    return step, f"{how}: backward pass{several}, a loss that is added, or the norm itself"


def forward_or_backward(e: Evidence) -> Seen:
    """The first difference is a small one of the norm, where rounding may hide one of the loss."""
    step = e.first["grad_norm"]
    if not e.rounding or step >= e.first["loss"] or e.at("grad_norm", step) >= CLEARLY * e.rounding:
        return None
    return int(step), (
        f"the gradient norm differs by {e.at('grad_norm', step):.2g}, the loss by no more than the {e.rounding:.1g} "
        "that rounding may hide; a run in fp64 tells whether the forward pass differs"
    )


def hidden(e: Evidence) -> Seen:
    """What differs is too small for the curves to show where it began."""
    step = e.updates + 1
    grown = e.updates and e.at("loss", step) < CLEARLY * e.rounding
    unseen = e.trained == NEVER == e.first["learning_rate"] and not e.agrees_at_the_end
    if not e.rounding or not (grown or unseen):
        return None
    where = f"the losses differ from step {step}, by {e.at('loss', step):.2g}" if grown else "the final states differ"
    return max(e.updates, 1), (
        f"{where}, and step 1 agrees to the {e.rounding:.1g} that rounding may hide; a run in fp64 tells which it is"
    )


def differing_gradients(e: Evidence, step: int) -> Iterator[str]:
    """Names of the gradients of a step that differ, the largest difference first, as far as both sides kept them."""
    x, y = e.theirs.kept("gradient", step), e.ours.kept("gradient", step)
    found = {name: compare.relative(x[name], y[name]) for name in x.keys() & y.keys()}
    bound = float(e.bounds["grad_norm"][step - 1])
    for name in sorted(found, key=found.__getitem__, reverse=True):
        if found[name] > bound:
            yield name.partition("/")[2]


def clip(e: Evidence) -> Seen:
    """Adam's moments are those of gradients without the clip, or both are larger by one factor, the second by its
    square. That the clip is first reached at the step is no evidence: other mistakes begin there too."""
    step = e.updates
    if not step or (applied := clip_applied(e)):
        return None
    limit = e.ours.experiment.optimizer.clip
    if applied is False:
        return step, f"{SECOND} of {e.theirs.side} adds up as if the clip of {limit:g} were not applied"
    (m, spread), (v, _) = e.scale(FIRST), e.scale(SECOND)
    if abs(m) <= 3 * spread or abs(v - 2 * m) > 0.3 * abs(m):
        return None
    how = f"the gradients that the optimizer of {e.theirs.side} gets are {math.exp(m):.4g} times ours, by its moments"
    reached = limit and e.curves("grad_norm")[0].max() > limit
    return step, how if reached else f"{how}, and the clip of ours was never reached: their scale differs"


def clip_applied(e: Evidence) -> bool | None:
    """Whether their gradients were clipped as ours, or not at all; None where the moments show neither.

    Summed over all parameters, Adam's second moments are an average of the squared norms of the clipped gradients. So
    the logged norms predict them, under the same beta2. Where that does not hold for ours, nothing is known: with decay
    in the gradient, for one, or moments that began before the run.
    """
    o, norms = e.ours.experiment.optimizer, e.curves("grad_norm")
    sums = np.array([(x.sum(), y.sum()) for _, x, y in e.states(SECOND)]).reshape(-1, 2).sum(0)
    if not o.clip:
        return None

    def predicted(norm: np.ndarray) -> float:
        weights = (1 - o.beta2) * o.beta2 ** np.arange(len(norm))[::-1]
        return float(weights @ norm**2)

    clipped = np.array([predicted(np.minimum(norm, o.clip)) for norm in norms])
    if not (np.isfinite([*sums, *clipped]).all() and sums.all() and clipped.all()):
        return None
    (error, theirs), effect = np.log(sums / clipped), math.log(predicted(norms[1]) / clipped[1])
    tolerance = max(ROUNDED, 10 * abs(error))
    if effect < 10 * tolerance:
        return None
    return True if abs(theirs) < tolerance else False if abs(theirs - effect) < tolerance else None


def weight_decay(e: Evidence) -> Seen:
    """Final weights differ along the weights themselves."""
    step = e.updates
    rates = float(sum(record["learning_rate"] for record in e.ours.metrics))
    found = [(name, x, y - x) for name, x, y in e.states("weights") if np.linalg.norm(x) and np.any(y != x)]
    if not step or not found or not rates:
        return None
    name, x, off = max(found, key=lambda item: float(np.linalg.norm(item[2]) / np.linalg.norm(item[1])))
    share = float(np.vdot(off, x) / np.vdot(x, x))
    cosine = float(np.vdot(off, x) / (np.linalg.norm(off) * np.linalg.norm(x)))
    given = e.ours.experiment.optimizer.weight_decay
    if abs(cosine) < ALONG or (x.ndim < 2 and abs(abs(share / rates / (given or 1)) - 1) > LIKE):
        return None  # a vector of ones differs along itself whatever moves it
    return step, (
        f"{name} of {e.theirs.side} differs at the end along itself, as by a decay that is {abs(share) / rates:.2g} "
        f"{'less' if share > 0 else 'more'} than ours, where optimizer.weight_decay = {given:g}"
    )


def moments(e: Evidence) -> Seen:
    """One kind of moments differs far more than the others: its own formula does."""
    step = e.updates
    kinds = {kind: e.scale(kind) for kind in KEPT}
    sizes = {kind: abs(scale) for kind, (scale, spread) in kinds.items() if abs(scale) > 3 * spread}
    if not step or not sizes:
        return None
    kind = max(sizes, key=sizes.__getitem__)
    others = [abs(scale) for other, (scale, _) in kinds.items() if other != kind and scale]
    if others and sizes[kind] < UNLIKE * max(others):
        return None
    factor = math.exp(kinds[kind][0])
    return step, f"{kind} of {e.theirs.side} is {factor:.4g} times ours at the end, and what it is made of agrees"


def update(e: Evidence) -> Seen:
    step = e.updates
    if not step:
        return None
    agree = "loss, gradient norm and learning rate agree until then"
    applied = clip_applied(e)
    how = (
        f"{agree}, and at step {step + 1} the loss differs by {e.at('loss', step + 1):.2g}: "
        f"{'' if applied else 'clip, '}update rule, weight decay, or a learning rate that is not the logged one"
    )
    if applied:
        return step, f"{how}; clip and beta2 are as ours, by the sum of {SECOND}"
    limit, (norms, _) = e.ours.experiment.optimizer.clip, e.curves("grad_norm")
    first = limit and norms[step - 1] > limit and (norms[: step - 1] <= limit).all()
    return step, joined(how, f"the gradient norm first exceeds the clip of {limit:g} there" if first else "")


def narrower(e: Evidence) -> Seen:
    return (max(e.updates, 1), e.narrow) if e.narrow else None


def policy(e: Evidence) -> Seen:
    return (e.parting.step if e.parting else 1, e.costly) if e.costly else None


BACKWARD = ("activation_gradient", "gradient", "grad_norm")
UPDATED = ("weights", "ema")
CAUSES: tuple[Cause, ...] = (
    Cause("other batches", ("batch",), "loss", lambda e: e.fed_otherwise),
    Cause("other starting weights", ("start",), "starting weights|loss", other_start),
    Cause("learning rate", ("learning_rate",), "learning.rate", learning_rate),
    Cause("forward pass or loss", ("activation", "scalar", "loss"), "loss", forward),
    Cause("gradients", BACKWARD, "gradient|grad_norm", gradients),
    Cause("forward or backward pass", (), "gradient|grad_norm|loss", forward_or_backward),
    Cause("precision", UPDATED, "in less than", narrower),
    Cause("clip", ("clipped", *KEPT), "exp_avg|momentum", clip),
    Cause("weight decay", UPDATED, "weights", weight_decay),
    Cause("moments", KEPT, "exp_avg|momentum|_var|variance", moments),
    Cause("forward pass, backward pass or update", (), "cost to", hidden),
    Cause("update of the weights", UPDATED, "weights", update),
    Cause("precision", (), "cost to", policy),
)  # fmt: skip


def diagnose(e: Evidence) -> Diagnosis | None:
    """The cause that comes first: of several the one of the earliest step, then of the table's order.

    Where the first tensor that differs was found, it says which rows come into question.
    """
    rows = CAUSES
    if e.parting and e.parting.first and not e.costly:
        kind = e.parting.tensor.partition("/")[0]
        rows = tuple(row for row in CAUSES if kind in row.kinds)
    found = [(seen, row) for row in rows if (seen := row.seen(e))]
    if found:
        (step, how), row = min(found, key=lambda item: item[0][0])
        return Diagnosis(row.name, step, how, row.checks)
    return of_parting(e.parting) if e.parting and e.parting.first else None


def of_parting(parting: Parting) -> Diagnosis:
    """The cause that the first tensor which differs points to, where that is all that is known."""
    kind = parting.tensor.removeprefix("scalar/").partition("/")[0]
    row = next(row for row in reversed(CAUSES) if kind in row.kinds)
    return Diagnosis(row.name, parting.step, f"{parting.where} is the first that differs", row.checks)
