"""Transformations that must not change a step of JAX, for every family.

A proof against torch cannot find a mistake that both sides share; here one side is compared with itself. Packed
documents share positions, so that a document is independent of its neighbours is tested on padded ones.

| transformation | what is compared |
|---|---|
| more padding | sequences of 14 times in place of 8 |
| other padding | padding of other ids in place of 0 |
| order of rows | the batch's rows reversed |
| microbatches | two in place of one, with different numbers of targets |
| equal microbatches | two of the same rows in place of one |
| moved | as `microbatches`, with the rows rotated by one, so that one changes its microbatch |
| alone | each row's loss and gradient computed alone, weighted by its number of targets and summed |
| unused rows | other embeddings for ids that are not in the batch; their gradient is 0 |
| renamed ids | the ids permuted, with the rows of embedding and head |

A mixture's load-balance loss is computed per microbatch, so it is left out where rows change their microbatch. A ResNet
has no padding, and its batch norms cover a microbatch: its microbatches have the same images, and running statistics,
which each microbatch moves, are not compared.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.conftest import often, tiny
from jaxdist.data import IGNORED, Batch, Images
from jaxdist.families.mixtral import model as mixtral
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.experts import Capped
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training import step
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder

pytestmark = pytest.mark.long

DECODER = {"layers": 1, "dim": 16, "heads": 2, "hidden": 24, "vocab": 32, "init_std": 0.2}
ROTARY = DECODER | {"kv_heads": 1, "head_dim": 8}
MIXTURE = ROTARY | {"experts": 4, "top_k": 2, "balance": 0.05}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": ROTARY | {"family": "llama", "qkv_bias": True},
    "gpt2": DECODER | {"family": "gpt2", "positions": 16, "tied": False},
    "mixtral": MIXTURE | {"family": "mixtral", "capacity": 1.0},
    "qwen3_moe": MIXTURE | {"family": "qwen3_moe", "qk_norm": True},
    "resnet": {"family": "resnet", "depths": [1], "widths": [8], "stem": 4, "channels": 1, "image": 8, "classes": 10},
}
DECODERS = [family for family in FAMILIES if family != "resnet"]

# Rounding: each number is a chain of sums, at most 10 per block and 4 for the loss forward and as many backward, and a
# sum of n numbers in another order differs by at most n epsilons. The longest has fewer than 256 terms.
BOUND = np.finfo(np.float64).eps * 256 * 2 * (10 + 4)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A step to take: a batch, the sections of its experiment, and starting weights by name."""

    batch: Any
    sections: dict[str, Any]
    weights: Arrays


@dataclass(frozen=True)
class Step:
    """Result of a step: loss, gradients, and weights after an update."""

    loss: float
    gradients: Arrays
    weights: Arrays


@cache
def program_of(sections: str) -> Program:
    # With so large an eps an update is no more sensitive than its gradient.
    optimizer = {"warmup": 0, "learning_rate": 1e-2, "eps": 1e-2}
    experiment = tiny(**json.loads(sections), parallel={"mesh": "1x1"}, optimizer=optimizer)
    return Program(experiment, make_mesh(experiment, "cpu")[0])


@cache
def compiled(sections: str) -> Any:
    return Recorder(program_of(sections)).update


def taken(case: Case) -> Step:
    key = json.dumps(case.sections)
    program = program_of(key)
    state = jax.jit(program.state_from)({name: jnp.asarray(w) for name, w in case.weights.items()})
    found = compiled(key)(state, program.placement.put(case.batch))
    gradients, weights = ({n: np.asarray(a) for n, a in found[kind].items()} for kind in ("gradient", "weights"))
    return Step(float(found["scalar"]["loss"]), gradients, weights)


def case_of(family: str, **model: Any) -> Case:
    """A batch of 4 sequences of 8 times, all but the first ending in padding, with inputs below 24."""
    random = np.random.default_rng(0)
    fields = FAMILIES[family] | model
    if family == "resnet":
        batch: Any = Images(random.random((4, 8, 8, 1), np.float32), random.integers(0, 10, 4, np.int32))
        sections: dict[str, Any] = {"model": fields, "train": {"batch": 4}}
    else:
        tokens, targets = (random.integers(1, high, (4, 8), np.int32) for high in (24, 32))
        padding = np.arange(8) >= np.array([8, 2, 5, 6])[:, None]
        batch = Batch(np.where(padding, 0, tokens), np.where(padding, IGNORED, targets))
        sections = {"model": fields, "data": {"sequence": 8}, "train": {"batch": 4}}
    param_specs = program_of(json.dumps(sections)).param_specs
    weights = {
        name: np.full(of.shape, of.mean, np.float64 if of.shape else np.int32)
        if of.statistic
        else of.mean + 0.2 * random.normal(size=of.shape)
        for name, of in param_specs.items()
    }
    return Case(batch, sections, weights)


def difference(a: Step, b: Step) -> float:
    """Largest of the differences of loss, gradients and weights, each relative to its largest number."""
    apart = [abs(a.loss / b.loss - 1)]
    for one, other in ((a.gradients, b.gradients), (a.weights, b.weights)):
        assert one.keys() == other.keys()
        largest = max(np.abs(w).max() for w in other.values())
        apart.append(max(np.abs(one[name] - other[name]).max() for name in one) / largest)
    return float(max(apart))


def with_sections(case: Case, **sections: Any) -> Case:
    return replace(case, sections={name: of | sections.get(name, {}) for name, of in case.sections.items()})


def more_padding(case: Case) -> float:
    beside = ((0, 0), (0, 6))
    tokens, targets = (np.pad(x, beside, constant_values=v) for x, v in zip(case.batch, (0, IGNORED), strict=True))
    longer = replace(with_sections(case, data={"sequence": 14}), batch=Batch(tokens, targets))
    return difference(taken(longer), taken(case))


def other_padding(case: Case) -> float:
    tokens, targets = case.batch
    ids = np.random.default_rng(1).integers(1, 32, tokens.shape, np.int32)
    other = Batch(np.where(targets == IGNORED, ids, tokens), targets)
    return difference(taken(replace(case, batch=other)), taken(case))


def order_of_rows(case: Case) -> float:
    return difference(taken(replace(case, batch=type(case.batch)(*(x[::-1] for x in case.batch)))), taken(case))


def microbatches(case: Case) -> float:
    return difference(taken(with_sections(case, train={"accumulation": 2})), taken(case))


def equal_microbatches(case: Case) -> float:
    case = replace(case, batch=Images(*(np.concatenate((x[:2], x[:2])) for x in case.batch)))

    def trained(found: Step) -> Step:
        return replace(found, weights={name: found.weights[name] for name in found.gradients})

    return difference(trained(taken(with_sections(case, train={"accumulation": 2}))), trained(taken(case)))


def moved(case: Case) -> float:
    rolled = replace(case, batch=Batch(*(np.roll(x, 1, axis=0) for x in case.batch)))
    return difference(taken(with_sections(rolled, train={"accumulation": 2})), taken(case))


def alone(case: Case) -> float:
    tokens, targets = case.batch
    counts, complete = (targets != IGNORED).sum(1), taken(case)
    rows = np.arange(len(tokens))[:, None]
    found = [
        taken(replace(case, batch=Batch(np.where(rows == row, tokens, 0), np.where(rows == row, targets, IGNORED))))
        for row in range(len(tokens))
    ]
    shares = counts / counts.sum()
    gradients = {n: sum(s * f.gradients[n] for s, f in zip(shares, found, strict=True)) for n in complete.gradients}
    loss = sum(s * f.loss for s, f in zip(shares, found, strict=True))
    return difference(replace(complete, loss=loss, gradients=gradients), complete)


def unused_rows(case: Case) -> float:
    name, first = "embed.embedding", 24
    other = case.weights[name].copy()
    other[first:] += 7
    a, b = taken(replace(case, weights=case.weights | {name: other})), taken(case)
    learned = max(float(np.abs(s.gradients[name][first:]).max()) for s in (a, b))
    used = {name: a.weights[name][:first]}, {name: b.weights[name][:first]}
    apart = difference(*(replace(s, weights=s.weights | own) for s, own in zip((a, b), used, strict=True)))
    return max(apart, learned)


def renamed_ids(case: Case) -> float:
    images = isinstance(case.batch, Images)
    size = case.sections["model"]["classes" if images else "vocab"]
    new = np.random.default_rng(1).permutation(size).astype(np.int32)  # old id -> new id
    old = np.argsort(new)

    def permuted(arrays: Arrays, order: np.ndarray) -> Arrays:
        axes = {"head.kernel": 1, "head.bias": 0} if images else {"embed.embedding": 0, "lm_head.kernel": 1}
        return {n: a.take(order, axes[n]) if n in axes else a for n, a in arrays.items()}

    first, targets = case.batch
    targets = np.where(targets == IGNORED, IGNORED, new[np.maximum(targets, 0)])
    batch = Images(first, targets) if images else Batch(new[first], targets)
    a = taken(replace(case, batch=batch, weights=permuted(case.weights, old)))
    return difference(Step(a.loss, permuted(a.gradients, new), permuted(a.weights, new)), taken(case))


# transformation -> families
TABLE: dict[Callable[[Case], float], list[str]] = {
    more_padding: DECODERS,
    other_padding: DECODERS,
    order_of_rows: [*FAMILIES],
    microbatches: DECODERS,
    equal_microbatches: ["resnet"],
    moved: DECODERS,
    alone: DECODERS,
    unused_rows: DECODERS,
    renamed_ids: [*FAMILIES],
}
BY_ROWS = (microbatches, moved, alone)  # the load balance is over other tokens


def case_for(transformation: Callable[[Case], float], family: str) -> Case:
    balanced = transformation in BY_ROWS and "balance" in FAMILIES[family]
    return case_of(family, **{"balance": 0.0} if balanced else {})


CASES = [(t, family) for t, of in TABLE.items() for family in of]
QUICK = [  # llama under every transformation, and a mixture, which compiles slowly, under other padding
    (t, family) for t, family in CASES if family in ("llama", "resnet") or (t is other_padding and family == "mixtral")
]


@pytest.mark.parametrize("case", often(CASES, QUICK), ids=lambda case: f"{case[0].__name__} {case[1]}")
def test_nothing_changes(case: tuple[Callable[[Case], float], str]) -> None:
    transformation, family = case
    assert transformation(case_for(transformation, family)) < BOUND


def balance_of_padding(right: Any) -> Any:
    return lambda probabilities, chosen, valid: right(probabilities, chosen, jnp.ones_like(valid))


def room_of_padding(right: Any) -> Any:
    return lambda self, valid: right(self, jnp.ones_like(valid))


def mean_of_all_tokens(right: Any) -> int:
    return -1


def mean_of_microbatch_means(right: Any) -> Any:
    return lambda logits, targets: right(logits, targets) / jnp.maximum((targets != IGNORED).sum(), 1)


def first_row_twice(right: Any) -> Any:
    return lambda logits, targets: right(logits, targets) + right(logits[:1], targets[:1])


def mean_embedding_added(right: Any) -> Any:
    return lambda self, table, tokens: right(self, table, tokens) + table.mean(0)


def higher_ids_weigh_more(right: Any) -> Any:
    return lambda logits, targets: right(logits * (1 + 1e-6 * jnp.arange(logits.shape[-1])), targets)


def padding_attended(right: Any) -> Any:
    return lambda self, q, k, v, window=0: right(self, q, k, v, window) + v.mean(1, keepdims=True).repeat(2, 2)


MISTAKES: list[tuple[Any, str, Any, Callable[[Case], float], str]] = [
    (step, "IGNORED", mean_of_all_tokens, more_padding, "llama"),
    (step, "cross_entropy", mean_of_microbatch_means, microbatches, "llama"),
    (step, "cross_entropy", first_row_twice, order_of_rows, "llama"),
    (Parallel, "lookup", mean_embedding_added, unused_rows, "llama"),
    (step, "cross_entropy", higher_ids_weigh_more, renamed_ids, "llama"),
    (Parallel, "attend", padding_attended, other_padding, "llama"),
]
# With these, one for each transformation.
MORE_MISTAKES: list[tuple[Any, str, Any, Callable[[Case], float], str]] = [
    (step, "cross_entropy", mean_of_microbatch_means, moved, "llama"),
    (step, "cross_entropy", mean_of_microbatch_means, alone, "llama"),
    (step, "cross_entropy", first_row_twice, equal_microbatches, "resnet"),
    (mixtral, "tally", balance_of_padding, other_padding, "qwen3_moe"),
    (Capped, "rooms", room_of_padding, more_padding, "mixtral"),
    (step, "cross_entropy", mean_of_microbatch_means, moved, "gpt2"),
    (step, "cross_entropy", first_row_twice, order_of_rows, "gpt2"),
]


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "transformation", "family"),
    [*MISTAKES, *(pytest.param(*mistake, marks=pytest.mark.slow) for mistake in MORE_MISTAKES)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_mistakes_are_found(
    owner: Any, name: str, mistake: Any, transformation: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_for(transformation, family)
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    compiled.cache_clear()
    try:
        assert transformation(case) > 1e3 * BOUND
    finally:
        compiled.cache_clear()
