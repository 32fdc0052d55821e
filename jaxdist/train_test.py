"""The training command: the files of its contract, resume to the bit, and bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.conftest import SHORT_RUN
from jaxdist.convert.kinds import orbax_files
from jaxdist.runs import checkpoints
from jaxdist.runs.checkpoints import steps_in
from jaxdist.runs.folder import read_metrics
from jaxdist.runtime import xla
from jaxdist.train import main, notes
from jaxdist.training import checkpoint

pytestmark = pytest.mark.long


def outside() -> dict[str, str]:
    """The environment without the tests' variables, except XLA's flags."""
    return {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}


def command(*argv: str, module: str = "jaxdist.train", **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        capture_output=True,
        text=True,
        env=outside() | env,
        timeout=600,
    )


def weights(path: Path) -> dict[str, np.ndarray]:
    saved = checkpoint.read(path)
    kept = checkpoint.kept_in(saved.optimizer)
    assert set(kept) == {"exp_avg", "exp_avg_sq"}
    return saved.parameters | {f"{kind}/{n}": w for kind, tree in kept.items() for n, w in tree.items()}


def assert_same(a: Path, b: Path) -> None:
    """Assert equal weights, moments and metrics of two runs to the bit, except for times."""
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    timeless = [[{k: v for k, v in r.items() if "second" not in k} for r in read_metrics(p)] for p in (a, b)]
    assert timeless[0] == timeless[1]


def test_layers_can_be_read_one_by_one(straight: Path) -> None:
    """A conversion takes the memory of a layer, not of all of them."""
    path = checkpoint.locate(straight)
    kept = checkpoint.kept_in(orbax_files.stores(path / "optimizer"))
    for stores in (orbax_files.stores(path / "parameters"), kept["exp_avg"], kept["exp_avg_sq"]):
        chunks = {n: s.chunk_layout.read_chunk.shape[0] for n, s in stores.items() if n.startswith("layers.")}
        assert len(chunks) > 5 and set(chunks.values()) == {1}


def test_files_of_the_contract(straight: Path) -> None:
    records = read_metrics(straight)
    assert [r["step"] for r in records] == list(range(1, 9))
    fields = {"step", "loss", "grad_norm", "learning_rate", "tokens", "step_seconds", "tokens_per_second"}
    fields |= {"target_tokens", "target_tokens_per_second"}
    assert all(set(record) == fields for record in records)
    assert records[-1]["tokens"] == 8 * 8 * 16
    assert records[0]["loss"] == pytest.approx(np.log(256), rel=0.02)  # untrained
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["backend"] == "jax" and summary["devices"] == 4
    assert summary["mesh"] == {"pipeline": 1, "data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
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
    assert all({"op", "axis", "dtype", "single", "count", "bytes"} == set(c) for c in summary["collectives"])
    assert {"config.toml", "metrics.jsonl", "summary.json", "checkpoints"} == {f.name for f in straight.iterdir()}
    assert [f.name for f in (straight / "checkpoints").iterdir()] == ["8"]


def test_a_run_reports_its_compiler_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown in the start-up table, if any are set, and in its summary."""
    main([*SHORT_RUN, "--mesh", "1x1", "--steps", "1", "--parallel.bucket_mb", "2", "--output", str(tmp_path)])
    options = json.loads((tmp_path / "summary.json").read_text())["compiler_options"]
    assert options.items() >= dict.fromkeys(xla.BUCKETS, 2 * 2**20).items()
    shown = "".join(capsys.readouterr().out.replace("│", "").split())
    assert "compileroptions" in shown and all(f"{name}={value}" in shown for name, value in options.items())
    memory = dict.fromkeys(("parameters", "gradients", "optimizer_state", "host", "peak"), 0)
    assert "compiler options" not in notes(memory, 1.0, {})


def test_resume_is_bitwise(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "resumed"
    first = [*SHORT_RUN, "--mesh", "2x2", "--output", str(path)]
    main([*first, "--steps", "3"])
    (path / "checkpoints" / "4.unfinished.orbax-checkpoint-tmp").mkdir()  # as left by an interrupted save
    main([*first, "--steps", "8", "--checkpoint.every", "2", "--checkpoint.keep", "2", "--resume"])
    assert_same(straight, path)
    assert sorted(f.name for f in (path / "checkpoints").iterdir()) == ["6", "8"]


@pytest.mark.parametrize("field", ["loss", "grad_norm", "learning_rate"])
def test_one_bit_is_found(field: str, straight: Path, tmp_path: Path) -> None:
    """Planted: the last bit of one metric of a step, or of one weight."""
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    assert_same(straight, copy)
    records = read_metrics(copy)
    records[4][field] = float(np.nextafter(records[4][field], np.inf))
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(AssertionError):
        assert_same(straight, copy)


def test_another_step_is_found(straight: Path, tmp_path: Path) -> None:
    """Planted: weights and moments one step later."""
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    main([*SHORT_RUN, "--mesh", "2x2", "--steps", "9", "--output", str(copy), "--resume"])
    (copy / "metrics.jsonl").write_text((straight / "metrics.jsonl").read_text())
    with pytest.raises(AssertionError):
        assert_same(straight, copy)


@pytest.mark.slow
def test_resume_on_another_mesh(tmp_path: Path) -> None:
    """Changing mesh and strategy half-way causes rounding alone in float64."""
    one, two = tmp_path / "one", tmp_path / "two"
    double = [*SHORT_RUN, "--precision", "fp64"]
    main([*double, "--mesh", "1x1", "--steps", "8", "--output", str(one)])
    main([*double, "--mesh", "fsdp=2,context=2,tensor=2", "--steps", "4", "--output", str(two)])
    main([*double, "--mesh", "8x1", "--strategy", "zero1", "--steps", "8", "--output", str(two), "--resume"])
    for a, b in zip(read_metrics(one), read_metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
    first, second = weights(one), weights(two)
    for name in first:
        assert np.linalg.norm(first[name] - second[name]) <= 1e-10 * np.linalg.norm(first[name]), name


def test_init_from_a_run_and_step_zero(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "zero"
    main([*SHORT_RUN, "--mesh", "4x1", "--steps", "0", "--init", str(straight), "--output", str(path)])
    source, copied = checkpoint.read(straight).parameters, checkpoint.read(path).parameters
    assert checkpoint.read(path).step == 0
    for name in source:
        np.testing.assert_array_equal(source[name], copied[name])


def test_the_last_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its save is still in progress when the run ends."""
    saved, publish, save = list[int](), checkpoints.publish, checkpoint.Checkpoints.save

    def slowly(folder: Path, step: int) -> None:
        time.sleep(2)
        publish(folder, step)

    def noted(self: checkpoint.Checkpoints, step: int, *state: Any) -> None:
        saved.append(step)
        save(self, step, *state)

    monkeypatch.setattr(checkpoint, "publish", slowly)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", noted)
    main([*SHORT_RUN, "--mesh", "2x2", "--steps", "4", "--checkpoint.every", "2", "--output", str(tmp_path / "run")])
    assert saved == [2, 4] == steps_in(tmp_path / "run" / "checkpoints")


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    main([*SHORT_RUN, "--steps", "1", "--metrics.tensorboard", "true", "--output", str(tmp_path / "run")])
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_a_finished_run_resumed_keeps_its_summary(straight: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    main([*SHORT_RUN, "--mesh", "2x2", "--steps", "8", "--output", str(copy), "--resume"])
    assert (copy / "summary.json").read_text() == (straight / "summary.json").read_text()
    assert_same(straight, copy)


@pytest.mark.slow
def test_the_default_run_learns() -> None:
    """The README's first command for a seventh of its steps, on 8 virtual devices. Byte frequencies alone give a loss
    of 3.3 nats."""
    done = command("--mesh", "2x4", "--device", "cpu", "--steps", "40", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert "running on 8 virtual CPU devices" in done.stdout
    validation = float(re.search(r"validation loss (\d+\.\d+)", done.stdout)[1])  # type: ignore[index]
    assert validation < 3.0, done.stdout
