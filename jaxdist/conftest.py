"""Small experiments and their batches."""

import socket
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import Data, Experiment, exit_codes
from jaxdist.data import IGNORED, Batch, Dataset, dataset_of

GPT2 = {
    "family": "gpt2", "layers": 2, "dim": 40, "heads": 4, "hidden": 56, "vocab": 64, "positions": 32, "init_std": 0.2,
}  # fmt: skip
MIXTRAL = {
    "family": "mixtral", "layers": 2, "dim": 40, "heads": 12, "kv_heads": 4, "head_dim": 8, "hidden": 24, "vocab": 64,
    "init_std": 0.2, "experts": 8, "top_k": 3, "balance": 0.05,
}  # fmt: skip
# Arguments of a run that takes seconds.
SHORT_RUN = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "2", "--model.head_dim", "8",
    "--model.hidden", "48", "--data.sequence", "16", "--train.batch", "8", "--train.validation_batches", "1",
    "--optimizer.warmup", "2", "--optimizer.decay_steps", "8", "--device", "cpu",
]  # fmt: skip


def tiny(**sections: Any) -> Experiment:
    """A model whose sizes all differ, so none can be mistaken for another: 12 query and 4 kv heads, H·C = 96 ≠ D."""
    model = {
        "family": "llama", "layers": 2, "dim": 40, "heads": 12, "kv_heads": 4, "head_dim": 8, "hidden": 56, "vocab": 64,
        "qk_norm": True, "qkv_bias": True, "init_std": 0.2,
    }  # fmt: skip
    values: dict[str, Any] = {
        "model": model,
        "data": {"sequence": 20},
        "train": {"steps": 20, "batch": 16},
        "optimizer": {"warmup": 3, "learning_rate": 1e-2},
        "precision": {"policy": "fp64"},
    }
    for name, section in sections.items():
        values[name] = section if name == "model" and "family" in section else values.get(name, {}) | section
    return Experiment.parse(values, source="test")


def open_dataset(data: Data, vocab: int) -> Dataset:
    """Data of an experiment whose model has `vocab` tokens."""
    experiment = tiny()
    model = experiment.model.model_copy(update={"vocab": vocab})
    return dataset_of(experiment.model_copy(update={"data": data, "model": model}))


def often(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of a test; those not in `quick` are marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow(cases: Iterable[Any]) -> list[Any]:
    """Parameters of a test, marked slow."""
    return often(cases, quick=[])


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 uninterrupted steps on fsdp=2, tensor=2."""
    from jaxdist.train import main

    path = tmp_path_factory.mktemp("runs") / "straight"
    main([*SHORT_RUN, "--mesh", "2x2", "--steps", "8", "--output", str(path)])
    return path


def ended(*argv: str) -> int | str | None:
    """Run a training command in this process and return its exit code; `capfd` has its output."""
    from jaxdist.train import main

    with pytest.raises(SystemExit) as end:
        exit_codes(partial(main, [*argv]))
    return end.value.code


@pytest.fixture
def batches() -> Any:
    """batches(experiment, n): random tokens whose first rows have few valid targets, so that means of means differ."""

    def make(experiment: Experiment, count: int) -> list[Batch]:
        random = np.random.default_rng(0)
        shape = (count, experiment.train.batch, experiment.data.sequence + 1)
        tokens = random.integers(0, experiment.model.vocab, shape, dtype=np.int32)
        targets = tokens[..., 1:].copy()
        targets[:, :5, 4:] = IGNORED
        return [Batch(x[:, :-1], y) for x, y in zip(tokens, targets, strict=True)]

    return make
