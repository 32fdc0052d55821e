"""The five levels of a proof: what is asked of a pair of runs, as checks with bounds and where these come from."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxdist.config import Experiment
from parity_tests import compare
from parity_tests.compare import K
from parity_tests.run import STATES, Run
from parity_tests.scratch import Scratch
from parity_tests.verdict import Check

Pair = tuple[Run, Run]
Tensors = Mapping[str, np.ndarray]

EXACT = "float64: both sides round alike to 1e-15, and no planted mistake is smaller"
AMPLIFIED = f"{K} times what a change of the starting weights by 64 roundings has become by then"
NUMBERS = 256  # bytes of the few scalars that cross devices
DERIVED = f"{K} times what both runs differ from their own float64 runs until then"
ALONE = f"a run without a float64 one of its own may lose {K} times what ours loses"
# How much more one side may lose to a policy than the other, as sums are ordered and formulas written in many ways:
# half of the bits to the next narrower arithmetic, 24 to TF32's 11 and 8 to float8's 4.
HALFWAY = {"float32": 2.0 ** ((24 - 11) / 2), "bfloat16": 2.0 ** ((8 - 4) / 2)}
ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9}
COUNTED = "one a parameter or block each time it is needed, and single numbers (parity_tests/collectives.py)"
DELICATE = "float32 at least, whatever the policy: less loses accuracy that the noise of bfloat16 hides"
LOSES = "the other side's loss against its own float64 run, and half of the bits to the next narrower arithmetic"
# What a policy moves a loss by is one number that drifts from step to step, on either side by chance: the ratio of two
# such is F-distributed with hardly more than 2 and 2 degrees of freedom, and exceeds this once in 10,000 times. Of
# gradients and weights, thousands of numbers at once, the ratio is all but fixed.
DRIFT = 100.0
DRIFTS = "the other side's loss, twice a number by chance: F(2, 2) exceeds it once in 10,000 times"
REORDERED = f"{K} times what both sides differ from themselves when their sums are taken in another order"


@dataclass(frozen=True)
class Noise:
    """How large rounding has grown in float64: what separates a run from one whose starting weights it was added to.

    Training amplifies rounding, some configs by orders of magnitude within 20 steps. A bound that does not know it
    would call equal runs different.
    """

    run: Run
    perturbed: Run
    zero_gradient: bool

    def curve(self, field: str) -> np.ndarray:
        """Largest relative difference of a field of metrics.jsonl until each step, times K, and at least its floor."""
        until = np.maximum.accumulate(compare.curve(self.run.metrics, self.perturbed.metrics, field))
        return np.maximum(K * until, compare.FLOOR[field])

    def gradients(self, step: int) -> float:
        """Of the gradients at a recorded step."""
        return self._largest(self.run.kept("gradient", step), self.perturbed.kept("gradient", step))

    def states(self, kind: str) -> float:
        """Of the final weights or moments."""
        return self._largest(self.run.kept_states(kind), self.perturbed.kept_states(kind))

    def tensors(self, step: int) -> float:
        """Of any tensor of a step: that of the gradients recorded at it or next after it."""
        return self.gradients(min((s for s in self.run.gradient_steps if s >= step), default=0))

    def _largest(self, a: Tensors, b: Tensors) -> float:
        grown = compare.states(a, b, self.zero_gradient).values()
        return max([compare.STATE, *(K * v for v in grown if v < np.inf)])  # a tensor of zeros in one has no scale


def agreement(level: str, what: str, a: Run, b: Run, noise: Noise) -> Iterator[Check]:
    """Curves, gradients and final states of two float64 runs."""

    def check(name: str, value: float, bound: float, floor: float = compare.STATE) -> Check:
        return Check(level, name, value, bound, EXACT if bound <= floor else AMPLIFIED, what)

    for name, floor in compare.FLOOR.items():
        value, bound = compare.furthest(compare.curve(a.metrics, b.metrics, name), noise.curve(name))
        yield check(name, value, bound, floor)
    for step in sorted({*a.gradient_steps, *b.gradient_steps}):
        gradients = compare.states(a.kept("gradient", step), b.kept("gradient", step), noise.zero_gradient)
        name, value = compare.worst(gradients)
        yield check(f"gradients at step {step}, worst {name.partition('/')[2]}", value, noise.gradients(step))
    for kind in STATES:
        states = compare.states(a.kept_states(kind), b.kept_states(kind), noise.zero_gradient)
        name, value = compare.worst(states)
        yield check(f"{kind} at the end, worst {name.partition('/')[2]}", value, noise.states(kind))


def apart(a: Run, b: Run) -> dict[str, float]:
    """How far two runs are from each other, relative, over all tensors of a kind that `a` has as one vector."""
    kinds = {f"gradients at step {s}": (a.kept("gradient", s), b.kept("gradient", s)) for s in a.gradient_steps[:1]}
    kinds |= {f"{kind} at the end": (a.kept_states(kind), b.kept_states(kind)) for kind in ("weights", "exp_avg")}
    return {name: compare.whole(ours, theirs) for name, (ours, theirs) in kinds.items() if ours}


def precision(policy: Pair, double: Pair, compute: str, reordered: Pair | None = None) -> Iterator[Check]:
    """Both sides under the policy, each step's losses against the bound, and what the policy costs either side."""
    (a, b), (a64, b64) = policy, double
    between = compare.curve(a.metrics, b.metrics, "loss")
    bound = compare.derived_bound(a.metrics, a64.metrics, b.metrics, b64.metrics)
    yield Check("precision", "loss", *compare.furthest(between, bound), DERIVED)
    if a is a64:
        return

    # The bound above grows with what one side loses: a side that loses more than its policy must is found here.
    def ratio(name: str, x: float, y: float, limit: float, why: str) -> Iterator[Check]:
        if x or y:
            times = max(x, y) / min(x, y) if x and y else float("inf")
            yield Check("precision", f"{name}: one side loses {times:.2g} times the other's", times, limit, why)

    limit, why = (K, ALONE) if b64 is a64 else (HALFWAY.get(compute, 1), LOSES)
    costs, others = apart(a, a64), apart(b, b64)
    for name, x in costs.items():
        yield from ratio(name, x, others.get(name, float("inf")), limit, why)
    x, y = (compare.rms(compare.curve(run.metrics, run64.metrics, "loss")) for run, run64 in ((a, a64), (b, b64)))
    yield from ratio("loss", x, y, DRIFT, DRIFTS)
    if reordered is not None:
        floors = [apart(x, again) for x, again in zip(policy, reordered, strict=True)]
        for name, value in apart(a, b).items():
            yield Check("precision", f"{name}, between the sides", value, K * sum(f[name] for f in floors), REORDERED)


def arithmetic(run: Run, compute: str) -> Iterator[Check]:
    """The dtypes of softmax, norms, rotation and loss; of a loop that does not report them nothing is known."""
    if dtypes := run.summary.get("arithmetic"):
        least = "float64" if compute == "float64" else "float32"
        narrow = [
            f"{function} in {dtype}" for function, dtype in dtypes.items() if ROUNDING.get(dtype, 1) > ROUNDING[least]
        ]
        title = f"{run.side}, of softmax, norms, rotation and loss in less than {least}: {', '.join(narrow) or 'none'}"
        yield Check("precision", title, len(narrow), 0, DELICATE)


def reordering(policy: Pair, reordered: Pair) -> float:
    """What reordered sums move the loss by, root mean square over the steps, both sides added."""
    curves = [compare.curve(a.metrics, b.metrics, "loss") for a, b in zip(policy, reordered, strict=True)]
    return sum(compare.rms(curve) for curve in curves)


def memory(a: Run, b: Run, experiment: Experiment) -> Iterator[Check]:
    """Bytes that the fullest device holds of each kind, torch's against JAX's, less the causes known by name."""
    parallel = experiment.parallel
    n, t = b.summary["mesh"]["fsdp"], b.summary["mesh"]["tensor"]
    item = np.dtype(experiment.precision.parameters).itemsize
    tensors = list(b.kept_states("weights").values())
    padding = sum(w[0].size for w in tensors if len(w) % (n * t)) * item
    largest = max(w.size for w in tensors) * item

    share = {"parameters": 1, "gradients": 1, "optimizer_state": 1}
    bound = {"parameters": padding, "gradients": padding, "optimizer_state": 2 * padding + 8 * len(tensors)}
    why = dict.fromkeys(share, "FSDP2 splits whole rows: less than one for each tensor whose rows do not divide")
    why["optimizer_state"] += "; torch counts steps in 4 to 8 bytes a tensor, optax in 8 for all"
    if parallel.strategy == "zero2":
        share["parameters"] = n
        why["parameters"] += "; FSDP2's zero2 keeps 1/fsdp of them at rest, ours the whole"
    if parallel.strategy in ("zero2", "fsdp") and parallel.reduce == "step" and experiment.train.accumulation == 1:
        share["gradients"] = n
        why["gradients"] += "; FSDP2 has nothing to keep whole for a single microbatch"
    if parallel.strategy == "zero1":
        bound["optimizer_state"] += 2 * largest
        why["optimizer_state"] += "; ZeroRedundancyOptimizer deals out whole tensors"
    for kind, parts in share.items():
        jax, torch = a.summary["memory"][kind] / parts, b.summary["memory"][kind]
        yield Check("memory", f"{kind}, bytes between the sides", abs(jax - torch), float(bound[kind]), why[kind])


def peak(run: Run, scratch: Scratch) -> Iterator[Check]:
    """The most bytes that a device holds within a step, against the closed form of what a step takes."""
    held = run.summary["memory"]
    if held.get("peak"):
        state = held["parameters"] + held["optimizer_state"]
        why = "its parameters and moments and what a step takes by the closed form, what is at work twice, and 5 %"
        yield Check("memory", f"{run.side}, peak, bytes", held["peak"], state + scratch.most(run.side), why)


def sent(run: Run) -> dict[str, float]:
    """Bytes per step by mesh axis; what crosses data and fsdp at once is counted as data."""
    total: dict[str, float] = {}
    for collective in run.summary["collectives"]:
        axis = compare.billed(collective["axis"])
        total[axis] = total.get(axis, 0) + collective["bytes"]
    return total


def traffic(
    run: Run,
    least: Mapping[str, float],
    strategy: str,
    most: Mapping[str, int] | None = None,
    unknown: Collection[str] = (),
) -> Iterator[Check]:
    """Bytes a device sends per step over each mesh axis, against the least that the strategy could send.

    `most`: how many collectives they may be, where that is known. Of axes that are `unknown` there is no closed form of
    the bytes, and no check.
    """
    bytes_sent = {axis: size for axis, size in sent(run).items() if axis not in unknown}
    for axis, expected in least.items():
        whole = run.summary.get("backend") != "jax" and strategy == "zero1" and axis == "fsdp"
        why = "the closed form and 5 %" + ("; DDP reduces whole gradients for zero1: 1.5 times" if whole else "")
        away = bytes_sent.get(axis, 0) / (expected * (1.5 if whole else 1)) - 1
        yield Check("traffic", f"{run.side}, {axis}: share from the least", abs(away), 0.05, why)
    for axis, bound in (most or {}).items():
        count = sum(c["count"] for c in run.summary["collectives"] if compare.billed(c["axis"]) == axis)
        yield Check("traffic", f"{run.side}, {axis}: collectives", count, bound, COUNTED)
    numbers = sum(size for axis, size in bytes_sent.items() if axis not in least)
    yield Check("traffic", f"{run.side}, bytes over other axes", numbers, NUMBERS, "the norm, the loss and the count")
