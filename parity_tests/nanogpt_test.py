"""GPT-2 as nanoGPT has it: exact GELU, and no biases."""

from pathlib import Path

import pytest
import tomli_w

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main as convert
from parity_tests.cases import MODELS, experiment, write_documents
from parity_tests.conftest import run
from parity_tests.parity_test import differences

NANOGPT = MODELS["gpt2"] | {"gelu": "exact", "bias": False}
STEPS = 6
QUICK = "--xla_backend_optimization_level=0"


def test_both_sides_train_it_alike(tmp_path: Path) -> None:
    """In float64 over tensor and fsdp with sequence parallelism, from one start."""
    config, documents = tmp_path / "nanogpt.toml", tmp_path / "documents.jsonl"
    write_documents(documents)
    values = experiment("gpt2", documents, STEPS) | {"model": NANOGPT}
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    seed = run("jaxdist", tmp_path / "seed", config, {"steps": 0, "precision": "fp32"}, xla_flags=QUICK)
    assert not any(name.endswith(".bias") for name in seed.states)
    with pytest.raises(ConfigError, match=r"model.bias = false: GPT2LMHeadModel has biases always.*--to torch"):
        convert([str(seed.path), str(tmp_path / "hf"), "--to", "hf"])
    convert([str(seed.path), str(tmp_path / "model.pt"), "--to", "torch"])
    convert([str(tmp_path / "model.pt"), str(tmp_path / "dcp"), "--to", "dcp"])
    mesh = {"mesh": "2x2", "parallel.sequence": True}
    ours = run("jaxdist", tmp_path / "jax", config, mesh, "--init", str(seed.path), xla_flags=QUICK)
    theirs = run("torch_ref", tmp_path / "torch", config, mesh, "--init", str(tmp_path / "dcp"))
    assert max(differences(ours, theirs, "llama").values()) <= 1  # no biases of keys, whose gradient is rounding
