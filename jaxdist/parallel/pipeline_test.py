"""Guarantees of a schedule: order of work, idle time of stages, memory, and placement of layers."""

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.accounting import exchanges
from jaxdist.accounting.traffic_test import BOUND, ratios
from jaxdist.config import Checkpoint, ConfigError
from jaxdist.conftest import GPT2, slow, tiny
from jaxdist.families.llama.config import Llama
from jaxdist.parallel import pipeline
from jaxdist.parallel.mesh import axes_of, make_mesh
from jaxdist.parallel.pipeline import OneFOneB, Timetable
from jaxdist.training import metrics
from jaxdist.training.checkpoint import Checkpoints
from jaxdist.training.program import Program
from jaxdist.training.step_test import LOSS, STAGES, STATE, error, train

DEEP = dict(tiny().model.model_dump(), layers=4)


def program(**sections: Any) -> Program:
    experiment = tiny(**{"model": DEEP} | sections)
    return Program(experiment, make_mesh(experiment, "cpu")[0])


TABLES = [Timetable(S, v, M) for S in (1, 2, 3, 4) for v in (1, 2, 3) for M in (1, 2, 3, 4, 6, 8, 9)]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_every_microbatch_goes_through_every_chunk_once_and_in_order(table: Timetable) -> None:
    """Each one tick after the stage before it, as needed to send a message at once."""
    S, v, M = table.stages, table.chunks, table.microbatches
    done: dict[tuple[int, int], list[int]] = {}
    for stage in range(S):
        microbatches, chunks, busy = table.at(np.arange(table.ticks) - stage)
        for tick in np.flatnonzero(busy):
            done.setdefault((int(microbatches[tick]), int(chunks[tick]) * S + stage), []).append(int(tick))
    assert done.keys() == {(m, part) for m in range(M) for part in range(S * v)}
    for m in range(M):
        ticks = [done[m, part] for part in range(S * v)]
        assert ticks == [[ticks[0][0] + part] for part in range(S * v)]


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_the_bubble_is_the_closed_form(table: Timetable) -> None:
    """(p-1)/(m+p-1), and with v chunks per stage (p-1)/(mv+p-1); larger only if p does not divide m."""
    S, v, M = table.stages, table.chunks, table.microbatches
    least = (S - 1) / (M * v + S - 1)
    assert table.bubble >= least - 1e-15
    if v == 1 or M % S == 0:
        assert table.bubble == pytest.approx(least, abs=1e-15)


def test_the_bubble_is_reported() -> None:
    p = program(**STAGES["interleaved"])
    assert metrics.pipeline(p)["pipeline"] == {
        "schedule": "Interleaved1F1B", "stages": 2, "virtual_stages": 2, "microbatches": 4,
        "bubble": pytest.approx(1 / 9), "least_bubble": pytest.approx(1 / 9),
    }  # fmt: skip
    assert metrics.pipeline(program()) == {}


def temporary(schedule: str, microbatches: int) -> int:
    """Bytes of temporary memory of a compiled step with sequences that dominate the weights."""
    chunks = {"Interleaved1F1B": 2}.get(schedule, 1)
    p = program(
        model=dict(DEEP, layers=8, positions=128),
        data={"sequence": 128},
        train={"batch": 32, "accumulation": microbatches} | {"batch": microbatches},
        parallel={"mesh": "pipeline=4", "pipeline_schedule": schedule, "virtual_stages": chunks},
        precision={"policy": "fp32"},
    )
    compiled = p.step.lower(p.abstract, p.abstract_batch).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


INPUT = 128 * 40 * 4  # bytes that a stage keeps of a microbatch: T · D numbers


@pytest.mark.long
@pytest.mark.parametrize("schedule", slow(["1F1B", "Interleaved1F1B"]))
def test_memory_does_not_grow_with_microbatches(schedule: str) -> None:
    few, many = temporary(schedule, 8), temporary(schedule, 32)
    assert many - few < 24 * INPUT / 10  # a tenth of the inputs of 24 more microbatches


@pytest.mark.slow
def test_memory_of_gpipe_grows_with_them() -> None:
    """Shows that the bound above can fail."""
    few, many = temporary("GPipe", 8), temporary("GPipe", 32)
    assert 24 * INPUT <= many - few < 3 * 24 * INPUT


SENDS = ["2x2x2", "2x2x2 GPipe"]


@pytest.mark.long
@pytest.mark.parametrize("case", SENDS)
def test_sends_the_least(case: str) -> None:
    found = ratios(program(**{"precision": {"policy": "bf16"}} | STAGES[case]))
    assert all(0.999 < ratio < 1.001 for ratio in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in STAGES if case not in SENDS])
def test_all_send_the_least(case: str) -> None:
    found = ratios(program(**{"precision": {"policy": "fp32"}} | STAGES[case]))
    assert all(0.999 < ratio <= BOUND for ratio in found.values()), found


def test_activations_once_a_tick() -> None:
    """2(Mv + S-1) times B·T·D numbers of a microbatch."""
    p = program(**STAGES["interleaved"])
    e, model = p.experiment, p.experiment.model
    assert isinstance(model, Llama)
    ticks, numbers = 2 * (4 * 2 + 1), e.train.batch // 4 * e.data.sequence * model.dim
    assert exchanges.stages(e, p.param_specs, axes_of(p.mesh)) == {"pipeline": ticks * numbers * 8}


@pytest.mark.long
def test_layers_are_in_the_order_of_stages() -> None:
    p = program(model=dict(DEEP, layers=8), **STAGES["interleaved"])
    assert p.placement.layers.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    state = p.initialize()
    in_order, alone = p.placement.to_checkpoint_order(state), program(model=dict(DEEP, layers=8)).initialize()
    for name, w in alone.parameters.items():
        own = np.asarray(state.parameters[name])
        np.testing.assert_array_equal(own, np.asarray(w)[p.placement.layers] if name in p.stacked else w)
        np.testing.assert_array_equal(np.asarray(in_order.parameters[name]), w)


@pytest.mark.slow
def test_a_run_goes_on_without_a_pipeline(batches: Any, tmp_path: Path) -> None:
    """A checkpoint has the layers in order: 3 interleaved steps and 3 on another mesh equal 6 on one device."""
    first, second, alone = program(**STAGES["interleaved"]), program(parallel={"mesh": "fsdp=2"}), program()
    data = batches(first.experiment, 6)
    state = first.initialize()
    for batch in data[:3]:
        state, _ = first.step(state, first.placement.put(batch))
    with Checkpoints(tmp_path, Checkpoint()) as checkpoints:
        checkpoints.save(3, first.experiment, first.placement.to_checkpoint_order(state))
        checkpoints.wait()
        state = second.placement.to_device_order(checkpoints.restore(3, second.abstract))
    for batch in data[3:]:
        state, values = second.step(state, second.placement.put(batch))
    other = alone.initialize()
    for batch in data:
        other, expected = alone.step(other, alone.placement.put(batch))
    assert float(values["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-12)
    for name, w in other.parameters.items():
        difference = np.asarray(state.parameters[name]) - np.asarray(w)
        assert np.linalg.norm(difference) <= 1e-12 * np.linalg.norm(w)


@pytest.mark.long
@pytest.mark.parametrize("case", slow(["interleaved", "1F1B", "2x2x2"]))
def test_evaluates_as_one_device(case: str, batches: Any) -> None:
    p, alone = program(**STAGES[case]), program()
    batch = batches(p.experiment, 1)[0]
    state, reference = p.initialize(), alone.initialize()
    found, expected = (
        [float(x) for x in q.evaluate(s.parameters, q.placement.put(batch))]
        for q, s in ((p, state), (alone, reference))
    )
    assert found == pytest.approx(expected, rel=1e-13)
    logits, right = (q.logits(s.parameters, batch.tokens) for q, s in ((p, state), (alone, reference)))
    np.testing.assert_allclose(logits, right, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_bf16_loses_no_more_than_without_stages(batches: Any) -> None:
    curves = {}
    for policy in ("fp64", "bf16"):
        for name, case in (("stages", "1F1B"), ("alone", "")):
            sections = {"precision": {"policy": policy}, "model": DEEP} | STAGES.get(case, {})
            curves[policy, name] = train(tiny(**sections), batches, 6)[0][:, 0]
    stages, alone = (np.abs(curves["bf16", name] / curves["fp64", name] - 1).max() for name in ("stages", "alone"))
    assert 0 < stages < 4 * alone


# ---- planted mistakes


def wrong_microbatch(pick: Any) -> Any:
    """Every stage but the first uses the tokens and targets of the microbatch after the one that it receives."""

    def wrong(parts: Any, m: Any) -> Any:
        return pick(parts, jnp.where(lax.axis_index("pipeline") > 0, (m + 1) % len(parts.targets), m))

    return wrong


def sent_twice_as_far(shift: Any) -> Any:
    """Activations skip a stage."""
    return lambda tree, by: shift(shift(tree, by), by)


def busy_always(at: Any) -> Any:
    """Idle ticks of a stage count too."""

    def wrong(self: Timetable, slot: Any) -> Any:
        m, c, busy = at(self, slot)
        return m, c, busy | True

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [
        (pipeline, "pick", wrong_microbatch),
        (pipeline, "shift", sent_twice_as_far),
        (Timetable, "at", busy_always),
    ],
    ids=["microbatch", "shift", "busy"],
)
def test_planted_mistakes_are_caught(
    owner: Any, name: str, mistake: Any, batches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = train(tiny(model=DEEP), batches, 2)
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))
    loss, state = error(train(tiny(model=DEEP, **STAGES["1F1B"]), batches, 2), right)
    assert loss > LOSS and state > STATE


@pytest.mark.slow
def test_a_tied_embedding_not_summed_over_stages_is_caught(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage's gradient replaces the sum; the first step's loss cannot show it."""
    sections = {"model": GPT2 | {"layers": 4, "tied": True}}
    right = train(tiny(**sections), batches, 2)
    add = OneFOneB.add

    def first_alone(self: Any, total: Any, own: Any, *place: Any) -> Any:
        first = lax.axis_index("pipeline") == 0
        return add(self, total, own | {"embed.embedding": own["embed.embedding"] * first}, *place)

    monkeypatch.setattr(OneFOneB, "add", first_alone)
    found = train(tiny(**sections, **STAGES["1F1B"]), batches, 2)
    assert found[0][0, 0] == pytest.approx(right[0][0, 0], rel=LOSS)
    assert math.fabs(found[0][1, 0] / right[0][1, 0] - 1) > LOSS


@pytest.mark.long
def test_a_model_without_a_stack_is_refused(monkeypatch: pytest.MonkeyPatch, batches: Any) -> None:
    monkeypatch.setattr("jaxdist.families.llama.model.scan_layers", lambda par, layers, x, *rest: x)
    p = program(**STAGES["1F1B"])
    with pytest.raises(ConfigError, match=r"axis pipeline = 4 splits a stack of blocks, .* use the axis fsdp"):
        p.step.trace(p.abstract, p.abstract_batch)
