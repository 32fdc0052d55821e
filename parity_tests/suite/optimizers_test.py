"""Every optimizer, and the average of weights: JAX against torch on the same mesh and on one device, in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import Experiment, optimizer
from jaxdist.convert.__main__ import main as convert
from jaxdist.families import models
from parity_tests.conftest import STEPS, Runs, run
from parity_tests.expected import collectives
from parity_tests.runs import compare
from parity_tests.runs.cases import MESHES
from parity_tests.runs.run import Run, command
from parity_tests.suite.parity_test import differences
from parity_tests.validation.seeded import misplaced
from torch_ref.training import registry

pytestmark = pytest.mark.long

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer.name": "adam", "optimizer.ema": 0.9},
    "sgd": {"optimizer.name": "sgd", "optimizer.nesterov": True, "optimizer.learning_rate": 0.1, "optimizer.ema": 0.8},
    "lion": {"optimizer.name": "lion", "optimizer.learning_rate": 1e-3, "optimizer.beta2": 0.99},
    "adamw": {"optimizer.ema": 0.9},
    "plain sgd": {"optimizer.name": "sgd", "optimizer.momentum": 0.0, "optimizer.learning_rate": 0.1},
    "adafactor": {"optimizer.name": "adafactor", "optimizer.learning_rate": 1e-2},
    "muon": {"optimizer.name": "muon", "optimizer.momentum": 0.95, "optimizer.nesterov": True, "optimizer.ema": 0.9},
}
SMALL = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "2", "--model.head_dim", "8",
    "--model.hidden", "48", "--model.positions", "64", "--data.sequence", "32", "--train.batch", "8", "--steps", "8",
    "--optimizer.warmup", "3", "--device", "cpu", "--mesh", "2x1",
]  # fmt: skip
QUICK = {"adam": "1x1"}
SLOW = [
    ("adam", "fsdp"),
    ("adafactor", "fsdp"),
    ("sgd", "zero1"),
    ("lion", "sequence"),
    ("adafactor", "sequence"),
    ("muon", "sequence"),
]
SLOW += [(name, mesh) for name in OPTIMIZERS for mesh in ("ddp", "zero2", "hybrid-zero1", "2x2x2", "ring")]
SLOW += [("muon", "fsdp"), ("adafactor", "zero1"), ("muon", "zero1")]
# optimizer -> a slightly wrong field on torch's side
MISTAKES: dict[str, dict[str, Any]] = {
    "adam": {"optimizer.name": "adamw"},
    "sgd": {"optimizer.nesterov": False},
    "lion": {"optimizer.beta1": 0.901},
    "plain sgd": {"optimizer.momentum": 0.001},
    "adamw": {"optimizer.ema": 0.9001},
    "adafactor": {"optimizer.beta2_decay": -0.801},
    "muon": {"optimizer.adjust_lr_fn": "original"},
}


def settings(name: str, mesh: str, **more: Any) -> dict[str, Any]:
    return MESHES[mesh] | OPTIMIZERS[name] | more


def check(runs: Runs, name: str, mesh: str) -> None:
    ours = runs("jaxdist", "llama", settings(name, mesh))
    assert len(ours.metrics) == STEPS
    theirs = {other: runs("torch_ref", "llama", settings(name, other)) for other in (mesh, "1x1")}
    for other, made in theirs.items():
        found = differences(ours, made)
        assert max(found.values()) <= 1, (other, found)
    for made in (ours, theirs[mesh]):
        assert misplaced(made) == []


@pytest.mark.parametrize(("name", "mesh"), QUICK.items())
def test_float64(runs: Runs, name: str, mesh: str) -> None:
    check(runs, name, mesh)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_unknown_traffic_has_no_least_bytes(name: str) -> None:
    """torch sends parameters otherwise than JAX under zero1."""
    values = {"parallel": {"mesh": "8x1", "strategy": "zero1"}, "optimizer": {"name": name}}
    e = Experiment.parse(values, source="test")
    mesh, param_specs = e.parallel.axes(), models.param_specs(models.build(e.model))
    assert "fsdp" in collectives.unknown("torch_ref", mesh, e)
    theirs, ours = (collectives.least(side, e, param_specs, mesh) or {} for side in ("torch_ref", "jaxdist"))
    assert "fsdp" not in theirs and "fsdp" in ours


@pytest.mark.parametrize(
    ("pieces", "lacking", "counted"),
    [
        ({"elementwise": True}, "", ("jaxdist", "torch_ref")),
        ({"elementwise": False}, "optimizer sgd", ()),
        ({"elementwise": False, "traffic": lambda *_: [("all_reduce", ("tensor",), 100.0)]}, "", ("jaxdist",)),
    ],
)
def test_an_optimizers_row_tells_whether_its_traffic_is_known(
    pieces: dict[str, Any], lacking: str, counted: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin's torch side has no closed form."""
    monkeypatch.setitem(optimizer.OPTIMIZERS._rows, "sgd", replace(optimizer.OPTIMIZERS["sgd"], **pieces))
    e = Experiment.parse({"parallel": {"mesh": "2x4"}, "optimizer": {"name": "sgd"}}, source="test")
    mesh, param_specs = e.parallel.axes(), models.param_specs(models.build(e.model))
    assert collectives.lacking(e, mesh) == lacking
    arguments = e, param_specs, mesh
    assert tuple(side for side in ("jaxdist", "torch_ref") if collectives.expected(side, *arguments)) == counted
    uncounted = {side: collectives.uncounted(side, e, mesh) for side in ("jaxdist", "torch_ref")}
    assert uncounted == {"jaxdist": "", "torch_ref": "" if pieces["elementwise"] else "optimizer sgd"}
    assert not collectives.uncounted("torch_ref", e, dict.fromkeys(mesh, 1))
    assert (collectives.least("torch_ref", *arguments) is None) == bool(lacking)
    assert {*collectives.unknown("torch_ref", mesh, e)} == (set() if pieces["elementwise"] else {"fsdp", "tensor"})


def test_a_rule_that_asks_for_pieces_in_torch_alone_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OPTIMIZERS._rows, "sgd", replace(registry.OPTIMIZERS["sgd"], pieces=True))
    e = Experiment.parse({"parallel": {"mesh": "2x4"}, "optimizer": {"name": "sgd"}}, source="test")
    mesh, param_specs = e.parallel.axes(), models.param_specs(models.build(e.model))
    assert collectives.uncounted("torch_ref", e, mesh) == "optimizer sgd"
    assert collectives.expected("torch_ref", e, param_specs, mesh) is None
    assert collectives.expected("jaxdist", e, param_specs, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), SLOW)
def test_float64_grid(runs: Runs, name: str, mesh: str) -> None:
    check(runs, name, mesh)


def caught(runs: Runs, name: str) -> None:
    right = runs("jaxdist", "llama", settings(name, "1x1"))
    found = differences(right, runs("torch_ref", "llama", settings(name, "1x1") | MISTAKES[name]))
    assert max(found.values()) > 1


def test_a_planted_mistake_is_caught(runs: Runs) -> None:
    caught(runs, "adam")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "lion", "plain sgd", "adamw", "adafactor", "muon"])
def test_more_planted_mistakes_are_caught(runs: Runs, name: str) -> None:
    caught(runs, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "sgd", "adafactor", "muon"])
def test_a_run_that_changes_its_backend(
    name: str, runs: Runs, experiments: dict[str, Path], start: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    """Ten steps in JAX, through a torch file, the rest in torch: the same weights, moments and averages."""
    half = {**settings(name, "fsdp"), "optimizer.decay_steps": STEPS, "steps": STEPS // 2}
    jax = run("jaxdist", tmp_path / "jax", experiments["llama"], half, "--init", str(start["jaxdist", "llama"]))
    convert([str(jax.path), str(tmp_path / "file.pt")])
    convert([str(tmp_path / "file.pt"), str(tmp_path / "torch"), "--to", "dcp"])
    complete = {**settings(name, "fsdp"), "optimizer.decay_steps": STEPS}
    torch = run("torch_ref", tmp_path / "torch", experiments["llama"], complete, "--resume")
    right: Run = runs("torch_ref", "llama", settings(name, "fsdp"))
    assert compare.curve(torch.metrics, right.metrics, "loss").max() <= compare.LOSS
    states = compare.states(torch.states, right.states)
    assert {state.partition("/")[0] for state in states} == {"weights", *torch.experiment.optimizer.kept}
    assert max(states.values()) <= compare.STATE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_a_proof_against_transformers(name: str, tmp_path: Path) -> None:
    fields = [text for field, value in OPTIMIZERS[name].items() for text in (f"--{field}", str(value))]
    asked = [*SMALL, *fields, "--against", "transformers", "--output", str(tmp_path / "proof")]
    done = command("parity_tests", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
