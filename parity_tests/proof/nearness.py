"""Whether a run is nearer to ours, or to a run of ours with another value of a field of the model."""

from collections.abc import Collection, Iterator

from parity_tests.proof import levels
from parity_tests.proof.levels import ROUNDING, Pair
from parity_tests.proof.verdict import Check
from parity_tests.runs.compare import K
from parity_tests.runs.run import Run

NEARER = "nearer to ours than to a run with another field of the model"
OTHERWISE = "a run that is nearer to another model is one of that"


def furthest_apart(other: Run, policy: Pair, exact: Run, still: Collection[str] = ()) -> str:
    """The kind of tensors of theirs that best distinguishes a run with another value of a field from `exact`, both in
    float64; empty where all are within K times what ours loses in float32."""
    ours, theirs = policy
    moved, costs, kept = (
        levels.apart(other, exact, still),
        levels.apart(ours, exact, still),
        levels.vectors(theirs, still),
    )
    times = {name: moved[name] / max(cost, ROUNDING["float32"]) for name, cost in costs.items() if name in kept}
    best = max(times, key=times.__getitem__, default="")
    return best if best and times[best] > K else ""


def nearer(policy: Pair, exact: Run, other: Run, field: str, still: Collection[str] = ()) -> Iterator[Check]:
    """Whether their run is nearer to our float64 run than to the `other`, of another `field`, beyond rounding.

    A run of ours is much nearer to ours, whatever its rounding; one of the other's twice as near to that at least.
    """
    if kind := furthest_apart(other, policy, exact, still):
        ours, others = (levels.apart(policy[1], run, still)[kind] for run in (exact, other))
        yield Check("precision", NEARER, ours / max(others, ROUNDING["float32"]), 2.0, OTHERWISE, field, kind)
