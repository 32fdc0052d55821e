"""A step that records logits computes them at once, any other in chunks; and a step that is not finite is diagnosed."""

from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import read_record
from torch_ref.conftest import command

pytestmark = pytest.mark.long

# Prints the number of chunks of each microbatch.
PRINTING = """
from torch_ref.training import step
losses = step.losses
def printing(model, rows, chunks):
    print(f"in {chunks} chunks")
    return losses(model, rows, chunks)
step.losses = printing
"""
LINE = ["--mesh", "1x1", "--device", "cpu", "--model.vocab", "256", "--train.validation_batches", "0", "--steps", "3"]


def recorded(folder: Path, tensors: str) -> tuple[list[int], dict[str, np.ndarray]]:
    """Chunks in each of three steps, and the record of the second."""
    line = [*LINE, "--memory.loss_chunks", "3", "--record.steps", "2", "--record.tensors", tensors]
    done = command(*line, "--output", str(folder / tensors), before=PRINTING)
    assert done.returncode == 0, done.stderr
    chunks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("in ")]
    return chunks, read_record(folder / tensors / "record" / "2.safetensors")


def test_a_recorded_step_has_all_logits_where_they_are_recorded_alone(tmp_path: Path) -> None:
    (alike, gradients), (other, everything) = (recorded(tmp_path, tensors) for tensors in ("gradients", "all"))
    assert alike == [3, 3, 3] and other == [3, 1, 3]
    assert {name.partition("/")[0] for name in gradients} == {"gradient"}
    assert everything["activation/logits"].shape == (8, 16, 256)
    for name, found in gradients.items():
        assert np.linalg.norm(found - everything[name]) <= 1e-12 * np.linalg.norm(found), name


# The last step's head overflows, though its weights are finite.
OVERFLOWING = """
from torch_ref import train
from torch_ref.training import record
right, first = train.train_step, record._first
def train_step(program, state, batch, step, watch):
    if step == 3:
        state.model.lm_head.weight.data.fill_(1e308)
    return right(program, state, batch, step, watch)
def numbers(tensors):
    if any(t.numel() > 1 for name, parts in tensors.items() if "activation" in name for t in parts):
        raise SystemExit("activations are kept whole")
    return first(tensors)
train.train_step, record._first = train_step, numbers
"""


@pytest.mark.parametrize(("chunks", "tensor"), [(1, "lm_head"), (3, "logits")])
def test_diagnosing_a_step_that_is_not_finite_takes_the_memory_of_the_step(chunks: int, tensor: str) -> None:
    """The diagnosis uses as many chunks as the step and keeps one number per activation."""
    done = command(*LINE, "--model.tied", "false", "--memory.loss_chunks", str(chunks), before=PRINTING + OVERFLOWING)
    assert done.returncode == 1 and done.stdout.count(f"in {chunks} chunks") == 4, done.stderr
    assert f"step 3: loss = nan; the first tensor that is not finite is activation {tensor}." in done.stderr
