"""Counts of a run: each sequence of its validation split once, and tokens with and without padding."""

import json
from pathlib import Path

import pytest

from jaxdist.evaluate import main as evaluate
from jaxdist.runs.folder import read_metrics
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import SIDES, command
from parity_tests.suite.kill_test import TINY

pytestmark = pytest.mark.long

DOCUMENTS = 61  # 55 to train on, 6 to validate


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_a_run_counts_as_evaluate_does(side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of 4, so the validation split's second is filled up; documents are padded."""
    lengths = [3 + n * n % 13 for n in range(DOCUMENTS)]
    lines = [json.dumps({"text": chr(97 + n % 26) * length}) for n, length in enumerate(lengths)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = ["--data.path", str(tmp_path / "a.jsonl"), "--data.documents", "padded", "--data.validation", "0.1"]
    fields = ["--train.batch", "4", "--precision", "fp64", "--checkpoint.every", "0", "--train.validation_batches", "8"]
    done = command(TRAIN[side], *TINY, *data, *fields, "--steps", "6", "--output", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    found = []
    for size in ("4", "1", "64"):
        capsys.readouterr()
        evaluate(["--checkpoint", str(tmp_path / "run"), "--batch", size, "--json", "--device", "cpu"])
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert len({one["tokens"] for one in found}) == 1
    assert [summary["validation_loss"]] * 3 == pytest.approx([one["loss"] for one in found], rel=1e-12)

    records = read_metrics(tmp_path / "run")
    assert [record["tokens"] for record in records] == [4 * 16 * step for step in range(1, 7)]
    counts = [record["target_tokens"] for record in records]
    assert all(0 < b - a < 64 for a, b in zip([0, *counts], counts, strict=False))
    for record in records:
        own = record["target_tokens_per_second"] * record["step_seconds"]
        before = counts[record["step"] - 2] if record["step"] > 1 else 0
        assert own == pytest.approx(record["target_tokens"] - before)
    assert summary["target_tokens_per_second"] < summary["tokens_per_second"]
    assert f"({summary['target_tokens_per_second']:,.0f} with a target)" in done.stdout
    assert "target_mfu" in summary
