"""Tensors as numpy's arrays and back, bit by bit, also of dtypes that numpy does not have itself."""

import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import numpy as np
import torch
from torch import Tensor


def dtype_of(dtype: torch.dtype) -> np.dtype:
    """numpy's. Raises TypeError where it has none."""
    return np.dtype(str(dtype).removeprefix("torch."))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The same bits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(dtype_of(tensor.dtype)).reshape(tensor.shape)


def to_torch(array: np.ndarray) -> Tensor:
    """The same bits."""
    flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return flat.view(getattr(torch, array.dtype.name)).reshape(array.shape)
