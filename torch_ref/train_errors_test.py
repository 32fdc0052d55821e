"""Runs that cannot start or continue: launchers, signals, failing ranks, and steps that are not finite."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jaxdist.config import ConfigError, Parallel
from jaxdist.runs.checkpoints import steps_in
from jaxdist.runs.folder import read_metrics
from torch_ref.conftest import FIELDS, ROOT, Run, Train, command, distance
from torch_ref.runtime import launch
from torch_ref.train import main
from torch_ref.train_test import ONE, data_of, resume
from torch_ref.training import checkpoint

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh 3x1", "train.batch = 16"),
        ("--mesh 1x3", "model.heads = 8"),
        ("--mesh 2x1 --device gpu", "needs 2 GPUs here, there are 1"),
    ],
)
def test_an_impossible_mesh_is_refused_before_any_rank_starts(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=message):
        main(arguments.split())


def test_a_launcher_must_start_as_many_ranks_as_the_mesh_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"parallel\.mesh = '4x1' has 4 devices, the launcher started 2"):
        launch.plan(Parallel(mesh="4x1"), "cpu")
    assert launch.plan(Parallel(mesh="-1x1"), "cpu").ranks == 2


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("5", "4"), ("0", "0")])
def test_a_rank_beyond_their_number_is_refused_by_itself(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=rf"RANK = {rank}: must be below WORLD_SIZE = {size}; let the launcher"):
        launch.plan(Parallel(mesh="4x1"), "cpu")
    assert not launch.quiet()


@pytest.mark.parametrize(
    ("rank", "size", "quiet"), [("0", "2", False), ("1", "2", True), ("many", "2", False), ("1", "many", True)]
)
def test_a_rank_is_quiet_where_another_says_the_same(
    rank: str, size: str, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert launch.quiet() == quiet


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"])
def test_variables_of_a_launcher_must_be_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    for variable, value in (launcher | {name: "many"}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"{name} = .*many"), launch.process_group(launch.plan(Parallel(), "cpu")):
        pass


def test_bad_input_seen_by_every_rank_is_reported_once() -> None:
    result = command("--mesh", "2x1", "--data.path", "/nowhere")
    assert result.returncode == 2
    assert result.stderr.count("error: data.path") == 1


FULL = """
import torch
from torch_ref import train

def train_step(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

train.train_step = train_step
"""


def test_a_device_without_memory_is_reported() -> None:
    result = command("--mesh", "1x1", "--model.vocab", "256", before=FULL)
    assert result.returncode == 1
    assert re.search(r"^error: a device is out of memory: CUDA .*; use more devices, .*offload$", result.stderr, re.M)


def test_a_run_that_diverges_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "run"
    wild = ["--optimizer.learning_rate", "1e300", "--optimizer.clip", "0", "--steps", "8", "--model.vocab", "256"]
    result = command("--mesh", "2x1", "--output", str(path), *wild)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("error: step") == 1
    assert re.search(
        r"the first tensor that is not finite is (weight|(gradient of )?activation) \S+\.", result.stderr
    ), result.stderr
    assert "there is no checkpoint" in result.stderr
    assert len(read_metrics(path)) < 8


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "run"
    wild = ["--optimizer.learning_rate", "1.79e308", "--optimizer.warmup", "0", "--optimizer.decay", "constant"]
    wild += ["--optimizer.weight_decay", "1", "--train.validation_batches", "0", "--model.vocab", "256"]
    result = command("--mesh", "2x1", "--output", str(path), *wild, "--steps", "1")
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.count("error: step 1: its update made embed.weight not finite.") == 1, result.stderr
    assert "there is no checkpoint" in result.stderr and not list((path / "checkpoints").glob("*"))


INFINITE = """
import os, torch
from torch_ref import train
right = train.train_step
def train_step(program, state, batch, step, watch):
    def spoil(stage):
        if step == 3 and stage == "gradient" and os.environ["RANK"] == "1":
            gradient = state.model.norm.weight.grad
            (gradient.to_local() if hasattr(gradient, "to_local") else gradient).mul_(float("inf"))
        watch(stage)
    return right(program, state, batch, step, spoil)
train.train_step = train_step
"""


def test_a_step_that_is_not_finite_is_skipped(train: Train) -> None:
    """Weights and moments stay the same; schedule and run continue."""
    run = train("--mesh 2x1 --checkpoint.every 1 --train.nonfinite skip", before=INFINITE)
    records = read_metrics(run.folder)
    assert [record["skipped"] for record in records] == [False, False, True, False]
    assert records[2]["grad_norm"] is None and records[2]["loss"] > 0
    rates = [record["learning_rate"] for record in records]
    assert rates == [record["learning_rate"] for record in read_metrics(train(ONE).folder)]
    saved = {step: checkpoint.read(run.folder / "checkpoints" / str(step))[1] for step in (2, 3, 4)}
    for kind, tensors in saved[2].items():
        assert all(torch.equal(t, saved[3][kind][name]) for name, t in tensors.items())
        assert not all(torch.equal(t, saved[4][kind][name]) for name, t in tensors.items())


@pytest.mark.slow
def test_a_step_that_is_not_finite_ends_a_run(tmp_path: Path) -> None:
    line = ["--mesh", "2x1", "--checkpoint.every", "1", "--output", str(tmp_path / "stopped")]
    result = command("--model.vocab", "256", *line, before=INFINITE)
    assert result.returncode == 1
    assert re.search(r"step 3: grad_norm = inf; .* is gradient norm.weight\..*checkpoints/2\.", result.stderr)


def test_an_impossible_output_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(launch, "start", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError, match=r"--output \S+: \S+file is a file"):
        main(["--output", str(tmp_path / "file" / "run")])


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_saves_and_ends_a_run(train: Train, tmp_path: Path, number: signal.Signals) -> None:
    """The process that started the ranks gets the signal; the ranks agree on the step."""
    right, folder = train("--mesh 2x1 --strategy ddp"), tmp_path / "run"
    slow = "import time\nfrom torch_ref import train\nright = train.train_step\n" + (
        "train.train_step = lambda *a: (time.sleep(1), right(*a))[1]"
    )
    line = ["--data.path", data_of(right.folder), "--output", str(folder), "--mesh", "2x1", "--strategy", "ddp"]
    code = f"{slow}\ntrain.exit_codes(train.main)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *FIELDS, *line],
        cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not ((folder / "metrics.jsonl").exists() and read_metrics(folder)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 75, output
    (last,) = steps_in(folder / "checkpoints")
    assert last == len(read_metrics(folder)) < 4
    assert output.count(f"error: ended by {number.name} after step {last}; step {last} is saved") == 1
    resume(folder, "--mesh 2x1 --strategy ddp")
    assert distance(Run(folder), right) == (0, 0)


SIGNALS = """
import os, signal
from torch_ref import train
start, step = train.launch.process_group, train.train_step
def starting(*arguments):
    os.kill(os.getpid(), signal.SIGUSR1)
    return start(*arguments)
def signalled(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM if arguments[3] == 3 else signal.SIGUSR1)
    return step(*arguments)
train.launch.process_group, train.train_step = starting, signalled
"""


def test_signals_to_one_rank_are_obeyed_by_all(tmp_path: Path) -> None:
    """One machine of several gets the signal. A rank that is still starting has nothing to save and is not ended."""
    line = ["--mesh", "2x1", "--model.vocab", "256", "--output", str(tmp_path / "run")]
    done = command(*line, before=SIGNALS)
    assert done.returncode == 75, done.stderr
    assert done.stderr.count("error: ended by a signal after step 3; step 3 is saved: continue by --resume") == 1
    assert steps_in(tmp_path / "run" / "checkpoints") == [1, 2, 3]


SIGNALLED = """
import os, signal
from torch_ref import train
evaluate = train.evaluate
def signalled(*inputs):
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*inputs)
train.evaluate = signalled
"""


@pytest.mark.slow
def test_a_signal_while_validating(tmp_path: Path) -> None:
    """All ranks skip the rest of the validation after the last step, and save the step."""
    line = ["--mesh", "2x1", "--steps", "2", "--model.vocab", "256", "--train.validation_batches", "8"]
    done = command(*line, "--output", str(tmp_path / "run"), before=SIGNALLED)
    assert done.returncode == 75, done.stderr
    assert "ended by SIGTERM after step 2; step 2 is saved: continue by --resume" in done.stderr
    assert steps_in(tmp_path / "run" / "checkpoints") == [2]


FAILING_RANK = """
import os
from torch_ref import train
right = train.train_step
def fail(*arguments):
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted")
    return right(*arguments)
train.train_step = fail
"""


KILLED_RANK = FAILING_RANK.replace('raise RuntimeError("planted")', "os.kill(os.getpid(), 9)")


def test_a_rank_that_is_killed_is_named() -> None:
    result = command("--mesh", "2x1", "--model.vocab", "256", before=KILLED_RANK)
    assert result.returncode == 1
    assert "error: rank 1 was ended by SIGKILL" in result.stderr


def test_a_rank_that_fails_ends_the_run_with_1() -> None:
    result = command("--mesh", "2x1", "--model.vocab", "256", before=FAILING_RANK)
    assert result.returncode == 1
    assert "planted" in result.stderr


def test_weights_without_a_loss_are_not_kept(tmp_path: Path) -> None:
    planted = "from torch_ref import train\ntrain.validation_loss = lambda *_: float('inf')"
    result = command("--mesh", "1x1", "--steps", "1", "--model.vocab", "256", "--output", str(tmp_path), before=planted)
    assert result.returncode == 1 and "error: step 1: validation_loss = inf" in result.stderr
    assert not (tmp_path / "checkpoints").exists() and not (tmp_path / "summary.json").exists()
