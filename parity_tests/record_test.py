"""Both sides record the same tensors under the same names; a mistake is named where it was made."""

from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import load
from parity_tests import bisect, transformers_train
from parity_tests.cases import MESHES, VARIANTS
from parity_tests.conftest import Runs
from parity_tests.run import SIDES

RECORD = {"steps": 4, "optimizer.decay_steps": 20, "record.steps": "1,3", "record.tensors": "all"}
NOISE = 1e-10

# one side's config -> the first tensor that it changes
CULPRITS = {
    "optimizer.eps": (1e-7, "weights/embed.weight", 1),
    "optimizer.clip": (0.5005, "clipped/embed.weight", 1),
    "optimizer.beta1": (0.9001, "exp_avg/embed.weight", 1),
    "optimizer.beta2": (0.951, "exp_avg_sq/embed.weight", 1),
    "optimizer.warmup": (2, "learning_rate", 1),
    "train.seed": (1, "batch/tokens", 1),
    "model.norm_eps": (1e-6, "activation/layers.0.attention_norm", 1),
    "model.window": (21, "activation/layers.0.attention.attended", 1),
    "model.rope_scaling": ("none", "activation/layers.0.attention.q_rotated", 1),
}


@pytest.mark.parametrize(
    ("model", "settings"),
    [("llama", MESHES["2x4"] | VARIANTS["accumulation"]), ("gpt2", MESHES["zero1"] | VARIANTS["full"])],
)
def test_both_sides_record_the_same(runs: Runs, model: str, settings: dict[str, Any]) -> None:
    a, b = (runs(side, model, settings | RECORD) for side in SIDES)
    for step in (1, 3):
        kept = {key for key in a.records[step] if not key.startswith("scalar/")}
        # torch calls a module for learned positions, JAX adds their table
        assert kept == b.records[step].keys()
        found = bisect.errors(a, b, step, zero_gradient=model == "gpt2")
        assert len(found) == len(kept) + 3 and max(found.values()) < NOISE, found
        assert bisect.exact(a, b, step, NOISE, model == "gpt2") is None


@pytest.mark.parametrize("field", CULPRITS)
def test_the_first_tensor_is_named(runs: Runs, field: str) -> None:
    value, culprit, step = CULPRITS[field]
    right = runs("jaxdist", "llama", MESHES["1x1"] | RECORD)
    wrong = runs("torch_ref", "llama", MESHES["1x1"] | RECORD | {field: value})
    found = bisect.exact(right, wrong, step, NOISE, zero_gradient=False)
    assert found and found.tensor == culprit and found.before < 1e-13
    later = bisect.exact(right, wrong, 3, NOISE, zero_gradient=False)
    assert later and later.tensor.startswith(("start/", "batch/"))


def test_a_record_cannot_be_without_a_step(experiments: dict[str, Path]) -> None:
    assert load(experiments["llama"], {"record.steps": " 1, 20 "}).record.steps == (1, 20)
    assert transformers_train.measured(load(experiments["llama"], {"record.steps": "1,2,3"})) == 4
