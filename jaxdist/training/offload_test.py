"""Offloading to the host trains the same to the bit, and arrays are in fact on the host."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.accounting.traffic import equations
from jaxdist.conftest import often, tiny
from jaxdist.parallel import collectives, rematerialization
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training import metrics, program, step
from jaxdist.training.checkpoint import Checkpoints
from jaxdist.training.metrics import bytes_on_device
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder
from jaxdist.training.step import Step, TrainState
from jaxdist.training.step_test import LOSS, STATE, error, train

pytestmark = pytest.mark.long

STEPS = 4
BOTH, ALL = "optimizer,parameters", "optimizer,parameters,activations"

PAIR: dict[str, Any] = {"parallel": {"mesh": "2x1"}, "memory": {"offload": BOTH}}
CASES: dict[str, dict[str, Any]] = {
    "2x2x2": {
        "parallel": {"mesh": "data=2,fsdp=2,tensor=2"},
        "train": {"accumulation": 2},
        "memory": {"remat": "selective", "offload": ALL},
    },
    "fsdp": {"parallel": {"mesh": "8x1"}, "memory": {"remat": "full", "offload": ALL}},
    "optimizer": {"parallel": {"mesh": "2x4"}, "memory": {"offload": "optimizer"}},
    "parameters": {"parallel": {"mesh": "2x4"}, "memory": {"offload": "parameters"}},
    "activations": {"parallel": {"mesh": "2x4"}, "memory": {"remat": "selective", "offload": "activations"}},
    "ddp": {"parallel": {"mesh": "4x2", "strategy": "ddp"}, "memory": {"remat": "full", "offload": ALL}},
    "zero1": {"parallel": {"mesh": "2x4", "strategy": "zero1"}, "memory": {"offload": BOTH}},
    "zero2": {
        "parallel": {"mesh": "8x1", "strategy": "zero2"},
        "train": {"accumulation": 2},
        "memory": {"offload": BOTH},
    },
    "kept": {
        "parallel": {"mesh": "data=2,fsdp=2,tensor=2", "reshard_after_forward": False},
        "train": {"accumulation": 2},
        "memory": {"remat": "selective", "offload": ALL},
    },
    "every second": {"parallel": {"mesh": "2x4"}, "memory": {"remat": "full", "remat_every": 2, "offload": ALL}},
    "ring": {"parallel": {"mesh": "fsdp=2,context=2,tensor=2"}, "memory": {"remat": "selective", "offload": ALL}},
    "sequence": {"parallel": {"mesh": "2x4", "sequence": True}, "memory": {"remat": "selective", "offload": ALL}},
    "bf16": {
        "parallel": {"mesh": "8x1"},
        "precision": {"policy": "bf16"},
        "memory": {"remat": "full", "offload": ALL},
    },
}
QUICK = ("2x2x2",)


def without(case: dict[str, Any]) -> dict[str, Any]:
    return case | {"memory": case["memory"] | {"offload": ""}}


def same(case: dict[str, Any], batches: Any) -> bool:
    """Whether curves, weights and moments equal those of the run without offloading, to the bit."""
    (curve, state), (curve_, state_) = (train(tiny(**c), batches, STEPS) for c in (case, without(case)))
    return np.array_equal(curve, curve_) and all(np.array_equal(state[name], state_[name]) for name in state_)


@pytest.mark.parametrize("case", often(CASES, QUICK))
def test_trains_the_same_to_the_bit(case: str, batches: Any) -> None:
    assert same(CASES[case], batches)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["2x2x2", "fsdp", "ring"])
def test_trains_as_one_device(case: str, batches: Any) -> None:
    loss, state = error(train(tiny(**CASES[case]), batches), train(tiny(), batches))
    assert loss <= LOSS and state <= STATE


def not_written_back(update: Any) -> Any:
    """The host keeps the moments that a step was given."""

    def wrong(self: Step, state: TrainState, *inputs: Any) -> TrainState:
        after: TrainState = update(self, state, *inputs)
        old = rematerialization.on_device(state.optimizer)
        return after._replace(optimizer=jax.tree.map(lambda a, b: b if a.ndim else a, after.optimizer, old))

    return wrong


@pytest.mark.slow
def test_moments_that_stay_on_the_device_are_found(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = train(tiny(**PAIR), batches, STEPS)
    monkeypatch.setattr(Step, "update", not_written_back(Step.update))
    wrong = train(tiny(**PAIR), batches, STEPS)
    assert np.array_equal(wrong[0][0], right[0][0]) and not np.array_equal(wrong[0], right[0])


def built(case: dict[str, Any]) -> Program:
    experiment = tiny(**case)
    return Program(experiment, make_mesh(experiment, "cpu")[0])


def kinds(state: Any) -> set[str]:
    return {array.sharding.memory_kind for array in jax.tree.leaves(state) if array.ndim}


@pytest.mark.slow
@pytest.mark.parametrize("offload", [BOTH, *BOTH.split(",")])
def test_it_is_on_the_host_between_steps(offload: str, batches: Any) -> None:
    p = built(PAIR | {"memory": {"offload": offload}})
    expected = [{rematerialization.HOST} if kind in offload else {"device"} for kind in ("parameters", "optimizer")]
    state = p.initialize()
    for batch in batches(p.experiment, 2):
        assert [kinds(state.parameters), kinds(state.optimizer)] == expected
        before, (state, _) = state, p.step(state, p.placement.put(batch))
        assert all(array.is_deleted() for array in jax.tree.leaves(before))  # donated
    traced = p.step.trace(p.abstract, p.abstract_batch)
    found = metrics.memory(p, traced, traced.lower().compile(), state)
    moments = bytes_on_device(state.optimizer) - 2 * 4  # step counts stay on the device
    assert (
        found["host"]
        == ("parameters" in offload) * bytes_on_device(state.parameters) + ("optimizer" in offload) * moments
    )


def test_a_state_that_stays_on_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "offloaded", lambda shardings: shardings)
    p = built({"memory": {"offload": BOTH}})
    assert kinds(p.initialize()) == {"device"} and bytes_on_device(p.abstract, offloaded=True) == 0


@pytest.mark.parametrize(("owner", "offload"), [(collectives, "parameters"), (step, "optimizer")])
def test_arrays_that_are_not_fetched_do_not_trace(owner: Any, offload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "on_device", lambda arrays, after=None: arrays)
    p = built({"parallel": {"mesh": "2x4", "strategy": "zero1"}, "memory": {"offload": offload}})
    with pytest.raises(ValueError, match="memory_space"):
        p.step.trace(p.abstract, p.abstract_batch)


def moves(case: dict[str, Any]) -> Counter[str]:
    """Transfers of the step lowered for GPUs: target -> number; lowered for CPUs there are none."""
    p = built(case)
    text = p.step.trace(p.abstract, p.abstract_batch).lower(lowering_platforms=("cuda",)).as_text()
    return Counter(re.findall(r'annotate_device_placement.*?_xla_buffer_placement = "(\w+)"', text))


def test_transfers_of_a_gpu() -> None:
    """Both moments of each parameter in both directions; weights once more for the update, and their blocks' inputs."""
    case: dict[str, Any] = {"parallel": {"mesh": "2x1"}, "memory": {"remat": "full", "offload": "optimizer"}}
    n = len(built(case).param_specs)
    moments = moves(case)
    assert moments[rematerialization.HOST] == 2 * n and moments["device"] >= 2 * n
    every = moves(case | {"memory": {"remat": "full", "offload": ALL}})
    assert every[rematerialization.HOST] == 3 * n + 1 and every["device"] > 4 * n
    assert not moves(without(case))


def awaited(case: dict[str, Any]) -> int:
    """Number of arrays that are fetched from the host only after the gradients' norm is known."""
    p = built(case)
    program = [e for e, *_ in equations(p.step.trace(p.abstract, p.abstract_batch).jaxpr)]
    barriers = [e for e in program if e.primitive.name == "optimization_barrier"]
    waiting = {e.outvars[0]: e.invars[1].aval.shape for e in barriers if len(e.invars) == 2}
    fetched = [v for e in program if e.primitive.name == "device_put" for v in e.invars]
    return sum(waiting.get(variable) == () for variable in fetched)


def test_moments_are_fetched_when_gradients_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of each parameter: a GPU fetches arrays without dependencies first, which saves no memory."""
    case: dict[str, Any] = {"parallel": {"mesh": "2x1"}, "memory": {"offload": "optimizer"}}
    assert awaited(case) == 2 * len(built(case).param_specs)
    monkeypatch.setattr(step, "on_device", lambda arrays, after=None: rematerialization.on_device(arrays))
    assert awaited(case) == 0


def on_host(case: dict[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the arrays that the loop over blocks leaves on the host of each device."""
    p = built(case)
    traced = p.step.trace(p.abstract, p.abstract_batch)
    scans = [e for e, *_ in equations(traced.jaxpr) if e.primitive.name == "scan"]
    avals = [variable.aval for scan in scans for variable in scan.outvars]
    return [aval.shape for aval in avals if aval.memory_space == jax.memory.Space.Host]


def test_activations_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full rematerialization offloads every block's input, [L, B, T, D], alone; selective offloads products too."""
    case: dict[str, Any] = {"parallel": {"mesh": "8x1"}, "memory": {"remat": "full", "offload": "activations"}}
    inputs = (2, 2, 20, 40)
    assert on_host(case) == [inputs]
    selective = on_host(case | {"memory": case["memory"] | {"remat": "selective"}})
    assert inputs in selective and len(selective) > 6
    assert on_host(without(case)) == []
    monkeypatch.setitem(rematerialization.OFFLOADED, "full", rematerialization.POLICIES["full"])
    assert on_host(case) == []


@pytest.mark.slow
def test_a_record_is_the_same(batches: Any) -> None:
    found = []
    for case in (PAIR, without(PAIR)):
        p = built(case | {"record": {"steps": [1], "tensors": "all"}})
        found.append(Recorder(p)(p.initialize(), batches(p.experiment, 1)[0]))
    assert list(found[0]) == list(found[1])
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [(PAIR, without(PAIR)), (without(PAIR), PAIR)],
    ids=["with", "without"],
)
def test_a_run_goes_on_the_other_way(first: dict[str, Any], then: dict[str, Any], batches: Any, tmp_path: Path) -> None:
    programs = [built(first), built(then)]
    state = programs[0].initialize()
    with Checkpoints(tmp_path, programs[0].experiment.checkpoint) as checkpoints:
        for done, batch in enumerate(batches(programs[0].experiment, STEPS), start=1):
            state, _ = programs[done > 2].step(state, batch)
            if done == 2:
                checkpoints.save(2, programs[0].experiment, state)
                checkpoints.wait()
                state = checkpoints.restore(2, programs[1].abstract)
    right = train(tiny(**first), batches, STEPS)[1].values()
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), right, strict=True))
