"""Epochs give the same sequences at the same step and row as `torch.utils.data.DistributedSampler` on its ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DistributedSampler

from jaxdist.config import ConfigError, Data, Experiment
from jaxdist.conftest import open_dataset
from jaxdist.data import Dataset, dataset_of, in_steps
from parity_tests.conftest import Runs
from parity_tests.suite.parity_test import differences


def numbered(folder: Path, sequences: int, **fields: Any) -> Dataset:
    """Sequence i is i, i, ..."""
    file, T = folder / "ids.npy", 4
    np.save(file, np.append(np.repeat(np.arange(sequences), T), sequences).astype(np.uint16))
    return open_dataset(Data(path=str(file), sequence=T, validation=0.0, **fields), vocab=2**15)


def visits(found: Dataset, size: int, epochs: int) -> np.ndarray:
    """[steps, size]: the number of each sequence."""
    steps = range(1, found.steps(size, epochs) + 1)
    return np.array([found.batch(step, size, seed=0).tokens[:, 0] for step in steps])


CASES = [(12, 4), (13, 4), (15, 4), (3, 4), (7, 1)]


@pytest.mark.parametrize(("sequences", "size"), CASES)
@pytest.mark.parametrize("last", ["drop", "pad"])
def test_epochs_are_those_of_the_distributed_sampler(tmp_path: Path, sequences: int, size: int, last: Any) -> None:
    """Unshuffled, the same places; shuffled, as many visits in each epoch."""
    if last == "drop" and sequences < size:
        with pytest.raises(ConfigError, match=r"leaves none of 3 sequences for train.batch = 4; set data.last = pad"):
            numbered(tmp_path, sequences, last=last).steps(size, 1)
        return
    ranks: list[list[int]] = [
        list(DistributedSampler(range(sequences), size, rank, shuffle=False, drop_last=last == "drop"))  # type: ignore[arg-type]
        for rank in range(size)
    ]
    plain = visits(numbered(tmp_path, sequences, last=last, shuffle=False), size, epochs=2)
    assert np.array_equal(plain, np.concatenate([np.transpose(ranks)] * 2))

    shuffled = visits(numbered(tmp_path, sequences, last=last), size, epochs=3).reshape(3, -1)
    for epoch in shuffled:
        counts = np.bincount(epoch, minlength=sequences)
        if last == "pad":
            assert counts.min() >= 1 and counts.sum() == np.size(ranks)
        else:
            assert counts.max() == 1 and counts.sum() == np.size(ranks)
    assert sequences <= size or any((shuffled[0] != epoch).any() for epoch in shuffled[1:])


def test_an_epoch_goes_on_within_a_batch(tmp_path: Path) -> None:
    """The next epoch starts within a batch by default: no sequence is dropped or repeated."""
    found = visits(numbered(tmp_path, 13), 4, epochs=2).ravel()[:26].reshape(2, 13)
    assert (np.sort(found) == np.arange(13)).all()


def test_epochs_become_steps(tmp_path: Path) -> None:
    numbered(tmp_path, 13)
    data = {"path": str(tmp_path / "ids.npy"), "sequence": 4, "validation": 0.0}
    for last, steps in {"continue": 7, "drop": 6, "pad": 8}.items():
        values = {"data": data | {"last": last}, "train": {"epochs": 2, "batch": 4}}
        experiment = in_steps(Experiment.parse(values, source="test"))
        assert (experiment.train.steps, experiment.train.epochs) == (steps, 0)
    assert in_steps(Experiment()) == Experiment()


@pytest.mark.slow
def test_both_sides_train_an_epoch(runs: Runs) -> None:
    a, b = (runs(side, "llama", {"mesh": "1x1", "epochs": 1, "data.last": "pad"}) for side in ("jaxdist", "torch_ref"))
    e = a.experiment
    steps = dataset_of(e).steps(e.train.batch, 1)
    assert len(a.metrics) == steps == e.train.steps > 20
    assert max(differences(a, b).values()) <= 1
