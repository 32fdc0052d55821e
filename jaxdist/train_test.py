"""The command line end to end: the files of the contract, resume to the bit, and bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxdist import checkpoint
from jaxdist.config import read_metrics
from jaxdist.train import main

TINY = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "2", "--model.head_dim", "8",
    "--model.hidden", "48", "--data.sequence", "16", "--train.batch", "8", "--train.validation_batches", "1",
    "--optimizer.warmup", "2", "--optimizer.decay_steps", "8", "--device", "cpu",
]  # fmt: skip


def command(*argv: str, module: str = "jaxdist.train", **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        capture_output=True,
        text=True,
        env=inherited | env,
        timeout=600,
    )


def weights(path: Path) -> dict[str, np.ndarray]:
    saved = checkpoint.read(path)
    adam = next(part for part in saved.optimizer if part and "mu" in part)
    return (
        saved.parameters | {f"mu/{n}": w for n, w in adam["mu"].items()} | {f"nu/{n}": w for n, w in adam["nu"].items()}
    )


def assert_same(a: Path, b: Path) -> None:
    """Weights, moments and metrics of two runs are equal to the bit, times aside."""
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    timeless = [[{k: v for k, v in r.items() if "second" not in k} for r in read_metrics(p)] for p in (a, b)]
    assert timeless[0] == timeless[1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 steps without a stop on fsdp=2, tensor=2."""
    path = tmp_path_factory.mktemp("runs") / "straight"
    main([*TINY, "--mesh", "2x2", "--steps", "8", "--output", str(path)])
    return path


def test_files_of_the_contract(straight: Path) -> None:
    records = read_metrics(straight)
    assert [r["step"] for r in records] == list(range(1, 9))
    fields = {"step", "loss", "grad_norm", "learning_rate", "tokens", "step_seconds", "tokens_per_second"}
    assert all(set(record) == fields for record in records)
    assert records[-1]["tokens"] == 8 * 8 * 16
    assert records[0]["loss"] == pytest.approx(np.log(256), rel=0.02)  # untrained
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["backend"] == "jax" and summary["devices"] == 4
    assert summary["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2}
    assert {
        "versions",
        "parameters",
        "strategy",
        "precision",
        "compile_seconds",
        "flops_per_token",
        "mfu",
    } <= set(summary)
    assert {"parameters", "gradients", "optimizer_state", "temporary", "peak"} <= set(summary["memory"])
    assert all({"op", "axis", "dtype", "count", "bytes"} == set(c) for c in summary["collectives"])
    assert {"config.toml", "metrics.jsonl", "summary.json", "checkpoints"} == {f.name for f in straight.iterdir()}
    assert [f.name for f in (straight / "checkpoints").iterdir()] == ["8"]


def test_resume_is_bitwise(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "resumed"
    main([*TINY, "--mesh", "2x2", "--steps", "3", "--output", str(path)])
    main(
        [
            *TINY,
            "--mesh",
            "2x2",
            "--steps",
            "8",
            "--checkpoint.every",
            "2",
            "--checkpoint.keep",
            "2",
            "--output",
            str(path),
            "--resume",
        ]
    )
    assert_same(straight, path)
    assert sorted(int(f.name) for f in (path / "checkpoints").iterdir()) == [6, 8]
    with pytest.raises(AssertionError):  # planted: one weight off by one bit
        moved = weights(path)
        moved["norm.scale"] = np.nextafter(moved["norm.scale"], 2)
        np.testing.assert_array_equal(moved["norm.scale"], weights(straight)["norm.scale"])


def test_resume_on_another_mesh(tmp_path: Path) -> None:
    """In float64 a change of mesh and strategy half way leaves nothing but rounding."""
    one, two = tmp_path / "one", tmp_path / "two"
    double = [*TINY, "--precision", "fp64"]
    main([*double, "--mesh", "1x1", "--steps", "8", "--output", str(one)])
    main([*double, "--mesh", "4x2", "--steps", "4", "--output", str(two)])
    main([*double, "--mesh", "8x1", "--strategy", "zero1", "--steps", "8", "--output", str(two), "--resume"])
    for a, b in zip(read_metrics(one), read_metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
    first, second = weights(one), weights(two)
    for name in first:
        assert np.linalg.norm(first[name] - second[name]) <= 1e-10 * np.linalg.norm(first[name]), name


def test_init_from_a_run_and_step_zero(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "zero"
    main([*TINY, "--mesh", "4x1", "--steps", "0", "--init", str(straight), "--output", str(path)])
    source, copied = checkpoint.read(straight).parameters, checkpoint.read(path).parameters
    assert checkpoint.read(path).step == 0
    for name in source:
        np.testing.assert_array_equal(source[name], copied[name])


def test_evaluate(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from jaxdist.evaluate import main as evaluate

    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 400)
    losses = []
    for mesh in ("1x1", "2x2"):
        evaluate(["--checkpoint", str(straight), "--data", str(text), "--mesh", mesh, "--json", "--device", "cpu"])
        losses.append(json.loads(capsys.readouterr().out.splitlines()[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    tokens = np.frombuffer(text.read_bytes(), np.uint8)[: 4 * 16].reshape(4, 16)
    np.save(tmp_path / "tokens.npy", tokens)
    evaluate(
        [
            "--checkpoint",
            str(straight),
            "--tokens",
            str(tmp_path / "tokens.npy"),
            "--logits",
            str(tmp_path / "l.npy"),
            "--device",
            "cpu",
        ]
    )
    logits = np.load(tmp_path / "l.npy")
    assert logits.shape == (4, 16, 256) and logits.dtype == np.float32


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    main([*TINY, "--steps", "1", "--metrics.tensorboard", "true", "--output", str(tmp_path / "run")])
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


BAD: dict[str, tuple[list[str], str]] = {
    "unknown key": (["--model.layrs", "3"], r"--model.layrs.*--model.layers"),
    "wrong type": (["--model.layers", "many"], r"model.layers = 'many'"),
    "mesh and devices": (["--mesh", "4x4"], r"'4x4' needs 16 devices, there are 8"),
    "axis twice": (["--mesh", "fsdp=2,fsdp=2"], r"'fsdp' is given twice"),
    "axis unknown": (["--mesh", "fdsp=2"], r"'fdsp'; did you mean 'fsdp'"),
    "heads": (["--mesh", "1x3"], r"model.heads = 8 .* tensor = 3"),
    "vocabulary": (["--mesh", "1x4", "--model.vocab", "257"], r"model.vocab = 257 .* tensor = 4"),
    "batch": (["--mesh", "8x1", "--train.batch", "12"], r"train.batch = 12 .* 8 devices"),
    "parameter": (
        ["--mesh", "8x1", "--model.dim", "36"],
        r"parameter \S+ has 36 along its axis embed.* fsdp = 8",
    ),
    "sequence": (["--data.sequence", "4096"], r"data.sequence = 4096 .* model.positions = 1024"),
    "missing data": (["--data.path", "nowhere.txt"], r"data.path.*nowhere.txt"),
    "empty data": (["--data.path", "empty.txt"], r"data.path.*empty.txt"),
    "token id": (["--model.vocab", "100"], r"model.vocab = 100"),
    "strategy": (["--strategy", "zero3"], r"parallel.strategy = 'zero3'"),
    "precision": (["--precision", "fp4"], r"precision.policy = 'fp4'"),
    "another run": (["--output", "occupied"], r"--output occupied already holds a run"),
    "another model": (
        ["--init", "occupied"],
        r"another model: parameter \S+ is \(\S+.*\) there and \(\S+.*\) in the config",
    ),
    "no checkpoint": (["--init", "empty.txt"], r"empty.txt"),
    "no gpu": (["--device", "gpu"], r"--device gpu: .*--device cpu"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty.txt").write_text("")
    main([*TINY, "--steps", "0", "--output", str(folder / "occupied")])
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_2_and_one_message(case: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv, says = BAD[case]
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    output = [] if "--output" in argv else ["--output", "new"]
    done = command(*argv, *output, JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert sorted(place.rglob("*")) == before, "something was written"


def test_the_default_run_learns() -> None:
    """The README's first command: 8 virtual devices, and a loss that only a model that has learnt reaches."""
    done = command("--mesh", "2x4", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "running on 8 virtual CPU devices" in done.stdout
    validation = float(re.search(r"validation loss (\d+\.\d+)", done.stdout)[1])  # type: ignore[index]
    assert validation < 2.1, done.stdout
