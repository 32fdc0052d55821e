"""A seeded permutation of range(n) that stores nothing: 1e12 sequences cost what ten do."""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8


def permute(index: NDArray[np.int64], n: int, seed: int, epoch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Image of each index under the permutation of range(n) given by (seed, epoch); index and epoch are [B].

    A balanced Feistel network over the smallest even number of bits that holds n, so over fewer than 4n
    numbers (4 for n = 1); what lands outside range(n) goes through again until it is inside. This is the
    cycle walking of Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002). The order is shuffled,
    not secret.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    base = _mix(_mix(np.array([seed % 2**64], np.uint64)) + epoch.astype(np.uint64))
    keys = np.stack([_mix(base + np.uint64(number)) for number in range(ROUNDS)])
    result = _feistel(index.astype(np.uint64), keys, half)
    while (outside := result >= n).any():
        result[outside] = _feistel(result[outside], keys[:, outside], half)
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    """A permutation of range(4**half) for each column of keys [ROUNDS, B]; values are [B]."""
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea and Flood, 2014): a change of one bit reaches all."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
