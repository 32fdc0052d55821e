"""Gradients that differ by more than rounding are found in the order of the backward pass."""

import numpy as np

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
    assert gradients.differing(found) == [NAMES[2], NAMES[1]] and not gradients.of_the_forward_pass(found)
    assert "is that of layers.0.mlp.up_proj.weight, 25 times what rounding explains" in gradients.told(found)
    assert gradients.told(gradients.multiples(noise, OURS, noise, 1e-10)) == ""


def test_those_behind_the_last_block_are_of_the_forward_pass() -> None:
    assert gradients.of_the_forward_pass(gradients.multiples(moved(1e-5, "norm.weight"), OURS, {}, 1e-10))


def test_one_that_is_rounding_alone_is_passed_over() -> None:
    ours = OURS | {"gradient/layers.0.attention.k_proj.bias": np.full(8, 1e-17)}
    theirs = OURS | {"gradient/layers.0.attention.k_proj.bias": np.full(8, -1e-9)}
    assert gradients.told(gradients.multiples(theirs, ours, OURS, 1e-10)) == ""
