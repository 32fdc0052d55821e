"""Comparison of runs from a common start: curves, states and traffic."""

from jaxdist.families import models
from parity_tests.expected import collectives
from parity_tests.proof import levels
from parity_tests.runs import compare
from parity_tests.runs.run import Run


def worst(a: Run, b: Run) -> float:
    """Largest difference over the contract's bound: equivalent when at most 1."""
    curves = {"loss": compare.LOSS, "grad_norm": compare.GRAD_NORM, "learning_rate": compare.LOSS}
    found = [compare.curve(a.metrics, b.metrics, field).max() / bound for field, bound in curves.items()]
    return max(
        *found,
        compare.worst(compare.states(a.states, b.states, a.zero_gradients))[1] / compare.STATE,
    )


def misplaced(run: Run) -> list[str]:
    """Differences between the bytes that a run sent and the closed form, which all families here have."""
    e, mesh = run.experiment, run.mesh
    param_specs = models.param_specs(models.build(e.model))
    least = collectives.least(run.side, e, param_specs, mesh) or {}
    counts = collectives.expected(run.side, e, param_specs, mesh)
    checks = levels.traffic(run, least, counts, collectives.unknown(run.side, mesh, e))
    return [f"{check.name}: {check.value}" for check in checks if not check.holds]
