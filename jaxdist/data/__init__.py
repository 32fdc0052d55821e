"""Text, token ids and images as batches: `batch(step)` is the same global batch on both sides.

Imports `config`, `runs`, `formats`. Neutral: it imports neither jax nor torch.
"""

from jaxdist.data.dataset import (
    IGNORED,
    Batch,
    Batches,
    Dataset,
    Images,
    Sequences,
    Split,
    Targets,
    dataset_of,
    in_steps,
    microbatch_order,
)
from jaxdist.data.sources import Stream

__all__ = [
    "IGNORED",
    "Batch",
    "Batches",
    "Dataset",
    "Images",
    "Sequences",
    "Split",
    "Stream",
    "Targets",
    "dataset_of",
    "in_steps",
    "microbatch_order",
]
