from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxdist.data import permutation
from jaxdist.data.permutation import permute

SIZES = (1, 2, 3, 4, 5, 16, 17, 255, 257, 10007)


def order(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, seed, np.full(n, epoch))


def each_once(found: np.ndarray, n: int) -> bool:
    return np.array_equal(np.sort(found), np.arange(n))


@pytest.mark.parametrize("n", SIZES)
def test_every_index_once(n: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**70, 3)):
        assert each_once(order(n, seed, epoch), n)


@pytest.mark.parametrize(
    "planted",
    [
        # a hash
        lambda values, keys, half: permutation._mix(values + keys[0]) & np.uint64(4**half - 1),
        lambda values, keys, half: values >> np.uint64(1),
    ],
)
def test_once_per_epoch_catches_a_map_that_is_no_permutation(
    monkeypatch: pytest.MonkeyPatch, planted: Callable[..., Any]
) -> None:
    monkeypatch.setattr(permutation, "_feistel", planted)
    assert not each_once(order(256), 256)


def test_seed_and_epoch_change_the_order() -> None:
    orders = [order(10007, seed, epoch) for seed, epoch in ((0, 0), (1, 0), (0, 1), (1, 1))]
    for number, one in enumerate(orders):
        for other in [*orders[:number], np.arange(10007)]:
            assert (one == other).mean() < 0.01
    assert np.array_equal(orders[0], order(10007))


def test_epochs_of_one_call_are_those_of_single_calls() -> None:
    index, epoch = np.tile(np.arange(11), 3), np.repeat(np.arange(3), 11)
    together = permute(index, 11, 5, epoch)
    assert np.array_equal(together, np.concatenate([order(11, 5, number) for number in range(3)]))


def fairness(orders: np.ndarray) -> float:
    """Largest standard score of how often an index comes to a place, over orders [epochs, n]."""
    epochs, n = orders.shape
    counts = np.stack([np.bincount(column, minlength=n) for column in orders.T])
    return np.abs(counts - epochs / n).max() / np.sqrt(epochs / n * (1 - 1 / n))


@pytest.mark.parametrize("n", [2, 3, 5, 13])
def test_every_place_is_equally_likely(n: int) -> None:
    epochs = np.repeat(np.arange(4000), n)
    assert fairness(permute(np.tile(np.arange(n), 4000), n, 0, epochs).reshape(4000, n)) < 5


def test_fairness_catches_a_rotation_that_favours_small_shifts() -> None:
    shifts = np.random.default_rng(0).binomial(4, 0.5, 4000)
    assert fairness((np.arange(5) + shifts[:, None]) % 5) > 5


def test_a_huge_range_costs_no_memory() -> None:
    n = 10**13 + 1
    index = np.array([0, 1, n - 1])
    found = permute(index, n, 0, np.zeros(3, np.int64))
    assert ((found >= 0) & (found < n)).all() and len(set(found.tolist())) == 3


def test_the_order_is_pinned() -> None:
    """Another order would silently change every resumed run."""
    assert order(10).tolist() == [8, 5, 3, 1, 6, 7, 0, 4, 2, 9]
