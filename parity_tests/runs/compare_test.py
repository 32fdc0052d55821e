"""The bound derived from float64 runs: wide where precision costs digits, never because of values that are not
comparable."""

from typing import Any

import numpy as np
import pytest

from parity_tests.runs import compare


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, 1)]


EXACT = losses(4.0, 2.0, 1.0, 1.0)


def test_the_bound_is_k_times_the_most_lost_until_then() -> None:
    a, b = losses(4.0, 2.0 + 2e-6, 1.0, 1.0), losses(4.0, 2.0, 1.0 + 3e-6, 1.0)
    bound = compare.derived_bound(a, EXACT, b, EXACT)
    np.testing.assert_allclose(bound, [compare.LOSS, *(compare.K * np.array([1e-6, 3e-6, 3e-6]))], rtol=1e-6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nothing_is_within_the_bound_of_a_loss_that_is_no_number(wrong: float) -> None:
    a = losses(4.0, wrong, 1.0, 1.0)
    for bound in (compare.derived_bound(a, EXACT, EXACT, EXACT), compare.derived_bound(EXACT, a, EXACT, EXACT)):
        assert bound[0] == compare.LOSS
        assert not (compare.curve(a, EXACT, "loss")[1:] <= bound[1:]).any()


def test_nothing_is_within_the_bound_of_runs_of_unequal_length() -> None:
    for runs in ((EXACT[:2], EXACT, EXACT, EXACT), (EXACT[:2], EXACT[:2], EXACT, EXACT)):
        assert np.isnan(compare.derived_bound(*runs)).all()


def test_replicas_are_billed_to_data() -> None:
    assert [compare.billed(axis) for axis in ("data+fsdp", "fsdp", "fsdp+context")] == ["data", "fsdp", "fsdp"]


@pytest.mark.parametrize("size", [1e-305, 1e-170, 1.0, 1e170, 8e307])
def test_differences_of_tensors_of_any_size(size: float) -> None:
    """Squares of such numbers underflow or overflow."""
    a = np.linspace(1, 2, 50) * size
    b = a * (1 + 1e-3 * (np.arange(50) == 7))
    assert compare.relative(a, a) == 0.0
    np.testing.assert_allclose(compare.relative(b, a), 1e-3 * a[7] / size / np.linalg.norm(a / size), rtol=1e-9)


@pytest.mark.parametrize("flipped", [1e200, 1.7e308, -1.7e308])
def test_a_single_number_of_another_magnitude_is_found(flipped: float) -> None:
    """A flipped exponent bit gives a finite number whose square is infinite."""
    right = {"a": np.full(9, 0.5), "b": np.full(9, 0.5), "c": np.full(9, -1.7e308)}
    wrong = {name: w.copy() for name, w in right.items()}
    for w in wrong.values():
        w[3] = flipped if w[3] != flipped else -flipped
    differences = compare.states(wrong, right)
    assert min(differences.values()) > 0.3
    assert compare.worst(differences)[1] > 1 and compare.joint_error(wrong, right) > 0.3


def test_nan_is_the_worst_difference() -> None:
    """NaN is the worst at any place, though no comparison with it holds."""
    for order in ("xyz", "zyx", "yxz"):
        differences = {name: {"x": 1e3, "y": float("nan"), "z": float("inf")}[name] for name in order}
        assert compare.worst(differences)[0] == "y"
        assert compare.closest(differences, {"z": 1.0})[0] == "y"
