"""Data files through the command line of either side: as both share the reader, the values themselves are checked."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.data import dataset_of
from jaxdist.train import main as train_jaxdist
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import Run, command
from torch_ref.train import main as train_torch_ref

MAIN: dict[str, Any] = {"jaxdist": train_jaxdist, "torch_ref": train_torch_ref}
TINY = [
    *("--model.vocab", "70000", "--model.layers", "1", "--model.dim", "8", "--model.heads", "1", "--model.kv_heads"),
    *("1", "--model.head_dim", "8", "--model.hidden", "8", "--data.sequence", "32", "--train.batch", "4"),
    *("--train.validation_batches", "1", "--device", "cpu"),
]


@pytest.mark.long
@pytest.mark.parametrize("side", MAIN)
def test_a_folder_of_ids_and_its_content_in_another_order(tmp_path: Path, side: str) -> None:
    """nanoGPT's folder with ids beyond two bytes; swapping halves of a file makes other data."""
    folder, random = tmp_path / "data", np.random.default_rng(0)
    folder.mkdir()
    ids = random.integers(0, 70_000, 4 * 32 + 1).astype(np.uint32)
    ids.tofile(folder / "train.bin")
    random.integers(0, 70_000, 65).astype(np.uint32).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 70_000}))
    line = [*TINY, "--data.path", str(folder), "--output", str(tmp_path / "run")]
    done = command(TRAIN[side], *line, "--steps", "1")
    assert done.returncode == 0, done.stderr
    message = " ".join(done.stdout.replace("│", " ").split())
    for row in (
        f"194 tokens: uint32 ids, as the content shows (they begin {', '.join(map(str, ids[:4]))}; the greatest seen "
        f"is {ids.max()}); train.bin, for validation val.bin",
        "end of document as the ids have it",
        "training 4, validation 2",
        "left alone meta.pkl",
        "epochs 1",
    ):
        assert row in message
    run = Run(side, tmp_path / "run")
    batch = dataset_of(run.experiment).batch(1, 4, 0)
    assert sorted(batch.tokens.ravel().tolist()) == sorted(ids[:-1].tolist())
    assert run.summary["validation_loss"] > 0

    np.roll(ids, 64).tofile(folder / "train.bin")
    with pytest.raises(ConfigError, match=rf"'{run.summary['data']}': the data at .* are others, .* order differ"):
        MAIN[side]([*line, "--steps", "1", "--resume"])
