"""Plain torch loops with one mistake each: the verdict names the mistake as cause."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config.optimizer import ALL, OPTIMIZERS, UpdateRule
from jaxdist.config.registry import FAMILIES
from parity_tests.proof import batches, levels, nearness
from parity_tests.proof.bisect import STAGES, Divergence
from parity_tests.proof.causes import Diagnosis, cause_of, causes, diagnose, schedule
from parity_tests.proof.evidence import Evidence, Search
from parity_tests.runs import compare
from parity_tests.validation import loops
from parity_tests.validation.loops import STEPS, Finished, Loop


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very unequal lengths, one per sequence, so that batches differ in loss and number of tokens."""
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("etaoinshrdlu"), size)) for size in random.integers(1, 9, 2000)]
    file = tmp_path_factory.mktemp("causes") / "documents.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for size in random.choice([1, 2, 3, 4, 6, 10, 20, 60], 400):
            start = random.integers(len(words) - size)
            lines.write(json.dumps({"text": " ".join(words[start : start + size])}) + "\n")
    return file


@pytest.fixture(scope="module")
def right(documents: Path) -> Finished:
    return Loop(documents).run("ours")


def named(wrong: Loop, right: Finished) -> Diagnosis | None:
    """Cause of a loop's difference from the right loop in float64."""
    ours, theirs = replace(right, experiment=wrong.experiment), wrong.run("theirs")
    return diagnose(evidence(ours, theirs, {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}))


def often(rows: Sequence[tuple[Any, ...]], each: int = 2) -> list[Any]:
    """Parameters (loop, cause, ...), marked slow after `each` rows with the same cause."""
    known: Counter[str] = Counter()
    parameters = []
    for loop, cause, *rest in rows:
        marks = [pytest.mark.slow] if known[cause] >= each else []
        parameters.append(pytest.param(loop, cause, *rest, id=loop.__name__, marks=marks))
        known[cause] += 1
    return parameters


def evidence(ours: Finished, theirs: Finished, bounds: Mapping[str, np.ndarray]) -> Evidence:
    def batch(step: int) -> Search:
        losses = ours.metrics[step - 1]["loss"], theirs.metrics[step - 1]["loss"]
        return batches.identify(ours.experiment, ours.before[step], step, losses, bounds["loss"][step - 1])

    start = {f"weights/{name}": w for name, w in ours.before[1].items()}
    return Evidence(ours, theirs, bounds, start, batch)  # type: ignore[arg-type]


NAMED = [
    (loops.MeanOfMeans, "forward pass or loss", 1, "loss of this batch as the mean of its microbatches' means"),
    (loops.NeverClipped, "clip", 1, "as if the clip of 0.5 were not applied"),
    (loops.ClippedByValue, "clip", 1, "separately"),
    (loops.ClippedByGroup, "clip", 1, "separately"),
    (loops.LongWarmup, "learning rate", 1, "it is 0.000375 in theirs, and 0.00075 in ours"),
    (loops.LastMicrobatchDropped, "gradients", 1, "the sum over 4 microbatches"),
    (loops.NeverZeroed, "gradients", 2, "may not have been set to zero"),
    (loops.SwappedBetas, "moments", 2, "exp_avg (optimizer.beta1) and exp_avg_sq (optimizer.beta2) of theirs differ"),
    (loops.NoDecay, "weight decay", 1, "0.1 less than ours"),
    (loops.Coupled, "weight decay", 1, "added to the gradient (coupled, L2)"),
    (loops.TwoStepsAStep, "learning rate", 1, "their schedule advances 2 steps a step"),
    (loops.StepLate, "learning rate", 1, "their schedule is 1 step late"),
    (loops.ClippedScaled, "clip", 1, "times ours, by its moments"),
    (loops.HalfRotation, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (loops.HalfAccumulated, "gradients", 1, "the sum over 4 microbatches and its dtype"),
    (loops.EmbeddingNotDecayed, "weight decay", 1, "embed.weight of theirs differs at the end along itself"),
    (loops.StepAhead, "learning rate", 1, "their schedule is 1 step ahead"),
    (loops.NoWarmup, "learning rate", 1, "it is 0.003 in theirs, and 0.00075 in ours"),
    (loops.RateLoggedWrong, "learning rate", 1, "so it is only logged differently"),
    (loops.RateAppliedTwice, "update of the weights", 1, "a learning rate that is not the logged one"),
    (loops.OtherClip, "clip", 1, "times ours, by its moments"),
    (loops.Summed, "gradients", 1, "all are 2 times ours"),
    (loops.AddedLoss, "gradients", 1, "a loss that is added"),
    (loops.NormOfTheClipped, "gradients", 1, "only the norm is computed or logged differently"),
    (loops.LossLoggedInBits, "forward pass or loss", 1, "so it is only logged differently"),
    (loops.Smoothed, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (loops.LargeNormEps, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (loops.NormsDecayed, "weight decay", 1, "more than ours"),
    (loops.Beta2, "moments", 2, "exp_avg_sq (optimizer.beta2) of theirs differs"),
    (loops.Eps, "update of the weights", 1, "update rule"),
    (loops.NextBatch, "other batches", 1, "the batch of step 2"),
    (loops.SameBatch, "other batches", 2, "the batch of step 1"),
    (loops.BatchesFromFive, "other batches", 5, ""),
    (loops.OtherSeed, "other batches", 1, "the batch of train.seed = 3"),
    (loops.UnknownSeed, "other batches", 1, "as much as the losses of two batches"),
    (loops.HalfOfTheBatch, "other batches", 1, "the first half of the batch"),
    (loops.OtherStart, "other starting weights", 1, "times the size of the given ones away"),
]


@pytest.mark.long
@pytest.mark.parametrize(("loop", "cause", "step", "how"), often(NAMED))
def test_the_cause_is_named(
    documents: Path, right: Finished, loop: type[Loop], cause: str, step: int, how: str
) -> None:
    found = named(loop(documents), right)
    assert found and (found.cause, found.step) == (cause, step) and how in found.how, found


# The clip is first reached at step 2, where other mistakes begin too.
CLIPPED_FROM_TWO = [
    (loops.NeverClipped, "clip", 2, "as if the clip of"),
    (loops.OtherClip, "clip", 2, "times ours, by its moments"),
    (loops.Beta1, "moments", 2, "exp_avg (optimizer.beta1) of theirs differs"),
    (loops.Beta2, "moments", 2, "exp_avg_sq (optimizer.beta2) of theirs differs"),
    (loops.Eps, "update of the weights", 1, ": update rule (eps, bias correction), weight decay"),
    (loops.EpsFromTwo, "update of the weights", 2, ": update rule (eps, bias correction), weight decay"),
    (loops.NormsDecayed, "weight decay", 1, "more than ours"),
    (loops.NoDecayFromTwo, "weight decay", 2, "less than ours"),
]


@pytest.fixture(scope="module")
def clipped_from_two(documents: Path) -> Finished:
    first, second = (record["grad_norm"] for record in Loop(documents, clip=1e9).run("ours").metrics[:2])
    return Loop(documents, (first * second) ** 0.5).run("ours")


@pytest.mark.long
@pytest.mark.parametrize(("loop", "cause", "step", "how"), often(CLIPPED_FROM_TWO, each=1))
def test_a_mistake_that_begins_where_the_clip_is_first_reached_is_named(
    documents: Path, clipped_from_two: Finished, loop: type[Loop], cause: str, step: int, how: str
) -> None:
    ours, limit = clipped_from_two, clipped_from_two.experiment.optimizer.clip
    assert ours.metrics[0]["grad_norm"] < limit < ours.metrics[1]["grad_norm"]
    found = named(loop(documents, limit), ours)
    assert found and (found.cause, found.step) == (cause, step) and how in found.how, found


def test_a_vector_that_differs_along_itself_by_chance_is_not_called_decayed(documents: Path, right: Finished) -> None:
    """A vector of ones may differ so by chance: decay must shrink all vectors."""
    theirs, rates = loops.Eps(documents).run("theirs"), sum(record["learning_rate"] for record in right.metrics)
    name, decay = "weights/norm.weight", right.experiment.optimizer.weight_decay
    theirs.kept_at_the_end[name] = right.kept_at_the_end[name] * (1 - decay * rates)
    found = diagnose(evidence(right, theirs, {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}))
    assert found and found.cause == "update of the weights", found


def test_runs_that_share_no_curve_are_compared_by_their_final_weights(right: Finished) -> None:
    other = replace(right, kept_at_the_end={n: w + 1e-3 for n, w in right.kept_at_the_end.items()})
    for bounds in ({}, {"loss": np.array([])}):
        assert Evidence(right, right, bounds, {}).agrees_at_the_end  # type: ignore[arg-type]
        assert not Evidence(right, other, bounds, {}).agrees_at_the_end  # type: ignore[arg-type]


def test_a_schedule_that_ends_at_zero_is_compared_at_its_peak() -> None:
    ours = np.array([0.001, 0.002, 0.003, 0.002, 0.001, 0.0])
    assert schedule(ours, 0.1 * ours) == ": 0.1 times ours at every step"
    assert schedule(ours, np.append(ours[1:], 0.0)) == ": their schedule is 1 step ahead"
    assert schedule(ours, ours + 0.001) == "" == schedule(0 * ours, ours)


@pytest.mark.parametrize("known", [True, False])
def test_another_start_is_the_other_possibility_where_theirs_was_not_recorded(right: Finished, known: bool) -> None:
    """The loss is off by the same share from the first step on, as with a slightly larger head."""
    metrics = [record | {"loss": record["loss"] * (1 + 1e-6)} for record in right.metrics]
    theirs = replace(right, side="theirs", metrics=metrics, before=right.before if known else {})
    bounds = {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()} | {"grad_norm": np.full(STEPS, -1.0)}
    found = diagnose(evidence(right, theirs, bounds))
    assert found and found.cause == "forward pass or loss"
    assert ("if theirs began with the given weights" in found.how) is not known
    assert ("other starting weights than the given ones are the other possibility" in found.how) is not known


def test_a_recorded_start_that_is_not_the_given_one_is_named(right: Finished) -> None:
    began = {1: {name: w * (1.001 if name == "embed.weight" else 1) for name, w in right.before[1].items()}}
    metrics = [record | {"loss": record["loss"] * (1 + 1e-6)} for record in right.metrics]
    theirs = replace(right, side="theirs", metrics=metrics, before=began)
    found = diagnose(evidence(right, theirs, {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}))
    assert found and found.cause == "other starting weights"
    assert "embed.weight differs from the given one by 0.001" in found.how


def test_a_tensor_whose_gradient_alone_was_halved_is_named(right: Finished) -> None:
    name = "layers.0.attention.q_proj.weight"
    halved = {f"exp_avg/{name}": 0.5, f"exp_avg_sq/{name}": 0.25}
    kept = {n: w * halved.get(n, 1 + 1e-7) for n, w in right.kept_at_the_end.items()}
    metrics = [r | {"grad_norm": r["grad_norm"] * (1 - 1e-7 * r["step"])} for r in right.metrics]
    theirs = replace(right, side="theirs", metrics=metrics, kept_at_the_end=kept)
    found = diagnose(evidence(right, theirs, {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}))
    assert found and (found.cause, found.step) == ("gradients", 1)
    assert f"exp_avg is 0.5 times ours and exp_avg_sq is 0.25 times ours for {name} alone" in found.how


def test_a_right_loop_has_no_cause(documents: Path, right: Finished) -> None:
    assert named(Loop(documents), right) is None


# ---- in float32, whose rounding hides small differences


ROUNDED = [
    (loops.ExactGelu, "forward pass or loss", "from equal weights and batches the loss differs"),
    (loops.SingleSummed, "gradients", "all are 2 times ours"),
    (loops.SingleNextBatch, "other batches", "the batch of step 2"),
    (loops.SingleBeta2, "moments", "exp_avg_sq"),
    (loops.SingleLate, "learning rate", "their schedule is 1 step late"),
    (loops.SingleBeta1, "moments", "exp_avg (optimizer.beta1) of theirs differs"),
    (loops.SingleNoDecay, "weight decay", "0.1 less than ours"),
    (loops.SingleClippedByGroup, "clip", "separately"),
]


@pytest.fixture(scope="module")
def single(documents: Path) -> tuple[Finished, Finished]:
    return loops.Single(documents).run("ours"), loops.SingleInDouble(documents).run("ours")


@pytest.mark.long
@pytest.mark.parametrize(("loop", "cause", "how"), often(ROUNDED, each=1))
def test_the_cause_is_named_in_float32(
    documents: Path, single: tuple[Finished, Finished], loop: type[Loop], cause: str, how: str
) -> None:
    ours, exact = single
    bounds = levels.float_bounds(ours, exact, "float32")  # type: ignore[arg-type]
    found = diagnose(evidence(exact, loop(documents).run("theirs"), bounds))
    assert found and found.cause == cause and how in found.how, found


@pytest.fixture(scope="module")
def small(documents: Path) -> tuple[Finished, Finished]:
    return loops.SmallSingle(documents).run("ours"), loops.SmallInDouble(documents).run("ours")


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "cause", "how"),
    [
        (loops.SmallExactGelu, "forward pass or loss", "the first gradient to differ in the backward pass is that of "),
        (loops.SmallEps, "update of the weights", "update rule (eps, bias correction)"),
        (loops.SmallSingle, "", ""),
    ],
)
def test_gradients_of_the_first_step_show_mistakes_hidden_in_the_loss(
    documents: Path, small: tuple[Finished, Finished], loop: type[Loop], cause: str, how: str
) -> None:
    ours, exact = small
    bounds = levels.float_bounds(ours, exact, "float32")  # type: ignore[arg-type]
    theirs = loop(documents).run("theirs")
    found = diagnose(replace(evidence(exact, theirs, bounds), rounded=ours))  # type: ignore[arg-type]
    assert not cause if found is None else found.cause == cause and how in found.how, found
    unkept = diagnose(evidence(exact, replace(theirs, gradients={}), bounds))
    assert unkept and "a run in fp64" in unkept.how


@pytest.mark.long
@pytest.mark.parametrize(("loop", "holds"), [(loops.SmallSingle, True), (loops.SmallExactGelu, False)])
@pytest.mark.parametrize("kept", [True, False])
def test_a_run_with_the_other_gelu_is_named_by_the_nearer_one(
    documents: Path, small: tuple[Finished, Finished], loop: type[Loop], holds: bool, kept: bool
) -> None:
    other, theirs = loops.SmallExactInDouble(documents).run("ours"), loop(documents).run("theirs")
    ours, exact, other, theirs = (
        run if kept else replace(run, gradients={}) for run in (small[0], small[1], other, theirs)
    )
    pair: Any = (ours, theirs)
    (check,) = nearness.nearer(pair, exact, other, "model.gelu = exact", FAMILIES["gpt2"].zero_gradients)  # type: ignore[arg-type]
    assert check.holds is holds and (check.of == "gradients at step 1" or not kept), check
    assert not list(nearness.nearer(pair, exact, exact, "none", ()))  # type: ignore[arg-type]
    diagnosis = diagnose(
        replace(evidence(exact, theirs, {n: np.ones(STEPS) for n in compare.FLOOR}), other_model="as other")
    )
    assert diagnosis and diagnosis.cause == "forward pass or loss" and diagnosis.how == "as other"


# ---- from the first tensor that differs


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        ("batch/tokens", "other batches"),
        ("start/embed.weight", "other starting weights"),
        ("activation/layers.0", "forward pass or loss"),
        ("scalar/loss", "forward pass or loss"),
        ("gradient/embed.weight", "gradients"),
        ("scalar/grad_norm", "gradients"),
        ("clipped/embed.weight", "clip"),
        ("exp_avg/embed.weight", "moments"),
        ("scalar/learning_rate", "learning rate"),
        ("weights/embed.weight", "update of the weights"),
    ],
)
def test_the_first_tensor_points_to_a_cause(tensor: str, cause: str) -> None:
    found = cause_of(Divergence(3, tensor, 1e-3, 1e-10, 1e-14))
    assert (found.cause, found.step) == (cause, 3) and "step 3 is the first that differs" in found.how


def test_every_kind_of_tensor_has_a_cause() -> None:
    kinds = {kind for row in causes() for kind in row.kinds}
    assert STAGES.keys() <= kinds


def test_the_state_of_a_plugins_optimizer_points_to_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS._rows, "centered", UpdateRule("centered", {"mean_grad": ALL}))
    found = cause_of(Divergence(2, "mean_grad/embed.weight", 1e-3, 1e-10, 1e-14))
    assert found.cause == "moments" and re.search(found.checks, "distribution, mean_grad at the end")
