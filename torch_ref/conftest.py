"""Runs of the command line, shared by all tests that look at them."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from jaxdist.runs.folder import read_metrics
from parity_tests.runs import forkserver
from torch_ref.training import checkpoint

ROOT = Path(__file__).parents[1]
TINY = {
    "model": "layers=2 dim=32 heads=4 kv_heads=2 head_dim=8 hidden=48 vocab=128 init_std=0.2 "
    "qk_norm=true qkv_bias=true tied=true",
    "data": "sequence=16 documents=padded",
    "train": "batch=8 steps=4 validation_batches=1",
    "optimizer": "warmup=2 decay_steps=4",
    "precision": "policy=fp64",
}
FIELDS = [f"--{section}.{field}" for section, fields in TINY.items() for field in fields.split()]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path

    @property
    def curves(self) -> NDArray[np.float64]:
        """Loss and gradient norm, [steps, 2]."""
        return np.array([(r["loss"], r["grad_norm"]) for r in read_metrics(self.folder)])

    @property
    def state(self) -> dict[str, Tensor]:
        """Parameters and moments of the newest checkpoint."""
        kinds = checkpoint.read(self.folder)[1]
        return {f"{kind} {name}": t for kind, tensors in kinds.items() for name, t in tensors.items()}

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        return found


def distance(run: Run, reference: Run) -> tuple[float, float]:
    """Largest relative differences: of the curves, and by norm of any parameter or moment."""
    curves = float(np.abs(run.curves / reference.curves - 1).max())
    state, other = run.state, reference.state
    assert state.keys() == other.keys()
    return curves, max(float((state[n] - other[n]).norm() / other[n].norm().clamp_min(1e-12)) for n in other)


def command(*arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line, after executing the code `before`. Forked from a process that has imported torch, unless
    `environment` is given."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}  # it changes with every test
    inherited |= {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    module, line = "torch_ref.train", [*FIELDS, *arguments]
    if before:
        module, line = "parity_tests.runs.planted", [before, module, *line]
    if not environment:
        return forkserver.run(module, tuple(line), inherited)
    started = [sys.executable, "-m", module, *line]
    return subprocess.run(started, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=400)


Train = Callable[..., Run]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """train("--mesh 2x1 ...") -> Run, from a cache; train(..., before=code) plants something first."""
    folder = tmp_path_factory.mktemp("runs")
    documents = folder / "documents.jsonl"
    rng = np.random.default_rng(0)
    lines = [bytes(rng.integers(97, 107, rng.integers(3, 60), dtype=np.uint8)).decode() for _ in range(120)]
    documents.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    done: dict[tuple[str, str], Run] = {}

    def run(arguments: str, before: str = "") -> Run:
        key = (" ".join(arguments.split()), before)
        if key not in done:
            output = Path(tempfile.mkdtemp(dir=folder)) / "run"  # a failed run leaves a folder too
            result = command("--data.path", str(documents), "--output", str(output), *arguments.split(), before=before)
            assert result.returncode == 0, result.stdout + result.stderr
            done[key] = Run(output)
        return done[key]

    return run
