"""Distributed training: in float64 every mesh and strategy trains as one device does."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.config import AXES, Experiment
from jaxdist.conftest import GPT2, MIXTRAL, often, slow, tiny
from jaxdist.data import IGNORED
from jaxdist.families.loss import cross_entropy
from jaxdist.families.mixtral import model as mixtral
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.sharding import TOKENS
from jaxdist.training import step
from jaxdist.training.program import Program
from jaxdist.training.step import Step

pytestmark = pytest.mark.long

STEPS = 20
LOSS, STATE = 1e-12, 1e-10  # the contract's relative bounds in float64

CASES: dict[str, dict[str, Any]] = {
    "accumulation": {"train": {"accumulation": 2}},
    "ddp": {"parallel": {"mesh": "8x1", "strategy": "ddp"}},
    "zero1": {"parallel": {"mesh": "8x1", "strategy": "zero1"}},
    "zero2": {"parallel": {"mesh": "8x1", "strategy": "zero2"}},
    "fsdp": {"parallel": {"mesh": "8x1"}},
    "kept": {"parallel": {"mesh": "8x1", "reshard_after_forward": False}},
    "hybrid": {"parallel": {"mesh": "data=2,fsdp=4"}},
    "tensor": {"parallel": {"mesh": "1x4"}},
    "2x4": {"parallel": {"mesh": "2x4"}},
    "2x4 ddp": {"parallel": {"mesh": "2x4", "strategy": "ddp"}, "train": {"accumulation": 2}},
    "2x4 zero1": {"parallel": {"mesh": "2x4", "strategy": "zero1"}, "train": {"accumulation": 2}},
    "2x4 zero2": {"parallel": {"mesh": "2x4", "strategy": "zero2"}, "train": {"accumulation": 2}},
    "2x2x2": {
        "parallel": {"mesh": "data=2,fsdp=2,tensor=2"},
        "train": {"accumulation": 2},
        "memory": {"remat": "full"},
    },
    "2x2x2 zero1": {"parallel": {"mesh": "data=2,fsdp=2,tensor=2", "strategy": "zero1"}},
    "2x2x2 kept": {
        "parallel": {"mesh": "data=2,fsdp=2,tensor=2", "reshard_after_forward": False},
        "train": {"accumulation": 2},
    },
    "2x2x2 zero2": {"parallel": {"mesh": "data=2,fsdp=2,tensor=2", "strategy": "zero2"}},
    "reduce per step": {"parallel": {"mesh": "4x2", "reduce": "step"}, "train": {"accumulation": 4}},
    "zero2 per step": {
        "parallel": {"mesh": "4x2", "strategy": "zero2", "reduce": "step"},
        "train": {"accumulation": 4},
    },
    "full": {"parallel": {"mesh": "2x4"}, "memory": {"remat": "full"}},
    "selective": {"parallel": {"mesh": "2x4"}, "memory": {"remat": "selective"}},
    "chunks": {"parallel": {"mesh": "2x4"}, "memory": {"loss_chunks": 3}, "train": {"accumulation": 2}},
    "chunks ddp": {"parallel": {"mesh": "8x1", "strategy": "ddp"}, "memory": {"loss_chunks": 2}},
    "chunks sequence": {
        "parallel": {"mesh": "fsdp=2,context=2,tensor=2", "sequence": True},
        "memory": {"loss_chunks": 4},
    },
    "sequence": {"parallel": {"mesh": "2x4", "sequence": True}},
    "sequence full": {
        "parallel": {"mesh": "data=2,fsdp=2,tensor=2", "strategy": "zero1", "sequence": True},
        "train": {"accumulation": 2},
        "memory": {"remat": "full"},
    },
    "sequence selective": {"parallel": {"mesh": "2x4", "sequence": True}, "memory": {"remat": "selective"}},
    "ring": {"parallel": {"mesh": "context=2"}},
    "ring 2x2x2": {
        "parallel": {"mesh": "fsdp=2,context=2,tensor=2"},
        "train": {"accumulation": 2},
        "memory": {"remat": "full"},
    },
    "ring ddp": {"parallel": {"mesh": "data=2,context=2", "strategy": "ddp"}},
    "ulysses": {"parallel": {"mesh": "fsdp=2,context=2,tensor=2", "context": "ulysses", "sequence": True}},
    "ring selective": {"parallel": {"mesh": "fsdp=2,context=2"}, "memory": {"remat": "selective"}},
    "ulysses full": {"parallel": {"mesh": "fsdp=2,context=2", "context": "ulysses"}, "memory": {"remat": "full"}},
    "ulysses 4": {"parallel": {"mesh": "data=2,context=4", "strategy": "zero1", "context": "ulysses"}},
    "every second": {"parallel": {"mesh": "2x4"}, "memory": {"remat": "full", "remat_every": 2}},
}


EXPERT_CASES: dict[str, dict[str, Any]] = {
    "fsdp": {"parallel": {"mesh": "fsdp=2,expert=2"}},
    "ddp": {"parallel": {"mesh": "data=2,expert=4", "strategy": "ddp"}},
    "zero1": {"parallel": {"mesh": "data=2,expert=2", "strategy": "zero1"}},
    "tensor zero2": {"parallel": {"mesh": "expert=4,tensor=2", "strategy": "zero2"}, "memory": {"remat": "selective"}},
    "sequence": {
        "parallel": {"mesh": "expert=2,tensor=4", "sequence": True},
        "memory": {"remat": "full", "loss_chunks": 2},
    },
    "hybrid kept": {"parallel": {"mesh": "data=2,fsdp=2,expert=2", "reshard_after_forward": False}},
    "no expert axis": {"parallel": {"mesh": "fsdp=2,tensor=2"}},
    "context": {"parallel": {"mesh": "fsdp=2,expert=2,context=2"}, "memory": {"remat": "full"}},
}
EXPERTS = [(case, capacity) for case in EXPERT_CASES for capacity in (0.0, 1.0)]


def train(experiment: Experiment, batches: Any, steps: int = STEPS) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(loss and grad_norm per step [steps, 2], final parameters and moments by name)."""
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    state, curve = program.initialize(), []
    for batch in batches(experiment, steps):
        state, values = program.step(state, program.placement.put(batch))
        curve.append((float(values["loss"]), float(values["grad_norm"])))
    flat = jax.tree_util.tree_leaves_with_path(program.placement.to_checkpoint_order(state))
    return np.array(curve), {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def error(
    a: tuple[np.ndarray, dict[str, np.ndarray]], b: tuple[np.ndarray, dict[str, np.ndarray]]
) -> tuple[float, float]:
    """Largest relative difference along the loss curve, and of grad_norm, parameters and moments."""
    curve: Any = np.abs(a[0] / b[0] - 1).max(0)
    states: list[Any] = [np.linalg.norm(a[1][k] - b[1][k]) / np.maximum(np.linalg.norm(b[1][k]), 1e-300) for k in b[1]]
    return curve[0], max(curve[1], *states)


# Cases with four layers.
STAGES: dict[str, dict[str, Any]] = {
    "GPipe": {"parallel": {"mesh": "pipeline=4", "pipeline_schedule": "GPipe"}, "train": {"accumulation": 4}},
    "1F1B": {"parallel": {"mesh": "pipeline=4"}, "train": {"accumulation": 8}, "memory": {"remat": "selective"}},
    "1F1B, 2 of 4": {"parallel": {"mesh": "pipeline=4,data=2", "strategy": "ddp"}, "train": {"accumulation": 2}},
    "interleaved": {
        "parallel": {"mesh": "pipeline=2", "pipeline_schedule": "Interleaved1F1B", "virtual_stages": 2},
        "train": {"accumulation": 4},
    },
    "interleaved, 3 of 2": {
        "parallel": {
            "mesh": "pipeline=2,data=2", "strategy": "ddp", "pipeline_schedule": "Interleaved1F1B",
            "virtual_stages": 2,
        },
        "train": {"accumulation": 3, "batch": 12},
    },
    "2x2x2": {"parallel": {"mesh": "pipeline=2,fsdp=2,tensor=2"}, "train": {"accumulation": 4}},
    "2x2x2 GPipe": {
        "parallel": {"mesh": "pipeline=2,fsdp=2,tensor=2", "pipeline_schedule": "GPipe"},
        "train": {"accumulation": 4},
        "memory": {"remat": "full", "loss_chunks": 2},
    },
    "2x2x2 interleaved": {
        "parallel": {
            "mesh": "pipeline=2,fsdp=2,tensor=2", "pipeline_schedule": "Interleaved1F1B", "virtual_stages": 2,
            "sequence": True,
        },
        "train": {"accumulation": 4},
        "memory": {"remat": "full"},
    },
    "zero1": {"parallel": {"mesh": "pipeline=2,data=2,fsdp=2", "strategy": "zero1"}, "train": {"accumulation": 2}},
    "zero2": {"parallel": {"mesh": "pipeline=2,fsdp=4", "strategy": "zero2"}, "train": {"accumulation": 2}},
    "kept": {
        "parallel": {"mesh": "pipeline=2,fsdp=2", "reshard_after_forward": False}, "train": {"accumulation": 4},
    },
    "ring": {
        "parallel": {"mesh": "pipeline=2,fsdp=2,context=2"}, "train": {"accumulation": 2}, "memory": {"loss_chunks": 2},
    },
    "scaled, offloaded": {
        "parallel": {"mesh": "pipeline=2,fsdp=2"}, "train": {"accumulation": 2},
        "precision": {"policy": "fp64", "loss_scale": 1024}, "memory": {"offload": "optimizer"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Callable[..., Any]:
    """One device's run of a model, computed once."""
    known: dict[str, Any] = {}

    def run(batches: Any, **sections: Any) -> Any:
        if (key := str(sections)) not in known:
            known[key] = train(tiny(**sections), batches)
        return known[key]

    return run


# Each axis once, on the meshes with most axes.
QUICK = ("2x2x2",)


@pytest.mark.parametrize("case", often(CASES, QUICK))
def test_trains_as_one_device(case: str, batches: Any, alone: Any) -> None:
    loss, state = error(train(tiny(**CASES[case]), batches), alone(batches))
    assert loss <= LOSS and state <= STATE


@pytest.mark.slow
def test_a_ring_of_five(batches: Any, alone: Any) -> None:
    """More than two devices, an odd number, and a window that ends within and between chunks."""
    sections = {"model": dict(tiny().model.model_dump(), window=7)}
    ring = {"parallel": {"mesh": "context=5", "strategy": "ddp"}}
    loss, state = error(train(tiny(**ring, **sections), batches), alone(batches, **sections))
    assert loss <= LOSS and state <= STATE


@pytest.mark.parametrize("case", slow(["fsdp", "2x4", "2x2x2", "ring 2x2x2", "ulysses"]))
def test_gpt2_trains_as_one_device(case: str, batches: Any, alone: Any) -> None:
    sections = {"model": GPT2}
    # The key bias has a true gradient of zero: Adam turns its rounding into steps.
    first, second = train(tiny(**CASES[case], **sections), batches), alone(batches, **sections)
    kept = [name for name in second[1] if "k_proj.bias" not in name]
    loss, state = error((first[0], {n: first[1][n] for n in kept}), (second[0], {n: second[1][n] for n in kept}))
    assert loss <= LOSS and state <= STATE


@pytest.mark.parametrize("case", slow(["tensor", "2x4", "chunks"]))
def test_tied_embeddings(case: str, batches: Any, alone: Any) -> None:
    sections = {"model": dict(tiny().model.model_dump(), tied=True)}
    loss, state = error(train(tiny(**CASES[case], **sections), batches), alone(batches, **sections))
    assert loss <= LOSS and state <= STATE


@pytest.mark.slow
@pytest.mark.parametrize(("case", "capacity"), EXPERTS)
def test_a_mixture_trains_as_on_one_device(case: str, capacity: float, batches: Any, alone: Any) -> None:
    sections = {"model": MIXTRAL | {"capacity": capacity}}
    loss, state = error(train(tiny(**EXPERT_CASES[case], **sections), batches), alone(batches, **sections))
    assert loss <= LOSS and state <= STATE


@pytest.mark.slow
def test_tokens_balanced_by_each_device_are_caught(batches: Any, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load balance alone: each device divides by its own tokens, and counts those routed to its own experts."""
    sections = {"model": MIXTRAL | {"capacity": 1.0}}
    right = alone(batches, **sections)
    monkeypatch.setattr(Parallel, "sum_over_tokens", lambda self, sums: lax.stop_gradient(sums))
    loss, state = error(train(tiny(**EXPERT_CASES["sequence"], **sections), batches, STEPS), right)
    assert loss > LOSS and state > STATE


def stages_differ(case: str, model: Any, batches: Any, alone: Any) -> float:
    """Difference of a pipeline from one device, over the contract's bounds."""
    # At a rate of 1e-2 a model this deep, on 12 sequences, amplifies rounding to 1e-10 by step 20, even for another
    # accumulation.
    sections = {"model": dict(model, layers=4), "optimizer": {"learning_rate": 3e-3}}
    unsplit = {"train": {"batch": STAGES[case]["train"].get("batch", 16)}}
    first, second = train(tiny(**STAGES[case], **sections), batches), alone(batches, **sections, **unsplit)
    kept = {name: a for name, a in second[1].items() if "k_proj.bias" not in name and ".scaling" not in name}
    loss, state = error((first[0], first[1]), (second[0], kept))
    return max(loss / LOSS, state / STATE)


@pytest.mark.parametrize("case", slow(STAGES))
def test_a_pipeline_trains_as_one_device(case: str, batches: Any, alone: Any) -> None:
    assert stages_differ(case, tiny().model.model_dump(), batches, alone) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GPipe", "1F1B", "interleaved", "2x2x2"])
def test_a_pipeline_of_gpt2_with_tied_embeddings(case: str, batches: Any, alone: Any) -> None:
    assert stages_differ(case, GPT2 | {"tied": True}, batches, alone) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0.0, 1.0])
def test_a_pipeline_of_mixtures(capacity: float, batches: Any) -> None:
    """Balanced within each microbatch, so compared with devices that have the same rows in each."""
    sections = {"model": MIXTRAL | {"capacity": capacity, "layers": 4}, "train": {"accumulation": 2}}
    meshes = ({"mesh": f"{stages}fsdp=2,expert=2"} for stages in ("pipeline=2,", ""))
    loss, state = error(*(train(tiny(parallel=mesh, **sections), batches) for mesh in meshes))
    assert loss <= LOSS and state <= STATE


def test_equal_probabilities_choose_the_first_experts() -> None:
    """torch.topk may choose any of equal ones; both sides take the first."""
    probabilities = jnp.array([0.1, 0.3, 0.2, 0.3, 0.2, 0.3])[None, None]
    assert mixtral.choose(probabilities, 4).tolist() == [[[1, 3, 5, 2]]]


def divided(reduce: Any) -> Any:
    """Gradients are averaged over the devices, though the loss is already divided by the global count."""
    return lambda self, g: jax.tree.map(lambda x: x / lax.axis_size(TOKENS), reduce(self, g))


def one_replica(reduce: Any) -> Any:
    """The first replica's gradients replace the sum."""

    def wrong(self: Step, gradients: Any) -> Any:
        first = lax.axis_index("data") == 0
        return reduce(self, jax.tree.map(lambda g: jnp.where(first, g, 0) * lax.axis_size("data"), gradients))

    return wrong


def counted_per_device(norm: Any) -> Any:
    """Replicated parameters are counted by each device: the sum of squares is over all axes."""

    def wrong(self: Step, gradients: Any) -> Any:
        return norm(self, gradients) * math.prod(lax.axis_size(axis) for axis in AXES) ** 0.5

    return wrong


@pytest.mark.parametrize("level", [0.0, 1e4])
def test_the_gradient_of_a_token_sums_to_zero(level: float) -> None:
    """softmax - one-hot sums to nearly 0 in float32 even with large logits, as the largest is subtracted first."""
    experiment = tiny(parallel={"mesh": "1x1"}, precision={"policy": "fp32"})
    mesh = make_mesh(experiment, "cpu")[0]
    random = np.random.default_rng(0)
    logits = jnp.asarray(level + random.normal(size=(2, 8, 64)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 64, (2, 8)), jnp.int32)

    def gradient(logits: jax.Array, targets: jax.Array) -> Any:
        return jax.grad(cross_entropy)(logits, targets)

    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (P(), P()), "out_specs": P()}
    found = jax.jit(jax.shard_map(gradient, **specs))(logits, targets)
    assert float(jnp.abs(found.sum(-1)).max()) < 5e-7
    assert float(jnp.abs(found - jax.grad(plain_loss)(logits, targets)).max()) < 5e-7


def plain_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).sum()


def own_tokens(cross_entropy: Any) -> Any:
    """Each device takes the mean over its own valid tokens, and the loss is the mean of means."""

    def wrong(logits: Any, targets: Any) -> Any:
        count = (targets != IGNORED).sum()
        return cross_entropy(logits, targets) / count * lax.pmean(count, TOKENS)

    return wrong


def neighbours(pieces: Any) -> Any:
    """Each device updates its neighbour's shard with its own gradient."""

    def wrong(self: Step, parameters: Any) -> Any:
        n = lax.axis_size("fsdp")
        turn = [(i, (i + 1) % n) for i in range(n)]
        return jax.tree.map(lambda w: lax.ppermute(w, "fsdp", turn), pieces(self, parameters))

    return wrong


def last_microbatch(accumulate: Any) -> Any:
    """Every microbatch is the last one."""

    def wrong(self: Step, parameters: Any, batch: Any, *scale: Any) -> Any:
        parts = self.accumulation
        last = jax.tree.map(lambda x: jnp.tile(x[-(x.shape[0] // parts) :], (parts, 1)), batch)
        return accumulate(self, parameters, last, *scale)

    return wrong


# Each on its meshes; outside of the slow grid the first alone.
MISTAKES: dict[Any, tuple[Any, str, tuple[str, ...]]] = {
    divided: (Step, "reduce", ("zero2", "ddp", "fsdp", "reduce per step")),
    one_replica: (Step, "reduce", ("hybrid", "2x2x2 zero1")),
    counted_per_device: (Step, "norm", ("tensor", "ddp")),
    own_tokens: (step, "cross_entropy", ("fsdp", "ddp")),
    neighbours: (Step, "shard_params", ("zero1", "zero2")),
    last_microbatch: (Step, "accumulate", ("accumulation", "2x4 zero2", "2x2x2 kept")),
}
PLANTED = [(mistake, case) for mistake, (_, _, cases) in MISTAKES.items() for case in cases]


@pytest.mark.parametrize("planted", often(PLANTED, PLANTED[:1]), ids=lambda pair: f"{pair[0].__name__} {pair[1]}")
def test_planted_mistakes_are_caught(
    planted: tuple[Any, str], batches: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake, case = planted
    right = alone(batches)
    owner, name, _ = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    loss, state = error(train(tiny(**CASES[case]), batches), right)
    assert loss > LOSS or state > STATE


@pytest.mark.parametrize("case", often(["ddp", "2x4"], ["2x4"]))
def test_sums_forgotten_do_not_compile(case: str, batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`check_vma` refuses a program whose outputs differ between devices but are declared replicated."""
    monkeypatch.setattr(lax, "psum", lambda x, axes: x)
    with pytest.raises(Exception, match=r"varying|vma|replicat"):
        train(tiny(**CASES[case]), batches, steps=1)


def test_start_is_the_same_on_any_mesh() -> None:
    """Weights depend on the seed and the name alone, to the bit."""
    states = []
    for sections in ({}, CASES["2x2x2"], CASES["ddp"]):
        experiment = tiny(**sections, precision={"policy": "fp32"})
        states.append(Program(experiment, make_mesh(experiment, "cpu")[0]).initialize().parameters)
    for other in states[1:]:
        for name, array in states[0].items():
            np.testing.assert_array_equal(np.asarray(array), np.asarray(other[name]))
