"""The cause of a difference, recognized by the step and the quantity in which two runs first differ.

Within a step the loss is computed before the gradient norm, and both before the update; so where the loss of step 1
differs under equal weights, the forward pass, the loss or the batch differs, and where only later losses do, the
update. Final weights and moments distinguish causes that curves can't. `causes` has a row for each cause, in the order
in which a run meets them.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxdist.config import EMA, state_kinds
from parity_tests.proof import digits
from parity_tests.proof.bisect import STAGES, Divergence
from parity_tests.proof.evidence import CLEARLY, NEVER, UPDATE, Evidence, Seen, far_from_the_start, joined
from parity_tests.proof.gradients import CLEAR, from_forward_pass, largest_differences
from parity_tests.runs import compare

FIRST, SECOND = "exp_avg", "exp_avg_sq"
SHIFTS = (1, -1, 2, -2)  # steps by which a schedule is tried to be ahead
FACTORS = range(2, 17)  # times that a schedule is tried to be stepped per step
ALONG = 0.9  # cosine from which a difference of weights is along the weights
UNLIKE = 5.0  # times that one moment differs more than the other
COUPLED = 3.0  # times our weight decay from which theirs is hardly another value of it
FORMULA = 10.0  # times that moments differ more than weights, where those differ by what moments made of them
EACH = 0.5  # of the largest logarithm of a factor of gradients, from where they have not one factor
FIELDS = {FIRST: "beta1", SECOND: "beta2", "momentum_buffer": "momentum"}  # what the moments are made with
LIKE = 0.1  # relative tolerance of a prediction
SEVERAL = 4  # update rules that are named beside each other
EXPLAINED = 32.0  # roundings of a narrower dtype that may be in the loss of a first step: of some sums of its numbers
ROUNDED = 1e-5  # relative error of a sum of squares in float32, or by the 1e-6 that torch adds to the norm it clips by


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


def spread_of(values: np.ndarray) -> tuple[float, float]:
    """The median, and the median distance from it."""
    middle = float(np.median(values))
    return middle, float(np.median(np.abs(values - middle)))


def other_start(e: Evidence) -> Seen:
    if e.first["loss"] > 1:
        return None
    if not (found := far_from_the_start(e)):
        if not (unlike := e.unlike_at_the_start):
            return None
        most = max(unlike, key=unlike.__getitem__)
        return (
            1,
            f"{e.theirs.side} started from other weights: {most} differs from the given one by {unlike[most]:.2g}",
        )
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
    only = "; the trained weights agree, so it is only logged differently" if e.trained == NEVER else ""
    return step, how + schedule(ours, theirs) + only


def schedule(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Relation of another schedule to ours, in words; empty where it is not a simple change."""

    def same(x: np.ndarray, y: np.ndarray) -> bool:
        return len(x) >= 3 and bool(np.allclose(x, y, rtol=1e-6, atol=0))

    for shift in SHIFTS:
        x, y = (ours[shift:], theirs[:-shift]) if shift > 0 else (ours[:shift], theirs[-shift:])
        if same(x, y):
            steps = f"{abs(shift)} step{'s' * (abs(shift) > 1)}"
            return f": their schedule is {steps} {'ahead' if shift > 0 else 'late'}"
    for factor in FACTORS:
        if same(ours[factor - 1 :: factor], theirs[: len(ours) // factor]):
            return f": their schedule advances {factor} steps a step"
    peak = int(np.argmax(np.abs(ours)))
    if ours[peak] and same(ours * (theirs[peak] / ours[peak]), theirs):
        return f": {theirs[peak] / ours[peak]:.6g} times ours at every step"
    return ""


def forward(e: Evidence) -> Seen:
    if e.other_model:
        return 1, e.other_model
    if e.fed_otherwise:
        return None
    if e.first["loss"] > 1:  # then gradients may show it, if rounding may hide it
        if not e.rounding or not from_forward_pass(e.at_first):
            return None
        how = (
            f"{agreeing(e)}, and {largest_differences(e.at_first)}; it is one that no backward pass of a layer reaches"
        )
        return 1, joined(how, e.unless_the_start)
    if_so = "from" if e.same_start else f"if {e.theirs.side} began with the given weights, then from"
    how = f"{if_so} equal weights and batches the loss differs by {e.at('loss', 1):.2g}"
    if e.first["grad_norm"] == NEVER and e.agrees_at_the_end:
        return 1, f"{how}, and the trained weights agree, so it is only logged differently"
    least = float(e.bounds["loss"][0])
    if e.rounding and e.at("loss", 1) < CLEAR * least:
        how += f", less than {CLEAR:g} times the {least:.1g} that rounding explains: a run in fp64 decides it"
    parts = e.ours.experiment.train.accumulation
    if parts > 1 and not e.batch_search.own:
        how += f"; with {parts} microbatches of unequal numbers of tokens, a mean of their means is such a loss"
    return 1, joined(how, e.batch_search.remark, e.unless_the_start)


def agreeing(e: Evidence) -> str:
    """Agreement of the loss of step 1, in words."""
    return f"the loss of step 1 agrees to the {e.rounding:.1g} that rounding may hide"


def gradients(e: Evidence) -> Seen:
    step = e.first["grad_norm"]
    if step >= e.first["loss"] or e.slightly:
        return None
    step = int(step)
    how = f"the loss agrees and the gradient norm differs by {e.at('grad_norm', step):.2g}"
    if e.first["loss"] == NEVER and e.agrees_at_the_end:
        return step, f"{how}, and the trained weights agree, so only the norm is computed or logged differently"
    ours, theirs = e.curves("grad_norm")
    ratios = theirs[step - 1 :] / ours[step - 1 :]
    if np.ptp(ratios) < 1e-3 * abs(ratios[0] - 1):
        return step, f"{how}: all are {ratios[0]:.6g} times ours"
    if which := largest_differences(e.multiples(step)):
        return step, joined(f"{how}: {which}", str(e.alone or ""))
    if e.alone:
        return step, f"{how}: {e.alone}"
    parts = e.ours.experiment.train.accumulation
    several = f", the sum over {parts} microbatches and its dtype" if parts > 1 else ""
    carried = "; step 1 agrees, so gradients of the step before may not have been set to zero" if step == 2 else ""
    tied = e.ours.experiment.model.tied
    apart = ", a head that does not share the embedding's weights (model.tied = true)" if tied else ""
    return step, f"{how}: backward pass{several}{apart}, a loss that is added, or the norm itself{carried}"


def forward_or_backward(e: Evidence) -> Seen:
    """Gradients of step 1 differ, or slightly their norm, where rounding may hide a difference of the loss."""
    if not e.rounding or e.first["loss"] == 1 or e.fed_otherwise:
        return None
    which = largest_differences(e.at_first)
    if not which and (e.first["grad_norm"] > 1 or not e.slightly):
        return None
    norm = f"the gradient norm differs by {e.at('grad_norm', 1):.2g}"
    how = f"{agreeing(e)}, and {which or norm}; a run in fp64 shows whether the forward pass differs"
    return 1, joined(how, str(e.alone or e.unless_the_start))


def hidden(e: Evidence) -> Seen:
    """The difference is too small for the curves to show where it began, and gradients of step 1 were not recorded."""
    if not e.rounding or e.same_at_first:
        return None
    step = e.updates + 1
    if e.updates and (e.slightly or e.at("loss", step) < CLEARLY * e.rounding):
        where = f"the {'gradient norms' if e.slightly else 'losses'} differ from step {step}"
    elif e.trained == NEVER == e.first["learning_rate"] and not e.agrees_at_the_end:
        where = "the final states differ"
    else:
        return None
    how = f"{where}, and {agreeing(e)}; its gradients, if kept, or a run in fp64, show which it is"
    return max(e.updates, 1), joined(how, str(e.alone or e.unless_the_start))


def clip(e: Evidence) -> Seen:
    """Adam's moments are those of gradients without the clip, or of ours times one factor, or one for each tensor.

    That the clip is first reached at the step is no evidence: other mistakes begin there too.
    """
    step = e.updates
    if not step or (applied := clip_applied(e)):
        return None
    limit = e.ours.experiment.optimizer.clip
    if applied is False:
        return step, f"{SECOND} of {e.theirs.side} adds up as if the clip of {limit:g} were not applied"
    first, second = e.sizes(FIRST), e.sizes(SECOND)
    names = [name for name in first.keys() & second.keys() if not name.endswith(e.zero_gradients)]
    if not names:
        return None
    m, v = (np.array([kind[name] for name in names]) for kind in (first, second))
    far = min(e.difference(FIRST), e.difference(SECOND)) > FORMULA * e.difference("weights")
    squared = compare.rms(v - 2 * m) < 0.3 * compare.rms(m)
    middle, spread = spread_of(m)
    if far and (squared or step == 1) and np.ptp(m) > EACH * np.abs(m).max():  # Adam's first update is one for any beta
        factor = f"{math.exp(m.min()):.4g} to {math.exp(m.max()):.4g}"
    elif squared and abs(middle) > 3 * spread:
        factor = f"{math.exp(middle):.4g}"
    else:
        return None
    how = f"the gradients that the optimizer of {e.theirs.side} gets are {factor} times ours, by its moments"
    if not limit or e.curves("grad_norm")[0].max() <= limit:
        return step, f"{how}, and the clip of ours was never reached: their scale differs"
    if e.alone:
        return step, f"{how}: {e.alone}"
    each = ": numbers, tensors or groups may be clipped separately" if " to " in factor else ""
    return step, f"{how}{each}"


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
    if not step or not rates:
        return None
    decay = e.ours.experiment.optimizer.weight_decay
    shares: dict[str, float] = {}  # of itself, by which a tensor differs along itself
    vectors: dict[str, float] = {}  # one of ones does whatever moves it: by decay, of which ours have none, all do
    for name, x, y in e.states("weights"):
        off, size = y - x, float(np.vdot(x, x))
        along = float(np.vdot(off, x))
        if x.ndim < 2 and np.any(e.start.get(f"weights/{name}", 0)):
            vectors[name] = along / size
        elif x.ndim >= 2 and abs(along) > ALONG * math.sqrt(size) * np.linalg.norm(off):
            shares[name] = along / size
    if all(abs(share / rates / (decay or 1) + 1) < LIKE for share in vectors.values()):
        shares |= vectors
    if not shares:
        return None
    name, share = max(shares.items(), key=lambda item: abs(item[1]))
    how = (
        f"{name} of {e.theirs.side} differs at the end along itself, as by a decay that is {abs(share) / rates:.2g} "
        f"{'less' if share > 0 else 'more'} than ours, where optimizer.weight_decay = {decay:g}"
    )
    coupled = "so far, it may be added to the gradient (coupled, L2), which Adam divides by the size of gradients"
    return step, joined(how, coupled if share < -COUPLED * rates * decay else "")


def moments(e: Evidence) -> Seen:
    """One kind of moments differs far more than the other, or both do far more than the weights: the formula does."""
    step = e.updates
    found = {kind: off for kind in state_kinds() if kind != EMA and (off := e.difference(kind))}
    if not step or not found:
        return None
    most = max(found, key=found.__getitem__)
    other = max((off for kind, off in found.items() if kind != most), default=0.0)
    if other and found[most] > UNLIKE * other:
        found = {most: found[most]}
    elif min(found.values()) < FORMULA * e.difference("weights"):
        return None
    names = [f"{kind} (optimizer.{field})" if (field := FIELDS.get(kind)) else kind for kind in found]
    sizes = " and ".join(f"{off:.2g}" for off in found.values())
    rest = f"the other by {other:.2g}" if len(found) == 1 and other else f"weights by {e.difference('weights'):.2g}"
    return (
        step,
        f"{' and '.join(names)} of {e.theirs.side} differ{'s' * (len(found) == 1)} by {sizes} at the end, {rest}",
    )


def by_rule(cause: str, seen: Callable[[Evidence], Seen]) -> Callable[[Evidence], Seen]:
    """A row of `cause` that an update rule proves where it was identified, and excludes where another cause's was."""

    def shown(e: Evidence) -> Seen:
        if not e.rules.found:
            return seen(e)
        if e.rules.cause not in ("", cause) or (not e.rules.cause and cause != UPDATE):
            return None
        names = [name for name, _ in e.rules.found]
        some = " or ".join(names) if len(names) <= SEVERAL else f"by any of {len(names)} rules, as {names[0]}"
        how = f"an update {some} gives the losses and gradient norms of {e.theirs.side}, where ours does not"
        more = seen(e) if cause != UPDATE else None
        return e.updates, joined(how, more[1] if more else "")

    return shown


def update(e: Evidence) -> Seen:
    step = e.updates
    if not step or (e.rounding and e.slightly and not e.same_at_first):
        return None
    agree = "loss, gradient norm and learning rate agree until then"
    applied = clip_applied(e)
    field, curve = ("grad_norm", "gradient norm") if e.slightly else ("loss", "loss")
    how = (
        f"{agree}, and at step {step + 1} the {curve} differs by {e.at(field, step + 1):.2g}: "
        f"{'' if applied else 'clip, '}update rule (eps, bias correction), weight decay, "
        "or a learning rate that is not the logged one"
    )
    if e.rules.tried:
        near = f"; only the first update is as one {' or '.join(e.rules.near[:SEVERAL])}" if e.rules.near else ""
        how += f"; none of {e.rules.tried} other rules tried gives their losses{near}"
    if applied:
        return step, f"{how}; clip and beta2 are as ours, by the sum of {SECOND}"
    limit, (norms, _) = e.ours.experiment.optimizer.clip, e.curves("grad_norm")
    first = limit and norms[step - 1] > limit and (norms[: step - 1] <= limit).all()
    return step, joined(how, f"the gradient norm first exceeds the clip of {limit:g} there" if first else "")


def recorded(e: Evidence) -> Seen:
    """In a narrower dtype than the config says: what the first step computes, or its weights."""
    groups = [narrow for narrow in e.recorded.values() if not narrow.moments_only]
    if not groups:
        return None
    if e.trained == NEVER:
        return 1, f"{dtypes(e)}; losses and gradient norms agree, so it is only recorded so"
    most = EXPLAINED * max(digits.ROUNDING[dtype] for narrow in groups for dtype in narrow.kinds)
    off = e.at("loss", 1) if "loss" in e.apart else 0.0
    return 1, joined(dtypes(e), f"the loss of step 1 differs by {off:.2g}, more than that explains" * (off > most))


def dtypes(e: Evidence) -> str:
    """Text on tensors of theirs that are recorded in a narrower dtype than the config says."""
    found = [f"{narrow}, config says {narrow.dtype}" for narrow in e.recorded.values()]
    return f"{e.theirs.side} recorded {'; '.join(found)}" if found else ""


def narrower(e: Evidence) -> Seen:
    how = joined(dtypes(e), e.narrow)
    return (max(e.updates, 1), how) if how else None


def policy(e: Evidence) -> Seen:
    return (e.divergence.step if e.divergence else 1, e.costly) if e.costly else None


BACKWARD = ("activation_gradient", "gradient", "grad_norm")
UPDATED = ("weights", "ema")


def causes() -> tuple[Cause, ...]:
    """The causes, in the order in which a run meets them; of the state of every optimizer that is registered."""
    kept = state_kinds()
    moments_of = "|".join(re.escape(kind) for kind in kept if kind != EMA)
    return (
        Cause("precision", tuple(STAGES), "or wider", recorded),
        Cause("other batches", ("batch",), "loss", lambda e: e.fed_otherwise),
        Cause("other starting weights", ("start",), "starting weights|loss", other_start),
        Cause("learning rate", ("learning_rate",), "learning.rate", learning_rate),
        Cause("forward pass or loss", ("activation", "scalar", "loss"), "loss|model\\.", forward),
        Cause("gradients", BACKWARD, "gradient|grad_norm", gradients),
        Cause("forward or backward pass", (), "gradient|grad_norm|loss", forward_or_backward),
        Cause("precision", UPDATED, "or wider", narrower),
        Cause("clip", ("clipped", *kept), "exp_avg|momentum", by_rule("clip", clip)),
        Cause("moments", kept, moments_of, by_rule("moments", moments)),
        Cause("weight decay", UPDATED, "weights", by_rule("weight decay", weight_decay)),
        Cause("forward pass, backward pass or update", (), "cost to", hidden),
        Cause(UPDATE, UPDATED, "weights", by_rule(UPDATE, update)),
        Cause("precision", (), "cost to", policy),
    )  # fmt: skip


def diagnose(e: Evidence) -> Diagnosis | None:
    """The cause that comes first: of several the one of the earliest step, then of the table's order.

    Where the first tensor that differs was found, it says which rows come into question.
    """
    rows = causes()
    if e.divergence and e.divergence.first and not e.costly:
        kind = e.divergence.tensor.partition("/")[0]
        rows = tuple(row for row in rows if kind in row.kinds)
    found = [(seen, row) for row in rows if (seen := row.seen(e))]
    if found:
        (step, how), row = min(found, key=lambda item: item[0][0])
        return Diagnosis(row.name, step, how, row.checks)
    return cause_of(e.divergence) if e.divergence and e.divergence.first else None


def cause_of(divergence: Divergence) -> Diagnosis:
    """The cause that the first tensor which differs points to, where that is all that is known."""
    kind = divergence.tensor.removeprefix("scalar/").partition("/")[0]
    row = next(row for row in reversed(causes()) if kind in row.kinds)
    return Diagnosis(row.name, divergence.step, f"{divergence.where} is the first that differs", row.checks)
