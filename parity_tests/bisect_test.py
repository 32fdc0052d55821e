"""The order within a step, and the search for the step in which two runs part."""

import math

import numpy as np
import pytest

from parity_tests.bisect import Parting, first, in_order, search

RECORD = [
    "weights/embed.weight", "gradient/embed.weight", "gradient/layers.0.mlp.up.weight", "start/embed.weight",
    "batch/tokens", "activation/embed", "activation/layers.0.mlp.up", "activation/layers.0.mlp",
    "activation/layers.0", "activation_gradient/layers.0", "activation_gradient/layers.0.mlp",
    "activation_gradient/layers.0.mlp.up", "activation_gradient/embed", "clipped/embed.weight", "exp_avg/embed.weight",
    "gradient/positions.weight", "loss", "grad_norm", "learning_rate",
]  # fmt: skip


def test_a_step_is_walked_as_it_is_computed() -> None:
    order = list(in_order(dict.fromkeys(RECORD, np.zeros(1))))
    assert sorted(order) == sorted(RECORD)
    assert order == [
        "batch/tokens", "start/embed.weight", "activation/embed", "activation/layers.0.mlp.up",
        "activation/layers.0.mlp", "activation/layers.0", "loss", "activation_gradient/layers.0",
        "activation_gradient/layers.0.mlp", "activation_gradient/layers.0.mlp.up", "gradient/layers.0.mlp.up.weight",
        "activation_gradient/embed", "gradient/embed.weight", "gradient/positions.weight", "grad_norm",
        "clipped/embed.weight", "exp_avg/embed.weight", "learning_rate", "weights/embed.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [1e-9, math.inf, math.nan])
def test_the_first_that_leaves_its_bound(wrong: float) -> None:
    bounds = dict.fromkeys(["activation/a", "activation/b", "gradient/a"], 1e-10)
    assert first(3, dict.fromkeys(bounds, 1e-12), bounds) is None
    found = first(3, {"activation/a": 1e-14, "activation/b": wrong, "gradient/a": 1.0}, bounds)
    assert found and found.tensor == "activation/b" and found.before == 1e-14
    assert "b, step 3" in str(found)


@pytest.mark.parametrize("origin", range(1, 65))
@pytest.mark.parametrize("suspect", [1, 2, 17, 64])
def test_the_search_finds_the_step(origin: int, suspect: int) -> None:
    """From a step that is suspected because its loss differs, back to the one in which something went wrong."""
    asked: list[int] = []

    def look(steps: list[int]) -> list[Parting | None]:
        asked.extend(steps)

        def parting(step: int) -> Parting | None:
            where = "gradient/w" if step == origin else "start/w" if step > origin else ""
            return Parting(step, where, 1.0, 1e-10, 0.0) if where else None

        return [parting(step) for step in steps]

    found = search(look, suspect)
    if origin > suspect:
        assert found is None
    else:
        assert found and (found.step, found.tensor) == (origin, "gradient/w")
    assert len(asked) <= 2 + math.ceil(math.log2(suspect))


def test_weights_that_differ_from_the_start_are_named() -> None:
    found = search(lambda steps: [Parting(step, "start/w", 1.0, 1e-10, 0.0) for step in steps], 9)
    assert found and (found.step, found.tensor) == (1, "start/w")
