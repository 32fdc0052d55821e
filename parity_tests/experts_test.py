"""Mixtures of experts: JAX against torch on each mesh, and both against torch on one device, in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from jaxdist.config import ConfigError, Experiment
from parity_tests import collectives, compare
from parity_tests.cases import EXPERT_MESHES, experiment, write_documents
from parity_tests.conftest import FIGURES, STEPS, run
from parity_tests.parity_test import Record, measured
from parity_tests.run import JAX, Run
from torch_ref import experts

SIDES = ("jaxdist", "torch_ref")
DROPS = {"model.capacity": 1.0}
QUICK = "fsdp, full"
# Qwen3-MoE has a capacity, which counts whole sequences, and `context` splits them.
SLOW = [("mixtral", mesh) for mesh in EXPERT_MESHES if mesh != QUICK]
SLOW += [("qwen3_moe", mesh) for mesh in EXPERT_MESHES if mesh != "context"]
Mixed = Callable[..., Run]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Mixed:
    """mixed(side, model, **settings) -> Run of 20 steps from a common start; the same settings are run once."""
    from jaxdist.convert.__main__ import main as convert

    quick = "" if pytestconfig.option.markexpr == "slow" else "--xla_backend_optimization_level=0"
    folder, known, starts = tmp_path_factory.mktemp("experts"), dict[Any, Run](), dict[str, Path]()
    write_documents(folder / "documents.jsonl")

    def start(model: str, config: Path) -> Path:
        if model not in starts:
            config.write_text(tomli_w.dumps(experiment(model, folder / "documents.jsonl", STEPS)), encoding="utf-8")
            seed = run(JAX, folder / f"{model}-seed", config, {"steps": 0, "precision": "fp32"}, xla_flags=quick)
            starts[model] = folder / f"{model}-hf"
            convert([str(seed.path), str(starts[model]), "--to", "hf"])
        return starts[model]

    def get(side: str, model: str, settings: dict[str, Any]) -> Run:
        key = (side, model, *sorted(settings.items()))
        if key not in known:
            config = folder / f"{model}.toml"
            init = str(start(model, config))
            known[key] = run(side, folder / f"{len(known)}", config, settings, "--init", init, xla_flags=quick)
        return known[key]

    return get


def worst(a: Run, b: Run) -> float:
    """The largest difference, over its bound of the contract: equivalent when at most 1."""
    curves = {"loss": compare.LOSS, "grad_norm": compare.GRAD_NORM, "learning_rate": compare.LOSS}
    found = [compare.curve(a.metrics, b.metrics, field).max() / bound for field, bound in curves.items()]
    return max(*found, compare.worst(compare.states(a.states, b.states))[1] / compare.STATE)


def check(mixed: Mixed, record: Record, model: str, mesh: str) -> None:
    jax, torch = (mixed(side, model, EXPERT_MESHES[mesh]) for side in SIDES)
    alone = mixed("torch_ref", model, {"mesh": "1x1"})
    assert len(jax.metrics) == STEPS
    record(FIGURES, {"model": model, "mesh": "expert", "variant": mesh, **measured(jax, torch, model)})
    assert worst(jax, torch) <= 1 and worst(jax, alone) <= 1 and worst(torch, alone) <= 1
    for made in (jax, torch):
        assert misplaced(made) == []


def misplaced(made: Run) -> list[str]:
    """By axis what a run has sent more often, less often or more than the closed form says."""
    from jaxdist import models

    e, mesh = made.experiment, made.summary["mesh"]
    layouts = models.layouts(models.build(e.model))
    counts = collectives.expected(made.side, e, layouts, mesh)
    sent = {axis: dict.fromkeys(ops, 0) for axis, ops in counts.items()}
    sizes = dict.fromkeys(counts, 0.0)
    for c in made.summary["collectives"]:
        axis = compare.billed(c["axis"])
        sent[axis][c["op"]] = sent[axis].get(c["op"], 0) + c["count"]
        sizes[axis] += c["bytes"]
    wrong = [
        f"{axis}: {number} {op}, where {counts[axis].get(op, (0, 0))} belong"
        for axis, ops in sent.items()
        for op, number in ops.items()
        if not counts[axis].get(op, (0, 0))[0] <= number <= counts[axis].get(op, (0, 0))[1]
    ]
    least = collectives.least(made.side, e, layouts, mesh)
    return wrong + [
        f"{axis}: {sizes[axis]} bytes of {size}" for axis, size in least.items() if sizes[axis] > 1.05 * size
    ]


def test_float64(mixed: Mixed, record_property: Record) -> None:
    check(mixed, record_property, "mixtral", QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), SLOW)
def test_float64_grid(mixed: Mixed, record_property: Record, model: str, mesh: str) -> None:
    check(mixed, record_property, model, mesh)


@pytest.mark.parametrize("mistake", [pytest.param({"model.balance": 0.0499}, marks=pytest.mark.slow), DROPS], ids=str)
def test_planted_mistakes_are_caught(mixed: Mixed, mistake: dict[str, Any]) -> None:
    """A load-balance loss that is a little off, and an expert that drops what exceeds its room."""
    wrong = mixed("torch_ref", "mixtral", {"mesh": "1x1", **mistake})
    assert worst(wrong, mixed("torch_ref", "mixtral", {"mesh": "1x1"})) > 100


def test_what_torch_has_no_part_for() -> None:
    made = Experiment.parse({"model": {"family": "mixtral"}, "parallel": {"strategy": "zero1"}}, source="test")
    axes = made.parallel.axes()
    experts.check(made, axes)
    with pytest.raises(ConfigError, match=r"zero1 with the mesh axis expert = 2: .*; use zero2 or fsdp"):
        experts.check(made, axes | {"expert": 2})
