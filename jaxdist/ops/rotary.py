"""Rotary position embedding."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import Rotary
from jaxdist.ops.varying import at_least_f32

Rotation = tuple[jax.Array, jax.Array]


def rotary_frequencies(c: Rotary, dtype: Any) -> jax.Array:
    """Angle per position of each of the head_dim/2 pairs, radians; llama3 scaling as in Llama 3.1's reference code."""
    frequency = c.rope_theta ** -(jnp.arange(0, c.head_dim, 2, dtype=dtype) / c.head_dim)
    if c.rope_scaling == "none":
        return frequency
    turns = c.rope_original_positions * frequency / (2 * math.pi)  # full turns within the original context
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)  # 1: fast, left alone; 0: slow, stretched in full
    return frequency * (kept + (1 - kept) / c.rope_factor)


def rotary(c: Rotary, length: int, dtype: Any) -> Rotation:
    """cos and sin [T, 1, C/2] of every position (arXiv:2104.09864), in float32 or wider."""
    dtype = jnp.promote_types(dtype, jnp.float32)
    angle = jnp.arange(length, dtype=dtype)[:, None] * rotary_frequencies(c, dtype)
    return jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]


def rotate(x_BTHC: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the pairs (i, i + C/2), Hugging Face's layout of the halves."""
    cos, sin = rotation
    first, second = jnp.split(at_least_f32(x_BTHC), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_BTHC.dtype)
