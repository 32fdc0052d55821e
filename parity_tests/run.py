"""Runs of either side through their command lines, and what they left behind, under common names."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError, Experiment, checkpoint_in, read_metrics, read_record
from jaxdist.config.arguments import load
from parity_tests import compare, names

Overrides = Mapping[str, Any]

STATES = ("weights", "exp_avg", "exp_avg_sq")
METRICS = tuple(compare.FLOOR)


@dataclass(frozen=True)
class Run:
    """A finished run folder. `side` is its name in a verdict; what wrote it is seen by its files."""

    side: str
    path: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty where a loop of one's own wrote none. Raises ConfigError."""
        file = self.path / "summary.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is damaged: {error}; mend or remove it") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{file} is damaged: it is no object; mend or remove it")
        return found

    @cached_property
    def states(self) -> dict[str, np.ndarray]:
        """Weights and Adam moments at the end: `weights/...`, `exp_avg/...`, `exp_avg_sq/...`.

        From the newest checkpoint of either backend; without one from the last record.
        """
        newest = checkpoint_in(self.path)
        for marker, read in (("parameters", _jax_states), (".metadata", _torch_states)):
            if (newest / marker).exists():
                return read(newest)
        last = self.records[max(self.records)] if self.records else {}
        return {name: a for name, a in last.items() if name.partition("/")[0] in STATES}

    @cached_property
    def records(self) -> dict[int, dict[str, np.ndarray]]:
        """The tensors kept of single steps, by step and `kind/name` (`jaxdist/config/record.py`)."""
        files = {int(file.stem): file for file in (self.path / "record").glob("*.safetensors")}
        records = {step: read_record(files[step]) for step in sorted(files)}
        return {step: self._renamed(record) for step, record in records.items()}

    def _renamed(self, record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        if names.is_jax(record):
            return names.from_jax(record)
        if names.is_hf(record):
            model = self.experiment.model
            return names.from_hf(record, model.family, model.layers)
        return record

    @cached_property
    def experiment(self) -> Experiment:
        """The resolved config."""
        return load(self.path / "config.toml", {})

    def check(self) -> None:
        """Raises ConfigError unless the folder holds a whole run that can be compared, all of its numbers finite."""
        if not (self.path / "config.toml").exists():
            raise ConfigError(f"{self.path} is no run folder, it lacks config.toml; give the --output of a run")
        steps, told = [record["step"] for record in self.metrics], self.experiment.train.steps
        if steps != list(range(1, told + 1)):
            raise ConfigError(
                f"{self.path / 'metrics.jsonl'} has {len(steps)} whole steps where train.steps = {told}: the run was "
                "cut short or its metrics are; finish it with --resume, or make it again"
            )
        for record in self.metrics:
            for name in METRICS:
                if not isinstance(record.get(name), int | float) or not math.isfinite(record[name]):
                    raise ConfigError(
                        f"{self.path}: {name} = {record.get(name)} at step {record['step']}; a run with what is no "
                        "number is equal to nothing, mend it first"
                    )
        for name, kind in (("memory", dict), ("collectives", list), ("arithmetic", dict)):
            if not isinstance(self.summary.get(name, kind()), kind):
                raise ConfigError(
                    f"{self.path / 'summary.json'}: {name} is no {kind.__name__}; mend it or leave it out"
                )
        lacking = [kind for kind in STATES if not self.kept_states(kind)]
        if lacking:
            raise ConfigError(
                f"{self.path} has neither a checkpoint nor a record of {' and '.join(lacking)} at step {told}; see "
                "README, 'A run of your own loop'"
            )

    def kept(self, kind: str, step: int) -> dict[str, np.ndarray]:
        """The tensors of one kind in the record of a step; none without a record."""
        return {name: a for name, a in self.records.get(step, {}).items() if name.startswith(f"{kind}/")}

    @property
    def gradient_steps(self) -> list[int]:
        """The steps of which gradients were kept."""
        return [step for step in self.records if self.kept("gradient", step)]

    def kept_states(self, kind: str) -> dict[str, np.ndarray]:
        """The final weights or moments."""
        return {name: a for name, a in self.states.items() if name.startswith(f"{kind}/")}

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """A recorded step, its metrics among it, each as an array of one number."""
        metrics = next(record for record in self.metrics if record["step"] == step)
        numbers = {name: np.array([metrics[name]], np.float64) for name in METRICS}
        return {name: a for name, a in self.records[step].items() if not name.startswith("scalar/")} | numbers


JAX = "jaxdist"
SIDES = (JAX, "torch_ref")
REFERENCES = {"torch": "torch_ref", "transformers": "transformers"}  # --against -> the side
TRAIN = {  # side -> the module of its train command
    JAX: "jaxdist.train",
    "torch_ref": "torch_ref.train",
    "transformers": "parity_tests.transformers_train",
}


def environment(xla_flags: str = "") -> dict[str, str]:
    """Of a process that inherits nothing of this one's settings of JAX."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return inherited | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": xla_flags}


def command(module: str, *arguments: str, xla_flags: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ...` in a process of its own."""
    line = [sys.executable, "-m", module, *arguments]
    return subprocess.run(line, capture_output=True, text=True, env=environment(xla_flags))


def run(side: str, path: Path, config: Path, overrides: Overrides, *arguments: str, xla_flags: str = "") -> Run:
    """Train one side on the CPU into the folder `path`. Raises AssertionError with its output when it fails."""
    flags = [text for name, value in overrides.items() for text in (f"--{name}", str(value))]
    line = ["--config", str(config), "--device", "cpu", "--output", str(path), *flags, *arguments]
    done = command(TRAIN[side], *line, xla_flags=xla_flags)
    assert done.returncode == 0, f"{side} {' '.join(flags)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return Run(side, path)


def _jax_states(path: Path) -> dict[str, np.ndarray]:
    from jaxdist import checkpoint

    saved = checkpoint.read(path)
    adam = next(part for part in saved.optimizer if part and "mu" in part)
    trees = {"weights": saved.parameters, "exp_avg": adam["mu"], "exp_avg_sq": adam["nu"]}
    return {f"{kind}/{name}": w for kind, tree in trees.items() for name, w in names.as_torch(tree).items()}


def _torch_states(path: Path) -> dict[str, np.ndarray]:
    from torch_ref import checkpoint

    _, trees = checkpoint.read(path)
    kinds = {"model": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {f"{kinds[kind]}/{name}": w.numpy() for kind, tree in trees.items() for name, w in tree.items()}
