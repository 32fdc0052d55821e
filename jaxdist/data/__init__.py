"""The same global batch for both backends: batch(step). Neither jax nor torch in here."""

from jaxdist.data.dataset import IGNORED, Batch, Dataset, Split, in_steps, open_dataset

__all__ = ["IGNORED", "Batch", "Dataset", "Split", "in_steps", "open_dataset"]
