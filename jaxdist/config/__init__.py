"""The experiment: its sections, their checks, and the hardware it runs on.

Imports no other room; `registry.py` loads the rows of `families` by name on first use. Neutral: both sides read it,
so it imports neither jax nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxdist.config.data import Data
from jaxdist.config.decoder import Decoder, Rotary
from jaxdist.config.environment import environment_integer
from jaxdist.config.errors import (
    ConfigError,
    TrainingError,
    check_finite,
    check_validation,
    diverged,
    overflown,
)
from jaxdist.config.exits import exit_codes
from jaxdist.config.experiment import (
    Checkpoint,
    Experiment,
    Memory,
    Metrics,
    Train,
)
from jaxdist.config.images import ImageModel
from jaxdist.config.model import Model, check_shapes, same_model
from jaxdist.config.optimizer import ALL, EMA, INNER, MATRICES, OUTER, VECTORS, Optimizer, state_kinds
from jaxdist.config.parallel import AXES, Parallel
from jaxdist.config.precision import POLICIES, Precision
from jaxdist.config.record import Record, read_record, write_record
from jaxdist.config.strategies import STRATEGIES

__all__ = [
    "ALL",
    "AXES",
    "EMA",
    "INNER",
    "MATRICES",
    "OUTER",
    "POLICIES",
    "STRATEGIES",
    "VECTORS",
    "Checkpoint",
    "ConfigError",
    "Data",
    "Decoder",
    "Experiment",
    "ImageModel",
    "Memory",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "Record",
    "Rotary",
    "Train",
    "TrainingError",
    "check_finite",
    "check_shapes",
    "check_validation",
    "diverged",
    "environment_integer",
    "exit_codes",
    "overflown",
    "read_record",
    "same_model",
    "state_kinds",
    "write_record",
]

# Earlier places of names, which scripts import from here: looked up when asked for, since this room imports no other.
MOVED = {"RunFolder": "jaxdist.runs.folder", "load": "jaxdist.command_line.arguments"}

if not TYPE_CHECKING:  # which would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in MOVED:
            return getattr(import_module(MOVED[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
