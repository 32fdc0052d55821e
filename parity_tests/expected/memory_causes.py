"""Causes of the memory that a step takes."""

from dataclasses import dataclass

UNEXPLAINED = "unexplained"


@dataclass(frozen=True)
class Cause:
    """Bytes that a named cause takes of the fullest device at the peak of a step, on JAX's side and on torch's."""

    name: str
    jax: float
    torch: float
