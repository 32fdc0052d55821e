"""The rules that turn checks into a verdict."""

import json

import pytest

from parity_tests.proof.verdict import Check, Verdict

HOLDS = Check("mathematics", "loss", 1e-15, 1e-12, "why")
FAILS = Check("memory", "parameters", 8.0, 0.0, "why")


def test_one_failed_check_decides() -> None:
    assert Verdict([HOLDS]).word == "equivalent"
    verdict = Verdict([HOLDS, FAILS], open={"precision": "no float64 run"})
    assert verdict.word == "not_equivalent"
    assert "1 of 2 checks fail, first memory: parameters: 8" in verdict.sentence


def test_unchecked_levels_leave_the_verdict_open() -> None:
    verdict = Verdict([HOLDS], open={"precision": "no float64 run"})
    assert verdict.word == "undecided" and "precision: no float64 run" in verdict.sentence
    assert Verdict([]).word == "undecided"


def test_check_names_leave_out_the_tensor() -> None:
    """verdict.json names the tensor in a field of its own."""
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


def near(value: float, bound: float = 32.0, level: str = "precision") -> Check:
    return Check(level, "cost to loss", value, bound, "why", of="run mine", widest=1e-5)


DECIDES = {"precision": "a run of it in fp64"}


@pytest.mark.parametrize("value", [35.3, 63.9, 16.1, 31.9])
def test_a_bound_met_or_missed_narrowly_names_the_decisive_value(value: float) -> None:
    sentence = Verdict([HOLDS, near(value)], not_compared=["memory"], decides=DECIDES).sentence
    by = "missed" if value > 32 else "met"
    assert f"{by} by less than a factor of two: a run of it in fp64 decides it." in sentence
    assert f"cost to loss: run mine: {value:.3g} where 32 is allowed" in sentence


@pytest.mark.parametrize("checks", [[near(64.1)], [near(15.9)], [near(35.3), near(300.0)], [near(35.3), FAILS]])
def test_a_clear_verdict_mentions_no_narrow_margin(checks: list[Check]) -> None:
    assert "factor of two" not in Verdict([HOLDS, *checks], decides=DECIDES).sentence


def test_the_check_that_is_shown_is_a_clear_one() -> None:
    assert "cost to loss: run mine: 300, at most 32" in Verdict([near(35.3), near(300.0)], decides=DECIDES).sentence


def test_failing_checks_are_in_the_order_of_a_step() -> None:
    names = (
        "starting weights",
        "learning_rate",
        "loss",
        "gradients at step 1",
        "exp_avg at the end",
        "weights at the end",
    )
    checks = [Check("mathematics", name, 1.0, 0.0, "why") for name in reversed(names)]
    assert [check.name for check in Verdict([FAILS, *checks]).failed] == [*names, FAILS.name]
