"""GPT-2 as in nanoGPT: exact GELU and no biases."""

import json
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from jaxdist.convert.__main__ import main as convert
from parity_tests.__main__ import main as prove
from parity_tests.conftest import run
from parity_tests.examples import nanogpt
from parity_tests.runs.cases import MODELS, experiment, write_documents
from parity_tests.suite.parity_test import differences

pytestmark = pytest.mark.long

NANOGPT = MODELS["gpt2"] | {"gelu": "exact", "bias": False}
STEPS = 6


@pytest.mark.slow
def test_both_sides_train_it_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains in float64 over tensor and fsdp with sequence parallelism, from a start whose logits transformers
    reproduces."""
    config, documents = tmp_path / "nanogpt.toml", tmp_path / "documents.jsonl"
    write_documents(documents)
    values = experiment("gpt2", documents, STEPS) | {"model": NANOGPT}
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    seed = run("jaxdist", tmp_path / "seed", config, {"steps": 0, "precision": "fp32"})
    assert not any(name.endswith(".bias") for name in seed.states)
    convert([str(seed.path), str(tmp_path / "hf"), "--to", "hf", "--verify"])
    assert "logits of a probe batch" in (output := capsys.readouterr().out) and "of TARGET by transformers" in output
    mesh = {"mesh": "2x2", "parallel.sequence": True}
    ours = run("jaxdist", tmp_path / "jax", config, mesh, "--init", str(seed.path))
    theirs = run("torch_ref", tmp_path / "torch", config, mesh, "--init", str(tmp_path / "hf"))
    assert max(differences(ours, theirs).values()) <= 1


@pytest.mark.slow
def test_from_a_checkpoint_to_a_proof(tmp_path: Path) -> None:
    """ckpt.pt of a loop like nanoGPT's with its train.bin: converted, it continues as the loop did, and a proof finds
    both equivalent."""
    config, data = tmp_path / "config.toml", tmp_path / "train.bin"
    np.random.default_rng(0).zipf(1.5, 4000).clip(max=NANOGPT["vocab"] - 1).astype(np.uint16).tofile(data)
    optimizer = {"learning_rate": 0.01, "warmup": 3, "decay_steps": 20, "clip": 0.5}
    values = {
        "model": NANOGPT | {"hidden": 4 * NANOGPT["dim"]},
        "data": {"path": str(data), "sequence": NANOGPT["positions"], "validation": 0.0},
        "train": {"steps": STEPS, "batch": 8, "validation_batches": 0},
        "optimizer": optimizer,
        "precision": {"policy": "fp64"},
    }
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    nanogpt.main(config, tmp_path, tmp_path / "loop")
    records = [json.loads(line) for line in (tmp_path / "loop" / "metrics.jsonl").read_text().splitlines()]

    convert([str(tmp_path / "ckpt.pt"), str(tmp_path / "run")])
    going = {"data.path": data, "data.validation": 0.0, "train.validation_batches": 0}
    resumed = run("jaxdist", tmp_path / "run", tmp_path / "run" / "config.toml", going, "--resume")
    assert [record["step"] for record in resumed.metrics] == [4, 5, 6]
    for ours, theirs in zip(resumed.metrics, records[nanogpt.SAVED :], strict=True):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name

    proof = ["--against", str(tmp_path / "loop"), "--init", str(tmp_path / "init.pt"), "--device", "cpu"]
    prove([*proof, "--output", str(tmp_path / "proof")])
    verdict = json.loads((tmp_path / "proof" / "verdict.json").read_text(encoding="utf-8"))
    assert verdict["verdict"] == "equivalent", verdict["checks"]
