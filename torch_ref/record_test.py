"""What a record asks of its step: all logits at once where they are recorded, else chunks of them as in any other."""

from pathlib import Path

import numpy as np

from jaxdist.config import read_record
from torch_ref.conftest import command

# Tells the chunks of each microbatch.
TELLING = """
from torch_ref import step
losses = step.losses
def told(model, rows, chunks):
    print(f"in {chunks} chunks")
    return losses(model, rows, chunks)
step.losses = told
"""
LINE = ["--mesh", "1x1", "--device", "cpu", "--model.vocab", "256", "--train.validation_batches", "0", "--steps", "3"]
LINE += ["--memory.loss_chunks", "3", "--record.steps", "2"]


def recorded(folder: Path, tensors: str) -> tuple[list[int], dict[str, np.ndarray]]:
    """The chunks of each of three steps, and the record of the second."""
    done = command(*LINE, "--record.tensors", tensors, "--output", str(folder / tensors), before=TELLING)
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
