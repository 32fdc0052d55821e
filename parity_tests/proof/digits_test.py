"""The dtype of a run that differs from its config's is named as cause, before its consequences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxdist.config import Experiment
from parity_tests.proof import levels
from parity_tests.proof.causes import Diagnosis, diagnose
from parity_tests.proof.evidence import Evidence
from parity_tests.runs import compare
from parity_tests.validation import loops
from parity_tests.validation.loops import STEPS, Finished, Loop


class Recorded(Loop):
    """The right loop, which keeps gradients of its first step."""

    records = True


class Float32(Recorded):
    dtype = torch.float32


class Float32Smoothed(Float32, loops.Smoothed): ...


class Float32NextBatch(Float32, loops.NextBatch): ...


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Loop], str], Finished]:
    """A loop's run under the config of a policy."""
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list("etaoin shrdlu"), n)) for n in random.integers(20, 60, 200)]
    file = tmp_path_factory.mktemp("digits") / "documents.txt"
    file.write_text("\n".join(lines), encoding="utf-8")
    done: dict[type[Loop], Finished] = {}

    def run(loop: type[Loop], policy: str) -> Finished:
        found = done.setdefault(loop, loop(file).run("theirs"))
        values = found.experiment.model_dump(exclude_none=True) | {"precision": {"policy": policy}}
        return replace(found, experiment=Experiment.parse(values, source="test"))

    return run


def named(theirs: Finished, ours: Finished, bounds: dict[str, np.ndarray] | None = None) -> Diagnosis | None:
    start = {f"weights/{name}": w for name, w in ours.before[1].items()}
    least = bounds or {name: np.full(STEPS, floor) for name, floor in compare.FLOOR.items()}
    return diagnose(Evidence(ours, theirs, least, start))  # type: ignore[arg-type]


def in_dtype(dtype: Any, kept: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Round to one dtype, store in another."""
    return lambda w: w.astype(dtype).astype(kept)


def changed(run: Finished, change: Callable[[np.ndarray], np.ndarray], *prefixes: str) -> Finished:
    """A run with `change` applied to its recorded tensors with these prefixes."""

    def all_of(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: change(w) if name.startswith(prefixes) else w for name, w in tensors.items()}

    return replace(run, kept_at_the_end=all_of(run.kept_at_the_end), gradients=all_of(run.gradients))


ALL = ("weights/", "exp_avg/", "exp_avg_sq/", "gradient/")


@pytest.mark.parametrize("kept", [np.float32, np.float64])
def test_a_run_in_float32_under_a_config_of_float64_is_named_by_that(runs: Any, kept: type) -> None:
    """The record may be wider than the loop's tensors."""
    theirs = changed(runs(Float32, "fp64"), in_dtype(np.float32, kept), *ALL)
    found = named(theirs, runs(Recorded, "fp64"))
    assert found and (found.cause, found.step, found.checks) == ("precision", 1, "or wider"), found
    assert f"theirs recorded {sorted_states('float32', 'float64')}" in found.how
    assert "gradient of step 1 in float32, config says float64" in found.how
    assert "loss, grad_norm in float32, config says float64" in found.how and "more than" not in found.how


def sorted_states(dtype: str, configured: str) -> str:
    """The states as listed by a run that sorts its kinds."""
    return f"exp_avg, exp_avg_sq, weights in {dtype}, config says {configured}"


@pytest.mark.parametrize("loop", [Float32Smoothed, Float32NextBatch])
def test_a_dtype_is_named_first_and_does_not_excuse_another_mistake(runs: Any, loop: type[Loop]) -> None:
    found = named(runs(loop, "fp64"), runs(Recorded, "fp64"))
    assert found and found.cause == "precision" and "more than that explains" in found.how, found


@pytest.mark.parametrize("kept", [ml_dtypes.bfloat16, np.float32])
def test_bfloat16_is_recognized_in_float32_too(runs: Any, kept: type) -> None:
    ours, single = runs(Recorded, "fp32"), runs(Float32, "fp32")
    bounds = levels.float_bounds(single, ours, "float32")
    found = named(changed(single, in_dtype(ml_dtypes.bfloat16, kept), *ALL), ours, bounds)
    assert found and found.cause == "precision" and sorted_states("bfloat16", "float32") in found.how, found
    assert "only recorded so" in found.how


ONE = "layers.0.attention.q_proj.weight"
ALONE = {
    "weights/": "weights in float32",
    f"weights/{ONE}": f"weights of {ONE} in float32",
    "weights/norm.weight": "weights of norm.weight in float32",
    "exp_avg/": "exp_avg in float32",
    "exp_avg_sq/": "exp_avg_sq in float32",
    f"exp_avg/{ONE}": f"exp_avg of {ONE} in float32",
    "gradient/": "gradient of step 1 in float32",
    f"gradient/{ONE}": f"gradient of step 1 of {ONE} in float32",
}


@pytest.mark.parametrize("prefix", ALONE)
def test_a_single_kind_in_another_dtype_is_named(runs: Any, prefix: str) -> None:
    ours = runs(Recorded, "fp64")
    found = named(changed(ours, in_dtype(np.float32, np.float32), prefix), ours)
    assert found and found.cause == "precision", found
    assert found.how.startswith(f"theirs recorded {ALONE[prefix]}, config says float64")


@pytest.mark.parametrize("curve", ["loss", "grad_norm"])
def test_a_curve_alone_in_float32_is_named(runs: Any, curve: str) -> None:
    ours = runs(Recorded, "fp64")
    metrics = [record | {curve: float(np.float32(record[curve]))} for record in ours.metrics]
    found = named(replace(ours, metrics=metrics), ours)
    assert found and found.cause == "precision" and f"recorded {curve} in float32, config says float64" in found.how


def test_a_norm_that_is_the_clip_at_every_step_has_no_dtype(runs: Any) -> None:
    ours = runs(Recorded, "fp64")
    clipped = replace(ours, metrics=[record | {"grad_norm": 0.5} for record in ours.metrics])
    assert not evidence_of(clipped, ours).recorded


def test_dtypes_of_the_config_are_not_named(runs: Any) -> None:
    ours, single = runs(Recorded, "fp64"), runs(Float32, "fp32")
    bounds = levels.float_bounds(single, ours, "float32")
    assert named(ours, ours) is None
    assert named(single, ours, bounds) is None
    assert not evidence_of(single, ours).recorded and not evidence_of(ours, ours).recorded
    for policy in ("bf16", "bf16-true", "16-true"):  # policies whose gradients, or all tensors, may be this narrow
        rounded = changed(runs(Float32, policy), in_dtype(dtype_of(policy), np.float32), *kinds_of(policy))
        assert not evidence_of(rounded, ours).recorded, policy


def dtype_of(policy: str) -> Any:
    return np.float16 if policy.startswith("16") else ml_dtypes.bfloat16


def kinds_of(policy: str) -> tuple[str, ...]:
    return ALL if policy.endswith("true") else ("gradient/",)


def evidence_of(theirs: Finished, ours: Finished) -> Evidence:
    return Evidence(ours, theirs, {}, {})  # type: ignore[arg-type]


def test_weights_that_rounding_did_not_let_move_are_not_narrow(runs: Any) -> None:
    """A bfloat16 checkpoint may train at a learning rate below float32's resolution."""
    ours = runs(Recorded, "fp64")
    narrowed = changed(ours, in_dtype(ml_dtypes.bfloat16, np.float64), "weights/")
    moved = changed(narrowed, lambda w: w * (1 + 1e-12), "weights/")
    still = changed(narrowed, in_dtype(np.float32, np.float32), *ALL)
    single = replace(still, experiment=runs(Float32, "fp32").experiment)
    assert not evidence_of(single, moved).recorded
