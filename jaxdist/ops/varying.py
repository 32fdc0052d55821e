"""Dtypes and device-varying types of arrays within `jax.shard_map`: conversions that send nothing."""

import jax
import jax.numpy as jnp
from jax import lax


def at_least_f32(x: jax.Array) -> jax.Array:
    """`x` in float32 or wider: what norms, softmax, rotations, the loss and every sum over tokens are computed in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def mark_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`x`, the same on all devices of `axes`, typed as differing there. Sends nothing."""
    marked: jax.Array = lax.pcast(x, axes, to="varying")
    return marked


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes along which `x` differs between devices, by its type."""
    varying: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return varying


def match_varying(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, typed as differing wherever one of `others` does."""
    axes = frozenset().union(*map(varying_axes, others)) - varying_axes(x)
    return mark_varying(x, tuple(sorted(axes))) if axes else x
