"""Checkpoints of any kind into any other: `python -m jaxdist.convert SOURCE TARGET`."""

from jaxdist.config.hf import experiment_for, read_model
from jaxdist.convert.hf import is_hf, read_hf, write_hf

__all__ = ["experiment_for", "is_hf", "read_hf", "read_model", "write_hf"]
