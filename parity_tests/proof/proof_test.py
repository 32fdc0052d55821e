"""Runs, verdicts and searches of a proof, over made-up runs: no training."""

from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdist.config import ConfigError, Experiment, TrainingError
from jaxdist.config.registry import FAMILIES
from parity_tests.proof import bisect, levels, proof
from parity_tests.proof.proof import Proof
from parity_tests.proof.verdict import Check, Verdict
from parity_tests.runs.run import JAX, Run
from torch_ref.families.registry import FAMILIES as TORCH_FAMILIES

TORCH = "torch_ref"
ONE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
TWO = ONE | {"data": 2}
MEMORY = dict.fromkeys(("parameters", "gradients", "optimizer_state"), 0) | {"peak": 1}
LOSSES = [3.0, 2.5, 2.2, 2.0, 1.9]

STATES = ("weights", "exp_avg", "exp_avg_sq")  # of AdamW


def experiment(**sections: Any) -> Experiment:
    values = {"train": {"steps": len(LOSSES)}, "optimizer": {"warmup": 2}, "parallel": {"mesh": "1x1"}}
    return Experiment.parse(values | sections, source="test")


FIGURES = {"arithmetic": {"rsqrt": "float64"}, "schedule": {"1": 0.1}}


def fake_run(side: str, off: float = 0.0, steps: tuple[int, ...] = (1, 2, 5), **summary: Any) -> Run:
    """A run whose numbers all have the relative error `off`."""
    run, tensor = Run(side, Path("nowhere")), np.linspace(1, 2, 50) * (1 + off)
    records = {step: {"gradient/w": tensor} for step in steps}
    states = {f"{kind}/w": tensor for kind in STATES}
    metrics = [
        {"step": step, "loss": loss * (1 + off), "grad_norm": 1.0 + off, "learning_rate": 0.1}
        for step, loss in enumerate(LOSSES, 1)
    ]
    summary = {"mesh": ONE, "least_bytes": {}, "collectives": [], "memory": MEMORY} | FIGURES | summary
    run.__dict__.update(metrics=metrics, records=records, states=states, summary=summary)
    run.__dict__.update(experiment=experiment(), shapes={"w": tensor.shape})
    return run


def mesh_of(_: str, kind: str, __: int) -> dict[str, int]:
    """Replaces a proof's meshes: the policy's is one device, where nothing is sent."""
    return TWO if kind == "mesh" else ONE


def judged(asked: Proof, **off: float) -> Verdict:
    """Verdict of a proof with right runs, except for the relative errors `off`, by names like `torch_ref_policy`."""
    vars(asked)["mesh_of"] = mesh_of
    for side, kind in asked.needed():
        cost = 1e-3 if kind in ("policy", "reordered") and asked.noisy else 0.0
        mesh = TWO if kind == "mesh" else ONE
        asked.done[side, kind] = fake_run(side, off.get(f"{side}_{kind}", cost), mesh=mesh)
    return asked.verdict()


def asked(tmp_path: Path, **sections: Any) -> Proof:
    return Proof.of(experiment(**sections), tmp_path)


BF16 = {"policy": "bf16"}
WIDEST = levels.WIDEST["mathematics"]
SMALL = {"layers": 1, "dim": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "hidden": 24, "vocab": 256}


def test_steps_that_were_not_run_are_reported(tmp_path: Path) -> None:
    longer = judged(asked(tmp_path, train={"steps": 300}))
    assert any(note.startswith("Steps 1 to 20 of 300 were run") for note in longer.notes)
    assert not any(note.startswith("Steps") for note in judged(asked(tmp_path)).notes)


def test_nothing_sent_is_compared_on_one_device(tmp_path: Path) -> None:
    """torch reports no collectives on one device, which counts as a figure."""
    assert not any(note.startswith("collectives") for note in judged(asked(tmp_path)).notes)


@pytest.mark.parametrize("figure", ["mesh", "memory", "collectives", "arithmetic", "schedule"])
def test_a_figure_that_a_run_of_ours_lacks_leaves_it_open(tmp_path: Path, figure: str) -> None:
    proof = asked(tmp_path)
    assert judged(proof).word == "equivalent"
    summary = proof.done[TORCH, "policy"].summary
    proof.done[TORCH, "policy"].__dict__["summary"] = {name: x for name, x in summary.items() if name != figure}
    assert proof.verdict().open == {"torch_ref, policy": f"its run lacks {figure}; prove it again"}


def test_a_family_without_closed_forms_is_judged_by_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak and traffic are not judged, as the notes say; the sides' memory is compared."""
    known = judged(asked(tmp_path))
    for table in (FAMILIES, TORCH_FAMILIES):
        rows: Any = table._rows
        monkeypatch.setitem(rows, "llama", replace(rows["llama"], accounting=None))
    found = judged(asked(tmp_path))
    assert found.word == known.word == "equivalent" and "traffic" in {check.level for check in known.checks}
    left_out = [check.name for check in known.checks if check not in found.checks]
    assert {check.level for check in found.checks} == {check.level for check in known.checks} - {"traffic"}
    assert all("peak" in name or "bytes over other axes" in name for name in left_out)
    notes = [note for note in found.notes if "closed form" in note]
    assert [note.partition(":")[0] for note in notes] == ["memory", "traffic"] and "unknown" in notes[1]


def emptied(run: Run, part: str) -> None:
    """Remove part of a run: no comparison shows what all runs lack."""
    match part:
        case "a parameter":
            run.__dict__["shapes"] = {"w": (50,), "q_proj.weight": (50,)}
        case "metrics":
            del run.metrics[3:]
        case "a step twice":
            run.metrics[3] = run.metrics[2]
        case "zeros":
            run.records[5]["gradient/w"] = np.zeros(50)
        case "moments":
            run.states["exp_avg/w"] = np.zeros(50)
        case "peak":
            run.__dict__["summary"] = run.summary | {"memory": MEMORY | {"peak": None}}
        case _:
            run.__dict__["summary"] = run.summary | {part: {}}


@pytest.mark.parametrize(
    ("part", "lacks"),
    [
        ("a parameter", "weights at the end of q_proj.weight and 0 others"),
        ("metrics", "metrics of 2 of 5 steps"),
        ("a step twice", "metrics of 1 of 5 steps"),
        ("zeros", "gradients of step 5 other than zeros"),
        ("moments", "exp_avg at the end other than zeros"),
        ("peak", "peak of memory"),
        ("arithmetic", "arithmetic"),
        ("schedule", "schedule"),
    ],
)
def test_a_part_that_all_runs_lack_leaves_the_verdict_open(tmp_path: Path, part: str, lacks: str) -> None:
    proof = asked(tmp_path)
    judged(proof)
    for run in proof.done.values():
        emptied(run, part)
    verdict = proof.verdict()
    assert verdict.word == "undecided"
    assert lacks in verdict.open["torch_ref, policy"]


def test_a_parameter_with_a_zero_gradient_passes(tmp_path: Path) -> None:
    """Such as GPT-2's key bias: both sides may compute zero, while other parameters' gradients are not."""
    proof = asked(tmp_path)
    judged(proof)
    for run in proof.done.values():
        run.__dict__["shapes"] = {"w": (50,), "b": (2,)}
        run.states.update({f"{kind}/b": np.ones(2) for kind in STATES})
        for record in run.records.values():
            record["gradient/b"] = np.zeros(2)
    assert proof.verdict().word == "equivalent"


def test_no_peak_is_expected_from_transformers(tmp_path: Path) -> None:
    """Its runs do not measure the peak, so nothing checks it."""
    ours, theirs = fake_run(JAX), fake_run("transformers", memory=MEMORY | {"peak": None})
    assert list(theirs.lacking([1, 2, 5])) == [] == list(ours.lacking([1, 2, 5]))
    assert list(fake_run(TORCH, memory=MEMORY | {"peak": 0}).lacking([])) == ["peak of memory"]


def test_a_record_that_runs_of_ours_lack_leaves_it_open(tmp_path: Path) -> None:
    proof = asked(tmp_path)
    judged(proof)
    for run in proof.done.values():
        del run.records[5]
        for name in list(run.states):
            if name.startswith("exp_avg/"):
                del run.states[name]
    verdict = proof.verdict()
    assert verdict.word != "equivalent" and len(verdict.open) == len(proof.done)
    assert verdict.open["jaxdist, one"] == "its run lacks exp_avg at the end, gradients of step 5; prove it again"


@pytest.mark.parametrize(("batch", "accumulation", "other"), [(8, 1, 2), (3, 1, 3), (9, 1, 3), (7, 7, 1), (8, 4, 1)])
def test_sums_in_another_order_on_one_device(tmp_path: Path, batch: int, accumulation: int, other: int) -> None:
    train = {"steps": len(LOSSES), "batch": batch, "accumulation": accumulation}
    one = asked(tmp_path, precision=BF16, train=train)
    assert "reordered" in one.kinds
    assert f"accumulation = {other}" in one.config("reordered")
    assert f"accumulation = {accumulation}" in one.config("policy")


def test_one_sequence_has_one_order(tmp_path: Path) -> None:
    alone = asked(tmp_path, precision=BF16, train={"steps": len(LOSSES), "batch": 1})
    assert "reordered" not in alone.kinds
    assert any("summed in one order only" in note for note in judged(alone).notes)


def test_a_mesh_is_reordered_by_one_device(tmp_path: Path) -> None:
    mesh = asked(tmp_path, precision=BF16, parallel={"mesh": "2x1"})
    assert 'mesh = "1x1"' in mesh.config("reordered") and "accumulation = 1" in mesh.config("reordered")


def test_the_note_of_a_noisy_policy_agrees_with_its_checks(tmp_path: Path) -> None:
    """A loss that moves by more than the note says fails, whatever the noise of reordered sums."""
    right = asked(tmp_path, precision=BF16)
    (note,) = (note for note in judged(right).notes if note.startswith("bf16: reordering"))
    assert "jaxdist's by" in note and "torch_ref's by" in note
    limit = levels.DRIFT * 1e-3
    assert f"more than {limit:.1g}; smaller ones" in note
    names = {check.name for check in judged(asked(tmp_path, precision=BF16), torch_ref_policy=2 * limit).failed}
    assert "cost to loss" in names


@pytest.mark.parametrize("value", ["grad_norm = nan at step 5", "exp_avg_sq/w of step 5", "gradient/w of step 4"])
def test_a_value_that_is_not_finite_fails(tmp_path: Path, value: str) -> None:
    """A step without gradients to compare is checked too."""
    proof = asked(tmp_path, precision=BF16)
    assert judged(proof).word == "equivalent"
    wrong = fake_run(TORCH, 1e-3, steps=(1, 2, 4, 5))
    metrics = [
        record | ({"grad_norm": np.nan} if value.startswith("grad_norm") and record["step"] == 5 else {})
        for record in wrong.metrics
    ]
    wrong.__dict__.update(metrics=metrics)
    for tensors in (wrong.states, wrong.records[4]):
        tensors |= {name: a * np.nan for name, a in tensors.items() if value.startswith(name)}
    proof.done[TORCH, "policy"] = wrong
    assert ("torch_ref, all values finite", value) in {(check.name, check.of) for check in proof.verdict().failed}


def test_a_bound_too_wide_leaves_it_open(tmp_path: Path) -> None:
    verdict = judged(asked(tmp_path), jaxdist_perturbed=WIDEST)
    assert verdict.word == "undecided" and "mathematics" in verdict.open and "amplifies" in verdict.sentence
    assert judged(asked(tmp_path), jaxdist_perturbed=WIDEST / 8).word == "equivalent"
    assert judged(asked(tmp_path), jaxdist_perturbed=WIDEST, torch_ref_one=1e-3).word == "not_equivalent"


@pytest.mark.parametrize(("reordered", "word"), [((3,), "undecided"), ((4,), "not_equivalent"), ((), "not_equivalent")])
def test_an_overflow_on_one_side_alone(tmp_path: Path, reordered: tuple[int, ...], word: str) -> None:
    """A mistake, unless reordered sums make one of a side's own runs overflow, or not, by then."""
    proof = asked(tmp_path, precision={"policy": "fp16"})
    judged(proof)
    for (side, kind), run in proof.done.items():
        at = (3,) if side == JAX else reordered if kind == "reordered" else ()
        run.__dict__.pop("overflown", None)
        run.__dict__["experiment"] = proof.experiment
        for record in run.metrics if kind in ("policy", "reordered") else ():
            skipped = record["step"] in at
            record |= {"loss_scale": 1024.0, "skipped": skipped} | ({"grad_norm": None} if skipped else {})
    verdict = proof.verdict()
    assert verdict.word == word
    assert ("precision" in verdict.open) == (word == "undecided")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", STATES)
def test_states_of_a_narrower_dtype(tmp_path: Path, kind: str, dtype: str) -> None:
    """Rounded but stored in float32, they cost no more than a 16-bit policy."""
    proof = asked(tmp_path, precision=BF16)
    judged(proof)
    for run in proof.done.values():
        run.states[f"{kind}/matrix"] = np.linspace(1, 2, 2500).reshape(50, 50)
    assert proof.verdict().word == "equivalent"
    states = proof.done[TORCH, "policy"].states
    states[f"{kind}/matrix"] = states[f"{kind}/matrix"].astype(dtype).astype(np.float32)
    (failed,) = (check for check in proof.verdict().failed if "states in" in check.name)
    assert failed.name == "torch_ref, states in float32 or wider" and failed.of.endswith(f"{kind} in {dtype}")


# ---- where the runs diverge


@pytest.mark.parametrize(
    ("name", "steps"),
    [("cost to gradients at step 1", [1]), ("cost to weights at the end", [1, 5]), ("cost to loss", [1, 5])],
)
def test_the_first_step_is_searched_and_then_where_the_policy_costs_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, steps: list[int]
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(bisect, "search", lambda look, step: begun.append(step))
    found = asked(tmp_path)
    judged(found)
    found.divergence(Verdict([Check("precision", name, 100.0, 32.0, "why")]), tmp_path)
    assert begun == steps
    here = bisect.Divergence(1, "gradient/w", 1.0, 1e-3, 0.0)
    monkeypatch.setattr(bisect, "search", lambda look, step: here if step == steps[-1] else None)
    assert found.divergence(Verdict([Check("precision", name, 100.0, 32.0, "why")]), tmp_path) is here


@pytest.mark.long
def test_weights_of_any_kind_begin_a_proof(tmp_path: Path) -> None:
    """Other kinds are converted to a Hugging Face folder, in a folder that does not exist yet."""
    drawn = asked(tmp_path / "drawn", model=SMALL)
    drawn.start()
    start = asked(tmp_path / "new", model=SMALL).start(drawn.folder / "seed")
    assert load_file(start / "model.safetensors").keys() == load_file(drawn.folder / "start/model.safetensors").keys()


def test_a_command_that_fails_without_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(code: int, stderr: str) -> None:
        monkeypatch.setattr(proof, "command", lambda module, *_, **__: CompletedProcess([], code, "", stderr))
        asked(tmp_path).finish("torch_ref.train")

    with pytest.raises(TrainingError, match=r"^python -m torch_ref\.train: ended with -9, without a word$"):
        ended(-9, "")
    with pytest.raises(ConfigError, match=r"^python -m torch_ref\.train: train\.steps = -1: mend it$"):
        ended(2, "error: train.steps = -1: mend it\n")
    with pytest.raises(TrainingError, match="out of memory"):
        ended(1, "out of memory")
    # like NaN in a run folder
    with pytest.raises(ConfigError, match=r"^python -m torch_ref\.train: step 3: loss = nan"):
        ended(1, "8 virtual CPU devices\nerror: step 3: loss = nan; lower the rate\n")
