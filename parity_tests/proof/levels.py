"""The five levels of a proof: what is asked of a pair of runs, as checks with bounds and where these come from."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdist.config import Experiment
from jaxdist.config.optimizer import EMA, REDUCED_DIMS
from parity_tests.expected.collectives import Counts
from parity_tests.expected.memory_model import Scratch, state
from parity_tests.proof.digits import ROUNDING, Narrow
from parity_tests.proof.verdict import Check
from parity_tests.runs import compare
from parity_tests.runs.compare import K
from parity_tests.runs.names import STATISTICS
from parity_tests.runs.run import Run

Pair = tuple[Run, Run]
Tensors = Mapping[str, np.ndarray]

EXACT = "float64: both sides round alike to 1e-15, and no planted mistake is smaller"
AMPLIFIED = f"{K} times what a change of the starting weights by 64 roundings has become by then"
# By level, the widest bound within which runs are called the same. In float64 the smallest of `cases.MISTAKES` moves a
# loss by 3e-5. In float32 a clip that is 0.1 % wider moves first moments by 1e-3, and training does not amplify that.
WIDEST = {"mathematics": 1e-6, "distribution": 1e-6, "precision": 1e-3}
# A policy in less has none: its noise is more from the first step on, and the verdict says what that may hide.
WIDEST_NOISY = {level: limit for level, limit in WIDEST.items() if level != "precision"}
NUMBERS = 256  # bytes of the few scalars that cross devices
COUNTED = (
    "one a parameter or block each time it is needed, and a few single numbers (parity_tests/expected/collectives.py)"
)
DELICATE = "float32 at least, whatever the policy: less loses accuracy that the noise of bfloat16 hides"
# The effect of a policy on a loss drifts from step to step, on either side by chance. In 312 pairs of equal runs in
# each precision (8 steps; 39 seeds, 2 families, 4 meshes; pairs of one seed are much alike) ratios of the mean squares
# fit F with 3 to 4 degrees of freedom on either side in float32 and 5 in bfloat16; the largest was 12.6, as a ratio of
# roots. F(3, 3) exceeds this, either way, once in 10,000 times.
DRIFT = 32.0
# Largest ratio of the sides' losses in first gradients and weights. Chosen: those pairs reached 1.8 in bfloat16 and 15
# in float32, where planted mistakes begin at 19 and 1,400. Later gradients, and moments, their means, are drift in any
# policy: of 1,968 equal pairs one reached 4.3 in bfloat16, and 6.6 with reordered sums.
LIMIT = {"float32": DRIFT, "bfloat16": 4.0, "float16": 4.0}
OFFLOADED = {"parameters": "parameters", "optimizer": "optimizer_state"}  # of memory.offload, in summary.json
COUNTS_STAY = "parameters and Adam's moments as stored; optax's counts of steps stay on the device"
JUDGED = ("loss", "grad_norm")  # curves that have a cost; the learning rate is a formula's
FEWEST = 4  # steps of which a curve's cost is judged: that of one step may be next to nothing by chance
LOSES = "times what the other side loses, each against its own float64 run; chosen between equal runs and mistakes"
ALONE = "times what ours loses against the same float64 run; chosen between equal runs and mistakes"
DRIFTS = "times what the other side loses, twice a number by chance: F(3, 3) exceeds it once in 10,000 times"
COMPUTED = "softmax, norms, rotation and loss"
DIGITS = "among thousands of values of a dtype, hardly any is exactly representable in a narrower one by chance"
LONGER = "prove more steps or a larger learning rate, or give a run of it in fp64"
UNEQUAL = "NaN and infinity are equal to nothing"
SCHEDULE = "learning rate of the whole schedule"
SCALED = "powers of their factors: an overflow on one side alone is one within rounding of the largest number"
WEIGHTS = "weights at the end"
GRADIENTS = "cost to gradients at step "
ROUNDED = "weights that rounding alone moves at the end"
AVERAGES, RUNNING = f"{EMA} at the end", "running statistics at the end"
AT_ONCE = ("gradients at step 1", WEIGHTS, AVERAGES, RUNNING)  # what no drift of a few numbers decides
RATE = f"{K} roundings of float32, of the highest rate: the formula's angle, cosine, factor and product"


@dataclass(frozen=True)
class Noise:
    """Growth of rounding in float64: the distance of a run from one whose starting weights were perturbed by rounding.

    Training amplifies rounding, some configs by orders of magnitude within 20 steps. A bound that does not know it
    would call equal runs different.
    """

    run: Run
    perturbed: Run

    def curve(self, field: str) -> np.ndarray:
        """Largest relative difference of a field of metrics.jsonl until each step, times K, and at least its floor."""
        until = np.maximum.accumulate(compare.curve(self.run.metrics, self.perturbed.metrics, field))
        return np.maximum(K * until, compare.FLOOR[field])

    def gradients(self, step: int) -> dict[str, float]:
        """Bound on the difference of each gradient of a recorded step."""
        return self._bounds(self.run.kept("gradient", step), self.perturbed.kept("gradient", step))

    def states(self, kind: str) -> dict[str, float]:
        """Bound on the difference of each of the final weights or moments."""
        return self._bounds(self.run.kept_states(kind), self.perturbed.kept_states(kind))

    def most(self, step: int) -> float:
        """Bound on any tensor of a step: the largest of the gradients recorded at this step or the next recorded
        one."""
        recorded = min((s for s in self.run.gradient_steps if s >= step), default=0)
        return max(self.gradients(recorded).values(), default=compare.STATE)

    def _bounds(self, a: Tensors, b: Tensors) -> dict[str, float]:
        return compare.amplified(compare.states(a, b, self.run.zero_gradients))


def agreement(level: str, what: str, a: Run, b: Run, noise: Noise) -> Iterator[Check]:
    """Curves, gradients and final states of two float64 runs, and the learning rates of steps that were not run."""

    def check(
        name: str, value: float, bound: float, widest: float, floor: float = compare.STATE, of: str = ""
    ) -> Check:
        return Check(level, name, value, bound, EXACT if bound <= floor else AMPLIFIED, what, of, widest)

    def closest(name: str, differences: Mapping[str, float], bounds: Mapping[str, float]) -> Check:
        tensor, value, bound = compare.closest(differences, bounds)
        return check(name, value, bound, max(bounds.values(), default=0.0), of=tensor.partition("/")[2])

    for name, floor in compare.FLOOR.items():
        bounds = noise.curve(name)
        value, bound = compare.furthest(compare.curve(a.metrics, b.metrics, name), bounds)
        yield check(name, value, bound, float(bounds.max()), floor)
    yield from scaling(level, what, a, b)
    schedules = [run.summary["schedule"] for run in (a, b) if "schedule" in run.summary]
    if len(schedules) == 2 and any(schedules):
        rates = [{s: np.array(rate) for s, rate in schedule.items()} for schedule in schedules]
        when, value = compare.worst(compare.states(rates[0], rates[1]))
        floor = compare.FLOOR["learning_rate"]
        yield check(SCHEDULE, value, floor, floor, floor, f"step {when}")
    for step in sorted({*a.gradient_steps, *b.gradient_steps}):
        gradients = compare.states(a.kept("gradient", step), b.kept("gradient", step), a.zero_gradients)
        yield closest(f"gradients at step {step}", gradients, noise.gradients(step))
    for kind in a.state_kinds:
        if states := compare.states(a.kept_states(kind), b.kept_states(kind), a.zero_gradients):
            yield closest(f"{kind} at the end", states, noise.states(kind))


def too_wide(checks: Iterable[Check], limits: Mapping[str, float] = WIDEST) -> dict[str, str]:
    """Levels that cannot be decided, as equal runs may differ by more than a mistake moves them, with the reason."""
    found = {}
    for level, limit in limits.items():
        widest = max((c for c in checks if c.level == level), key=lambda check: check.widest, default=None)
        if widest and limit < widest.widest < float("inf"):
            found[level] = (
                f"training amplifies rounding so far that equal runs may differ by {widest.widest:.1g} in {widest.key}"
                f", where more than {limit:g} could be a mistake; prove fewer steps, or with a smaller learning rate"
            )
    return found


def judged_until(checks: Iterable[Check]) -> int:
    """The last step whose gradients, and the updates before it, no rounding hides at the precision level; else 0."""
    narrow = (c.name for c in checks if c.level == "precision" and c.widest <= WIDEST["precision"])
    return max((int(name.removeprefix(GRADIENTS)) for name in narrow if name.startswith(GRADIENTS)), default=0)


def hardly_moved(policy: Pair, double: Pair, start: Tensors, decay: float, still: Collection[str] = ()) -> str:
    """Why the weights of a float32 run that is all there is of the other side decide nothing; empty where they do."""
    moved = compare.length(w - start[n] for n, w in vectors(double[0], still)[WEIGHTS].items())
    decayed = decay * rates_of(double[0])
    return too_little(may_differ(policy, double, still), moved, decayed * smallest(start.values()))


def may_differ(policy: Pair, double: Pair, still: Collection[str] = ()) -> float:
    """The norm by which weights of a float32 run that is all there is of the other side may differ from those of our
    float64 run."""
    ours, exact = (vectors(run, still)[WEIGHTS] for run in (policy[0], double[0]))
    cost = max(compare.joint_error(ours, exact), ROUNDING["float32"])
    return LIMIT["float32"] * cost * compare.length(exact.values())


def rates_of(run: Run) -> float:
    """The sum of its learning rates: times the decay, the share of itself by which weight decay moves a tensor."""
    return float(sum(record["learning_rate"] for record in run.metrics))


def decay_hidden(policy: Pair, double: Pair, start: Tensors, decay: float, still: Collection[str] = ()) -> list[str]:
    """Kinds of tensors, by name without the layer, whose weight decay such a run may leave out, or add, unseen."""
    kinds: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    for name, tensor in start.items():
        kinds[re.sub(r"\.\d+\.", ".", name.partition("/")[2])].append(tensor)
    decayed, allowed = decay * rates_of(double[0]), may_differ(policy, double, still)
    return [kind for kind, tensors in kinds.items() if 0 < decayed * compare.length(tensors) <= allowed]


def smallest(tensors: Collection[np.ndarray]) -> float:
    """The norm of all matrices or of all vectors, whichever is less: decay may be left out of either, or none's be."""
    parts = [[w for w in tensors if (w.ndim >= 2) is matrices] for matrices in (True, False)]
    return min((size for part in parts if (size := compare.length(part))), default=0.0)


def too_little(apart: float, moved: float, decayed: float) -> str:
    """Reason why weights decide nothing if equal runs may be `apart` by that much; "" if they decide. All are norms.

    A difference of weights is relative to their size, of which fine-tuning moves a thousandth, and weight decay a
    millionth. So the tolerance between equal runs is compared with these: 1e-3 of what training `moved`, and all that
    decay moved, or would have moved, of matrices or of vectors.
    """
    limit = WIDEST["precision"]
    small = f"training moved the weights so little that equal runs may differ in them by {apart:.1g}"
    if apart > limit * moved:
        share = apart / moved if moved else float("inf")
        return f"{small}, {share:.1g} of what they moved, where {limit:g} of it could be a mistake; {LONGER}"
    if decayed and apart > decayed:
        return f"{small}, where weight decay left out, or where none belongs, is {decayed:.1g}; {LONGER}"
    return ""


def within_noise(other: Run, ours: Run, exact: Run, still: Collection[str] = ()) -> bool:
    """Whether `other`, a float64 run unlike `exact` in one field, leaves it in nothing by more than float32 may hide.

    What ours loses, another run may lose as many times as the level allows, or that much the other way.
    """

    def hides(moved: float, cost: float, limit: float) -> bool:
        return moved < 2 * limit * max(cost, ROUNDING["float32"])

    moved, costs = (apart(run, exact, still) for run in (other, ours))
    curves = [lost((other, ours), (exact, exact), field) for field in JUDGED]
    return all(hides(x, costs[name], LIMIT["float32"]) for name, x in moved.items() if name in costs) and all(
        hides(x, y, DRIFT) for x, y in curves
    )


def vectors(run: Run, still: Collection[str] = ()) -> dict[str, Tensors]:
    """All tensors of a kind that a run has, to be compared as one vector.

    Weights whose names end in one of `still`, of a true gradient of zero, are one of their own: rounding moves them, by
    Adam as far as training moves others.
    """
    found = {f"gradients at step {step}": run.kept("gradient", step) for step in run.gradient_steps}
    states = {kind: run.kept_states(kind) for kind in run.state_kinds}
    running = {name: w for name, w in states["weights"].items() if name.endswith(STATISTICS)}
    states["weights"] = {name: w for name, w in states["weights"].items() if name not in running}
    rounded = {name: w for name, w in states["weights"].items() if name.endswith(tuple(still))}
    states["weights"] = {name: w for name, w in states["weights"].items() if name not in rounded}
    found |= {f"{kind} at the end": tensors for kind, tensors in states.items()}
    found |= {ROUNDED: rounded, RUNNING: running}
    return {name: tensors for name, tensors in found.items() if tensors}


def apart(a: Run, b: Run, still: Collection[str] = ()) -> dict[str, float]:
    """Relative distances of two runs in everything that `a` has."""
    theirs = vectors(b, still)
    return {name: compare.joint_error(tensors, theirs.get(name, {})) for name, tensors in vectors(a, still).items()}


def lost(policy: Pair, double: Pair, field: str = "loss") -> tuple[float, float]:
    """Effect of a policy on a curve, root mean square over the steps, on either side."""

    def moved(run: Run, run64: Run) -> float:
        return compare.rms(compare.curve(counted(run), counted(run64, run), field))

    x, y = (moved(*pair) for pair in zip(policy, double, strict=True))
    return x, y


def precision(
    policy: Pair, double: Pair, compute: str, still: Collection[str] = (), rounding: float = 0.0
) -> Iterator[Check]:
    """Cost of the policy on either side, against the other's cost; no checks if the policy is float64.

    Where the other side has no float64 run of its own, both are held against ours, and only what it loses more counts.
    `rounding`: of the dtype that a side computes in whatever it is given, if it does.
    """
    (a, b), (a64, b64) = policy, double
    if compute == "float64":
        return
    alone = b64 is a64

    def cost(name: str, x: float, y: float, limit: float, why: str) -> Iterator[Check]:
        # At least a rounding: a side whose float64 run is narrow within loses nothing against it.
        x, y = (max(loss, ROUNDING["float32"], rounding) for loss in (x, y))
        least, most = (x, y) if alone else (min(x, y), max(x, y))
        widest = 0.0 if name == ROUNDED else limit * least
        of = (b if most is y else a).side
        yield Check("precision", f"cost to {name}", most / least, limit, why, of=of, widest=widest)

    yield from scaling("precision", "", a, b)
    costs, others = apart(a, a64, still), apart(b, b64, still)
    for name, x in costs.items():
        limit = LIMIT[compute] if name in AT_ONCE else DRIFT
        yield from cost(name, x, others.get(name, float("inf")), limit, ALONE if alone else LOSES)
    for field in compare.FLOOR:
        if any(all(record[field] is None for record in counted(run)) for run in policy):
            continue  # steps of a user's own return the loss alone
        if field == "learning_rate":
            yield from rates(policy, double)
        elif min(len(counted(run)) for run in policy) >= FEWEST:
            yield from cost(field, *lost(policy, double, field), DRIFT, DRIFTS)


def float_bounds(ours: Run, exact: Run, compute: str) -> dict[str, np.ndarray]:
    """Bound on each curve of a run in `compute` against our float64 run, per step, to find where it first differs: K
    times our largest loss of accuracy up to then, or in the first few steps, since one step may lose little by
    chance."""
    found = {}
    for field in compare.FLOOR:
        lost = compare.curve(ours.metrics, exact.metrics, field)
        until = np.maximum.accumulate(lost)
        found[field] = K * np.maximum(np.maximum(until, lost[:FEWEST].max()), ROUNDING[compute])
    return found


def counted(run: Run, as_of: Run | None = None) -> list[dict[str, Any]]:
    """The metrics of the steps that did not overflow, in this run or in another."""
    return [record for record in run.metrics if record["step"] not in (as_of or run).overflown]


def scales_differ(a: Run, b: Run) -> list[int]:
    """The steps of which two scaled runs have another loss scale, or which one of them alone passed over for it."""
    scales = [[(r.get("loss_scale"), r["step"] in run.overflown) for r in run.metrics] for run in (a, b)]
    return [step for step, (x, y) in enumerate(zip(*scales, strict=False), start=1) if x != y]


def scaling(level: str, what: str, a: Run, b: Run) -> Iterator[Check]:
    """The loss scale and the steps passed over for it, which both sides must have alike; nothing where one has none."""
    if all(any(r.get("loss_scale") is not None for r in run.metrics) for run in (a, b)):
        differ = scales_differ(a, b)
        of = f"step {differ[0]}" if differ else ""
        yield Check(level, "loss scale, equal at every step", len(differ), 0, SCALED, what, of)


def rates(policy: Pair, double: Pair) -> Iterator[Check]:
    """The learning rate of each side, which is a formula's and knows no noise."""
    for run, run64 in zip(policy, double, strict=True):
        rates, exact = (np.array([record["learning_rate"] for record in r.metrics]) for r in (run, run64))
        bound = K * ROUNDING["float32"] * float(exact.max())
        yield Check("precision", f"{run.side}, learning_rate", compare.absolute(rates, exact), bound, RATE)


def numbers(run: Run) -> Check:
    """Check that curves and recorded tensors are finite, including those that nothing else compares."""
    found = list(run.no_numbers())
    return Check("precision", f"{run.side}, all values finite", len(found), 0, UNEQUAL, of=", ".join(found[:3]))


def digits(side: str, narrow: Narrow) -> Check:
    """Tensors or curves that are all numbers of a narrower dtype than they are kept in: no noise makes them so."""
    name = f"{side}, {narrow.group} in {narrow.dtype} or wider"
    return Check("precision", name, sum(map(len, narrow.kinds.values())), 0, DIGITS, of=str(narrow))


def arithmetic(run: Run, compute: str) -> Iterator[Check]:
    """The dtypes of softmax, norms, rotation and loss; of a loop that does not report them nothing is known."""
    if dtypes := run.summary.get("arithmetic"):
        least = "float64" if compute == "float64" else "float32"
        narrow = [
            f"{function} in {dtype}" for function, dtype in dtypes.items() if ROUNDING.get(dtype, 1) > ROUNDING[least]
        ]
        name = f"{run.side}, {COMPUTED} in {least} or wider"
        yield Check("precision", name, len(narrow), 0, DELICATE, of=", ".join(narrow))


def reordering(policy: Pair, reordered: Pair) -> tuple[float, float]:
    """Effect of reordered sums on either side's loss, root mean square over the steps."""
    x, y = (compare.rms(compare.curve(a.metrics, b.metrics, "loss")) for a, b in zip(policy, reordered, strict=True))
    return x, y


def memory(a: Run, b: Run, experiment: Experiment) -> Iterator[Check]:
    """Bytes that the fullest device holds of each kind, torch's against JAX's, less the causes known by name."""
    parallel = experiment.parallel
    mesh = a.mesh
    over_experts, t = mesh["fsdp"] * mesh["context"], mesh["tensor"]
    n = over_experts * mesh["expert"]
    item = np.dtype(experiment.precision.parameters).itemsize
    tensors = [w for name, w in b.kept_states("weights").items() if not name.endswith(STATISTICS)]
    padding = sum(w[0].size for w in tensors if w.ndim < 3 and len(w) % (n * t)) * item  # experts are cut evenly
    if parallel.row.optimizer:  # FSDP2 splits the bias of a head that no mesh divides, ours replicates it
        padding += sum(w.size for name, w in b.kept_states("weights").items() if name == "weights/head.bias") * item
    largest = max(w.size for w in tensors) * item
    experts = sum(w.size for w in tensors if w.ndim == 3) * item / (mesh["expert"] * t)

    share = {"parameters": 1, "gradients": 1, "optimizer_state": 1}
    kept = len(experiment.optimizer.kept)
    bound = {"parameters": padding, "gradients": padding, "optimizer_state": kept * padding + 8 * len(tensors)}
    why = dict.fromkeys(share, "FSDP2 splits between rows: up to one more for each tensor whose rows do not divide")
    why["optimizer_state"] += "; torch counts steps in 4 to 8 bytes a tensor, optax in 8 for all"
    if parallel.row.gradients and not parallel.row.parameters:
        share["parameters"] = n
        why["parameters"] += "; FSDP2's zero2 keeps 1/fsdp of them at rest, ours all"
    if not parallel.row.replicates and parallel.once and experiment.train.accumulation == 1:
        share["gradients"] = n
        why["gradients"] += "; FSDP2 keeps nothing unsharded for a single microbatch"
    if parallel.row.splits_update:
        bound["optimizer_state"] += kept * largest
        why["optimizer_state"] += "; ZeroRedundancyOptimizer assigns full tensors to ranks"
    if factors := sum(w.size for kind in REDUCED_DIMS for w in b.kept_states(kind).values()) * item:
        bound["optimizer_state"] += factors
        why["optimizer_state"] += "; a factor of a matrix is replicated where its other dimension is split"
    running = sum(name.endswith(STATISTICS) for name in b.kept_states("weights"))
    if running and "statistics" in b.memory:
        share["statistics"], bound["statistics"] = 1, 4 * running // len(STATISTICS)
        why["statistics"] = "torch counts batches in 8 bytes, JAX in 4; all else of them is replicated"
    stages, elsewhere = mesh["pipeline"], ends_elsewhere(b, n * t) * item
    waits = stages > 1 and not parallel.row.replicates and experiment.train.accumulation > 1
    if stages > 1:
        why |= {
            kind: f"{reason}; a torch rank holds the embedding or head only where it uses it"
            for kind, reason in why.items()
        }
    if waits and not parallel.once:
        why["gradients"] += "; FSDP2 below a pipeline's schedule keeps them unsharded until the end of the step"
    for kind, parts in share.items():
        jax, torch = a.summary["memory"][kind], b.summary["memory"][kind]
        if stages > 1:
            jax -= elsewhere * (kept if kind == "optimizer_state" else 1)
        if waits and parallel.reduce != "step" and kind == "gradients":
            torch /= n
        if parts > 1:
            jax = (jax - experts) / parts + experts / over_experts
        yield Check("memory", f"{kind}, equal bytes on both sides", abs(jax - torch), float(bound[kind]), why[kind])
    offloaded = [kind for name, kind in OFFLOADED.items() if name in experiment.memory.offload]
    for run in (run for run in (a, b) if run.summary["memory"].get("host") is not None):  # a loop of one's own may not
        held = run.summary["memory"]
        elsewhere = abs(held["host"] - sum(held[kind] for kind in offloaded))
        yield Check("memory", f"{run.side}, host, bytes match memory.offload", elsewhere, NUMBERS, COUNTS_STAY)


def ends_elsewhere(run: Run, ways: int) -> float:
    """Numbers of what is outside of the layers that a pipeline's fullest rank of torch has not, and JAX's devices have:
    of the first rank's embedding and positions and the last one's norm and head it has the larger part."""
    tied = run.experiment.model.tied
    sizes = {n.partition("/")[2]: w.size for n, w in run.kept_states("weights").items()}
    first, last = (
        sum(size for name, size in sizes.items() if name.partition(".")[0] in names)
        for names in (("embed", "positions"), ("norm", "lm_head", *(("embed",) if tied else ())))
    )
    all_ends = sum(size for name, size in sizes.items() if not name.startswith("layers."))
    return (all_ends - max(first, last)) / ways


def peak(run: Run, scratch: Scratch) -> Iterator[Check]:
    """The most bytes that a device holds within a step, against the closed form of what a step takes."""
    held = run.summary["memory"]
    if held.get("peak"):
        why = "its parameters and moments, a step's memory by the closed form with working arrays twice, and 5 %"
        yield Check("memory", f"{run.side}, peak, bytes", held["peak"], state(held) + scratch.most(run.side), why)


def sent(run: Run) -> dict[str, float]:
    """Bytes per step by mesh axis; what crosses several at once is counted as the first's."""
    total: dict[str, float] = {}
    for collective in run.summary["collectives"]:
        axis = compare.billed(collective["axis"])
        total[axis] = total.get(axis, 0) + collective["bytes"]
    return total


def traffic(
    run: Run, least: Mapping[str, float], counts: Counts | None = None, unknown: Collection[str] = ()
) -> Iterator[Check]:
    """Bytes a device sends per step over each mesh axis, against the `least` that its side could send.

    `counts`: number of collectives by kind, where it is known, without sums of single numbers. Axes that are `unknown`
    have no closed form of their bytes, and no check.
    """
    bytes_sent = {axis: size for axis, size in sent(run).items() if axis not in unknown}
    for axis, expected in least.items():
        away = bytes_sent.get(axis, 0) / expected - 1
        name = f"{run.side}, {axis}: bytes match the closed form"
        yield Check("traffic", name, abs(away), 0.05, "the closed form and 5 %")
    for axis, ranges in (counts or {}).items():
        found: Counter[str] = Counter()
        for collective in run.summary["collectives"]:
            if compare.billed(collective["axis"]) == axis and not collective["single"]:
                found[collective["op"]] += collective["count"]
        for op in sorted({*ranges, *found}):
            fewest, most = ranges.get(op, (0, 0))
            beyond = max(fewest - found[op], found[op] - most, 0)
            yield Check("traffic", f"{run.side}, {axis}: {op}, as many as expected", beyond, 0, COUNTED)
    numbers = sum(size for axis, size in bytes_sent.items() if axis not in least)
    yield Check("traffic", f"{run.side}, bytes over other axes", numbers, NUMBERS, "the norm, the loss and the count")
