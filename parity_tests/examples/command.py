"""The command line of an example loop, and the configs that such a loop supports."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from jaxdist.command_line.arguments import load, positional
from jaxdist.config import ConfigError, Experiment, exit_codes, same_model
from jaxdist.data import in_steps
from jaxdist.formats.hf import read_model
from parity_tests.runs.transformers_train import Double

# field -> the values that a plain loop implements; it must refuse all others
PLAIN: dict[str, tuple[Any, ...]] = {
    "optimizer.name": ("adamw",),
    "optimizer.ema": (0.0,),
    "train.skip": ((),),
    "model.balance": (0.0,),
    "model.capacity": (0,),
    "precision.policy": ("fp32", "fp64"),
}


def example(doc: str | None, *names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that runs a script's `main` on the paths `names` of its command line; bad input ends it with 2."""

    def runs(main: Callable[..., None]) -> Callable[..., None]:
        if main.__module__ == "__main__":
            exit_codes(lambda: main(*positional(doc, *names)))
        return main

    return runs


def supported(config: Path, start: Path) -> Experiment:
    """The experiment of `config`, which a plain loop can train from the Hugging Face folder `start`.

    Raises ConfigError.
    """
    experiment = in_steps(load(config, {}))
    check(experiment, PLAIN | {"precision.compute": (experiment.precision.parameters,)})
    same_model(experiment.model, read_model(start), f"HF_FOLDER {start}")
    return experiment


def check(experiment: Experiment, does: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ConfigError with all fields whose value is not one that the loop `does`; a field may be absent."""
    wrong = []
    for name, values in does.items():
        section, field = name.split(".")
        table = getattr(experiment, section)
        if hasattr(table, field) and (value := getattr(table, field)) not in values:
            wrong.append(f"{name} = {value!r}, which this loop does not do; give {' or '.join(map(repr, values))}")
    if experiment.train.steps < 1:
        wrong.append("train.steps = 0: a loop leaves no moments without a step; give 1 or more")
    if wrong:
        raise ConfigError("\n".join(wrong))


@contextmanager
def in_dtype(experiment: Experiment) -> Iterator[torch.dtype]:
    """Dtype of the policy; within this context transformers' models compute in it where they ask for float32 by
    name."""
    dtype = getattr(torch, experiment.precision.parameters)
    with Double() if dtype == torch.float64 else nullcontext():
        yield dtype
