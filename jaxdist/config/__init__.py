"""What both backends read: the experiment, its command line and its run folder. Neither jax nor torch in here."""

from jaxdist.config.arguments import Arguments, load, parse, positional
from jaxdist.config.checkpoints import checkpoint_in, newest, whole
from jaxdist.config.environment import whole_number
from jaxdist.config.errors import (
    ConfigError,
    TrainingError,
    check_finite,
    check_validation,
    diverged,
    exit_codes,
    overflown,
)
from jaxdist.config.experiment import (
    Checkpoint,
    Data,
    Experiment,
    Memory,
    Metrics,
    Train,
)
from jaxdist.config.folder import RunFolder, check_new, check_writable, differences, make_new, read_metrics
from jaxdist.config.model import GPT2, Decoder, Family, Llama, Mixture, Model, ResNet, Rotary, check_shapes, same_model
from jaxdist.config.optimizer import EMA, KEPT, Optimizer
from jaxdist.config.parallel import AXES, STRATEGIES, Parallel
from jaxdist.config.precision import POLICIES, Precision
from jaxdist.config.record import Record, read_record, write_record

__all__ = [
    "AXES",
    "EMA",
    "GPT2",
    "KEPT",
    "POLICIES",
    "STRATEGIES",
    "Arguments",
    "Checkpoint",
    "ConfigError",
    "Data",
    "Decoder",
    "Experiment",
    "Family",
    "Llama",
    "Memory",
    "Metrics",
    "Mixture",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "Record",
    "ResNet",
    "Rotary",
    "RunFolder",
    "Train",
    "TrainingError",
    "check_finite",
    "check_new",
    "check_shapes",
    "check_validation",
    "check_writable",
    "checkpoint_in",
    "differences",
    "diverged",
    "exit_codes",
    "load",
    "make_new",
    "newest",
    "overflown",
    "parse",
    "positional",
    "read_metrics",
    "read_record",
    "same_model",
    "whole",
    "whole_number",
    "write_record",
]
