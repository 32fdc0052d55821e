"""The benchmark of saving works, at a small size."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxdist import train
from jaxdist.bench import saving
from jaxdist.bench.effort import QUICK, Bench

pytestmark = pytest.mark.long

TINY = [
    "--data.sequence", "8", "--train.batch", "2", "--model.layers", "1",
    "--model.dim", "16", "--model.heads", "2", "--model.kv_heads", "1", "--model.head_dim", "4", "--model.hidden", "16",
]  # fmt: skip


@pytest.mark.slow
def test_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that saves and one that never does, each in its own process."""
    monkeypatch.setattr(saving, "TENFOLD", TINY)
    monkeypatch.setattr(saving, "STEPS", 60)
    lines: list[str] = []
    blocked, slower = saving.measure(Bench("cpu", replace(QUICK, savings=1), tmp_path, lines.append))
    assert 0 < blocked.median < 100 and blocked.goal == saving.BLOCKED and slower.unit == "%" and len(lines) == 2


def test_which_saves_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves from step `start` on, except the last step's, which all runs make. Freed memory is kept as in training."""
    kept: list[Any] = []
    monkeypatch.setattr(train, "keep_freed", kept.append)
    monkeypatch.setattr(saving, "STEPS", 3)
    monkeypatch.setattr(train.Run, "keep", slow := lambda *_: time.sleep(0.1))
    saved = saving.train(saving.command([*TINY, "--device", "cpu"], 1, tmp_path / "a"), start=1)
    assert 0.2 <= saved.blocked < 0.4 and saved.seconds > saved.blocked  # for steps 1 and 2
    monkeypatch.setattr(train.Run, "keep", slow)
    never = saving.train(saving.command([*TINY, "--device", "cpu"], 0, tmp_path / "b"), start=1)
    assert never.blocked == 0 < never.seconds and len(kept) == 2
