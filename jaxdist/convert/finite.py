"""Values of an array that cannot be: NaN, infinity, and of a mean of squares those below zero."""

import numpy as np

from jaxdist.formats.finite import BadValues, is_square

BLOCK = 1 << 18  # numbers that are looked at together: they stay in a core's cache
# bits of the exponent, which are all set in what is not finite
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}


def bad_values(array: np.ndarray, name: str = "") -> BadValues | None:
    """Number of bad values and the first of them; None without any, as in arrays of integers. A tensor's `name` shows
    whether it is a mean of squares, as `is_square` knows."""
    if array.dtype.name not in EXPONENTS:
        return None
    if not all(_finite(block) for block in _blocks(array)):
        return _described(array, ~np.isfinite(array))
    if is_square(name) and not all(_positive(block) for block in _blocks(array)):
        return _described(array, array < 0)
    return None


def _described(array: np.ndarray, wrong: np.ndarray) -> BadValues:
    index = np.unravel_index(int(wrong.argmax()), array.shape)
    return BadValues(int(wrong.sum()), array.size, float(array[index]), tuple(map(int, index)))


def _blocks(array: np.ndarray) -> list[np.ndarray]:
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel(order="K")
    return [flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK)]


def _finite(block: np.ndarray) -> bool:
    """Compare bits: numpy has no fast arithmetic in 16 bits."""
    exponent = np.array(EXPONENTS[block.dtype.name], f"u{block.itemsize}")
    return bool((block.view(exponent.dtype) & exponent).max() != exponent)


def _positive(block: np.ndarray) -> bool:
    """Whether none is below zero, by bits: -0 is the least that has the sign's."""
    return bool(block.view(f"u{block.itemsize}").max() <= 1 << (8 * block.itemsize - 1))
