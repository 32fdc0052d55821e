"""Gradients of a step that differ by more than rounding, in the order of the backward pass."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

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

FAR_MORE = 30.0  # times that moments of some tensors differ more than those of all others, where they stand out
PARALLEL = 1e-2  # relative distance from a multiple of ours, up to which theirs is called one

# Common property of outlying tensors: one tensor, one module in every layer, or one layer.
GROUPS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: re.sub(r"\.\d+\.", ".*.", name),
    lambda name: found[0] if (found := re.match(r".*?\.\d+\.", name)) else name,
)


class Alone(NamedTuple):
    """Tensors whose moments at the end differ far more than all others' do.

    name: of one, or with `*` for the number of a layer, or of a layer. how: what each kind of their moments is, in
    words. rest: the most that a moment of any other tensor differs by.
    """

    name: str
    how: str
    rest: float

    def __str__(self) -> str:
        others = f"those of all other tensors differ by at most {self.rest:.2g}"
        return f"at the end {self.how} for {self.name} alone, where {others}"


def standing_out(moments: Mapping[str, Iterable[tuple[str, np.ndarray, np.ndarray]]]) -> Alone | None:
    """The tensors by whose gradients alone two runs differ; None where no one tensor, module or layer stands out.

    moments: at the end, by kind; each has a tensor's name, ours and theirs.
    """
    by_kind: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for kind, tensors in moments.items():
        kept = {name: (x, y) for name, x, y in tensors}
        least = NOTHING * compare.length([x for x, _ in kept.values()])
        by_kind[kind] = {name: pair for name, pair in kept.items() if np.linalg.norm(pair[0]) > least}
    first = next(iter(by_kind.values()), {})
    off = {name: compare.relative(y, x) for name, (x, y) in first.items()}
    if not off or not all(np.isfinite(list(off.values()))):
        return None
    most = max(off, key=off.__getitem__)
    for group in GROUPS:
        some = [name for name in off if group(name) == group(most)]
        rest = max((off[name] for name in off.keys() - set(some)), default=np.inf)
        if min(off[name] for name in some) > FAR_MORE * rest:
            how = [f"{kind} is {multiple([pairs[n] for n in some if n in pairs])}" for kind, pairs in by_kind.items()]
            return Alone(group(most).rstrip("."), " and ".join(how), float(rest))
    return None


def multiple(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> str:
    """Text on their gradient relative to ours: a multiple, or a tensor that differs from it."""
    x, y = (np.concatenate([pair[side].ravel() for pair in pairs]) for side in (0, 1))
    times = float(x @ y / (x @ x))
    if np.linalg.norm(y - times * x) <= PARALLEL * np.linalg.norm(y):
        return f"{times:.4g} times ours"
    return f"apart from ours by {compare.relative(y, x):.2g}"


def place(name: str) -> tuple[int, ...]:
    """Position of a parameter, by torch's names, in the forward pass."""
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
    """Gradients that differ clearly, in the order of the backward pass."""
    return [name for name, times in multiples.items() if not times <= CLEAR]


def largest_differences(multiples: Mapping[str, float]) -> str:
    """The first and the largest that differ, in words; empty where none does."""
    if not (names := differing(multiples)):
        return ""
    most = max(multiples, key=multiples.__getitem__)
    first = f"the first gradient to differ in the backward pass is that of {names[0]}, {multiples[names[0]]:.2g} times"
    largest = f", and the most that of {most}, {multiples[most]:.2g} times" if most != names[0] else ""
    return f"{first} what rounding explains{largest}"


def from_forward_pass(multiples: Mapping[str, float]) -> bool:
    """Whether gradients after the last block differ: they depend on the forward pass and the loss alone."""
    return any(name.partition(".")[0] in LAST for name in differing(multiples))
