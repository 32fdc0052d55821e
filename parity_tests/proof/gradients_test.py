"""Gradients that differ by more than rounding are found in the order of the backward pass."""

import numpy as np
import pytest

from parity_tests.proof import gradients

NAMES = (
    "embed.weight",
    "layers.0.attention.q_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.10.mlp.norm.weight",
)
OURS = {f"gradient/{name}": np.linspace(1, 2, 8) for name in (*NAMES, "layers.2.attention_norm.weight", "norm.weight")}


def moved(by: float, *names: str) -> dict[str, np.ndarray]:
    return {name: w * (1 + by) if name.partition("/")[2] in names else w for name, w in OURS.items()}


def test_they_come_last_layer_first() -> None:
    order = list(gradients.multiples(OURS, OURS, {}, 1e-10))
    assert order[0] == "norm.weight" and order[-1] == "embed.weight"
    assert order[1:3] == ["layers.10.mlp.norm.weight", "layers.2.attention_norm.weight"]


def test_each_is_held_to_its_own_rounding() -> None:
    noise, theirs = moved(1e-7, *NAMES, "norm.weight"), moved(1e-5, *NAMES[1:3])
    found = gradients.multiples(theirs, OURS, noise, 1e-10)
    assert gradients.differing(found) == [NAMES[2], NAMES[1]] and not gradients.from_forward_pass(found)
    assert "is that of layers.0.mlp.up_proj.weight, 25 times what rounding explains" in gradients.largest_differences(
        found
    )
    assert gradients.largest_differences(gradients.multiples(noise, OURS, noise, 1e-10)) == ""


def test_those_behind_the_last_block_are_of_the_forward_pass() -> None:
    assert gradients.from_forward_pass(gradients.multiples(moved(1e-5, "norm.weight"), OURS, {}, 1e-10))


def test_one_that_is_rounding_alone_is_passed_over() -> None:
    ours = OURS | {"gradient/layers.0.attention.k_proj.bias": np.full(8, 1e-17)}
    theirs = OURS | {"gradient/layers.0.attention.k_proj.bias": np.full(8, -1e-9)}
    assert gradients.largest_differences(gradients.multiples(theirs, ours, OURS, 1e-10)) == ""


# ---- final moments of a loop that kept no gradients


MOMENTS = {
    name: np.random.default_rng(place).normal(size=8)
    for place, name in enumerate(
        f"layers.{layer}.attention.{kind}_proj.weight" for layer in range(3) for kind in ("q", "k", "v")
    )
}


def standing_out(**times: float) -> gradients.Alone | None:
    """Result for moments that are `times` ours for parameters whose name contains the key, and nearly ours
    elsewhere."""

    def of(name: str) -> float:
        return next((by for part, by in times.items() if part in name), 1 + 1e-5)

    moments = {
        kind: [(name, w**power, w**power * of(name) ** power) for name, w in MOMENTS.items()]
        for kind, power in (("exp_avg", 1), ("exp_avg_sq", 2))
    }
    return gradients.standing_out(moments)


@pytest.mark.parametrize(
    ("part", "times", "name"),
    [
        ("layers.0.attention.q_proj", 0.5, "layers.0.attention.q_proj.weight"),
        ("v_proj", 3.0, "layers.*.attention.v_proj.weight"),
        ("layers.1.", 2.0, "layers.1"),
        ("layers.2.attention.k_proj", 0.0, "layers.2.attention.k_proj.weight"),
    ],
)
def test_tensors_whose_moments_alone_differ_are_named_with_the_ratio(part: str, times: float, name: str) -> None:
    found = standing_out(**{part: times})
    assert found and found.name == name
    assert found.how == f"exp_avg is {times:.4g} times ours and exp_avg_sq is {times**2:.4g} times ours"
    assert f"for {name} alone" in str(found) and "differ by at most 1e-05" in str(found)


def test_moments_that_all_differ_or_differ_in_two_places_stand_out_nowhere() -> None:
    assert standing_out() is None and standing_out(weight=0.5) is None
    assert standing_out(**{"layers.0.attention.q": 0.5, "layers.1.attention.k": 0.5}) is None
    assert gradients.standing_out({}) is None


def test_a_moment_that_is_no_multiple_is_reported_as_different() -> None:
    moments = [(name, w, w[::-1] if "0.attention.q" in name else w) for name, w in MOMENTS.items()]
    found = gradients.standing_out({"exp_avg": moments})
    assert found and found.how.startswith("exp_avg is apart from ours by ")
