"""A package from outside adds a decoder family to both sides, without a change to our files.

`toy/toy_family` is that package: attention and MLP side by side, a partial rotation, a scaled embedding.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from jaxdist.convert.__main__ import main as convert
from parity_tests.conftest import run
from parity_tests.runs import compare
from parity_tests.runs.run import Run, command
from parity_tests.suite import plugins_test
from parity_tests.suite.plugins_test import on_path

assert on_path  # a fixture
CONFIG: dict[str, Any] = {
    "plugins": ["toy_family", "toy_plugin"],
    "model": {
        "family": "wide", "layers": 2, "dim": 24, "heads": 8, "kv_heads": 4, "head_dim": 8, "rotated": 4, "hidden": 56,
        "vocab": 64, "positions": 32, "init_std": 0.1,
    },
    "data": plugins_test.CONFIG["data"],
    "train": {"steps": 6, "batch": 8, "validation_batches": 2},
    "optimizer": {"learning_rate": 0.01, "warmup": 2, "clip": 0.5},
    "parallel": {"mesh": "2x2"},
    "precision": {"policy": "fp64"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(on_path: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds config.toml, and `hf`, weights under the family's own names."""
    folder = tmp_path_factory.mktemp("family")
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG), encoding="utf-8")
    drawn = {"steps": 0, "mesh": "1x1", "precision": "fp32"}
    seed = run("jaxdist", folder / "seed", folder / "config.toml", drawn)
    done = command("jaxdist.convert", str(seed.path), str(folder / "hf"), "--to", "hf")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Run:
    return trained("jaxdist", folder, {})


def trained(side: str, folder: Path, settings: dict[str, Any]) -> Run:
    init = ("--init", str(folder / "hf"))
    name = "-".join([side, *map(str, settings.values())])
    return run(side, folder / name, folder / "config.toml", settings, *init)


@pytest.mark.long
def test_both_sides_agree(folder: Path, ours: Run) -> None:
    theirs = trained("torch_ref", folder, {})
    assert compare.curve(ours.metrics, theirs.metrics, "loss").max() <= compare.LOSS
    assert max(compare.states(ours.states, theirs.states).values()) <= 1e-12
    assert ours.metrics[-1]["loss"] < ours.metrics[0]["loss"]


@pytest.mark.long
def test_its_own_options_and_names(folder: Path, ours: Run, tmp_path: Path) -> None:
    """A flag of its model section changes the model; all its names in files convert both ways to the bit."""
    drawn = {"steps": 1, "model.rotated": 8}  # the same starting weights as the seed of `hf`
    other = run("jaxdist", tmp_path / "other", folder / "config.toml", drawn)
    assert other.experiment.model.model_dump()["rotated"] == 8
    assert abs(other.metrics[0]["loss"] / ours.metrics[0]["loss"] - 1) > 1e-4
    weights = load_file(folder / "hf" / "model.safetensors")
    assert {"tokens.weight", "blocks.1.query.weight", "blocks.0.norm.weight", "logits.weight"} < weights.keys()
    assert json.loads((folder / "hf" / "config.json").read_text())["rotated"] == 4
    convert([str(folder / "hf"), str(tmp_path / "torch.pt"), "--plugins", "toy_family"])
    convert([str(tmp_path / "torch.pt"), str(tmp_path / "back"), "--to", "hf", "--plugins", "toy_family"])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(np.array_equal(back[name], weights[name]) for name in weights)


@pytest.mark.long
def test_it_is_evaluated_and_planned(folder: Path, ours: Run) -> None:
    done = command("jaxdist.evaluate", "--checkpoint", str(ours.path), "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["loss"] < np.log(CONFIG["model"]["vocab"])
    done = command("jaxdist.plan", "--config", str(folder / "config.toml"), "--compiled", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compiled"]["memory"]["peak"] > 0


@pytest.mark.slow
def test_its_proof(folder: Path, tmp_path: Path) -> None:
    flags = ["--config", str(folder / "config.toml"), "--init", str(folder / "hf"), "--device", "cpu"]
    done = command("parity_tests", *flags, "--output", str(tmp_path / "proof"))
    assert done.returncode == 0 and "Equivalent" in done.stdout, done.stdout + done.stderr
