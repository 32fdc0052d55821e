"""Memory that reading takes, besides the tensor that is read."""

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

from jaxdist.config import Checkpoint, ConfigError, Model
from jaxdist.convert import stream
from jaxdist.convert.content import PARAMETERS, Leaf
from jaxdist.convert.convert_test import SMALL
from jaxdist.convert.entries import entries, shapes_of
from jaxdist.convert.kinds import orbax_files
from jaxdist.convert.stream import Conversion
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.formats import meta
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.orbax import CHUNK
from jaxdist.formats.tables import LAYERS
from jaxdist.training import optim
from jaxdist.training.checkpoint import Checkpoints
from jaxdist.training.step import TrainState

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
torch_leaves = importlib.import_module("jaxdist.convert.kinds.torch_leaves")

ROWS = 1_000_000
LLAMA = Llama(layers=1, dim=512, heads=4, kv_heads=4, head_dim=128, hidden=768, vocab=999)
GPT = GPT2(family="gpt2", layers=1, dim=512, heads=4, hidden=768, vocab=999)
TIED = Llama(**{**SMALL, "vocab": ROWS, "tied": True})


def peak(do: Callable[[], Any]) -> int:
    """Most bytes allocated at once."""
    tracemalloc.start()
    do()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.long
@pytest.mark.parametrize("stored", ["once", "twice"])
def test_a_tied_head_is_compared_in_blocks(stored: str, tmp_path: Path) -> None:
    """Head and embedding stored as one tensor are not compared at all."""
    weights = {name: torch.ones(entry.shape) for name, entry in entries("huggingface", TIED).items()}
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding if stored == "once" else embedding.clone()
    torch.save(weights, tmp_path / "a.pt")
    experiment = experiment_for(TIED.model_dump(), "test")
    torch_files.read_content(tmp_path / "a.pt", experiment)  # imports allocate too
    most = peak(lambda: torch_files.read_content(tmp_path / "a.pt", experiment))
    assert most < (0.1 if stored == "once" else 2.1) * embedding.nbytes


@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
def test_a_head_that_differs_in_one_number(row: int, tmp_path: Path) -> None:
    weights = {name: torch.ones(entry.shape) for name, entry in entries("huggingface", TIED).items()}
    weights["lm_head.weight"] = torch.ones(ROWS, TIED.dim)
    weights["lm_head.weight"][row, -1] = 2
    torch.save(weights, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
        torch_files.read_content(tmp_path / "a.pt", experiment_for(TIED.model_dump(), "test"))


STORED: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda w: w,
    "turned": lambda w: w.T.contiguous().T,
    "half of the columns": lambda w: torch.cat([w, w], 1)[:, : w.shape[1]],
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("model", "naming"),
    [(LLAMA, "huggingface"), (LLAMA, LAYERS), (GPT, LAYERS)],
    ids=["the same", "turned", "one is three"],
)
@pytest.mark.parametrize("stored", STORED)
def test_a_unit_takes_the_stated_memory(
    stored: str, model: Model, naming: str, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise more units would be converted at once than fit into memory."""
    monkeypatch.setattr(torch_leaves, "PIECE", 2**16)
    monkeypatch.setattr(stream, "BLOCK", 2**12)
    weights = {name: torch.ones(entry.shape) for name, entry in entries("huggingface", model).items()}
    torch.save({name: STORED[stored](w) if w.ndim == 2 else w for name, w in weights.items()}, tmp_path / "a.pt")
    content = torch_files.read_content(tmp_path / "a.pt", experiment_for(model.model_dump(), "test"))
    conversion = Conversion(content, naming, dtype=dtype)
    jobs = [job for job in conversion._jobs([PARAMETERS]) if job.bytes > 2**20]
    assert len(jobs) >= 3
    for job in jobs:
        convert = partial(conversion.convert, job.group, job.unit)
        convert()  # imports allocate too
        assert 0.9 * job.bytes < peak(convert) < job.bytes + 2**16


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_of_ranks_are_read_one_at_a_time(axis: int) -> None:
    shape = (2000, 1000)
    sizes = [(size // 2 if i == axis else size) for i, size in enumerate(shape)]
    pieces = [Leaf(tuple(sizes), np.dtype(np.float32), partial(np.full, sizes, i, np.float32)) for i in (0, 1)]
    leaf = meta._unsharded(Path("meta"), "a", [{"a": piece} for piece in pieces], shape)
    assert leaf.bytes < peak(leaf.read) < leaf.bytes + leaf.besides + 10_000 < 1.6 * leaf.bytes
    assert np.array_equal(leaf.read(), np.concatenate([piece.read() for piece in pieces], axis))


@pytest.mark.long
def test_a_run_writes_its_embeddings_in_small_chunks(tmp_path: Path) -> None:
    """Reading a chunk holds several copies of it."""
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
