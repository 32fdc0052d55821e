"""First difference of two runs: the first step, and in it the first tensor, whose error exceeds the noise.

A step is walked in the order in which its tensors arise: batch, weights, activations forward, loss; gradients backward,
each module's output before its parameters; then the optimizer's stages, clip, moments, learning rate, update.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from jaxdist.config import EMA, state_kinds
from parity_tests.runs import compare
from parity_tests.runs.run import Run

Record = Mapping[str, np.ndarray]

UNFOUND = "No tensor shows where they differ first: the failed checks compare none, and all tensors agree."
PARTLY = ("activation/", "activation_gradient/")
STAGES = {
    "batch": "{name} of the batch",
    "start": "{name} before the step",
    "activation": "{name}",
    "scalar": "{name}",
    "loss": "the loss",
    "activation_gradient": "{name}, gradient of its output",
    "gradient": "{name}, gradient",
    "grad_norm": "the gradient norm",
    "clipped": "{name}, clipped gradient",
    "exp_avg": "{name}, first moment",
    "exp_avg_sq": "{name}, second moment",
    "momentum_buffer": "{name}, momentum",
    "row_var": "{name}, second moments of rows",
    "col_var": "{name}, second moments of columns",
    "variance": "{name}, second moment",
    "learning_rate": "the learning rate",
    "weights": "{name} after the update",
    "ema": "{name}, average after the update",
}


@dataclass(frozen=True)
class Divergence:
    """The first tensor that differs: `kind/name`, or one of METRICS, with what came before it."""

    step: int
    tensor: str
    error: float
    bound: float
    before: float  # the largest error of what came before
    first: bool = True  # whether what the step began with agrees, so that no earlier one differs

    @property
    def where(self) -> str:
        """In the terms of the config: "layers.3.attention.q_proj.weight, gradient, step 1"."""
        kind, _, name = self.tensor.partition("/")
        return f"{STAGES.get(kind, f'{{name}}, {kind}').format(name=name)}, step {self.step}"

    def __str__(self) -> str:
        part = "part at" if self.first else "differ, among the recorded steps, first at"
        return (
            f"The runs {part} {self.where}: it differs by {self.error:.2g}, noise is at most {self.bound:.2g}; "
            f"what comes before it{'' if self.first else ' in that step'} agrees to {self.before:.2g}."
        )


def carried() -> tuple[str, ...]:
    """Prefixes of the tensors that a step takes from the one before."""
    return ("start/", *(f"{kind}/" for kind in state_kinds()))


def computation_order(record: Record) -> Iterator[str]:
    """`kind/name` of what a record holds, as it arises within a step, METRICS among them."""
    kinds: dict[str, list[str]] = {}
    for key in record:
        kind, _, name = key.partition("/")
        kinds.setdefault(kind, []).append(name)
    forward = kinds.get("activation", [])
    backward = kinds.get("activation_gradient", [])

    place = {module: i for i, module in enumerate(forward)}

    def owner(parameter: str) -> int:
        """The place in the forward pass of the module that a parameter belongs to; -1 if that is not noted."""
        path = parameter.split(".")
        return next((place[p] for n in range(len(path), 0, -1) if (p := ".".join(path[:n])) in place), -1)

    yield from (f"batch/{name}" for name in kinds.get("batch", []))
    yield from (f"start/{name}" for name in sorted(kinds.get("start", []), key=owner))
    yield from (f"activation/{name}" for name in forward)
    yield "loss"
    gradients = sorted(kinds.get("gradient", []), key=owner, reverse=True)
    for module in backward:
        yield f"activation_gradient/{module}"
        yield from (f"gradient/{name}" for name in gradients if owner(name) == place.get(module))
    noted = {place.get(module) for module in backward}
    yield from (f"gradient/{name}" for name in gradients if owner(name) not in noted)
    yield "grad_norm"
    for kind in ("clipped", *(kind for kind in state_kinds() if kind != EMA)):
        yield from (f"{kind}/{name}" for name in sorted(kinds.get(kind, []), key=owner))
    yield "learning_rate"
    for kind in ("weights", EMA):
        yield from (f"{kind}/{name}" for name in sorted(kinds.get(kind, []), key=owner))


def errors(a: Run, b: Run, step: int) -> dict[str, float]:
    """The relative difference of every tensor of a recorded step, in order; infinite for what one side lacks.

    Activations are those that both have, since not every implementation has all modules, and kinds those of which
    both have some, since not every loop keeps them all.
    """
    x, y = (run.tensors(step) for run in (a, b))
    kinds = {key.partition("/")[0] for key in x} & {key.partition("/")[0] for key in y}
    lone = {key for key in x.keys() ^ y.keys() if key.startswith(PARTLY) or key.partition("/")[0] not in kinds}
    x, y = ({key: w for key, w in tensors.items() if key not in lone} for tensors in (x, y))
    found = compare.states(x, y, a.zero_gradients)
    order = [key for key in computation_order(y) if key in found]
    return {key: found[key] for key in [*order, *sorted(found.keys() - set(order))]}


def first(step: int, errors: Mapping[str, float], bounds: Mapping[str, float]) -> Divergence | None:
    """The first tensor that leaves its bound; None where all agree."""
    before, began = 0.0, step == 1
    for tensor, error in errors.items():
        if not error <= bounds[tensor]:
            return Divergence(step, tensor, error, bounds[tensor], before, began)
        began |= tensor.startswith("start/")
        before = max(before, error)
    return None


def exact(a: Run, b: Run, step: int, noise: float) -> Divergence | None:
    """First difference of two float64 runs in a step; `noise` is the smallest bound of a tensor."""
    found = errors(a, b, step)
    return first(step, found, {tensor: max(compare.FLOOR.get(tensor, 0), noise) for tensor in found})


def cost(
    a: tuple[Run, Run], b: tuple[Run, Run], step: int, limit: float, roundings: tuple[float, float]
) -> Divergence | None:
    """First tensor in which one side of a policy loses more than `limit` times what the other does, each against its
    float64 run.

    `roundings` are those of the dtypes that are computed and stored in: a side that is exact by chance does not count
    as better. Weights are stored; a single number that Adam sends the other way is chance too, so each is held to the
    most that both sides lose in any of them. Tensors that one side does not keep are skipped.
    """
    x, y = (errors(run, run64, step) for run, run64 in (a, b))
    x = {tensor: error for tensor, error in x.items() if tensor in y}
    worse, both = ({tensor: f(x[tensor], y[tensor]) for tensor in x} for f in (max, min))
    computed, stored = roundings

    def least(tensor: str) -> float:
        kind = tensor.partition("/")[0]
        if kind not in ("start", "weights"):
            return max(both[tensor], computed)
        return max(stored, *(error for name, error in both.items() if name.startswith(f"{kind}/")))

    return first(step, worse, {tensor: limit * least(tensor) for tensor in x})


def first_step(a: Run, b: Run, bounds: Mapping[str, np.ndarray]) -> int:
    """The first step at which a field of metrics.jsonl leaves its bounds, one per step; the last one if none does."""
    steps = [record["step"] for record in a.metrics]
    parted = {steps[-1]}
    for field, bound in bounds.items():
        different = compare.curve(a.metrics, b.metrics, field) > bound
        parted |= {step for step, differs in zip(steps, different, strict=False) if differs}
    return min(parted)


def search(look: Callable[[list[int]], list[Divergence | None]], suspect: int) -> Divergence | None:
    """First divergence at or before step `suspect`; None where that step and the one before agree in everything.

    `look(steps)` makes both runs anew with all tensors of these steps recorded, and says where each step parts. A step
    that begins with different weights or moments is not where they come from, one in which all agrees lies before it:
    bisection.
    """
    found = next(filter(None, look(sorted({max(1, suspect - 1), suspect}))), None)
    low = 1
    while found and found.tensor.startswith(carried()) and low < found.step:
        middle = (low + found.step) // 2
        earlier = next(iter(look([middle])), None)
        low, found = (middle + 1, found) if earlier is None else (low, earlier)
    return found
