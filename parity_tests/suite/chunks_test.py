"""The loss in chunks: both sides split a microbatch's tokens at the same places."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxdist.data import IGNORED
from jaxdist.families import loss
from torch_ref.families import loss as torch_loss

pytestmark = pytest.mark.long


@pytest.mark.parametrize("chunks", [7, 4, 6, 14])  # last chunk full; padded; empty; one token each
def test_both_sides_have_the_same_chunks(chunks: int) -> None:
    targets = np.arange(14).reshape(2, 7)
    ours = loss.chunked(jnp.asarray(targets), chunks).tolist()
    assert ours == torch_loss.chunked(torch.from_numpy(targets), chunks).tolist()
    tokens = [[token for token in chunk if token != IGNORED] for chunk in ours]
    uneven = [chunk.tolist() for chunk in torch.from_numpy(targets).flatten().tensor_split(chunks)]
    assert (tokens == uneven) == (targets.size % chunks == 0)
