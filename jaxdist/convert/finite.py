"""Values of an array that are NaN or infinite."""

import numpy as np

from jaxdist.config.finite import NotFinite

BLOCK = 1 << 18  # numbers that are looked at together: they stay in a core's cache
# bits of the exponent, which are all set in what is not finite
EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}


def not_finite(array: np.ndarray) -> NotFinite | None:
    """How many there are and which comes first; None where there are none, as in arrays of whole numbers."""
    if array.dtype.name not in EXPONENTS or all(_finite(block) for block in _blocks(array)):
        return None
    wrong = ~np.isfinite(array)
    index = np.unravel_index(int(wrong.argmax()), array.shape)
    return NotFinite(int(wrong.sum()), array.size, float(array[index]), tuple(map(int, index)))


def _blocks(array: np.ndarray) -> list[np.ndarray]:
    flat = array.reshape(-1) if array.flags.c_contiguous else array.ravel(order="K")
    return [flat[start : start + BLOCK] for start in range(0, flat.size, BLOCK)]


def _finite(block: np.ndarray) -> bool:
    """By bits: of 16 bits numpy has no fast arithmetic."""
    exponent = np.array(EXPONENTS[block.dtype.name], f"u{block.itemsize}")
    return bool((block.view(exponent.dtype) & exponent).max() != exponent)
