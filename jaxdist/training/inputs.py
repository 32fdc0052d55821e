"""Kinds of inputs, a row each: types, shapes and PartitionSpecs of batches and of logits.

Twin: torch_ref/training/inputs.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxdist.data import Batch, Batches, Images
from jaxdist.parallel.sharding import BATCH, TOKENS


def correct_images(logits_BV: jax.Array, targets_B: jax.Array) -> jax.Array:
    """Number of images whose class has the largest logit."""
    correct: jax.Array = jnp.sum(logits_BV.argmax(-1) == targets_B)
    return correct


def not_counted(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """0: the vocabulary is split over devices, and no accuracy is reported."""
    return jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class InputKind:
    """Batches of one `input_kind` of models."""

    batch: type[Batches]
    dtype: Any
    """Dtype of the inputs; targets are int32."""
    spec: P
    """PartitionSpec of inputs and targets; an entry for each dimension of the targets."""
    logits: P
    """PartitionSpec of logits."""
    correct: Callable[[jax.Array, jax.Array], jax.Array]
    """(logits, targets) -> number of rows whose prediction is right, int32 []."""

    @property
    def has_times(self) -> bool:
        """Whether dimension 1 is time."""
        return len(self.spec) > 1

    @property
    def specs(self) -> Batches:
        """PartitionSpecs of a batch."""
        return self.batch(self.spec, self.spec)

    def abstract(self, shape: tuple[int, ...]) -> Batches:
        """Shapes and dtypes of a global batch whose inputs have this shape [B, ...]."""
        targets = jax.ShapeDtypeStruct(shape[: len(self.spec)], jnp.int32)
        return self.batch(jax.ShapeDtypeStruct(shape, self.dtype), targets)


INPUTS: Mapping[str, InputKind] = {
    "tokens": InputKind(Batch, jnp.int32, P(BATCH, "context"), P(BATCH, "context", "tensor"), not_counted),
    "images": InputKind(Images, jnp.float32, P(TOKENS), P(TOKENS), correct_images),
}
