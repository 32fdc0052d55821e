"""How runs from a common start are judged: their curves and states, and what they sent."""

from jaxdist import models
from parity_tests import collectives, compare
from parity_tests.run import Run


def worst(a: Run, b: Run) -> float:
    """The largest difference, over its bound of the contract: equivalent when at most 1."""
    curves = {"loss": compare.LOSS, "grad_norm": compare.GRAD_NORM, "learning_rate": compare.LOSS}
    found = [compare.curve(a.metrics, b.metrics, field).max() / bound for field, bound in curves.items()]
    return max(
        *found,
        compare.worst(compare.states(a.states, b.states, zero_gradient=a.experiment.model.family == "gpt2"))[1]
        / compare.STATE,
    )


def misplaced(made: Run) -> list[str]:
    """By axis what a run has sent more often, less often or more than the closed form says."""
    e, mesh = made.experiment, made.summary["mesh"]
    layouts = models.layouts(models.build(e.model))
    counts = collectives.expected(made.side, e, layouts, mesh)
    sent = {axis: dict.fromkeys(ops, 0) for axis, ops in counts.items()}
    sizes = dict.fromkeys(counts, 0.0)
    for c in made.summary["collectives"]:
        axis = compare.billed(c["axis"])
        sent[axis][c["op"]] = sent[axis].get(c["op"], 0) + c["count"] * (not c["single"])
        sizes[axis] += c["bytes"]
    wrong = [
        f"{axis}: {number} {op}, where {counts[axis].get(op, (0, 0))} belong"
        for axis, ops in sent.items()
        for op, number in ops.items()
        if not counts[axis].get(op, (0, 0))[0] <= number <= counts[axis].get(op, (0, 0))[1]
    ]
    least = collectives.least(made.side, e, layouts, mesh)
    return wrong + [
        f"{axis}: {sizes[axis]} bytes of {size}" for axis, size in least.items() if sizes[axis] > 1.05 * size
    ]
