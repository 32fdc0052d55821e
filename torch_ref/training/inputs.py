"""Kinds of inputs, a row each: types and shapes of batches. Twin: jaxdist/training/inputs.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from jaxdist.data import Batch, Batches, Images


@dataclass(frozen=True)
class InputKind:
    """Batches of one `input_kind` of models."""

    batch: type[Batches]
    dtype: DTypeLike
    """Dtype of the inputs; targets are int64."""
    has_times: bool
    """Whether dimension 1 is time."""


INPUTS: Mapping[str, InputKind] = {
    "tokens": InputKind(Batch, np.int64, has_times=True),
    "images": InputKind(Images, np.float32, has_times=False),
}
