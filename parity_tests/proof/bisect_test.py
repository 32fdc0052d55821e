"""The order within a step, and the search for the step in which two runs diverge."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from parity_tests.proof.bisect import Divergence, computation_order, cost, first, search

RECORD = [
    "weights/embed.weight", "gradient/embed.weight", "gradient/layers.0.mlp.up.weight", "start/embed.weight",
    "batch/tokens", "activation/embed", "activation/layers.0.mlp.up", "activation/layers.0.mlp",
    "activation/layers.0", "activation_gradient/layers.0", "activation_gradient/layers.0.mlp",
    "activation_gradient/layers.0.mlp.up", "activation_gradient/embed", "clipped/embed.weight", "exp_avg/embed.weight",
    "gradient/positions.weight", "loss", "grad_norm", "learning_rate",
]  # fmt: skip


def test_a_step_is_walked_as_it_is_computed() -> None:
    order = list(computation_order(dict.fromkeys(RECORD, np.zeros(1))))
    assert sorted(order) == sorted(RECORD)
    assert order == [
        "batch/tokens", "start/embed.weight", "activation/embed", "activation/layers.0.mlp.up",
        "activation/layers.0.mlp", "activation/layers.0", "loss", "activation_gradient/layers.0",
        "activation_gradient/layers.0.mlp", "activation_gradient/layers.0.mlp.up", "gradient/layers.0.mlp.up.weight",
        "activation_gradient/embed", "gradient/embed.weight", "gradient/positions.weight", "grad_norm",
        "clipped/embed.weight", "exp_avg/embed.weight", "learning_rate", "weights/embed.weight",
    ]  # fmt: skip


def test_gradients_come_before_the_update_for_any_recorded_tensors() -> None:
    """A module may record its output without the output's gradient."""
    shown = [name for name in RECORD if name != "activation_gradient/layers.0.mlp.up"]
    order = list(computation_order(dict.fromkeys(shown, np.zeros(1))))
    assert sorted(order) == sorted(shown)
    assert order.index("gradient/layers.0.mlp.up.weight") < order.index("grad_norm")


@pytest.mark.parametrize("wrong", [1e-9, math.inf, math.nan])
def test_the_first_that_leaves_its_bound(wrong: float) -> None:
    bounds = dict.fromkeys(["activation/a", "activation/b", "gradient/a"], 1e-10)
    assert first(3, dict.fromkeys(bounds, 1e-12), bounds) is None
    found = first(3, {"activation/a": 1e-14, "activation/b": wrong, "gradient/a": 1.0}, bounds)
    assert found and found.tensor == "activation/b" and found.before == 1e-14
    assert "b, step 3" in str(found)


def test_a_step_is_the_first_where_it_began_alike() -> None:
    """A run folder with gradients of a late step alone does not tell where the runs diverged."""
    for step, keys, seen in ((1, ["gradient/a"], True), (6, ["gradient/a"], False), (6, ["start/a", "loss"], True)):
        errors = {key: float(key == keys[-1]) for key in keys}
        found = first(step, errors, dict.fromkeys(keys, 1e-10))
        assert found and found.first is seen and ("among the recorded steps" in str(found)) is not seen


@pytest.mark.parametrize("origin", range(1, 65))
@pytest.mark.parametrize("suspect", [1, 2, 17, 64])
def test_the_search_finds_the_step(origin: int, suspect: int) -> None:
    """The search goes from a step whose loss differs back to the step that went wrong."""
    asked: list[int] = []

    def look(steps: list[int]) -> list[Divergence | None]:
        asked.extend(steps)

        def divergence(step: int) -> Divergence | None:
            where = "gradient/w" if step == origin else "start/w" if step > origin else ""
            return Divergence(step, where, 1.0, 1e-10, 0.0) if where else None

        return [divergence(step) for step in steps]

    found = search(look, suspect)
    if origin > suspect:
        assert found is None
    else:
        assert found and (found.step, found.tensor) == (origin, "gradient/w")
    assert len(asked) <= 2 + math.ceil(math.log2(suspect))


def test_weights_that_differ_from_the_start_are_named() -> None:
    found = search(lambda steps: [Divergence(step, "start/w", 1.0, 1e-10, 0.0) for step in steps], 9)
    assert found and (found.step, found.tensor) == (1, "start/w")


# ---- under a policy


@dataclass
class Kept:
    """A run that keeps some tensors of a step, off by these relative errors."""

    off: dict[str, float]
    zero_gradients: tuple[str, ...] = ()

    def tensors(self, _: int) -> dict[str, np.ndarray]:
        return {name: np.full(4, 1 + error) for name, error in self.off.items()}


ALL = ("batch/tokens", "start/w", "activation/q", "activation/q_rotated", "gradient/w", "weights/w")
DOUBLE: Any = Kept(dict.fromkeys(ALL, 0.0))


def costs(ours: dict[str, float], theirs: dict[str, float]) -> str | None:
    """Tensor by which the sides diverge in float32, each against its float64 run; `theirs` may keep fewer."""
    a, b, b64 = Kept(dict.fromkeys(ALL, 1e-7) | ours), Kept(theirs), Kept(dict.fromkeys(theirs, 0.0))
    found = cost((a, DOUBLE), (b, b64), 1, 32.0, (2.0**-24, 2.0**-24))  # type: ignore[arg-type]
    return found.tensor if found else None


def test_the_cost_of_a_policy_is_searched_in_tensors_of_both_sides() -> None:
    """A loop that keeps gradients alone, and an implementation without a rotation to record."""
    few = {"gradient/w": 1e-7, "weights/w": 1e-7}
    some = {name: 1e-7 for name in ALL if "rotated" not in name}
    for right in (few, some, dict.fromkeys(ALL, 1e-7)):
        assert costs({}, right) is None
        assert costs({}, right | {"gradient/w": 1e-3}) == "gradient/w"
        assert costs({"gradient/w": 1e-3}, right) == "gradient/w"
    assert costs({}, some | {"activation/q": 1e-3}) == "activation/q"
