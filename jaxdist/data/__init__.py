"""The same global batch for both backends: batch(step). Neither jax nor torch in here."""

from jaxdist.data.dataset import (
    IGNORED,
    Batch,
    Batches,
    Dataset,
    Images,
    Split,
    Targets,
    dataset_of,
    dealt,
    in_steps,
    open_dataset,
)

__all__ = [
    "IGNORED",
    "Batch",
    "Batches",
    "Dataset",
    "Images",
    "Split",
    "Targets",
    "dataset_of",
    "dealt",
    "in_steps",
    "open_dataset",
]
