"""Checkpoints of any kind into any other: `python -m jaxdist.convert SOURCE TARGET`.

Imports `training` and the rooms below it. The one room that imports torch, to read and write its files.
"""

from jaxdist.convert.kinds.hf import read_hf, write_hf
from jaxdist.formats.folders import is_hf
from jaxdist.formats.hf import experiment_for, read_model

__all__ = ["experiment_for", "is_hf", "read_hf", "read_model", "write_hf"]
