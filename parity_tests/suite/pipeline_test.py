"""Pipelines: JAX against torch on each mesh, and both against torch on one device, in float64."""

import pytest

from jaxdist.config import ConfigError, Experiment
from parity_tests.conftest import FIGURES, STEPS, Runs
from parity_tests.runs.cases import DEEP, PIPELINES
from parity_tests.suite.parity_test import Record, measured
from parity_tests.validation.seeded import misplaced, worst
from torch_ref.parallel import pipeline

pytestmark = pytest.mark.long

SIDES = ("jaxdist", "torch_ref")
GPT2 = list(DEEP)[1]
QUICK = [(GPT2, "interleaved")]
SLOW = [(model, mesh) for model in DEEP for mesh in PIPELINES if (model, mesh) not in QUICK]


def check(mixed: Runs, record: Record, model: str, mesh: str) -> None:
    jax, torch = (mixed(side, model, PIPELINES[mesh]) for side in SIDES)
    alone = mixed("torch_ref", model, {"mesh": "1x1"})
    assert len(jax.metrics) == STEPS
    record(FIGURES, {"model": model, "mesh": "pipeline", "variant": mesh, **measured(jax, torch)})
    found = worst(jax, torch), worst(jax, alone), worst(torch, alone)
    assert max(found) <= 1, found
    for made in (jax, torch):
        assert misplaced(made) == []
    reported = jax.summary["pipeline"]
    assert reported["bubble"] == pytest.approx(reported["least_bubble"], abs=1e-12)
    assert reported.items() >= torch.summary["pipeline"].items()


@pytest.mark.parametrize(("model", "mesh"), QUICK)
def test_float64(mixed: Runs, record_property: Record, model: str, mesh: str) -> None:
    check(mixed, record_property, model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), SLOW)
def test_float64_grid(mixed: Runs, record_property: Record, model: str, mesh: str) -> None:
    check(mixed, record_property, model, mesh)


REFUSED = {
    "accumulation 2 1F1B": r"train.accumulation = 2 with the mesh axis pipeline = 4: .* use train.accumulation = 4",
    "accumulation 9 Interleaved1F1B": r"accumulation = 9 with .* of its 2 rounds; use train.accumulation = 8",
    "sequence": r"parallel.sequence = true with the mesh axis pipeline = 4: .*; leave it out, or use jaxdist.train",
    "offload": r"memory.offload = optimizer,parameters with the mesh axis pipeline = 4: .*; leave it out",
    "chunks": r"memory.loss_chunks = 2 with the mesh axis pipeline = 4: .*; leave it out, or use jaxdist.train",
    "mixture": r"model.family = mixtral with the mesh axis pipeline = 4: .* use --mesh fsdp=4, or jaxdist",
}


@pytest.mark.parametrize("case", REFUSED)
def test_cases_that_torch_does_not_support(case: str) -> None:
    field, *rest = case.split()
    accumulation, schedule = rest or ("4", "1F1B")
    values = {
        "model": {"family": "mixtral" if field == "mixture" else "llama", "layers": 8},
        "train": {"accumulation": int(accumulation), "batch": 18 if accumulation == "9" else 16},
        "parallel": {
            "pipeline_schedule": schedule,
            "virtual_stages": 2 if schedule.startswith("I") else 1,
            "sequence": field == "sequence",
        },
        "memory": {
            "offload": ["optimizer", "parameters"] if field == "offload" else [],
            "loss_chunks": 2 if field == "chunks" else 1,
        },
    }
    made = Experiment.parse(values, source="test")
    axes = made.parallel.axes()
    pipeline.check(made, axes)
    with pytest.raises(ConfigError, match=REFUSED[case]):
        pipeline.check(made, axes | {"pipeline": 4})
