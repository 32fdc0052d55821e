"""The rules by which checks become a verdict."""

import json

import pytest

from parity_tests.verdict import Check, Verdict

HOLDS = Check("mathematics", "loss", 1e-15, 1e-12, "why")
FAILS = Check("memory", "parameters", 8.0, 0.0, "why")


def test_one_failed_check_decides() -> None:
    assert Verdict([HOLDS]).word == "equivalent"
    verdict = Verdict([HOLDS, FAILS], open={"precision": "no float64 run"})
    assert verdict.word == "not_equivalent"
    assert "1 of 2 checks fail, first memory: parameters is 8" in verdict.sentence


def test_what_was_not_checked_leaves_it_open() -> None:
    verdict = Verdict([HOLDS], open={"precision": "no float64 run"})
    assert verdict.word == "undecided" and "precision: no float64 run" in verdict.sentence
    assert Verdict([]).word == "undecided"


def test_what_was_measured_is_no_part_of_a_name() -> None:
    """verdict.json has the tensor in a field of its own."""
    checks = [Check("mathematics", "gradients at step 1", 1e-15, 1e-10, "why", "on one device", of) for of in "ab"]
    assert len({check.key for check in checks}) == 1
    assert [check.title for check in checks] == [f"gradients at step 1: {of}, on one device" for of in "ab"]
    (written,) = Verdict(checks[:1]).as_json()["checks"]
    assert (written["name"], written["of"]) == ("gradients at step 1", "a")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2e-12])
def test_a_nan_is_equal_to_nothing(value: float) -> None:
    check = Check("mathematics", "loss", value, 1e-12, "why")
    assert not check.holds and Verdict([check]).word == "not_equivalent"
    json.loads(json.dumps(Verdict([check]).as_json(), allow_nan=False))


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_nothing_is_within_a_bound_that_is_no_number(bound: float) -> None:
    assert not Check("mathematics", "loss", 0.0, bound, "why").holds
