"""The memory that reading takes, beside the tensor that is read."""

import importlib
import math
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist import optim
from jaxdist.checkpoint import CHUNK, Checkpoints
from jaxdist.config import Checkpoint, ConfigError, Llama
from jaxdist.config.hf import experiment_for
from jaxdist.convert import meta, orbax_files
from jaxdist.convert.content import Leaf
from jaxdist.convert.convert_test import SMALL
from jaxdist.convert.tables import entries, shapes_of
from jaxdist.step import TrainState

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.torch_files")

ROWS = 1_000_000
TIED = Llama(**{**SMALL, "vocab": ROWS, "tied": True})


def peak(do: Callable[[], Any]) -> int:
    """Bytes that were taken at once."""
    tracemalloc.start()
    do()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("stored", ["once", "twice"])
def test_a_tied_head_is_compared_in_blocks(stored: str, tmp_path: Path) -> None:
    """And not at all where both are one tensor of the file."""
    weights = {name: torch.ones(entry.shape) for name, entry in entries("huggingface", TIED).items()}
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding if stored == "once" else embedding.clone()
    torch.save(weights, tmp_path / "a.pt")
    experiment = experiment_for(TIED.model_dump(), "test")
    torch_files.opened(tmp_path / "a.pt", experiment)  # imports count too
    most = peak(lambda: torch_files.opened(tmp_path / "a.pt", experiment))
    assert most < (0.1 if stored == "once" else 2.1) * embedding.nbytes


@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
def test_a_head_that_differs_in_one_number(row: int, tmp_path: Path) -> None:
    weights = {name: torch.ones(entry.shape) for name, entry in entries("huggingface", TIED).items()}
    weights["lm_head.weight"] = torch.ones(ROWS, TIED.dim)
    weights["lm_head.weight"][row, -1] = 2
    torch.save(weights, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
        torch_files.opened(tmp_path / "a.pt", experiment_for(TIED.model_dump(), "test"))


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_of_ranks_are_read_one_at_a_time(axis: int) -> None:
    shape = (2000, 1000)
    sizes = [(size // 2 if i == axis else size) for i, size in enumerate(shape)]
    pieces = [Leaf(tuple(sizes), np.dtype(np.float32), partial(np.full, sizes, i, np.float32)) for i in (0, 1)]
    leaf = meta._whole(Path("meta"), "a", [{"a": piece} for piece in pieces], shape)
    assert peak(leaf.read) < 1.6 * leaf.bytes
    assert np.array_equal(leaf.read(), np.concatenate([piece.read() for piece in pieces], axis))


def test_a_run_writes_its_embeddings_in_small_chunks(tmp_path: Path) -> None:
    """A chunk is in memory several times while it is read."""
    model = Llama(**{**SMALL, "vocab": 3 * CHUNK // (4 * SMALL["dim"])})
    experiment = experiment_for(model.model_dump(), "test")
    weights = {name: jax.numpy.ones(shape) for name, shape in shapes_of(model).items()}
    state = TrainState(weights, optim.optimizer(experiment.optimizer, 1, {}).init({}))
    with Checkpoints(tmp_path / "checkpoints", Checkpoint()) as checkpoints:
        checkpoints.save(3, experiment, state)
    arrays = orbax_files.stores(tmp_path / "checkpoints" / "3" / "parameters")
    assert max(array.nbytes for array in weights.values()) > 2 * CHUNK
    for name, store in arrays.items():
        assert math.prod(store.chunk_layout.read_chunk.shape) * 4 <= CHUNK, name
