"""Verdicts against an existing run, over made-up runs: no training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.proof import levels
from parity_tests.proof.caveats import OTHERS
from parity_tests.proof.proof import Proof
from parity_tests.proof.proof_test import BF16, ONE, TORCH, TWO, asked, experiment, fake_run, judged, mesh_of
from parity_tests.runs.run import JAX


def against(
    tmp_path: Path,
    policy: str = "fp32",
    steps: tuple[int, ...] = (),
    off: float = 0.0,
    ours: float = 1e-7,
    **sections: Any,
) -> Proof:
    theirs = fake_run("run mine", off, steps)
    theirs.__dict__["experiment"] = experiment(precision={"policy": policy}, **sections)
    found = Proof.against(theirs, theirs.experiment, tmp_path)
    vars(found).update(mesh_of=mesh_of, started={"weights/w": np.zeros(50)})
    for kind in found.kinds:
        mesh = TWO if kind == "mesh" else ONE
        found.done[JAX, kind] = fake_run(JAX, ours if kind == "policy" else 0.0, steps, mesh=mesh)
    if policy == "fp64":
        found.done[JAX, "policy"] = fake_run(JAX, steps=steps)
    return found


def test_parts_that_a_run_leaves_out_are_reported(tmp_path: Path) -> None:
    notes = against(tmp_path).verdict().notes
    assert "gradients of run mine: not compared, as it recorded none" in notes
    assert "mathematics, distribution: run mine not compared, as it ran in fp32 and not in fp64" in notes
    notes = against(tmp_path, "fp64", (1, 5)).verdict().notes
    assert "gradients of run mine: compared at steps 1, 5 only, which it recorded" in notes
    assert not any(note.startswith("mathematics") for note in notes)


@pytest.mark.parametrize("kind", ["weights", "exp_avg", "gradient"])
def test_a_dtype_that_the_config_does_not_say_is_the_cause(tmp_path: Path, kind: str) -> None:
    found = against(tmp_path, "fp64", (1, 5))
    theirs = found.done["run mine", "policy"]
    for tensors in (theirs.states, *theirs.records.values()):
        tensors |= {name: w.astype(np.float32) for name, w in tensors.items() if name.startswith(f"{kind}/")}
    verdict = found.explained(found.verdict())
    assert verdict.cause and verdict.cause.cause == "precision", verdict.sentence
    what = f"{kind} of step 1, {kind} of step 5" if kind == "gradient" else kind
    assert f"run mine recorded {what} in float32, config says float64" in verdict.sentence
    assert against(tmp_path, "fp64", (1, 5)).verdict().word == "equivalent"


def test_a_run_that_training_amplified_is_left_open(tmp_path: Path) -> None:
    """32 times the amplified cost would admit a wider clip, or weights of half their size."""
    widest = levels.WIDEST["precision"]
    for off in (0.0, widest, 30 * 0.31):
        verdict = against(tmp_path, ours=off / 30 or 1.1 * widest / levels.DRIFT, off=off).verdict()
        assert verdict.word == "undecided" and "precision" in verdict.open and "amplifies" in verdict.sentence
    assert against(tmp_path, ours=0.9 * widest / levels.DRIFT).verdict().word == "equivalent"
    assert against(tmp_path, ours=0.1, off=30 * 0.31).verdict().word == "not_equivalent"


def test_a_run_that_hardly_trained_is_left_open(tmp_path: Path) -> None:
    """Weights move by a thousandth at a fine-tuning rate, and float32 hides missing weight decay."""
    found = against(tmp_path)
    assert found.verdict().word == "equivalent"
    found.__dict__["started"] = {"weights/w": np.linspace(1, 2, 50) * (1 + 1e-3)}
    assert found.verdict().word == "undecided" and "moved the weights so little" in found.verdict().open["precision"]
    assert against(tmp_path, "fp64").verdict().word == "equivalent"
    found.done["run mine", "policy"] = fake_run("run mine", 1e-3, ())
    assert found.verdict().word == "not_equivalent"


def test_a_float32_policy_that_training_amplified_is_left_open(tmp_path: Path) -> None:
    """A mistake in float32 alone could hide there; float64 runs do not show it. Smaller costs are decided."""
    proof = asked(tmp_path)
    judged(proof)
    for cost, word in ((1e-2, "undecided"), (1e-5, "equivalent")):
        for side in proof.sides:
            proof.done[side, "policy"] = fake_run(side, cost)
        assert proof.verdict().word == word
    assert judged(asked(tmp_path, precision=BF16), jaxdist_policy=1e-2, torch_ref_policy=1e-2).word == "equivalent"


def test_the_sentence_names_what_was_not_compared(tmp_path: Path) -> None:
    found = against(tmp_path)
    found.done |= {(JAX, kind): fake_run(JAX, 1e-3, ()) for kind in OTHERS}
    theirs = found.done["run mine", "policy"]
    theirs.summary.clear()
    verdict = found.verdict()
    assert verdict.sentence.endswith(
        "checks hold. Not compared: mathematics and distribution in float64, gradients, memory, traffic, dtypes of "
        "softmax, norms, rotation and loss."
    )
    assert verdict.as_json()["not_compared"] == list(verdict.not_compared)
    assert not judged(asked(tmp_path)).not_compared
    assert "gradients but of steps 1" in against(tmp_path, steps=(1,)).verdict().not_compared
    double = against(tmp_path, "fp64").verdict()  # a run folder has no second mesh
    assert {"distribution of run mine", "number of collectives"} <= set(double.not_compared)
    assert not any("one device" in note for note in double.notes)
    without = against(tmp_path)
    without.done["run mine", "policy"].summary["memory"] = {"parameters": 1, "gradients": 1, "optimizer_state": 1}
    assert "peak of memory" in without.verdict().not_compared and "peak of memory" not in double.not_compared
    assert not any(what.startswith("gradients") for what in against(tmp_path, steps=(1, 2, 5)).verdict().not_compared)


@pytest.mark.parametrize("kind", OTHERS)
def test_the_sentence_names_what_float32_hides(tmp_path: Path, kind: str) -> None:
    """A tenth of an eps that changes our run by less than equal runs may differ; fp64 hides nothing."""
    field = f"{OTHERS[kind]}.{kind} (a tenth is within the noise of float32)"
    found = against(tmp_path)
    limit = 2 * levels.DRIFT * 1e-7
    for moved, hidden in ((0.9 * limit, True), (1.1 * limit, False)):
        found.done[JAX, kind] = fake_run(JAX, moved, ())
        assert (field in found.verdict().not_compared) is hidden
    assert OTHERS.keys().isdisjoint(against(tmp_path, "fp64").kinds) and OTHERS.keys().isdisjoint(asked(tmp_path).kinds)
    wanted = found.experiment.model_dump()[OTHERS[kind]][kind] / 10
    assert f"\n{kind} = {wanted}" in found.config(kind)


def test_no_eps_is_asked_of_an_optimizer_without_one(tmp_path: Path) -> None:
    for name, kinds in (("adamw", {"norm_eps", "eps"}), ("sgd", {"norm_eps"}), ("lion", {"norm_eps"})):
        found = against(tmp_path, optimizer={"name": name})
        assert set(found.kinds) & OTHERS.keys() == kinds


def test_a_mesh_of_one_device_is_reported(tmp_path: Path) -> None:
    message = "distribution: nothing to compare for {}, whose mesh is one device"
    proof = asked(tmp_path)
    ours, theirs = proof.sides
    assert not any(note.startswith("distribution") for note in judged(proof).notes)
    # transformers splits the batch alone, unlike the mesh.
    vars(proof)["mesh_of"] = lambda side, kind, devices: TWO if (side, kind) == (ours, "mesh") else ONE
    proof.done[theirs, "mesh"] = fake_run(theirs)
    verdict = proof.verdict()
    assert message.format(theirs) in verdict.notes
    assert {check.about for check in verdict.checks if check.level == "distribution" and check.about} == {
        f"{ours} on the mesh and on one device"
    }
    vars(proof)["mesh_of"] = lambda side, kind, devices: ONE
    proof.done[ours, "mesh"] = proof.done[ours, "one"]
    assert message.format(f"{ours} and {theirs}") in proof.verdict().notes


def test_a_run_on_another_mesh_than_was_asked_for(tmp_path: Path) -> None:
    """Runs on one device alone give the same numbers, but compare nothing."""
    proof = asked(tmp_path)
    judged(proof)
    for (_, kind), run in proof.done.items():
        run.__dict__["summary"] = run.summary | {"mesh": ONE} if kind == "mesh" else run.summary
    (first, second) = (check for check in proof.verdict().failed if check.level == "distribution")
    assert (first.name, second.name) == ("jaxdist, mesh matches the request", "torch_ref, mesh matches the request")
    assert first.of == second.of == "mesh"


def test_the_mesh_that_is_asked_for(tmp_path: Path) -> None:
    """transformers' has the axes that split the batch; a size left open is the run's."""
    sections = {"parallel": {"mesh": "data=2,fsdp=2,tensor=2"}}
    proof = asked(tmp_path, **sections)
    theirs = Proof.of(experiment(**sections), tmp_path, reference="transformers")
    assert {n: k for n, k in proof.mesh_of(TORCH, "policy", 8).items() if k > 1} == {"data": 2, "fsdp": 2, "tensor": 2}
    assert {n: k for n, k in theirs.mesh_of("transformers", "mesh", 4).items() if k > 1} == {"data": 2, "fsdp": 2}
    assert set(proof.mesh_of(JAX, "one", 1).values()) == {1}
    assert asked(tmp_path, parallel={"mesh": "-1x2"}).mesh_of(JAX, "policy", 8)["fsdp"] == 4


def test_float32_that_training_amplified_leaves_the_rest_to_float64(tmp_path: Path) -> None:
    """float64 has judged the same steps; a note says what float32 hides."""
    found = asked(tmp_path)
    assert judged(found, jaxdist_policy=1e-3, torch_ref_policy=1e-3).word == "undecided"
    for narrow, word in ((1, "undecided"), (2, "equivalent")):  # the first step's update is not judged
        for side in found.sides:
            record = found.done[side, "policy"].records[narrow]
            record["gradient/w"] = np.linspace(1, 2, 50) * (1 + 1e-6)
        assert found.verdict().word == word
    (note,) = (note for note in found.verdict().notes if note.startswith("precision: steps 1 to 2 are judged"))
    assert "training amplifies" in note and "Only the float64 levels" in note
    assert not any(note.startswith("precision") for note in judged(asked(tmp_path)).notes)


def test_a_run_that_overflowed_all_the_time_is_left_open(tmp_path: Path) -> None:
    found = asked(tmp_path, precision={"policy": "fp16"})
    assert judged(found).word == "equivalent"
    for (_, kind), run in found.done.items():
        run.__dict__.pop("overflown", None)
        run.__dict__["experiment"] = found.experiment
        for record in run.metrics[:2] if kind in ("policy", "reordered") else ():
            record |= {"loss_scale": 1024.0, "skipped": True, "grad_norm": None}
    assert "2 of 5 steps overflow" in found.verdict().open["precision"]


def test_float32_within_float64_is_reported(tmp_path: Path) -> None:
    """A loop in fp64 with norms in float32 differs by little, and a note says why."""
    for off, noted in ((2e-9, True), (2e-5, False)):
        verdict = against(tmp_path, "fp64", off=off).verdict()
        assert verdict.word == "not_equivalent"
        assert any("computes partly in float32" in note for note in verdict.notes) is noted


def test_later_gradients_of_a_run_are_compared(tmp_path: Path) -> None:
    found = against(tmp_path, steps=(1, 5), off=1e-7)
    assert found.verdict().word == "equivalent"
    found.done["run mine", "policy"].records[5] = {"gradient/w": np.linspace(1, 2, 50) * (1 + 1e-4)}
    assert [check.name for check in found.verdict().failed] == ["cost to gradients at step 5"]


def test_a_search_that_finds_nothing_says_so(tmp_path: Path) -> None:
    assert "the failed checks compare none" in asked(tmp_path).unfound
    assert "run mine kept (of steps: 5) shows" in against(tmp_path, steps=(5,)).unfound
    assert "kept (of steps: none) shows" in against(tmp_path).unfound
