"""What both backends read: the experiment, its command line and its run folder. Neither jax nor torch in here."""

from jaxdist.config.arguments import Arguments, exit_codes, parse
from jaxdist.config.errors import ConfigError
from jaxdist.config.experiment import (
    AXES,
    GPT2,
    POLICIES,
    STRATEGIES,
    Checkpoint,
    Data,
    Experiment,
    Llama,
    Memory,
    Metrics,
    Model,
    Optimizer,
    Parallel,
    Precision,
    Train,
)
from jaxdist.config.folder import RunFolder, checkpoint_in, newest, read_metrics

__all__ = [
    "AXES",
    "GPT2",
    "POLICIES",
    "STRATEGIES",
    "Arguments",
    "Checkpoint",
    "ConfigError",
    "Data",
    "Experiment",
    "Llama",
    "Memory",
    "Metrics",
    "Model",
    "Optimizer",
    "Parallel",
    "Precision",
    "RunFolder",
    "Train",
    "checkpoint_in",
    "exit_codes",
    "newest",
    "parse",
    "read_metrics",
]
