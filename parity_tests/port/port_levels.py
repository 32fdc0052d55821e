"""Evidence from the files of a port's runs: the levels that apply, and the bisection."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxdist.config import read_record, state_kinds
from parity_tests.proof import levels
from parity_tests.proof.bisect import Divergence
from parity_tests.proof.levels import AMPLIFIED, EXACT
from parity_tests.proof.verdict import Check
from parity_tests.runs import compare
from parity_tests.runs.compare import FLOOR, K
from parity_tests.runs.run import Run

SHARE = "torch's tensors on one device, each over the devices that the strategy splits it over"
ROUNDED = f"{K} roundings of the dtype that a side computes in whatever it is given"
COUNTER = {"parameters": 0.0, "optimizer_state": 8.0}  # bytes: optax counts its steps
SENT = "on one device nothing is sent"
DECAY = 0.01  # that of torch's AdamW where none is given: steps of a user's own do not report theirs
# A parameter that moves by less than this share of the fastest one has a true gradient of zero, as a key's bias does:
# what moves it is rounding. Such tensors are compared absolutely.
STILL = 1e-6


@dataclass(frozen=True)
class PortRun(Run):
    """A run folder of a port, whose records are under torch's names from either side."""

    @cached_property
    def records(self) -> dict[int, dict[str, np.ndarray]]:
        """step -> `kind/name` -> array, in the order in which they arose."""
        return {int(file.stem): read_record(file) for file in sorted((self.path / "record").glob("*.safetensors"))}

    @cached_property
    def states(self) -> dict[str, np.ndarray]:
        return self.kinds(max(self.records), *self.state_kinds)

    @property
    def state_kinds(self) -> tuple[str, ...]:  # type: ignore[override]
        """All that there are: a port's own steps keep what they like."""
        return ("weights", *state_kinds())

    @property
    def zero_gradients(self) -> tuple[str, ...]:
        """None: the model is of no family."""
        return ()

    def kinds(self, step: int, *kinds: str) -> dict[str, np.ndarray]:
        return {n: a for n, a in self.records[step].items() if n.partition("/")[0] in kinds}


@dataclass
class Findings:
    """Two float64 runs, and a third, of `a` from another start, that shows how far rounding has grown.

    `still`: parameters that do not train. `least`: what any number may differ by, since a side rounds it to less than
    float64: a change may by chance not show in one.
    """

    a: PortRun
    b: PortRun
    perturbed: PortRun
    still: frozenset[str] | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.still is None:
            self.still = _still(self.a) & _still(self.b)

    def errors(self, a: PortRun, b: PortRun, step: int, *kinds: str) -> dict[str, float]:
        """The difference of every tensor of a record, in order; infinite for one that a side lacks."""
        x, y = ((run.kinds(step, *kinds) if kinds else run.records[step]) for run in (a, b))
        found = {}
        for name in {**x, **y}:
            measure = compare.absolute if name.partition("/")[2] in (self.still or ()) else compare.relative
            found[name] = measure(x[name], y[name]) if name in x and name in y else float("inf")
        return found

    def bounds(self, step: int) -> dict[str, float]:
        """Bound on each tensor's difference, from the effect of rounding on tensors of its kind."""
        kinds: dict[str, dict[str, float]] = {}
        for name, error in self.errors(self.a, self.perturbed, step).items():
            kinds.setdefault(name.partition("/")[0], {})[name] = error
        found = {name: bound for errors in kinds.values() for name, bound in compare.amplified(errors).items()}
        return {name: max(bound, self.least) for name, bound in found.items()}

    def most(self, step: int) -> float:
        """Bound on the difference of any gradient of a step."""
        gradients = [bound for name, bound in self.bounds(step).items() if name.startswith("gradient/")]
        return max(gradients, default=compare.STATE)

    def agreement(self, level: str, about: str = "") -> Iterator[Check]:
        """The common start, curves, and at each recorded step gradients, weights and moments."""

        def check(name: str, value: float, bound: float, why: str, of: str = "", widest: float = 0.0) -> Check:
            return Check(level, name, value, bound, why, about, of, widest)

        start = self.errors(self.a, self.b, 1, "start")
        yield check("starting weights", compare.worst(start)[1], 0.0, "one set of weights for both")
        for name, floor in FLOOR.items():
            if self.a.metrics[0][name] is not None:
                curve = compare.curve(self.a.metrics, self.b.metrics, name)
                grown = np.maximum.accumulate(compare.curve(self.a.metrics, self.perturbed.metrics, name))
                bounds = np.maximum(K * grown, max(floor, self.least))
                value, bound = compare.furthest(curve, bounds)
                yield check(name, value, bound, self.why(bound, floor), widest=float(bounds.max()))
        for step in self.a.records:
            allowed = self.bounds(step)
            for kind in ("gradient", *state_kinds(), "weights"):
                if errors := self.errors(self.a, self.b, step, kind):
                    tensor, value, bound = compare.closest(errors, allowed)
                    why, of = self.why(bound, compare.STATE), tensor.partition("/")[2]
                    widest = max(allowed.get(name, 0.0) for name in errors)
                    yield check(f"{kind} at step {step}", value, bound, why, of, widest)

    def why(self, bound: float, floor: float) -> str:
        """Origin of a bound, in words."""
        return EXACT if bound == floor else ROUNDED if bound == self.least else AMPLIFIED

    def hardly_moved(self, decay: float | None) -> str:
        """Reason why the weights decide nothing; "" if they do. `decay`: None if unknown."""
        last = max(self.a.records)
        started, ended = self.a.kinds(min(self.a.records), "start"), self.a.kinds(last, "weights")
        allowed = self.bounds(last)
        names = [n.removeprefix("weights/") for n in ended]
        pairs = {n: (started[f"start/{n}"], ended[f"weights/{n}"]) for n in names if n not in (self.still or ())}
        apart = compare.length(allowed[f"weights/{n}"] * w for n, (_, w) in pairs.items())
        steps = [w - start for start, w in pairs.values()]
        moved = compare.length(steps)
        if decay is None:  # rates are unknown too: an optimizer like Adam moves a number by about their sum
            decay, rates = DECAY, moved / sum(step.size for step in steps) ** 0.5 if moved else 0.0
        else:
            rates = sum(record["learning_rate"] for record in self.a.metrics)
        return levels.too_little(apart, moved, decay * rates * levels.smallest([start for start, _ in pairs.values()]))

    def first_difference(self, step: int) -> Divergence | None:
        """The first tensor of a recorded step that leaves the noise; None where all agree.

        Modules of equal weights may put out different things, as with or without the residual: what they put out
        counts only where the loss, or the gradients, which follow from it, differ too.
        """
        bounds, errors, before = self.bounds(step), self.errors(self.a, self.b, step), 0.0
        outside = {n for n, error in errors.items() if not error <= bounds.get(n, compare.STATE)}
        left = outside
        for of_modules, result in (("activation/", "scalar/loss"), ("activation_gradient/", "gradient/")):
            if not any(name.startswith(result) for name in left):
                left = {name for name in left if not name.startswith(of_modules)}
        for tensor, error in errors.items():
            if tensor in left:
                return Divergence(step, tensor, error, bounds.get(tensor, compare.STATE), before)
            if tensor not in outside:
                before = max(before, error)
        return None


def _still(run: PortRun) -> frozenset[str]:
    """Parameters that hardly moved from the first recorded step to the last."""
    first, last = run.records[min(run.records)], run.records[max(run.records)]
    moved = {
        name.removeprefix("weights/"): compare.absolute(w, first[f"start/{name.removeprefix('weights/')}"])
        for name, w in last.items()
        if name.startswith("weights/")
    }
    return frozenset(name for name, distance in moved.items() if distance <= STILL * max(moved.values()))


def traffic(*runs: PortRun) -> Iterator[Check]:
    """Bytes that a step sends: none on one device, elsewhere the closed form for parameters; nothing of torch's side,
    which is one process without a group.
    """
    for run in runs:
        if run.summary["devices"] > 1:
            yield from levels.traffic(run, run.summary["least_bytes"], unknown=("tensor",))
        elif "sent_bytes" in run.summary:
            yield Check("traffic", f"{run.side}: bytes sent per step", run.summary["sent_bytes"], 0.0, SENT)


def untraced(run: PortRun) -> Iterator[str]:
    """Note on a step whose traffic could not be counted."""
    if "sent_bytes" not in run.summary and run.summary["devices"] == 1:
        yield (
            "The traffic of a step is not counted, and its dtypes are unknown: jax_step cannot "
            "be traced, as it asks for numbers."
        )


def memory(run: PortRun, alone: PortRun) -> Iterator[Check]:
    """Bytes on the fullest device of a mesh, against what torch holds `alone`, each tensor over its devices."""
    last = max(alone.records)
    weights = {n.removeprefix("weights/"): w for n, w in alone.kinds(last, "weights").items()}
    item = next(iter(weights.values())).itemsize
    moments = sum(bool(alone.kinds(last, kind)) for kind in state_kinds())  # of each parameter
    for kind, copies in (("parameters", 1), ("optimizer_state", moments)):  # gradients live within a step alone
        shares, held = run.summary["shares"][kind], run.summary["memory"][kind]
        numbers = shares["ours_only"] + sum(weights[name].size / n for name, n in shares["ways"].items())
        away = abs(held - copies * item * numbers)
        yield Check("memory", f"{run.side}, {kind}, bytes match its share", away, COUNTER[kind], SHARE)
