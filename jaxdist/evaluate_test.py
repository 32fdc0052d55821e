"""Evaluation by the command line: the same loss and logits in any batches and on any mesh, and bad input."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.conftest import SHORT_RUN
from jaxdist.data import IGNORED
from jaxdist.evaluate import main as evaluate
from jaxdist.families.loss import chunked
from jaxdist.train import main
from jaxdist.training import step

pytestmark = pytest.mark.long


def test_evaluate(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same loss in any batches and on any mesh, over every token once."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 100)
    line = ["--checkpoint", str(straight), "--device", "cpu"]
    results = []
    for options in (
        ["--batch", "1"],
        ["--batch", "32", "--mesh", "2x2"],
        ["--batch", "12", "--mesh", "data=4", "--strategy", "ddp"],
        ["--batch", "8", "--mesh", "fsdp=2,context=4"],
    ):
        evaluate([*line, "--data", str(text), "--json", *options])
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    for result in results:
        assert result["tokens"] == (text.stat().st_size - 1) // 16 * 16
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)

    tokens = np.frombuffer(text.read_bytes(), np.uint8)[: 4 * 16].reshape(4, 16)
    np.save(tmp_path / "tokens.npy", tokens)
    found = []
    for mesh in ("1x1", "context=4"):
        arguments = ["--tokens", str(tmp_path / "tokens.npy"), "--logits", str(tmp_path / "l.npy"), "--mesh", mesh]
        evaluate([*line, *arguments])
        found.append(np.load(tmp_path / "l.npy"))
    assert found[0].shape == (4, 16, 256) and found[0].dtype == np.float32
    assert np.linalg.norm(found[0] - found[1]) <= 1e-5 * np.linalg.norm(found[0])


@pytest.mark.slow
def test_evaluation_of_a_run_in_chunks(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equals the loss at once, after training and alone; without the last chunk it differs."""

    def losses(run: Path) -> list[float]:
        evaluate(["--checkpoint", str(run), "--batches", "1", "--json", "--device", "cpu"])
        summary = json.loads((run / "summary.json").read_text())
        return [summary["validation_loss"], json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]]

    def in_chunks(name: str) -> list[float]:
        chunks = ["--mesh", "2x2", "--memory.loss_chunks", "5", "--steps", "0", "--init", str(straight)]
        main([*SHORT_RUN, *chunks, "--output", str(tmp_path / name)])
        return losses(tmp_path / name)

    full = losses(straight)
    assert in_chunks("right") == pytest.approx(full, rel=1e-6)
    monkeypatch.setattr(step, "chunked", lambda targets, chunks: chunked(targets, chunks).at[-1].set(IGNORED))
    assert all(abs(a / b - 1) > 0.01 for a, b in zip(in_chunks("wrong"), full, strict=True))


BAD_EVALUATION: dict[str, tuple[list[str], str]] = {
    "no batches": (["--batches", "0"], r"--batches: '0' is not a whole number from 1"),
    "empty file": (["--tokens", "empty.txt", "--logits", "l.npy"], r"--tokens empty.txt"),
    "several arrays": (["--tokens", "two.npz", "--logits", "l.npy"], r"two.npz: several arrays"),
    "no folder": (["--tokens", "ids.npy", "--logits", "nowhere/l.npy"], r"--logits nowhere/l.npy: no such folder"),
    "id": (
        ["--tokens", "ids.npy", "--logits", "l.npy"],
        r"ids from 0 to 299, beyond model.vocab = 256",
    ),
    "rows": (
        ["--tokens", "row.npy", "--logits", "l.npy", "--mesh", "2x1"],
        r"1 rows cannot be divided .* = 2; use --mesh",
    ),
    "times": (
        ["--tokens", "row.npy", "--logits", "l.npy", "--mesh", "context=4"],
        r"row.npy: tokens a row = 10 cannot be divided over the mesh axis context = 4",
    ),
    "data": (["--data", "empty.txt"], r"data.path"),
}


@pytest.mark.parametrize("case", BAD_EVALUATION)
def test_bad_evaluation(case: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    np.savez("two.npz", a=np.zeros(2), b=np.zeros(2))
    np.save("ids.npy", np.arange(300).reshape(30, 10))
    np.save("row.npy", np.zeros((1, 10), np.int64))
    argv, message = BAD_EVALUATION[case]
    with pytest.raises(ConfigError, match=message):
        evaluate(["--checkpoint", str(straight), "--device", "cpu", *argv])
    assert not Path("l.npy").exists()


def ids(rows: int, times: int, last: int = 0) -> np.ndarray:
    found = np.zeros((rows, times), np.int64)
    found[0, 0] = last
    return found


# refused token ids -> the mesh to give them with, and ids or a mesh that follow the fix
REFUSED_TOKENS: dict[str, tuple[np.ndarray, str, Callable[[re.Match[str]], np.ndarray | str], str]] = {
    "ids": (ids(1, 8, 299), "1x1", lambda m: ids(1, 8, int(m[1])), r"give ids from 0 to (\d+)$"),
    "positions": (ids(1, 2000), "1x1", lambda m: ids(1, int(m[1])), r"give at most (\d+)$"),
    "rows, by the mesh": (ids(3, 8), "2x1", lambda m: m[1], r"use --mesh (\S+), or"),
    "rows": (ids(3, 8), "2x1", lambda m: ids(int(m[1]), 8), r"or give (\d+) rows$"),
    "times, by the mesh": (ids(1, 12), "context=4", lambda m: m[1], r"use --mesh (\S+), or"),
    "times": (ids(1, 12), "context=4", lambda m: ids(1, int(m[1])), r"as tokens a row = (\d+)$"),
    "floats": (ids(1, 8) / 1, "1x1", lambda _: ids(1, 8), r"give one array of integers \[B, T\]$"),
}


@pytest.mark.parametrize("case", REFUSED_TOKENS)
def test_the_fix_for_tokens_is_followed(
    case: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values, mesh, follow, fix = REFUSED_TOKENS[case]

    def asked(tokens: np.ndarray, mesh: str) -> None:
        np.save("ids.npy", tokens)
        files = ["--tokens", "ids.npy", "--logits", "l.npy"]
        evaluate(["--checkpoint", str(straight), "--device", "cpu", *files, "--mesh", mesh])

    with pytest.raises(ConfigError) as error:
        asked(values, mesh)
    found = re.search(fix, str(error.value))
    assert found, str(error.value)
    other = follow(found)
    asked(*((values, other) if isinstance(other, str) else (other, mesh)))
    assert np.load("l.npy").shape[:2] == np.load("ids.npy").shape
