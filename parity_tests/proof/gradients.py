"""Which gradients of a step differ by more than rounding, in the order in which the backward pass makes them."""

from collections.abc import Mapping

import numpy as np

from parity_tests.runs import compare

Tensors = Mapping[str, np.ndarray]

# Parts of parameter names in the order of the forward pass; those after the blocks have gradients of no backward pass.
FORWARD = (
    *("embed", "positions", "stem", "stages", "layers"),
    *("attention_norm", "attention", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj"),
    *("mlp_norm", "mlp", "router", "experts", "gate_proj", "up_proj", "down_proj", "norm", "lm_head", "head"),
)
LAST = ("norm", "lm_head", "head")
NOTHING = 1e-10  # share of the size of all gradients below which one is rounding alone
CLEAR = 2.0  # times its bound from where a gradient differs by more than a hair


def place(name: str) -> tuple[int, ...]:
    """Where a parameter, by torch's names, comes in the forward pass."""
    parts = name.split(".")
    return tuple(int(part) if part.isdigit() else FORWARD.index(part) if part in FORWARD else -1 for part in parts)


def multiples(theirs: Tensors, ours: Tensors, rounded: Tensors, bound: float) -> dict[str, float]:
    """By parameter, last layer first: how many times what rounding explains do gradients of a step differ?

    ours: in float64, by `gradient/NAME`. rounded: those of our run in the precision of theirs, whose distance from ours
    is the rounding of each; where there are none, `bound` is what each may differ by.
    """
    least = NOTHING * compare.length(ours.values())
    names = [name for name in theirs.keys() & ours.keys() if compare.length([ours[name]]) > least]
    errors = {name: compare.relative(theirs[name], ours[name]) for name in names}
    if rounded.keys() >= set(names):
        bounds = compare.amplified({name: compare.relative(rounded[name], ours[name]) for name in names})
    else:
        bounds = dict.fromkeys(names, bound)
    found = {name.partition("/")[2]: errors[name] / bounds[name] for name in names}
    return {name: found[name] for name in sorted(found, key=place, reverse=True)}


def differing(multiples: Mapping[str, float]) -> list[str]:
    """Those that differ by more than a hair, in the order of the backward pass."""
    return [name for name, times in multiples.items() if not times <= CLEAR]


def told(multiples: Mapping[str, float]) -> str:
    """The first and the largest that differ, in words; empty where none does."""
    if not (names := differing(multiples)):
        return ""
    most = max(multiples, key=multiples.__getitem__)
    first = f"the first gradient to differ in the backward pass is that of {names[0]}, {multiples[names[0]]:.2g} times"
    largest = f", and the most that of {most}, {multiples[most]:.2g} times" if most != names[0] else ""
    return f"{first} what rounding explains{largest}"


def of_the_forward_pass(multiples: Mapping[str, float]) -> bool:
    """Whether gradients after the last block differ: they depend on the forward pass and the loss alone."""
    return any(name.partition(".")[0] in LAST for name in differing(multiples))
