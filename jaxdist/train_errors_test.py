"""Training that cannot start or continue: bad input, steps and weights that are not finite, damaged checkpoints."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.command_line.arguments import parse
from jaxdist.config import ConfigError, TrainingError
from jaxdist.conftest import SHORT_RUN, ended
from jaxdist.data import Batch, dataset_of
from jaxdist.evaluate import main as evaluate
from jaxdist.parallel.sharding import TOKENS
from jaxdist.runs.checkpoints import MANIFEST, damage
from jaxdist.runs.folder import read_metrics
from jaxdist.train import main
from jaxdist.train_test import assert_same, command, weights
from jaxdist.training import checkpoint
from jaxdist.training.step import Step

pytestmark = pytest.mark.long


def damaged(content: bytes, other: bytes) -> dict[str, bytes | None]:
    """Damages of a file: None is a missing file; `other` is another file's content."""

    def flipped(place: int) -> bytes:
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    size = len(content)
    places = {"first": 0, "early": size // 4, "middle": size // 2, "last": size - 1} if content else {}
    flips = {f"{where} bit": flipped(place) for where, place in places.items()}
    return {"gone": None, "empty": b"", "half": content[: len(content) // 2], "swapped": other, **flips}


def test_every_damage_to_every_file_is_found(straight: Path, tmp_path: Path) -> None:
    """Found by name, or the restored state is the saved one."""
    right, copy = weights(straight), tmp_path / "run"
    shutil.copytree(straight, copy)
    found = copy / "checkpoints" / "8"
    files = [file for file in sorted(found.rglob("*")) if file.is_file()]
    contents = {file: file.read_bytes() for file in files}
    cases = harmless = 0
    for file, other in zip(files, [*files[1:], files[0]], strict=True):
        for how, content in damaged(contents[file], contents[other]).items():
            file.unlink() if content is None else file.write_bytes(content)
            if how == "swapped":
                other.write_bytes(contents[file])
            cases += 1
            if reason := damage(found):
                said_by_another = MANIFEST in (file.name, other.name)
                assert said_by_another or any(str(f.relative_to(found)) in reason for f in (file, other)), how
            else:
                harmless += 1
                assert all(np.array_equal(array, right[name]) for name, array in weights(copy).items()), (file, how)
            file.write_bytes(contents[file])
            other.write_bytes(contents[other])
    assert cases >= 200 and harmless < cases / 10
    assert damage(found) is None


def test_a_damaged_checkpoint_is_named_and_passed_over(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Orbax alone restores the flipped bits silently."""
    path = tmp_path / "run"
    main([*SHORT_RUN, "--mesh", "2x2", "--output", str(path), "--steps", "6", "--checkpoint.every", "2"])
    file = max((path / "checkpoints" / "6" / "parameters").rglob("d/*"), key=lambda f: f.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    name = f"its file {file.relative_to(path / 'checkpoints' / '6')} has changed"
    with pytest.raises(ConfigError, match=rf"checkpoint .*/6 is damaged: {name}"):
        checkpoint.read(path / "checkpoints" / "6")
    with pytest.raises(ConfigError, match=name):
        evaluate(["--checkpoint", str(path / "checkpoints" / "6"), "--device", "cpu"])
    capsys.readouterr()
    evaluate(["--checkpoint", str(path), "--device", "cpu", "--batches", "1", "--json"])
    result, output = capsys.readouterr()
    assert json.loads(result)["loss"] > 0 and "going back to step 4" in output  # for programs, and for people
    main([*SHORT_RUN, "--mesh", "2x2", "--output", str(path), "--steps", "8", "--checkpoint.every", "0", "--resume"])
    output = capsys.readouterr().out
    assert f"6 is damaged: {name}" in output and "going back to step 4" in output
    assert_same(straight, path)
    assert sorted(f.name for f in (path / "checkpoints").iterdir()) == ["2", "4", "6.damaged", "8"]


def test_a_run_that_diverges_ends_with_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    wild = ["--optimizer.learning_rate", "1e30", "--optimizer.clip", "0", "--checkpoint.every", "1"]
    code = ended(*SHORT_RUN, "--mesh", "1x1", "--steps", "20", *wild, "--output", str(path))
    output = capfd.readouterr().err
    assert code == 1 and "Traceback" not in output
    step = int(re.search(r"step (\d+): .* = (nan|inf)", output)[1])  # type: ignore[index]
    assert re.search(r"the first tensor that is not finite is (weight|(gradient of )?activation) \S+\.", output), output
    assert f"the last checkpoint is {path}/checkpoints/{step - 1}." in output
    assert [record["step"] for record in read_metrics(path)] == list(range(1, step))


@pytest.fixture
def infinite(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plant an infinite gradient in the third step; the arguments of a run of five steps."""
    line, right = [*SHORT_RUN, "--mesh", "2x1", "--steps", "5", "--checkpoint.every", "1"], Step.accumulate
    experiment = parse(line, "jaxdist.train", "").experiment
    third = dataset_of(experiment).batch(3, experiment.train.batch, 0).tokens.sum()

    def accumulate(self: Step, parameters: Any, batch: Batch, *scale: Any) -> Any:
        loss, gradients, rest = right(self, parameters, batch, *scale)
        planted = jnp.where(lax.psum(batch.tokens.sum(), TOKENS) == int(third), jnp.inf, 1.0)
        return loss, gradients | {"norm.scale": gradients["norm.scale"] * planted}, rest

    monkeypatch.setattr(Step, "accumulate", accumulate)
    return line


def test_a_step_that_is_not_finite_is_skipped(infinite: list[str], tmp_path: Path) -> None:
    """Weights and moments stay, the schedule continues, and so does the run."""
    main([*infinite, "--output", str(tmp_path), "--train.nonfinite", "skip"])
    records = read_metrics(tmp_path)
    assert [record["skipped"] for record in records] == [False, False, True, False, False]
    assert records[2]["grad_norm"] is None and records[2]["loss"] > 0
    saved = {step: checkpoint.read(tmp_path / "checkpoints" / str(step)) for step in (2, 3, 4)}
    flat = {step: weights(tmp_path / "checkpoints" / str(step)) for step in saved}
    assert all(np.array_equal(flat[2][name], flat[3][name]) for name in flat[2])
    assert not all(np.array_equal(flat[3][name], flat[4][name]) for name in flat[3])
    counts = {
        step: [int(part[n]) for part in s.optimizer if part for n in ("updates", "count") if n in part]
        for step, s in saved.items()
    }
    assert counts == {2: [2, 2], 3: [2, 3], 4: [3, 4]}  # Adam's, the schedule's


@pytest.mark.slow
def test_a_run_ended_by_such_a_step_resumes_as_its_message_says(infinite: list[str], tmp_path: Path) -> None:
    skipping, stopped = tmp_path / "skipping", tmp_path / "stopped"
    main([*infinite, "--output", str(skipping), "--train.nonfinite", "skip"])
    with pytest.raises(
        TrainingError, match=r"step 3: grad_norm = inf; .* is gradient norm.scale.*/stopped/checkpoints/2"
    ):
        main([*infinite, "--output", str(stopped)])
    assert [record["step"] for record in read_metrics(stopped)] == [1, 2]
    main([*infinite, "--output", str(stopped), "--resume", "--train.nonfinite", "skip"])
    assert all(np.array_equal(array, weights(skipping)[name]) for name, array in weights(stopped).items())


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
        r"model.dim = 36 .* axis fsdp = 8, which splits parameter embed",
    ),
    "sequence": (["--data.sequence", "4096"], r"data.sequence = 4096 .* model.positions = 1024"),
    "missing data": (["--data.path", "nowhere.txt"], r"data.path.*nowhere.txt"),
    "empty data": (["--data.path", "empty.txt"], r"data.path.*empty.txt"),
    "token id": (["--model.vocab", "100"], r"model.vocab = 100"),
    "strategy": (["--strategy", "zero3"], r"parallel.strategy = 'zero3'"),
    "precision": (["--precision", "fp4"], r"precision.policy = 'fp4'"),
    "another run": (["--output", "occupied"], r"--output occupied already holds a run"),
    "another model": (
        ["--init", "occupied", "--model.dim", "128"],
        r"model.dim = 128, but --init occupied holds another model, with 32; leave out --model.dim",
    ),
    "no checkpoint": (["--init", "empty.txt"], r"empty.txt"),
    "no gpu": (["--device", "gpu"], r"--device gpu: .*--device cpu"),
    "no folder": (["--output", "empty.txt/run"], r"--output empty.txt/run: .*empty.txt is a file"),
    "seed": (["--seed", "4294967296"], r"train.seed = '4294967296': .*less than 4294967296"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "empty.txt").write_text("")
    main([*SHORT_RUN, "--steps", "0", "--output", str(folder / "occupied")])
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_2_and_one_message(
    case: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv, message = BAD[case]
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    output = [] if "--output" in argv else ["--output", "new"]
    code, printed = ended(*argv, *output), capfd.readouterr().err
    assert code == 2 and printed.count("error:") == 1 and re.search(message, printed), printed
    assert sorted(place.rglob("*")) == before, "something was written"


def test_bad_input_of_a_process() -> None:
    done = command("--mesh", "4x4", JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(r"error: .*'4x4' needs 16 devices, there are 8.*\n", done.stderr), done.stderr


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_a_last_update_that_diverges_is_not_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    wild = ["--optimizer.learning_rate", "1e39", "--optimizer.warmup", "0", "--optimizer.decay", "constant"]
    code = ended(*SHORT_RUN, "--mesh", "1x1", *wild, "--steps", "1", "--output", str(path))
    assert code == 1 and "step 1: validation_loss = nan" in capfd.readouterr().err
    assert not (path / "checkpoints").exists() and not (path / "summary.json").exists()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The message names the first weight and the checkpoint before, even if nothing else shows it."""
    path = tmp_path / "run"
    wild = ["--optimizer.warmup", "0", "--optimizer.decay", "constant", "--checkpoint.every", "1"]
    wild += ["--train.validation_batches", "0", "--train.nonfinite", "skip", "--output", str(path)]
    main([*SHORT_RUN, "--mesh", "1x1", *wild, "--steps", "1"])
    # A resume may not change the rate, so the run's config is edited.
    config = path / "config.toml"
    config.write_text(re.sub("(?m)^learning_rate = .*", "learning_rate = 1e39", config.read_text()))
    code = ended("--config", str(config), "--steps", "4", "--output", str(path), "--device", "cpu", "--resume")
    output = capfd.readouterr().err
    assert code == 1, output
    assert re.search(r"step 2: its update made \S+ not finite\. .* the last checkpoint is \S+checkpoints/1\.", output)
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == ["1"]


def test_a_mesh_of_the_remaining_devices_needs_devices_to_count() -> None:
    done = command(*SHORT_RUN, "--mesh", "-1x1")
    assert done.returncode == 2 and "-1 needs a known number of devices" in done.stderr
