"""Matrix products with backward passes that XLA runs fast on several CPU devices."""

from typing import Any

import jax
from jax import lax

from jaxdist.ops.varying import at_least_f32, match_varying


def written(x: jax.Array) -> jax.Array:
    """`x`, materialized on several CPU devices, so that XLA does not rewrite the product that reads it."""
    mesh = jax.sharding.get_abstract_mesh()
    several = mesh.size > 1 and mesh.abstract_device and mesh.abstract_device.platform == "cpu"
    return lax.optimization_barrier(x) if several else x


def transposed(x: jax.Array) -> jax.Array:
    """x[..., M, N] as [..., N, M], for a product that sums over M.

    XLA leaves a product on CPUs to YNNPACK only if its left side is summed over the last dimension, for which it has to
    be written. Else it is Eigen's, of whose many tasks the threads of several devices wait for each other. To one
    device Eigen's is as fast or faster.
    """
    return written(x.mT)


def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x[..., I] · kernel[I, O]. Tokens are flattened, so that the kernel's gradient sums over one dimension: over two
    XLA is slow on CPUs."""
    x_NI = x.reshape(-1, x.shape[-1])
    # Typed alike out here, where JAX sums gradients over axes that one lacks: a rule of our own must return its types.
    return _product(match_varying(x_NI, kernel), match_varying(kernel, x)).reshape(*x.shape[:-1], kernel.shape[-1])


@jax.custom_vjp
def _product(x_NI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    return x_NI @ kernel_IO


def _product_forward(x_NI: jax.Array, kernel_IO: jax.Array) -> Any:
    return x_NI @ kernel_IO, (x_NI, kernel_IO)


def _product_backward(kept: tuple[jax.Array, jax.Array], outer_NO: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_NI, kernel_IO = kept
    # Written, or a tied head's would be made as its transpose, with `outer_NO` on the left.
    return outer_NO @ kernel_IO.T, written(transposed(x_NI) @ outer_NO)


_product.defvjp(_product_forward, _product_backward)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias, in float32 or wider: the bias' gradient is a sum over all tokens. Rounded once."""
    return (at_least_f32(y) + at_least_f32(bias)).astype(y.dtype)
