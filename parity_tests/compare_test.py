"""The bound derived from float64 runs: wide where the precision costs, never wide by what cannot be compared."""

from typing import Any

import numpy as np
import pytest

from parity_tests import compare


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
