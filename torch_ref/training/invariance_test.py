"""Transformations that must not change a step of torch, for every family.

A proof against JAX cannot find a mistake that both sides share; here one side is compared with itself. Packed
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

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jaxdist.config import AXES, Experiment
from jaxdist.data import IGNORED
from torch_ref.families import layers, llama, mixtral
from torch_ref.families.mixtral import Experts
from torch_ref.families.models import build
from torch_ref.parallel.weights import model_tensors, named
from torch_ref.training import step
from torch_ref.training.optim import Optimizer
from torch_ref.training.parallelize import parallelize
from torch_ref.training.program import Program, TrainState
from torch_ref.training.step import Rows, train_step

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
BOUND = torch.finfo(torch.float64).eps * 256 * 2 * (10 + 4)

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    """One rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    MESH.append(init_device_mesh("cpu", (1,) * len(AXES), mesh_dim_names=AXES))
    yield MESH[0]
    MESH.clear()
    dist.destroy_process_group()


MESH: list[DeviceMesh] = []


@dataclass(frozen=True)
class Case:
    """A step to take: a batch, the sections of its experiment, and starting weights by name."""

    batch: Rows
    sections: dict[str, Any]
    weights: Tensors


@dataclass(frozen=True)
class Step:
    """Result of a step: loss, gradients, and weights after an update."""

    loss: float
    gradients: Tensors
    weights: Tensors


def experiment_of(sections: dict[str, Any]) -> Experiment:
    # With so large an eps an update is no more sensitive than its gradient.
    optimizer = {"warmup": 0, "learning_rate": 1e-2, "eps": 1e-2}
    values = {"train": {"steps": 1}, "optimizer": optimizer, "precision": {"policy": "fp64"}}
    values["parallel"] = {"mesh": "1x1", "strategy": "ddp"}
    return Experiment.parse(values | sections, source="test")


def taken(case: Case) -> Step:
    experiment = experiment_of(case.sections)
    with torch.device("meta"):
        plain = build(experiment.model).double()
    model = parallelize(plain, experiment, MESH[0])
    with torch.no_grad():
        for name, tensor in model_tensors(model):
            tensor.copy_(case.weights[name])
    optimizer = Optimizer(model, experiment, MESH[0])
    optimizer.begin()
    gradients: Tensors = {}

    def watch(stage: str) -> None:
        if stage == "gradient":
            gradients.update({name: p.grad.clone() for name, p in named(model) if p.grad is not None})

    values = train_step(Program(experiment, MESH[0]), TrainState(model, optimizer), case.batch, 1, watch)
    return Step(values.loss, gradients, {name: t.detach().clone() for name, t in model_tensors(model)})


def case_of(family: str, **model: Any) -> Case:
    """A batch of 4 sequences of 8 times, all but the first ending in padding, with inputs below 24."""
    random = torch.Generator().manual_seed(0)
    fields = FAMILIES[family] | model
    if family == "resnet":
        images = torch.rand((4, 8, 8, 1), generator=random)
        batch = Rows(images, torch.randint(10, (4,), generator=random))
        sections: dict[str, Any] = {"model": fields, "train": {"batch": 4, "steps": 1}}
    else:
        tokens, targets = (torch.randint(1, high, (4, 8), generator=random) for high in (24, 32))
        padding = torch.arange(8) >= torch.tensor([8, 2, 5, 6])[:, None]
        batch = Rows(torch.where(padding, 0, tokens), torch.where(padding, IGNORED, targets))
        sections = {"model": fields, "data": {"sequence": 8}, "train": {"batch": 4, "steps": 1}}

    def drawn(name: str, like: Tensor) -> Tensor:
        if not like.is_floating_point() or "running" in name:
            return torch.ones(like.shape, dtype=like.dtype)
        mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        return mean + 0.2 * torch.randn(like.shape, generator=random, dtype=torch.float64)

    with torch.device("meta"):
        plain = build(experiment_of(sections).model)
    return Case(batch, sections, {name: drawn(name, like) for name, like in model_tensors(plain)})


def difference(a: Step, b: Step) -> float:
    """Largest of the differences of loss, gradients and weights, each relative to its largest number."""
    apart = [abs(a.loss / b.loss - 1)]
    for one, other in ((a.gradients, b.gradients), (a.weights, b.weights)):
        assert one.keys() == other.keys()
        largest = max(float(w.abs().max()) for w in other.values())
        apart.append(max(float((one[name] - other[name]).abs().max()) for name in one) / largest)
    return max(apart)


def with_sections(case: Case, **sections: Any) -> Case:
    return replace(case, sections={name: of | sections.get(name, {}) for name, of in case.sections.items()})


def more_padding(case: Case) -> float:
    tokens, targets = (
        torch.nn.functional.pad(x, (0, 6), value=v) for x, v in zip(case.batch, (0, IGNORED), strict=True)
    )
    longer = replace(with_sections(case, data={"sequence": 14}), batch=Rows(tokens, targets))
    return difference(taken(longer), taken(case))


def other_padding(case: Case) -> float:
    tokens, targets = case.batch
    ids = torch.randint(1, 32, tokens.shape, generator=torch.Generator().manual_seed(1))
    other = Rows(torch.where(targets == IGNORED, ids, tokens), targets)
    return difference(taken(replace(case, batch=other)), taken(case))


def order_of_rows(case: Case) -> float:
    return difference(taken(replace(case, batch=Rows(*(x.flip(0) for x in case.batch)))), taken(case))


def microbatches(case: Case) -> float:
    return difference(taken(with_sections(case, train={"accumulation": 2})), taken(case))


def equal_microbatches(case: Case) -> float:
    case = replace(case, batch=Rows(*(torch.cat((x[:2], x[:2])) for x in case.batch)))

    def trained(found: Step) -> Step:
        return replace(found, weights={name: found.weights[name] for name in found.gradients})

    return difference(trained(taken(with_sections(case, train={"accumulation": 2}))), trained(taken(case)))


def moved(case: Case) -> float:
    rolled = replace(case, batch=Rows(*(x.roll(1, 0) for x in case.batch)))
    return difference(taken(with_sections(rolled, train={"accumulation": 2})), taken(case))


def alone(case: Case) -> float:
    tokens, targets = case.batch
    counts, complete = (targets != IGNORED).sum(1), taken(case)
    shares = counts.double() / counts.sum()
    one = with_sections(case, train={"batch": 1})
    found = [taken(replace(one, batch=Rows(x[None], y[None]))) for x, y in zip(tokens, targets, strict=True)]
    gradients = {n: sum(s * f.gradients[n] for s, f in zip(shares, found, strict=True)) for n in complete.gradients}
    loss = sum(float(s) * f.loss for s, f in zip(shares, found, strict=True))
    return difference(replace(complete, loss=loss, gradients=gradients), complete)


def unused_rows(case: Case) -> float:
    name, first = "embed.weight", 24
    other = case.weights[name].clone()
    other[first:] += 7
    a, b = taken(replace(case, weights=case.weights | {name: other})), taken(case)
    learned = max(float(s.gradients[name][first:].abs().max()) for s in (a, b))
    used = {name: a.weights[name][:first]}, {name: b.weights[name][:first]}
    apart = difference(*(replace(s, weights=s.weights | own) for s, own in zip((a, b), used, strict=True)))
    return max(apart, learned)


def renamed_ids(case: Case) -> float:
    images = "classes" in case.sections["model"]
    size = case.sections["model"]["classes" if images else "vocab"]
    new = torch.randperm(size, generator=torch.Generator().manual_seed(1))  # old id -> new id
    old = new.argsort()
    rows = ("head.weight", "head.bias") if images else ("embed.weight", "lm_head.weight")

    def permuted(tensors: Tensors, order: Tensor) -> Tensors:
        return {n: t[order] if n in rows else t for n, t in tensors.items()}

    first, targets = case.batch
    targets = torch.where(targets == IGNORED, IGNORED, new[targets.clamp_min(0)])
    batch = Rows(first if images else new[first], targets)
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


@pytest.mark.parametrize(("transformation", "family"), [(t, family) for t, of in TABLE.items() for family in of])
def test_nothing_changes(transformation: Callable[[Case], float], family: str) -> None:
    assert transformation(case_for(transformation, family)) < BOUND


def balance_of_padding(right: Any) -> Any:
    return lambda probabilities, chosen, valid: right(probabilities, chosen, torch.ones_like(valid))


def room_of_padding(right: Any) -> Any:
    return lambda self, valid: right(self, torch.ones_like(valid))


def mean_of_all_tokens(right: Any) -> int:
    return -1


def mean_of_microbatch_means(right: Any) -> Any:
    return lambda logits, targets: right(logits, targets) / (targets != IGNORED).sum()


def first_row_twice(right: Any) -> Any:
    return lambda logits, targets: right(logits, targets) + right(logits[:1], targets[:1])


def mean_embedding_added(right: Any) -> Any:
    return lambda self, tokens: right(self, tokens) + self.weight.mean(0)


def higher_ids_weigh_more(right: Any) -> Any:
    return lambda logits, targets: right(logits * (1 + 1e-6 * torch.arange(logits.shape[-1])), targets)


def padding_attended(right: Any) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
        return right(q, k, v, *rest, **named) + v.mean()

    return attend


MISTAKES: list[tuple[Any, str, Any, Callable[[Case], float], str]] = [
    (mixtral, "tally", balance_of_padding, more_padding, "qwen3_moe"),
    (mixtral, "tally", balance_of_padding, other_padding, "qwen3_moe"),
    (Experts, "rooms", room_of_padding, more_padding, "mixtral"),
    (step, "IGNORED", mean_of_all_tokens, more_padding, "llama"),
    (step, "cross_entropy", mean_of_microbatch_means, microbatches, "llama"),
    (step, "cross_entropy", mean_of_microbatch_means, moved, "gpt2"),
    (step, "cross_entropy", mean_of_microbatch_means, alone, "mixtral"),
    (step, "cross_entropy", first_row_twice, order_of_rows, "gpt2"),
    (step, "cross_entropy", first_row_twice, equal_microbatches, "resnet"),
    (step, "cross_entropy", higher_ids_weigh_more, renamed_ids, "resnet"),
    (layers.Embedding, "forward", mean_embedding_added, unused_rows, "llama"),
    (step, "cross_entropy", higher_ids_weigh_more, renamed_ids, "llama"),
    (llama, "attend", padding_attended, other_padding, "llama"),
]


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "transformation", "family"),
    MISTAKES,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_mistakes_are_found(
    owner: Any, name: str, mistake: Any, transformation: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_for(transformation, family)
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    assert transformation(case) > 1e3 * BOUND
