"""Two processes of four devices against one of eight, under users' launchers; and how they end together."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import read_record
from jaxdist.conftest import free_port
from jaxdist.runs.checkpoints import damage, steps_in
from jaxdist.runs.folder import read_metrics
from jaxdist.train import main
from jaxdist.training import checkpoint

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TINY = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "4", "--model.head_dim", "8",
    "--model.hidden", "48", "--data.sequence", "16", "--train.batch", "8", "--train.validation_batches", "1",
    "--optimizer.warmup", "2", "--optimizer.decay_steps", "6", "--precision", "fp64", "--device", "cpu",
    "--train.accumulation", "2", "--steps", "4", "--checkpoint.every", "2",
]  # fmt: skip
MESH = ["--mesh", "data=2,fsdp=2,tensor=2"]  # one replica per process


def environment(**more: str) -> dict[str, str]:
    """The environment without the tests' own devices; processes share compiled programs."""
    ours = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "NPROC")}
    return ours | {"PYTHONPATH": str(ROOT)} | more


Ended = subprocess.CompletedProcess[str]


def torchrun(*command: str, processes: int = 2) -> Ended:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run(
        [*launcher, *command], env=environment(), capture_output=True, text=True, timeout=300, cwd=ROOT
    )


def ranks(*command: str, **more: str) -> list[Ended]:
    """Processes of a launcher that ends none of them."""
    launcher = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    running = [
        subprocess.Popen(
            [sys.executable, *command], env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **(launcher | more)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()  # in case it waits for ever
    return [Ended(p.args, p.returncode, *texts) for p, texts in zip(running, out, strict=True)]


def command_of_one(*command: str) -> Ended:
    line = [sys.executable, *command]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, timeout=300, cwd=ROOT)


def errors(ended: list[Ended]) -> list[str]:
    return [line for process in ended for line in process.stderr.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process for all eight devices."""
    path = tmp_path_factory.mktemp("runs") / "one"
    main([*TINY, *MESH, "--output", str(path)])
    return path


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes under torchrun."""
    path = tmp_path_factory.mktemp("runs") / "two"
    done = torchrun("-m", "jaxdist.train", *TINY, *MESH, "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done: loss") == 1 and done.stdout.count("running on 8 virtual CPU devices of 2") == 1
    assert "Gloo" not in done.stdout
    return path


def state(path: Path) -> dict[str, Any]:
    saved = checkpoint.read(path)
    kept = checkpoint.kept_in(saved.optimizer)
    return saved.parameters | {f"{kind} {n}": w for kind, tree in kept.items() for n, w in tree.items()}


def distance(a: Path, b: Path) -> tuple[float, float]:
    """Largest relative differences: of losses and gradient norms, and by norm of a weight or moment."""
    curves = [np.array([(r["loss"], r["grad_norm"]) for r in read_metrics(path)]) for path in (a, b)]
    first, second = state(a), state(b)
    assert first.keys() == second.keys()
    states = max(float(np.linalg.norm(first[n] - w) / np.linalg.norm(w)) for n, w in second.items())
    return float(np.abs(curves[0] / curves[1] - 1).max()), states


def test_two_processes_train_as_one(one: Path, two: Path) -> None:
    curves, states = distance(two, one)
    assert curves < 1e-12 and states < 1e-10
    assert {file.name for file in two.iterdir()} == {file.name for file in one.iterdir()}
    assert steps_in(two / "checkpoints") == [2, 4] and damage(two / "checkpoints" / "4") is None


def assert_same_records(one: Path, two: Path, least: int) -> None:
    first, second = (read_record(path / "record" / "2.safetensors") for path in (one, two))
    assert list(first) == list(second) and len(first) > least
    for name, array in first.items():
        assert array.shape == second[name].shape
        np.testing.assert_allclose(second[name], array, rtol=0, atol=1e-11 * max(1, np.abs(array).max()), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "tensors", "least"),
    [("data=2,fsdp=2,tensor=2", "gradients", 10), ("data=2,fsdp=2,tensor=2", "all", 100), ("context=8", "all", 100)],
)
def test_a_record_of_two_processes_has_whole_tensors(mesh: str, tensors: str, least: int, tmp_path: Path) -> None:
    fields = [*TINY, "--mesh", mesh, "--steps", "2", "--record.steps", "2", "--record.tensors", tensors]
    command = ["-m", "jaxdist.train", *fields, "--output"]
    ended = [*ranks(*command, str(tmp_path / "two")), command_of_one(*command, str(tmp_path / "one"))]
    assert [process.returncode for process in ended] == [0, 0, 0], ended
    assert_same_records(tmp_path / "one", tmp_path / "two", least)


def test_the_summary_is_of_all_devices(one: Path, two: Path) -> None:
    first, second = (json.loads((path / "summary.json").read_text()) for path in (one, two))
    for name in ("devices", "mesh", "collectives", "parameters", "data", "schedule", "least_bytes"):
        assert first[name] == second[name]
    assert first["validation_loss"] == pytest.approx(second["validation_loss"], rel=1e-12)
    assert first["memory"]["parameters"] == second["memory"]["parameters"]


PLANT = """
import errno, functools, os, signal
import numpy as np
from orbax.checkpoint import AsyncCheckpointer
from jaxdist import train
from jaxdist.runtime import processes
from jaxdist.training import orbax_io
from jaxdist.data.dataset import Sequences
from jaxdist.training.placement import Placement

rank = os.environ["RANK"]
read, log = Sequences._read, train.RunFolder.log

def counted(self, sequences):
    with open(f"{os.environ['READS']}.{rank}", "a") as file:
        print(*sequences, file=file)
    return read(self, sequences)
if "READS" in os.environ:
    Sequences._read = counted

def at_step(number, action):
    fetch, seen = Placement.put, []
    def put(self, batch):
        seen.append(batch)
        if len(seen) == number + 1 and rank == "1":
            action()
        return fetch(self, batch)
    Placement.put = put
match os.environ.get("PLANT"):
    case "same rows":
        Placement.rows = slice(0, 4)
    case "SIGTERM":
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    case "full disk" if rank == "0":
        def full(self, record):
            with self.writing("metrics.jsonl"):
                if record["step"] == 3:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            log(self, record)
        train.RunFolder.log = full
    case "no memory":
        soon = functools.partial(AsyncCheckpointer, timeout_secs=3)  # what another has not begun is given up
        orbax_io.ocp.AsyncCheckpointer, save = soon, AsyncCheckpointer._save
        async def copy(self, folder, *inputs, **named):
            found = await save(self, folder, *inputs, **named)
            if rank == "1" and "/2." in str(folder.get_final()):
                raise MemoryError("no memory for a copy")
            return found
        AsyncCheckpointer._save = copy
processes.run(train.main)
"""


@pytest.fixture
def planted(tmp_path: Path) -> str:
    """A script that trains like the command, with the mistake that PLANT names."""
    file = tmp_path / "planted.py"
    file.write_text(PLANT)
    return str(file)


@pytest.mark.slow
def test_a_signal_to_one_ends_all_with_one_checkpoint_and_each_reads_its_rows(
    planted: str, one: Path, tmp_path: Path
) -> None:
    run, reads = tmp_path / "run", tmp_path / "reads"
    ended = ranks(planted, *TINY, *MESH, "--output", str(run), PLANT="SIGTERM", READS=str(reads))
    assert [process.returncode for process in ended] == [75, 75], ended
    assert len(errors(ended)) == 1 and "step 2 is saved: continue by --resume" in errors(ended)[0]
    assert steps_in(run / "checkpoints") == [2] and len(read_metrics(run)) == 2

    rows = [np.loadtxt(f"{reads}.{rank}", dtype=int) for rank in range(2)]
    assert [r.shape for r in rows] == [(3, 4), (3, 4)]  # half of each batch, for two steps and one fetched ahead
    assert len(np.unique(np.concatenate(rows))) == 3 * 8  # never the other's rows

    # One process continues from checkpoints of two.
    main([*TINY, *MESH, "--output", str(run), "--resume"])
    curves, states = distance(run, one)
    assert curves < 1e-12 and states < 1e-10


@pytest.mark.slow
def test_one_that_fails_alone_while_a_checkpoint_is_written_ends_all_and_it_is_kept(
    planted: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = ranks(planted, *TINY, *MESH, "--output", str(run), PLANT="full disk")
    assert [process.returncode for process in ended] == [1, 1], ended
    assert errors(ended) == [
        f"error: --output {run}: metrics.jsonl could not be written: No space left on device; make room, and continue "
        "by --resume"
    ]
    assert [file.name for file in (run / "checkpoints").iterdir()] == ["2"]
    assert damage(run / "checkpoints" / "2") is None


@pytest.mark.slow
def test_a_checkpoint_that_one_cannot_begin_is_left_out_by_all(planted: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    on = ["--checkpoint.failure", "go on"]
    ended = ranks(planted, *TINY, *MESH, *on, "--output", str(run), PLANT="no memory")
    assert [process.returncode for process in ended] == [0, 0], ended
    left_out = f"the checkpoint of step 2 could not be written to {run}/checkpoints: no memory for a copy; training"
    assert ended[0].stdout.count(left_out) == 1, ended[0].stdout
    assert [file.name for file in (run / "checkpoints").iterdir()] == ["4"]
    assert damage(run / "checkpoints" / "4") is None


@pytest.mark.slow
def test_two_processes_continue_a_run_of_one(one: Path, tmp_path: Path) -> None:
    """The mesh gives the processes the same rows, but different times of them."""
    run = tmp_path / "run"
    shutil.copytree(one, run)
    shutil.rmtree(run / "checkpoints" / "4")
    command = ["-m", "jaxdist.train", *TINY, "--mesh", "context=2,tensor=4", "--output", str(run), "--resume"]
    ended = ranks(*command)
    assert [process.returncode for process in ended] == [0, 0], ended
    assert "resuming from step 2" in ended[0].stdout and not ended[1].stdout
    curves, states = distance(run, one)
    assert curves < 1e-12 and states < 1e-10


@pytest.mark.slow
def test_processes_that_feed_the_same_rows_are_caught(planted: str, one: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ["--steps", "1", "--checkpoint.every", "0", "--train.validation_batches", "0"]
    ended = ranks(planted, *TINY, *MESH, *short, "--output", str(run), PLANT="same rows")
    assert [process.returncode for process in ended] == [0, 0], ended
    assert abs(read_metrics(run)[0]["loss"] / read_metrics(one)[0]["loss"] - 1) > 1e-6


SMALL = """
import os, signal, subprocess
import jax
from jaxdist.runtime import processes, rendezvous
from jaxdist.config import TrainingError

def fail(what):
    raise TrainingError(what)

rendezvous.SILENT, rendezvous.BEAT = 6.0, 0.2

def main():
    jax.config.update("jax_num_cpu_devices", 1)
    own = processes.world().rank
    assert processes.from_first(lambda: f"of {own}") == "of 0" and processes.greatest(7 + own) == 8
    jax.numpy.zeros(1)
    match os.environ["PLANT"]:
        case "SIGKILL" if own:
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSTOP" if own:
            subprocess.Popen(["sh", "-c", f"sleep 25; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        case "alone":
            processes.check_same("data.fingerprint", f"of {own}")
        case "first":
            processes.from_first(lambda: fail("the first disk"))
    processes.greatest(own)  # waits for the other
processes.run(main)
"""


@pytest.mark.parametrize(
    ("plant", "codes", "expected"),
    [
        ("SIGKILL", [1, -signal.SIGKILL], ["process 1 of 2 ended before the others"]),
        pytest.param(
            "SIGSTOP",
            [1, -signal.SIGKILL],
            ["process 1 of 2 has given no sign of life for 40 s and the others stop"],
            marks=pytest.mark.slow,
        ),
        ("alone", [1, 2], ["data.fingerprint = 'of 1' on process 1, 'of 0' on the first; give all machines the same"]),
        ("first", [1, 1], ["the first disk"]),
    ],
)
def test_all_end_and_one_reports_why(plant: str, codes: list[int], expected: list[str]) -> None:
    """No launcher ends the others, and they wait in a collective, where signals are not handled."""
    ended = ranks("-c", SMALL, PLANT=plant, JAX_PLATFORMS="cpu")
    assert [process.returncode for process in ended] == codes, ended
    assert len(errors(ended)) == len(expected) and all(
        text in line for text, line in zip(expected, errors(ended), strict=True)
    )
    assert not any("Traceback" in process.stderr for process in ended), ended


@pytest.mark.slow
def test_a_wrong_number_of_processes_is_reported_once() -> None:
    done = torchrun("-m", "jaxdist.train", *TINY, *MESH, processes=3)
    assert done.returncode == 1
    assert errors([done]) == [
        "error: parallel.mesh = 'data=2,fsdp=2,tensor=2' has 8 devices, which 3 processes cannot share equally; start 1"
    ]


def test_an_address_that_cannot_be_reached_is_reported_once() -> None:
    address = "192.0.2.1:29500"  # reserved for documentation: nobody answers
    ended = ranks("-c", SMALL, JAX_COORDINATOR_ADDRESS=address, JAXDIST_JOIN_SECONDS="2")
    assert [process.returncode for process in ended] == [1, 1]
    assert len(errors(ended)) == 1 and address in errors(ended)[0]


@pytest.mark.slow
def test_two_processes_evaluate_as_one(one: Path, tmp_path: Path) -> None:
    """Loss over a split with an incomplete last batch, and logits."""
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 256, (8, 16)))
    text = tmp_path / "text.txt"
    text.write_text("".join(map(chr, np.random.default_rng(0).integers(32, 127, 16 * 45))))
    common = ["-m", "jaxdist.evaluate", "--checkpoint", str(one), "--mesh", "2x4", "--device", "cpu"]
    found = []
    for name, run in (("one", lambda *command: [command_of_one(*command)]), ("two", ranks)):
        logits = ["--tokens", str(tmp_path / "tokens.npy"), "--logits", str(tmp_path / f"{name}.npy")]
        losses, wrote = run(*common, "--data", str(text), "--json"), run(*common, *logits)
        assert [process.returncode for process in (*losses, *wrote)] == [0] * 2 * len(losses), (losses, wrote)
        found.append((json.loads(losses[0].stdout), np.load(tmp_path / f"{name}.npy")))
    (first, first_logits), (second, second_logits) = found
    assert first["tokens"] == second["tokens"] == 44 * 16
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-12)
    np.testing.assert_allclose(first_logits, second_logits, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "O2"])
@pytest.mark.parametrize("mesh", ["8x1", "context=8", "data=2,context=2,tensor=2"])
def test_precisions_and_axes_over_two_processes(precision: str, mesh: str, tmp_path: Path) -> None:
    fields = [*TINY, "--mesh", mesh, "--precision", precision, "--train.accumulation", "1", "--checkpoint.every", "0"]
    ended = ranks("-m", "jaxdist.train", *fields, "--output", str(tmp_path / "two"))
    assert [process.returncode for process in ended] == [0, 0], ended
    done = command_of_one("-m", "jaxdist.train", *fields, "--output", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    curves = [np.array([r["loss"] for r in read_metrics(tmp_path / name)]) for name in ("one", "two")]
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-3)
