"""The benchmark of saving measures what it says, at a small size."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist import train
from parity_tests import saving

TINY = [
    "--device", "cpu", "--mesh", "1x1", "--data.sequence", "8", "--train.batch", "2", "--model.layers", "1",
    "--model.dim", "16", "--model.heads", "2", "--model.kv_heads", "1", "--model.head_dim", "4", "--model.hidden", "16",
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["--mesh", "3x"], "parallel.mesh = '3x': size '' of axis 'tensor' must be a number"),
        (["--mehs", "2x4"], "unknown argument '--mehs'; did you mean '--mesh'"),
        ([*TINY, "--train.batch", "3", "--mesh", "2x1"], "train.batch = 3"),  # only the run tells
    ],
)
def test_a_wrong_argument_ends_with_one_message(line: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "parity_tests.saving", *line], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "code"), [(1.0, None), (-1.0, 1)])
def test_a_pair(
    bound: float, code: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with 1 where a run is blocked for too long."""
    for name, value in {"PAIRS": 1, "EVERY": 2, "STEPS": 6, "BOUND": bound}.items():
        monkeypatch.setattr(saving, name, value)
    if code is None:
        saving.main(TINY)
    else:
        with pytest.raises(SystemExit, match=str(code)):
            saving.main(TINY)
    assert "pair 1: blocked " in capsys.readouterr().out


def test_what_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saves of the steps from `start` on, but for that of the last, which all runs make."""
    monkeypatch.setattr(saving, "STEPS", 3)
    monkeypatch.setattr(train, "keep", slow := lambda *_: time.sleep(0.1))
    saved = saving.train(saving.command(TINY, 1, tmp_path / "a"), start=1)
    assert 0.2 <= saved.blocked < 0.4 and saved.seconds > saved.blocked  # of steps 1 and 2
    monkeypatch.setattr(train, "keep", slow)
    never = saving.train(saving.command(TINY, 0, tmp_path / "b"), start=1)
    assert never.blocked == 0 < never.seconds
