"""Bytes sent and held are within their bounds; mistakes that add to either exceed them."""

import pytest

from jaxdist.bench.facts import FIRST, MEMORY, ROWS, TRAFFIC, figures, row_ratios
from jaxdist.conftest import often
from jaxdist.parallel import pipeline, rematerialization
from jaxdist.parallel.collectives import Parallel

pytestmark = pytest.mark.long


def met(name: str) -> list[bool | None]:
    """Whether the figures of traffic and memory meet their goals."""
    return [figure.met for figure in figures(name, row_ratios(name))]


@pytest.mark.parametrize("name", often(ROWS, FIRST))
def test_a_strategy_sends_and_holds_no_more(name: str) -> None:
    found = row_ratios(name)
    assert found.traffic <= TRAFFIC.value
    assert found.memory <= MEMORY.value


@pytest.mark.slow
def test_a_sum_too_many_is_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without `enter` JAX inserts a sum for each product."""
    monkeypatch.setattr(Parallel, "enter", lambda self, x: x)
    assert row_ratios("2x4").traffic > TRAFFIC.value and met("2x4") == [False, True]


@pytest.mark.slow
def test_activations_that_are_kept_are_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: activations are kept instead of recomputed."""
    monkeypatch.setitem(rematerialization.POLICIES, "full", rematerialization.POLICIES["none"])
    assert row_ratios("fsdp, remat full").memory > MEMORY.value and met("fsdp, remat full") == [True, False]


@pytest.mark.slow
def test_weights_that_are_gathered_before_the_first_tick_are_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: XLA may hoist gathers out of a pipeline's loops over ticks."""
    monkeypatch.setattr(pipeline, "not_before", lambda t, weights: weights)
    assert row_ratios("pipeline").memory > MEMORY.value and met("pipeline") == [True, False]
