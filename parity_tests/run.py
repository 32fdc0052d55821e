"""Runs of either side through their command lines, and what they left behind, under common names."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import read_metrics, read_record

Overrides = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A finished run folder."""

    side: str
    path: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text(encoding="utf-8"))

    @cached_property
    def states(self) -> dict[str, np.ndarray]:
        """Weights and Adam moments of the newest checkpoint: `weights/...`, `exp_avg/...`, `exp_avg_sq/...`."""
        return {"jaxdist": _jax_states, "torch_ref": _torch_states}[self.side](self.path)

    @cached_property
    def records(self) -> dict[int, dict[str, np.ndarray]]:
        """The tensors kept of single steps, by step and `kind/name` (`jaxdist/config/record.py`)."""
        files = {int(file.stem): file for file in (self.path / "record").glob("*.safetensors")}
        records = {step: read_record(files[step]) for step in sorted(files)}
        return {step: _under_torch_names(r) for step, r in records.items()} if self.side == "jaxdist" else records

    def kept(self, kind: str, step: int) -> dict[str, np.ndarray]:
        """The tensors of one kind in the record of a step; none without a record."""
        return {name: a for name, a in self.records.get(step, {}).items() if name.startswith(f"{kind}/")}

    def kept_states(self, kind: str) -> dict[str, np.ndarray]:
        """The final weights or moments."""
        return {name: a for name, a in self.states.items() if name.startswith(f"{kind}/")}

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """A recorded step, its metrics among it, each as an array of one number."""
        metrics = next(record for record in self.metrics if record["step"] == step)
        numbers = {name: np.array([metrics[name]], np.float64) for name in METRICS}
        return {name: a for name, a in self.records[step].items() if not name.startswith("scalar/")} | numbers


METRICS = ("loss", "grad_norm", "learning_rate")
JAX = "jaxdist"
REFERENCES = {"torch": "torch_ref"}  # --against -> the package of its train command
SIDES = (JAX, "torch_ref")


def command(module: str, *arguments: str, xla_flags: str = "") -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ...` in a process of its own, which inherits nothing of this one's settings of JAX."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True, text=True, env=inherited | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": xla_flags}, timeout=600,
    )  # fmt: skip


def run(side: str, path: Path, config: Path, overrides: Overrides, *arguments: str, xla_flags: str = "") -> Run:
    """Train one side on the CPU into the folder `path`. Raises AssertionError with its output when it fails."""
    flags = [text for name, value in overrides.items() for text in (f"--{name}", str(value))]
    line = ["--config", str(config), "--device", "cpu", "--output", str(path), *flags, *arguments]
    done = command(f"{side}.train", *line, xla_flags=xla_flags)
    assert done.returncode == 0, f"{side} {' '.join(flags)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return Run(side, path)


# JAX parameter -> torch parameter: the last part of the name, and whether the matrix is stored transposed.
LEAVES = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "bias": ("bias", False),
}


def as_torch(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """JAX's stacked, (in, out) parameters under torch's names, one per layer, (out, in)."""
    named: dict[str, np.ndarray] = {}
    for name, array in parameters.items():
        module, _, leaf = name.rpartition(".")
        new, transposed = LEAVES[leaf]
        if module.startswith("layers."):
            parts = {f"layers.{i}.{module.removeprefix('layers.')}.{new}": w for i, w in enumerate(array)}
        else:
            parts = {f"{module}.{new}": array}
        named |= {key: w.T if transposed else w for key, w in parts.items()}
    return named


PARAMETERS = ("start", "gradient", "clipped", "exp_avg", "exp_avg_sq", "weights")  # kinds named by parameters


def _under_torch_names(record: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A record of jaxdist with its parameters named, turned and taken apart as torch's."""
    named: dict[str, np.ndarray] = {}
    for key, array in record.items():
        kind, _, name = key.partition("/")
        renamed = as_torch({name: array}) if kind in PARAMETERS else {name: array}
        named |= {f"{kind}/{new}": a for new, a in renamed.items()}
    return named


def _jax_states(path: Path) -> dict[str, np.ndarray]:
    from jaxdist import checkpoint

    saved = checkpoint.read(path)
    adam = next(part for part in saved.optimizer if part and "mu" in part)
    trees = {"weights": saved.parameters, "exp_avg": adam["mu"], "exp_avg_sq": adam["nu"]}
    return {f"{kind}/{name}": w for kind, tree in trees.items() for name, w in as_torch(tree).items()}


def _torch_states(path: Path) -> dict[str, np.ndarray]:
    from torch_ref import checkpoint

    _, trees = checkpoint.read(path)
    kinds = {"model": "weights", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    return {f"{kinds[kind]}/{name}": w.numpy() for kind, tree in trees.items() for name, w in tree.items()}
