"""Every strategy and mesh against one rank, in float64, through the command line."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxdist.config import ConfigError
from jaxdist.runs.checkpoints import MANIFEST, steps_in
from jaxdist.runs.folder import read_metrics
from torch_ref.conftest import ROOT, Run, Train, command, distance
from torch_ref.train import main
from torch_ref.training import checkpoint

pytestmark = pytest.mark.long

ONE = "--mesh 1x1"
# The parity suite compares more meshes, each with JAX.
MESHES = ["--mesh 2x1 --strategy zero2 --train.accumulation 2"]
SLOW = [
    "--mesh data=2,fsdp=2 --train.accumulation 2 --memory.remat selective",
    "--mesh 2x1 --strategy ddp --train.accumulation 2",
    "--mesh 2x1 --parallel.reshard_after_forward false --train.accumulation 2",
    "--mesh data=2,fsdp=2 --strategy zero1",
    "--mesh 2x2",
    "--mesh 1x2 --memory.remat selective --memory.remat_every 2",
    "--mesh 2x2 --strategy ddp --train.accumulation 2",
    "--mesh 2x2 --strategy zero1 --memory.remat full",
    "--mesh 2x2 --strategy zero2 --train.accumulation 2",
    "--mesh 4x1 --parallel.reduce step --train.accumulation 2",
    "--mesh data=2,fsdp=2,tensor=2 --train.accumulation 2 --memory.remat full",
]


@pytest.mark.parametrize("mesh", [*MESHES, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)])
def test_a_mesh_trains_as_one_rank_does(train: Train, mesh: str) -> None:
    curves, states = distance(train(mesh), train(ONE))
    assert curves < 1e-12
    assert states < 1e-10


PREFETCHED = """
from torch.distributed.fsdp import FSDPModule
def refused(self, modules):
    raise SystemExit("prefetches")
FSDPModule.set_modules_to_forward_prefetch = refused
"""


@pytest.mark.slow
def test_prefetch_changes_no_number(train: Train) -> None:
    overlap = "--mesh 2x1 --parallel.overlap true"
    assert distance(train("--mesh 2x1"), train(overlap)) == (0, 0)
    with pytest.raises(AssertionError, match="prefetches"):  # prefetching is called
        train(overlap, before=PREFETCHED)


MEAN_OF_MEANS = """
from torch_ref.training import step
right = step.sum_over_batch
step.sum_over_batch = lambda value, mesh: right(value, mesh) if value.is_floating_point() else 2 * value
"""
AVERAGED_GRADIENTS = """
from torch.distributed.fsdp import FSDPModule
FSDPModule.set_gradient_divide_factor = lambda self, factor: None
"""


@pytest.mark.parametrize("planted", [MEAN_OF_MEANS, AVERAGED_GRADIENTS], ids=["mean of means", "averaged"])
def test_a_planted_mistake_is_found(train: Train, planted: str) -> None:
    curves, states = distance(train("--mesh 2x1", before=planted), train(ONE))
    assert curves > 1e-6
    assert states > 1e-8


def continued(train: Train, tmp_path: Path, first: str, then: str) -> Run:
    """Two steps with the arguments `first`, and the rest of the run with `then`."""
    folder = tmp_path / "run"
    shutil.copytree(train(f"{first} --train.steps 2").folder, folder)
    resume(folder, then)
    return Run(folder)


def data_of(folder: Path) -> str:
    """Path of the data that a run was trained on."""
    config = (folder / "config.toml").read_text().splitlines()
    return next(line for line in config if line.startswith("path")).split('"')[1]


def resume(folder: Path, then: str) -> str:
    """Output of the run in `folder`, resumed to its end with the arguments `then`."""
    result = command("--data.path", data_of(folder), "--output", str(folder), "--resume", *then.split())
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_resumed_run_is_the_same_to_the_bit(train: Train, tmp_path: Path) -> None:
    mesh = "--mesh 2x1 --strategy zero2 --train.accumulation 2"
    straight, resumed = train(mesh), continued(train, tmp_path, mesh, mesh)
    assert np.array_equal(resumed.curves, straight.curves)
    assert distance(resumed, straight) == (0, 0)


def test_a_run_resumes_on_another_mesh_and_strategy(train: Train, tmp_path: Path) -> None:
    resumed = continued(train, tmp_path, "--mesh 2x1 --strategy zero1", "--mesh 1x2")
    curves, states = distance(resumed, train(ONE))
    assert curves < 1e-12
    assert states < 1e-10


def test_zero_steps_write_the_starting_weights_and_init_reads_them(train: Train) -> None:
    seed = train(f"{ONE} --train.steps 0")
    assert [entry.name for entry in (seed.folder / "checkpoints").iterdir()] == ["0"]
    from_it = train(f"--mesh 2x1 --strategy ddp --init {seed.folder} --checkpoint.every 1 --checkpoint.keep 2")
    assert distance(from_it, train(ONE))[0] < 1e-12
    assert sorted(entry.name for entry in (from_it.folder / "checkpoints").iterdir()) == ["3", "4"]


def test_bf16_gathers_in_bfloat16_and_reduces_in_float32(train: Train) -> None:
    run = train("--mesh 2x1 --precision bf16")
    dtypes = {(c["op"], c["dtype"]) for c in run.summary["collectives"] if c["bytes"] > 100}
    assert dtypes == {("all_gather", "bfloat16"), ("reduce_scatter", "float32")}
    assert np.abs(run.curves[:, 0] / train(ONE).curves[:, 0] - 1).max() < 2e-2


def test_the_run_folder_keeps_the_contract(train: Train) -> None:
    run = train(ONE)
    records = read_metrics(run.folder)
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert [r["tokens"] for r in records] == [128, 256, 384, 512]
    assert [r["learning_rate"] for r in records] == pytest.approx([2.5e-3, 5e-3, 2.75e-3, 5e-4])
    names = {"step", "loss", "grad_norm", "learning_rate", "tokens", "step_seconds", "tokens_per_second"}
    names |= {"target_tokens", "target_tokens_per_second"}
    assert all(r.keys() == names for r in records)
    summary = run.summary
    assert {"backend", "versions", "parameters", "devices", "mesh", "strategy", "precision"} < summary.keys()
    assert {"compile_seconds", "tokens_per_second", "flops_per_token", "mfu"} < summary.keys()
    assert summary["memory"]["parameters"] == 8 * summary["parameters"]
    assert summary["validation_loss"] > 0


VALIDATED_AT_ONCE = """
import torch
from torch_ref.training import step
losses = step.losses
def seen(model, rows, chunks):
    if not torch.is_grad_enabled() and (len(rows.inputs), chunks) != (4, 7):
        raise SystemExit(f"{len(rows.inputs)} rows in {chunks} chunks")
    return losses(model, rows, chunks)
step.losses = seen
"""
WITHOUT_ITS_LAST_CHUNK = """
import torch
from torch_ref.training import step
chunked = step.chunked
def fewer(targets, chunks):
    found = chunked(targets, chunks)
    if not torch.is_grad_enabled():
        found[-1] = step.IGNORED
    return found
step.chunked = fewer
"""


def test_validation_goes_by_microbatches_and_chunks(train: Train) -> None:
    """Validation uses training's microbatches and chunks, so it takes no more memory; its loss equals that of the whole
    batch, also with a padded chunk."""
    at_once, chunks = train(ONE).summary["validation_loss"], f"{ONE} --train.accumulation 2 --memory.loss_chunks 7"
    assert train(chunks, before=VALIDATED_AT_ONCE).summary["validation_loss"] == pytest.approx(at_once, rel=1e-12)
    wrong = train(chunks, before=WITHOUT_ITS_LAST_CHUNK).summary["validation_loss"]
    assert abs(wrong / at_once - 1) > 0.01


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tmp_path: Path, train: Train) -> None:
    arguments = "--mesh 2x1 --train.steps 2"
    config = train(arguments).folder / "config.toml"
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "torch_ref.train"]
    done = subprocess.run(
        [sys.executable, *line, "--config", str(config), "--output", str(tmp_path / "run")],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert distance(Run(tmp_path / "run"), train(arguments)) == (0, 0)


def test_a_run_without_a_final_checkpoint(tmp_path: Path) -> None:
    """`checkpoint.final = false` leaves no checkpoint."""
    line = ["--mesh", "1x1", "--model.vocab", "256", "--checkpoint.final", "false", "--output", str(tmp_path)]
    done = command(*line)
    assert done.returncode == 0, done.stderr
    assert steps_in(tmp_path / "checkpoints") == [] and (tmp_path / "summary.json").exists()


def test_other_data_are_refused(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(train(ONE).folder, folder)
    text = tmp_path / "other.jsonl"
    text.write_text('{"text": "other"}\n' * 100)
    config = (folder / "config.toml").read_text()
    data = config.split('path = "')[1].split('"')[0]
    moved = config.replace(data, str(text)).replace("steps = 4", "steps = 5")
    (folder / "config.toml").write_text(moved)  # as if the file had been replaced
    with pytest.raises(ConfigError, match=r"data.fingerprint"):
        main(["--config", str(folder / "config.toml"), "--output", str(folder), "--resume", "--device", "cpu"])


PLACES = {"first bit": 0.0, "early bit": 0.25, "middle bit": 0.5, "late bit": 0.75, "last bit": 1.0}


@pytest.mark.parametrize("how", ["gone", "empty", "half", "swapped", *PLACES])
def test_damaged_checkpoints_are_named(how: str, train: Train, tmp_path: Path) -> None:
    """Each file of a checkpoint. A missing manifest is accepted: torch itself writes none."""
    source, copy = train("--mesh 2x1").folder / "checkpoints" / "4", tmp_path / "4"
    right, files = checkpoint.read(source)[1], sorted(source.iterdir())
    assert len(files) == 5  # from two ranks
    for file, other in zip(files, [*files[1:], files[0]], strict=True):
        shutil.copytree(source, copy)
        content = bytearray(file.read_bytes())
        if how in PLACES:
            content[round(PLACES[how] * (len(content) - 1))] ^= 1
        elif how == "swapped":
            content = bytearray(other.read_bytes())
            shutil.copy(file, copy / other.name)
        spoilt = {"empty": b"", "half": bytes(content[: len(content) // 2]), "gone": None}.get(how, bytes(content))
        (copy / file.name).unlink() if spoilt is None else (copy / file.name).write_bytes(spoilt)
        if how == "gone" and file.name == MANIFEST:
            found = checkpoint.read(copy)[1]
            assert all(torch.equal(found[kind][name], a) for kind in right for name, a in right[kind].items())
        else:
            with pytest.raises(ConfigError, match=f"checkpoint {copy} is damaged: its"):
                checkpoint.read(copy)
        shutil.rmtree(copy)


def test_a_damaged_checkpoint_is_passed_over(train: Train, tmp_path: Path) -> None:
    """All ranks skip it, with one message; the run ends as an uninterrupted one."""
    right, folder = train("--mesh 2x1 --checkpoint.every 2"), tmp_path / "run"
    shutil.copytree(right.folder, folder)
    file = next((folder / "checkpoints" / "4").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    output = resume(folder, "--mesh 2x1")
    assert output.count(f"its file {file.name} has changed") == output.count("going back to step 2") == 1
    assert distance(Run(folder), right) == (0, 0)
    assert sorted(entry.name for entry in (folder / "checkpoints").iterdir()) == ["2", "4", "4.damaged"]


@pytest.mark.slow
def test_an_evaluation_leaves_no_weights_gathered(train: Train) -> None:
    """Gathered weights would be evaluated again, whatever the optimizer does to the shards."""
    forgets = "from torch_ref.training import step\nstep.reshard = lambda model: None"
    mesh = "--mesh 2x1 --strategy zero2"
    kept, right = train(mesh, before=forgets).summary["memory"], train(mesh).summary["memory"]
    assert right["parameters"] == train(ONE).summary["memory"]["parameters"] // 2
    assert kept["parameters"] != right["parameters"] or kept["gradients"] != right["gradients"]
