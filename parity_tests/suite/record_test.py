"""Both sides record the same tensors under the same names; a mistake is named where it was made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.conftest import often
from parity_tests.conftest import Runs, as_if_on
from parity_tests.proof import bisect
from parity_tests.proof.proof import Proof
from parity_tests.runs.cases import MESHES, VARIANTS
from parity_tests.runs.run import JAX, SIDES, Run
from torch_ref.train import metered

pytestmark = pytest.mark.long

RECORD = {"steps": 5, "optimizer.decay_steps": 20, "record.steps": "1,2,3,5", "record.tensors": "all"}
NOISE = 1e-10

# changed field -> value, first tensor that it changes, step
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
QUICK = {"optimizer.clip", "optimizer.warmup", "model.window"}  # of the step, of the schedule, of the model


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", MESHES["1x1"]),
        pytest.param("llama", {"mesh": "2x2"} | VARIANTS["accumulation"], marks=pytest.mark.slow),
        pytest.param("gpt2", MESHES["zero1"] | VARIANTS["full"], marks=pytest.mark.slow),
        pytest.param("llama", MESHES["sequence"], marks=pytest.mark.slow),
    ],
)
def test_both_sides_record_the_same(runs: Runs, model: str, settings: dict[str, Any]) -> None:
    a, b = (runs(side, model, settings | RECORD) for side in SIDES)
    for step in (1, 3):
        kept = {key for key in a.records[step] if not key.startswith("scalar/")}
        # torch calls a module for learned positions, JAX adds their table
        assert kept == b.records[step].keys()
        found = bisect.errors(a, b, step)
        assert len(found) == len(kept) + 3 and max(found.values()) < NOISE, found
        assert bisect.exact(a, b, step, NOISE) is None


@pytest.mark.parametrize("field", often(CULPRITS, QUICK))
def test_the_first_tensor_is_named(runs: Runs, field: str) -> None:
    value, culprit, step = CULPRITS[field]
    right = runs("jaxdist", "llama", MESHES["1x1"] | RECORD)
    wrong = runs("torch_ref", "llama", MESHES["1x1"] | RECORD | {field: value})
    found = bisect.exact(right, wrong, step, NOISE)
    assert found and found.tensor == culprit and found.before < 1e-13
    later = bisect.exact(right, wrong, 3, NOISE)
    assert later and later.tensor.startswith(("start/", "batch/"))


class FinishedProof(Proof):
    """A proof whose runs are made, with all tensors of all steps."""

    def recorded(self, key: tuple[str, str], steps: list[int], start: Path) -> Run:
        run = self.done[key]
        assert set(steps) <= run.records.keys()
        return run


@pytest.mark.slow
def test_a_proof_says_where_its_runs_part(runs: Runs, experiments: dict[str, Path], tmp_path: Path) -> None:
    def proof(wrong: dict[str, Any]) -> FinishedProof:
        made = FinishedProof(
            Proof.of(load(experiments["llama"], {"train.steps": RECORD["steps"]}), tmp_path).experiment, tmp_path
        )
        for kind in made.kinds:
            made.done[JAX, kind] = runs(JAX, "llama", MESHES["1x1"] | RECORD)
            made.done["torch_ref", kind] = runs("torch_ref", "llama", MESHES["1x1"] | RECORD | wrong)
        return made

    alike = proof({})
    assert alike.verdict().word == "equivalent" and alike.divergence(alike.verdict(), tmp_path) is None
    for field, step in (("optimizer.eps", 2), ("optimizer.clip", 2), ("model.window", 1)):
        value, culprit, _ = CULPRITS[field]
        made = proof({field: value})
        verdict = made.verdict()
        bounds = {name: made.noise.curve(name) for name in ("loss", "grad_norm")}
        assert bisect.first_step(*made.pair("one"), bounds) == step  # the loss differs later than the tensor
        divergence = made.divergence(verdict, tmp_path)
        assert divergence and (divergence.step, divergence.tensor) == (1, culprit)
        extended = replace(verdict, divergence=divergence)
        assert divergence.where in extended.sentence and extended.as_json()["parting"]["tensor"] == culprit
    # On a mesh alone: compared with the same side on one device.
    made = proof({})
    wrong = runs("torch_ref", "llama", MESHES["1x1"] | RECORD | {"optimizer.beta1": 0.9001})
    made.done["torch_ref", "mesh"] = as_if_on(wrong, fsdp=2)
    divergence = made.divergence(made.verdict(), tmp_path)
    assert divergence and (divergence.step, divergence.tensor) == (1, CULPRITS["optimizer.beta1"][1])


def test_steps_are_numbers(experiments: dict[str, Path]) -> None:
    assert load(experiments["llama"], {"record.steps": " 1, 20 "}).record.steps == (1, 20)
    with pytest.raises(ConfigError, match=r"record\.steps"):
        load(experiments["llama"], {"record.steps": "0"})
    assert [metered(range(1, n + 1), (1, 2, 3)) for n in (0, 3, 4, 9)] == [None, None, 4, 4]
    assert [metered(range(5, 6), ()), metered(range(5, 8), ())] == [5, 6]
