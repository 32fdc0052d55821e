"""Mixtures of experts: JAX against torch on each mesh, and both against torch on one device, in float64."""

from typing import Any

import pytest

from jaxdist.config import ConfigError, Experiment
from parity_tests.conftest import FIGURES, STEPS, Runs
from parity_tests.runs.cases import EXPERT_MESHES, MIXTURES
from parity_tests.suite.parity_test import Record, measured
from parity_tests.validation.seeded import misplaced, worst
from torch_ref.parallel import experts

pytestmark = pytest.mark.long

SIDES = ("jaxdist", "torch_ref")
DROPS = {"model.capacity": 1.0}
QUICK = [("qwen3_moe", "ddp")]
SLOW = [(model, mesh) for model in MIXTURES for mesh in EXPERT_MESHES if (model, mesh) not in QUICK]


def check(mixed: Runs, record: Record, model: str, mesh: str) -> None:
    jax, torch = (mixed(side, model, EXPERT_MESHES[mesh]) for side in SIDES)
    # One device balances over the same microbatches.
    one = {name: value for name, value in EXPERT_MESHES[mesh].items() if name == "train.accumulation"}
    alone = mixed("torch_ref", model, {"mesh": "1x1"} | one)
    assert len(jax.metrics) == STEPS
    record(FIGURES, {"model": model, "mesh": "expert", "variant": mesh, **measured(jax, torch)})
    assert worst(jax, torch) <= 1 and worst(jax, alone) <= 1 and worst(torch, alone) <= 1
    for made in (jax, torch):
        assert misplaced(made) == []


@pytest.mark.parametrize(("model", "mesh"), QUICK)
def test_float64(mixed: Runs, record_property: Record, model: str, mesh: str) -> None:
    check(mixed, record_property, model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), SLOW)
def test_float64_grid(mixed: Runs, record_property: Record, model: str, mesh: str) -> None:
    check(mixed, record_property, model, mesh)


@pytest.mark.parametrize("mistake", [{"model.balance": 0.0499}, DROPS], ids=str)
@pytest.mark.slow
def test_planted_mistakes_are_caught(mixed: Runs, mistake: dict[str, Any]) -> None:
    """A load-balance loss that is slightly off, and an expert that drops tokens beyond its capacity."""
    wrong = mixed("torch_ref", "mixtral", {"mesh": "1x1", **mistake})
    assert worst(wrong, mixed("torch_ref", "mixtral", {"mesh": "1x1"})) > 100


def test_cases_that_torch_does_not_support() -> None:
    made = Experiment.parse({"model": {"family": "mixtral"}, "parallel": {"strategy": "zero1"}}, source="test")
    axes = made.parallel.axes()
    experts.check(made, axes)
    with pytest.raises(
        ConfigError, match=r"zero1 with the mesh axis expert = 2: .*; use parallel.strategy = zero2 or fsdp"
    ):
        experts.check(made, axes | {"expert": 2})
