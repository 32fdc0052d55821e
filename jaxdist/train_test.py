"""The command line end to end: the files of the contract, resume to the bit, and bad input."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.command_line.arguments import parse
from jaxdist.config import ConfigError, TrainingError, exit_codes
from jaxdist.convert.kinds import orbax_files
from jaxdist.data import IGNORED, Batch, dataset_of
from jaxdist.evaluate import main as evaluate
from jaxdist.families.loss import chunked
from jaxdist.parallel.sharding import TOKENS
from jaxdist.runs import checkpoints
from jaxdist.runs.checkpoints import MANIFEST, damage, steps_in
from jaxdist.runs.folder import read_metrics
from jaxdist.runtime import xla
from jaxdist.train import main, notes
from jaxdist.training import checkpoint, step
from jaxdist.training.step import Step

pytestmark = pytest.mark.long

TINY = [
    "--model.layers", "2", "--model.dim", "32", "--model.heads", "4", "--model.kv_heads", "2", "--model.head_dim", "8",
    "--model.hidden", "48", "--data.sequence", "16", "--train.batch", "8", "--train.validation_batches", "1",
    "--optimizer.warmup", "2", "--optimizer.decay_steps", "8", "--device", "cpu",
]  # fmt: skip


def outside() -> dict[str, str]:
    """The environment without what it holds for these tests, but for how XLA compiles."""
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


def test_layers_can_be_read_one_by_one(straight: Path) -> None:
    """A conversion takes as much memory as a layer, not as all of them."""
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


def test_a_run_tells_what_its_compiler_was_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table that it begins with, if it was told anything, and in its summary."""
    main([*TINY, "--mesh", "1x1", "--steps", "1", "--parallel.bucket_mb", "2", "--output", str(tmp_path)])
    told = json.loads((tmp_path / "summary.json").read_text())["compiler_options"]
    assert told.items() >= dict.fromkeys(xla.BUCKETS, 2 * 2**20).items()
    shown = "".join(capsys.readouterr().out.replace("│", "").split())
    assert "compileroptions" in shown and all(f"{name}={value}" in shown for name, value in told.items())
    memory = dict.fromkeys(("parameters", "gradients", "optimizer_state", "host", "peak"), 0)
    assert "compiler options" not in notes(memory, 1.0, {})


def test_resume_is_bitwise(straight: Path, tmp_path: Path) -> None:
    path = tmp_path / "resumed"
    first = [*TINY, "--mesh", "2x2", "--output", str(path)]
    main([*first, "--steps", "3"])
    (path / "checkpoints" / "4.unfinished.orbax-checkpoint-tmp").mkdir()  # as an interrupted save leaves it
    main([*first, "--steps", "8", "--checkpoint.every", "2", "--checkpoint.keep", "2", "--resume"])
    assert_same(straight, path)
    assert sorted(f.name for f in (path / "checkpoints").iterdir()) == ["6", "8"]


@pytest.mark.parametrize("field", ["loss", "grad_norm", "learning_rate"])
def test_one_bit_is_seen(field: str, straight: Path, tmp_path: Path) -> None:
    """Planted: one metric of one step, or one weight, off by its last bit."""
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    assert_same(straight, copy)
    records = read_metrics(copy)
    records[4][field] = float(np.nextafter(records[4][field], np.inf))
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(AssertionError):
        assert_same(straight, copy)


def test_another_step_is_seen(straight: Path, tmp_path: Path) -> None:
    """Planted: weights and moments one step on."""
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    main([*TINY, "--mesh", "2x2", "--steps", "9", "--output", str(copy), "--resume"])
    (copy / "metrics.jsonl").write_text((straight / "metrics.jsonl").read_text())
    with pytest.raises(AssertionError):
        assert_same(straight, copy)


def test_resume_on_another_mesh(tmp_path: Path) -> None:
    """In float64 a change of mesh and strategy half way leaves nothing but rounding."""
    one, two = tmp_path / "one", tmp_path / "two"
    double = [*TINY, "--precision", "fp64"]
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
    main([*TINY, "--mesh", "4x1", "--steps", "0", "--init", str(straight), "--output", str(path)])
    source, copied = checkpoint.read(straight).parameters, checkpoint.read(path).parameters
    assert checkpoint.read(path).step == 0
    for name in source:
        np.testing.assert_array_equal(source[name], copied[name])


def test_evaluate(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same loss in any batches and on any mesh, over every token once."""
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 100)
    given = ["--checkpoint", str(straight), "--device", "cpu"]
    results = []
    for options in (
        ["--batch", "1"],
        ["--batch", "32", "--mesh", "2x2"],
        ["--batch", "12", "--mesh", "data=4", "--strategy", "ddp"],
        ["--batch", "8", "--mesh", "fsdp=2,context=4"],
    ):
        evaluate([*given, "--data", str(text), "--json", *options])
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    for result in results:
        assert result["tokens"] == (text.stat().st_size - 1) // 16 * 16
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)

    tokens = np.frombuffer(text.read_bytes(), np.uint8)[: 4 * 16].reshape(4, 16)
    np.save(tmp_path / "tokens.npy", tokens)
    found = []
    for mesh in ("1x1", "context=4"):
        asked = ["--tokens", str(tmp_path / "tokens.npy"), "--logits", str(tmp_path / "l.npy"), "--mesh", mesh]
        evaluate([*given, *asked])
        found.append(np.load(tmp_path / "l.npy"))
    assert found[0].shape == (4, 16, 256) and found[0].dtype == np.float32
    assert np.linalg.norm(found[0] - found[1]) <= 1e-5 * np.linalg.norm(found[0])


def test_evaluation_of_a_run_in_chunks(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After training and by itself: what the same weights have at once; without the last chunk it is another loss."""

    def losses(run: Path) -> list[float]:
        evaluate(["--checkpoint", str(run), "--batches", "1", "--json", "--device", "cpu"])
        summary = json.loads((run / "summary.json").read_text())
        return [summary["validation_loss"], json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]]

    def in_chunks(name: str) -> list[float]:
        chunks = ["--mesh", "2x2", "--memory.loss_chunks", "5", "--steps", "0", "--init", str(straight)]
        main([*TINY, *chunks, "--output", str(tmp_path / name)])
        return losses(tmp_path / name)

    whole = losses(straight)
    assert in_chunks("right") == pytest.approx(whole, rel=1e-6)
    monkeypatch.setattr(step, "chunked", lambda targets, chunks: chunked(targets, chunks).at[-1].set(IGNORED))
    assert all(abs(a / b - 1) > 0.01 for a, b in zip(in_chunks("wrong"), whole, strict=True))


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
    argv, says = BAD_EVALUATION[case]
    with pytest.raises(ConfigError, match=says):
        evaluate(["--checkpoint", str(straight), "--device", "cpu", *argv])
    assert not Path("l.npy").exists()


def ids(rows: int, times: int, last: int = 0) -> np.ndarray:
    found = np.zeros((rows, times), np.int64)
    found[0, 0] = last
    return found


# Token ids that are refused -> the mesh they are given with, and what follows the fix: other ids, or another mesh.
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
    given, mesh, follow, fix = REFUSED_TOKENS[case]

    def asked(tokens: np.ndarray, mesh: str) -> None:
        np.save("ids.npy", tokens)
        files = ["--tokens", "ids.npy", "--logits", "l.npy"]
        evaluate(["--checkpoint", str(straight), "--device", "cpu", *files, "--mesh", mesh])

    with pytest.raises(ConfigError) as error:
        asked(given, mesh)
    found = re.search(fix, str(error.value))
    assert found, str(error.value)
    other = follow(found)
    asked(*((given, other) if isinstance(other, str) else (other, mesh)))
    assert np.load("l.npy").shape[:2] == np.load("ids.npy").shape


def damaged(content: bytes, other: bytes) -> dict[str, bytes | None]:
    """All that a file may become: None is gone; `other` is what another file holds."""

    def flipped(place: int) -> bytes:
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    size = len(content)
    places = {"first": 0, "early": size // 4, "middle": size // 2, "last": size - 1} if content else {}
    flips = {f"{where} bit": flipped(place) for where, place in places.items()}
    return {"gone": None, "empty": b"", "half": content[: len(content) // 2], "swapped": other, **flips}


def test_every_damage_to_every_file_is_found(straight: Path, tmp_path: Path) -> None:
    """By name; or what is restored is what was saved."""
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
    """Orbax restores the flipped bits as weights, without a word."""
    path = tmp_path / "run"
    main([*TINY, "--mesh", "2x2", "--output", str(path), "--steps", "6", "--checkpoint.every", "2"])
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
    told, said = capsys.readouterr()
    assert json.loads(told)["loss"] > 0 and "going back to step 4" in said  # for a program, and for a person
    main([*TINY, "--mesh", "2x2", "--output", str(path), "--steps", "8", "--checkpoint.every", "0", "--resume"])
    said = capsys.readouterr().out
    assert f"6 is damaged: {name}" in said and "going back to step 4" in said
    assert_same(straight, path)
    assert sorted(f.name for f in (path / "checkpoints").iterdir()) == ["2", "4", "6.damaged", "8"]


def test_the_last_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is still being written when the run comes to its end."""
    saved, publish, save = list[int](), checkpoints.publish, checkpoint.Checkpoints.save

    def slowly(folder: Path, step: int) -> None:
        time.sleep(2)
        publish(folder, step)

    def noted(self: checkpoint.Checkpoints, step: int, *state: Any) -> None:
        saved.append(step)
        save(self, step, *state)

    monkeypatch.setattr(checkpoint, "publish", slowly)
    monkeypatch.setattr(checkpoint.Checkpoints, "save", noted)
    main([*TINY, "--mesh", "2x2", "--steps", "4", "--checkpoint.every", "2", "--output", str(tmp_path / "run")])
    assert saved == [2, 4] == steps_in(tmp_path / "run" / "checkpoints")


def test_a_run_that_diverges_ends_with_1(tmp_path: Path) -> None:
    path = tmp_path / "run"
    wild = ["--optimizer.learning_rate", "1e30", "--optimizer.clip", "0", "--checkpoint.every", "1"]
    done = command(*TINY, "--steps", "20", *wild, "--output", str(path))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    step = int(re.search(r"step (\d+): .* = (nan|inf)", done.stderr)[1])  # type: ignore[index]
    assert re.search(r"the first tensor that is not finite is (weight|(gradient of )?activation) \S+\.", done.stderr), (
        done.stderr
    )
    assert f"the last checkpoint is {path}/checkpoints/{step - 1}." in done.stderr
    assert [record["step"] for record in read_metrics(path)] == list(range(1, step))


def test_a_step_that_is_not_finite_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and moments stay, the schedule continues, and so does the run."""
    path, right = tmp_path / "run", Step.accumulate
    line = [*TINY, "--mesh", "2x2", "--steps", "5", "--checkpoint.every", "1", "--output", str(path)]
    experiment = parse(line, "jaxdist.train", "").experiment
    third = dataset_of(experiment).batch(3, experiment.train.batch, 0).tokens.sum()

    def accumulate(self: Step, parameters: Any, batch: Batch, *scale: Any) -> Any:
        loss, gradients, rest = right(self, parameters, batch, *scale)
        planted = jnp.where(lax.psum(batch.tokens.sum(), TOKENS) == int(third), jnp.inf, 1.0)
        return loss, gradients | {"norm.scale": gradients["norm.scale"] * planted}, rest

    monkeypatch.setattr(Step, "accumulate", accumulate)
    main([*line, "--train.nonfinite", "skip"])
    records = read_metrics(path)
    assert [record["skipped"] for record in records] == [False, False, True, False, False]
    assert records[2]["grad_norm"] is None and records[2]["loss"] > 0
    saved = {step: checkpoint.read(path / "checkpoints" / str(step)) for step in (2, 3, 4)}
    flat = {step: weights(path / "checkpoints" / str(step)) for step in saved}
    assert all(np.array_equal(flat[2][name], flat[3][name]) for name in flat[2])
    assert not all(np.array_equal(flat[3][name], flat[4][name]) for name in flat[3])
    counts = {
        step: [int(part[n]) for part in s.optimizer if part for n in ("updates", "count") if n in part]
        for step, s in saved.items()
    }
    assert counts == {2: [2, 2], 3: [2, 3], 4: [3, 4]}  # of Adam, of the schedule

    stopped = tmp_path / "stopped"
    with pytest.raises(
        TrainingError, match=r"step 3: grad_norm = inf; .* is gradient norm.scale.*/stopped/checkpoints/2"
    ):
        main([*line[:-1], str(stopped)])
    assert [record["step"] for record in read_metrics(stopped)] == [1, 2]
    main([*line[:-1], str(stopped), "--resume", "--train.nonfinite", "skip"])  # as the message says
    assert all(np.array_equal(array, weights(path)[name]) for name, array in weights(stopped).items())


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
    main([*TINY, "--steps", "0", "--output", str(folder / "occupied")])
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_2_and_one_message(
    case: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv, says = BAD[case]
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    output = [] if "--output" in argv else ["--output", "new"]
    with pytest.raises(SystemExit) as end:
        exit_codes(partial(main, [*argv, *output]))
    told = capfd.readouterr().err
    assert end.value.code == 2 and told.count("error:") == 1 and re.search(says, told), told
    assert sorted(place.rglob("*")) == before, "something was written"


def test_bad_input_of_a_process() -> None:
    done = command("--mesh", "4x4", JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.fullmatch(r"error: .*'4x4' needs 16 devices, there are 8.*\n", done.stderr), done.stderr


def test_a_last_update_that_diverges_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    wild = ["--optimizer.learning_rate", "1e39", "--optimizer.warmup", "0", "--optimizer.decay", "constant"]
    done = command(*TINY, *wild, "--steps", "1", "--output", str(path))
    assert done.returncode == 1 and "step 1: validation_loss = nan" in done.stderr, done.stderr
    assert not (path / "checkpoints").exists() and not (path / "summary.json").exists()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """Also where nothing else would tell: the first weight is named, and the checkpoint before."""
    path = tmp_path / "run"
    wild = ["--optimizer.warmup", "0", "--optimizer.decay", "constant", "--checkpoint.every", "1"]
    wild += ["--train.validation_batches", "0", "--train.nonfinite", "skip", "--output", str(path)]
    assert command(*TINY, *wild, "--steps", "1").returncode == 0
    # The rate is none of what may be changed, so the config of the run is.
    config = path / "config.toml"
    config.write_text(re.sub("(?m)^learning_rate = .*", "learning_rate = 1e39", config.read_text()))
    done = command("--config", str(config), "--steps", "4", "--output", str(path), "--resume")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"step 2: its update made \S+ not finite\. .* the last checkpoint is \S+checkpoints/1\.", done.stderr
    )
    assert [entry.name for entry in (path / "checkpoints").iterdir()] == ["1"]


def test_a_finished_run_resumed_keeps_its_summary(straight: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(straight, copy)
    main([*TINY, "--mesh", "2x2", "--steps", "8", "--output", str(copy), "--resume"])
    assert (copy / "summary.json").read_text() == (straight / "summary.json").read_text()
    assert_same(straight, copy)


def test_a_mesh_of_what_is_left_needs_devices_to_count() -> None:
    done = command(*TINY, "--mesh", "-1x1")
    assert done.returncode == 2 and "-1 needs a known number of devices" in done.stderr


def test_the_default_run_learns() -> None:
    """The README's first command, the first seventh of it: 8 virtual devices, and a loss that only words explain.

    Bytes by how often they occur cost 3.3 nats.
    """
    done = command("--mesh", "2x4", "--device", "cpu", "--steps", "40", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    assert "running on 8 virtual CPU devices" in done.stdout
    validation = float(re.search(r"validation loss (\d+\.\d+)", done.stdout)[1])  # type: ignore[index]
    assert validation < 3.0, done.stdout
