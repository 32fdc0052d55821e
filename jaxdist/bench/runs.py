"""Runs of either side, and functions that need JAX, in processes of their own, and what they left behind."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, TrainingError
from jaxdist.config.hardware import USABLE
from jaxdist.runs.display import console
from jaxdist.runs.folder import read_metrics

WARM_UP = 3  # steps: torch compiles in its first, and measures its second


@dataclass(frozen=True)
class Run:
    """A finished run folder."""

    path: Path

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step after the warm-up."""
        return [record["step_seconds"] for record in read_metrics(self.path)[WARM_UP:]]

    @property
    def step(self) -> float:
        """The median of these."""
        return statistics.median(self.seconds)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text(encoding="utf-8"))


def train(side: str, arguments: Sequence[str], output: Path) -> Run:
    """`python -m SIDE.train ...` to its end, without a checkpoint. Compiled programs lie beside its folder, and not
    with the user's.

    Raises ConfigError where the run refuses its arguments, TrainingError where it fails.
    """
    steps_alone = ["--train.validation_batches", "0", "--checkpoint.final", "false"]
    line = ["-m", f"{side}.train", *steps_alone, *arguments, "--output", str(output)]
    room = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(USABLE)}  # of a GPU, where JAX would take 75 %
    environment = room | os.environ | {"XDG_CACHE_HOME": str(output.parent / "cache")}
    done = subprocess.run(
        [sys.executable, *line], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=own_cache(environment)
    )
    if done.returncode:
        message = done.stderr.strip()[-2000:].removeprefix("error: ")
        error = ConfigError if done.returncode == 2 else TrainingError
        raise error(f"python {' '.join(line)} ended with {done.returncode}: {message}")
    return Run(output)


def own_cache(environment: Mapping[str, str]) -> dict[str, str]:
    """Without JAX's variables of the cache, which go before XDG_CACHE_HOME."""
    return {name: value for name, value in environment.items() if not name.startswith("JAX_COMPILATION_CACHE")}


@contextmanager
def apart(**environment: str) -> Iterator[Callable[..., Any]]:
    """Calls of functions within one other process, which prints nothing: `call(function, *arguments)`."""
    with ProcessPoolExecutor(1, get_context("spawn"), _begin, (environment,)) as one:
        yield lambda function, *arguments: one.submit(function, *arguments).result()


def _begin(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)  # before JAX is imported, which reads some of it then
    for name in os.environ.keys() - own_cache(os.environ).keys():
        del os.environ[name]
    console.quiet = True
