"""Proofs against other references: transformers' models, and the run folder of another loop."""

import json
import math
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError, Experiment, read_record, write_record
from jaxdist.convert.kinds.hf import write_hf
from jaxdist.families import models
from jaxdist.runs.folder import RunFolder
from parity_tests.__main__ import main
from parity_tests.conftest import Runs, counted
from parity_tests.proof import bisect, levels
from parity_tests.proof.proof import Proof
from parity_tests.runs.run import JAX, Run
from parity_tests.runs.transformers_train import Double
from torch_ref.training.optim import learning_rate

pytest.importorskip("transformers")

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_loop.py"
STEPS = 6
RECORD = {"steps": STEPS, "optimizer.decay_steps": 20, "record.steps": f"1,{STEPS}", "record.tensors": "all"}
ONE = {"mesh": "1x1"}
MESHES = {
    "one": ONE,
    "fsdp": {"mesh": "2x1"},
    "ddp": {"mesh": "2x1", "strategy": "ddp"},
    "hybrid": {"mesh": "data=2,fsdp=2"},
}


def failed(a: Run, b: Run) -> list[str]:
    noise = levels.Noise(a, a)
    return [check.name for check in levels.agreement("mathematics", "", a, b, noise) if not check.holds]


@pytest.mark.parametrize(
    ("model", "mesh"),
    [("llama", "one"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", "fsdp"), ("gpt2", "ddp")))],
)
def test_transformers_trains_the_same(runs: Runs, model: str, mesh: str) -> None:
    """Qwen3 (with a window and Llama 3's rotation) and GPT-2 in float64 agree as closely as our twin."""
    ours = runs(JAX, model, ONE | RECORD)
    theirs = runs("transformers", model, MESHES[mesh] | RECORD | {"train.accumulation": 2})
    assert_same_training(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), [("mixtral", "hybrid"), ("qwen3_moe", "ddp")])
def test_a_mixture_of_transformers_trains_the_same(mixed: Runs, model: str, mesh: str) -> None:
    """Experts' gradients and moments, with the balance loss over the whole batch; another weight of that loss is
    found."""
    ours = mixed(JAX, model, ONE | RECORD | {"model.capacity": 0})
    theirs = mixed("transformers", model, MESHES[mesh] | RECORD | {"model.capacity": 0})
    assert_same_training(ours, theirs)
    wrong = mixed(JAX, model, ONE | RECORD | {"model.capacity": 0, "model.balance": 0.0500001})
    assert "loss" in failed(wrong, theirs)


def assert_same_training(ours: Run, theirs: Run) -> None:
    assert failed(ours, theirs) == []
    assert [check for check in counted(theirs) if not check.holds] == []
    for step in (1, STEPS):
        errors = bisect.errors(ours, theirs, step)
        assert sum(name.startswith("activation/") for name in errors) >= 20 and "activation/logits" in errors
        assert bisect.exact(ours, theirs, step, 1e-10) is None


def test_a_mistake_is_found_against_transformers(runs: Runs) -> None:
    wrong = runs(JAX, "llama", ONE | RECORD | {"optimizer.eps": 1e-7})
    theirs = runs("transformers", "llama", ONE | RECORD | {"train.accumulation": 2})
    assert "loss" in failed(wrong, theirs)
    found = bisect.exact(wrong, theirs, 1, 1e-10)
    assert found and found.tensor == "weights/embed.weight"


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "dim": 48, "head_dim": 4},
    "llama tied": {"tied": True, "dim": 48, "head_dim": 4},
    "llama 3": {"rope_scaling": "llama3", "rope_original_positions": 16, "dim": 48, "head_dim": 4},
    "mistral": {"window": 7},
    "qwen2": {"qkv_bias": True, "window": 7},
    "qwen3": {"qk_norm": True},
    "gpt2": {"family": "gpt2", "heads": 4},
    "gpt2 untied": {"family": "gpt2", "heads": 4, "tied": False},
    "mixtral": {"family": "mixtral", "experts": 8, "top_k": 3, "balance": 0.05},
    "qwen3 moe": {"family": "qwen3_moe", "experts": 8, "top_k": 3, "balance": 0.05, "qk_norm": True},
}
SIZES = {"layers": 2, "dim": 40, "hidden": 56, "vocab": 256, "positions": 64, "init_std": 0.1}
LLAMA = {"family": "llama", "heads": 12, "kv_heads": 4, "head_dim": 8}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_transformers(tmp_path: Path, family: str, mesh: str) -> None:
    model = SIZES | ({} if "gpt2" in family else LLAMA) | FAMILIES[family]
    values = {
        "model": model,
        "data": {"sequence": 32},
        "train": {"steps": STEPS, "batch": 8},
        "optimizer": {"warmup": 2, "clip": 0.5, "learning_rate": 0.01},
        "precision": {"policy": "fp64"},
        "parallel": MESHES[mesh],
    }
    proof = Proof.of(Experiment.parse(values, source="test"), tmp_path, "cpu", "transformers")
    start = proof.start()
    for side, kind in proof.needed():
        proof.run(side, kind, start)
    verdict = proof.verdict()
    assert verdict.word == "equivalent", verdict.failed


def test_float32_by_name_is_float64_within() -> None:
    x = torch.ones(3, dtype=torch.float64) / 3
    with Double():
        found = [x.float(), x.to(torch.float32), x.type(torch.float32), torch.zeros(3, dtype=torch.float32) + x]
        found.append(torch.softmax(x, 0, dtype=torch.float32))
    assert all(y.dtype == torch.float64 for y in found) and x.float().dtype == torch.float32


# ---- the run folder of another loop


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(config, run folder) of the example, a PyTorch loop with transformers' Llama in float32."""
    folder = tmp_path_factory.mktemp("loop")
    config, start = begun(folder)
    return config, looped(config, start, folder / "run")


def begun(folder: Path, policy: str = "fp32") -> tuple[Path, Path]:
    """(config, starting weights) of a short run."""
    values = {
        "model": SIZES | LLAMA | FAMILIES["llama"],
        "data": {"sequence": 32},
        "train": {"steps": STEPS, "batch": 8},
        "optimizer": {"warmup": 2, "clip": 0.5, "learning_rate": 0.01},
        "precision": {"policy": policy},
    }
    config = folder / "config.toml"
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    return config, Proof.of(Experiment.parse(values, source="test"), folder).start()


def looped(config: Path, start: Path, run: Path, example: Path = EXAMPLE) -> Path:
    """Run folder of the example, or of a script like it."""
    command = [sys.executable, str(example), str(config), str(start), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shutil.copytree(start, run / "start")
    return run


def proved(run: Path, output: Path) -> dict[str, Any]:
    """verdict.json of the proof of a run folder."""
    with suppress(SystemExit):
        main(["--against", str(run), "--output", str(output), "--device", "cpu"])
    found: dict[str, Any] = json.loads((output / "verdict.json").read_text(encoding="utf-8"))
    return found


def test_the_example_is_short() -> None:
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert sum("# <-" in line for line in lines[lines.index('"""', 1) :]) == 7
    assert sum(bool(line) for line in lines[lines.index('"""', 1) + 1 :]) <= 30


@pytest.mark.parametrize("example", ["own_loop", "nanogpt"])
@pytest.mark.parametrize("given", [["--help"], [], ["config.toml"]], ids=["help", "none", "one"])
def test_the_command_line_of_an_example(
    example: str, given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [example, *given])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE.with_stem(example)), run_name="__main__")
    assert end.value.code == (0 if given == ["--help"] else 2)
    output = "".join(capsys.readouterr())
    assert "CONFIG.toml" in output and "RUN_DIR" in output


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "own_loop": (
        {"optimizer": {"name": "lion"}, "precision": {"policy": "bf16"}},
        ("optimizer.name", "precision.policy"),
    ),
    "nanogpt": (
        {"optimizer": {"decay": "linear"}, "model": {"family": "gpt2"}},
        ("optimizer.decay", "precision.policy"),
    ),
    "own_loop of no steps": ({"train": {"steps": 0}}, ("train.steps = 0",)),
    "nanogpt of a llama": ({"model": {"family": "llama"}}, ("model.family = 'llama'",)),
    "own_loop of a bad field": (
        {"optimizer": {"decay": "cosign"}},
        ("optimizer.decay", "'cosine', 'linear' or 'constant'"),
    ),
    "nanogpt of a bad field": ({"train": {"batch": 0}}, ("train.batch",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_example_refuses_fields_that_its_loop_ignores(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values, message = REFUSED[case]
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["example", str(config), str(tmp_path / "hf"), str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE.with_stem(case.partition(" ")[0])), run_name="__main__")
    assert end.value.code == 2 and not (tmp_path / "run").exists()
    output = capsys.readouterr().err
    assert output.startswith("error: ") and all(part in output for part in message), output


SCHEDULES = [{"warmup": 3}, {"warmup": 1, "decay_steps": 2}, {"warmup": 0, "decay": "linear"}, {"decay": "constant"}]


@pytest.mark.parametrize("optimizer", SCHEDULES, ids=["all warm-up", "early end", "linear", "constant"])
@pytest.mark.parametrize("policy", ["fp32", "fp64"])
def test_the_example_honours_schedule_and_precision(tmp_path: Path, optimizer: dict[str, Any], policy: str) -> None:
    model = SIZES | LLAMA | {"layers": 1, "dim": 12, "heads": 2, "kv_heads": 1, "head_dim": 4}
    values = {
        "model": model,
        "data": {"sequence": 8},
        "train": {"steps": 3, "batch": 1},
        "optimizer": {"clip": 0.0} | optimizer,
        "precision": {"policy": policy},
    }
    config, experiment = tmp_path / "config.toml", Experiment.parse(values, source="test")
    config.write_text(tomli_w.dumps(values), encoding="utf-8")
    random = np.random.default_rng(0)
    shapes = {name: spec.shape for name, spec in models.param_specs(models.build(experiment.model)).items()}
    weights = {name: random.normal(0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    write_hf(tmp_path / "hf", experiment.model, weights)
    runpy.run_path(str(EXAMPLE))["main"](config, tmp_path / "hf", tmp_path / "run")
    run = Run("mine", tmp_path / "run")
    rates = [learning_rate(experiment.optimizer, 3, step) for step in (1, 2, 3)]
    assert [record["learning_rate"] for record in run.metrics] == rates
    assert {w.dtype.name for w in run.states.values()} == {{"fp32": "float32", "fp64": "float64"}[policy]}


@pytest.mark.long
@pytest.mark.slow
def test_a_custom_loop(loop: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = loop
    verdict = proved(run, tmp_path / "proof")
    assert verdict["verdict"] == "equivalent"
    assert "gradients of run run: not compared, as it recorded none" in verdict["notes"]
    assert (tmp_path / "proof" / "report.html").stat().st_size > 10_000

    # The same run with slightly changed final weights, and with a changed loss.
    def judged(change: Callable[[Path], None]) -> set[str]:
        wrong = tmp_path / change.__name__
        shutil.copytree(run, wrong)
        change(wrong)
        reference = Run("wrong", wrong)
        proof = Proof.against(reference, reference.experiment, tmp_path / "unused")
        proof.init = wrong / "start"
        for kind in proof.kinds:
            proof.done[JAX, kind] = Run(JAX, tmp_path / "proof" / "runs" / f"{JAX}-{kind}")
            if not proof.done[JAX, kind].path.exists():  # on one device there is no separate run on the mesh
                proof.done[JAX, kind] = proof.done[JAX, "one"]
        return {check.name for check in proof.verdict().failed}

    def weights(folder: Path) -> None:
        record = read_record(folder / "record" / f"{STEPS}.safetensors")
        random = np.random.default_rng(0)
        off = {n: a * (1 + 1e-3 * random.standard_normal(a.shape)).astype(a.dtype) for n, a in record.items()}
        write_record(folder, STEPS, off)

    def loss(folder: Path) -> None:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(record | {"loss": record["loss"] * (1 + 1e-4)}) for record in records]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def norm(folder: Path) -> None:
        """Logs the norm after clipping."""
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(record | {"grad_norm": min(record["grad_norm"], 0.5)}) for record in records]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    assert judged(weights) == {f"cost to {kind} at the end" for kind in ("weights", "exp_avg", "exp_avg_sq")}
    assert judged(loss) == {"cost to loss"}
    assert judged(norm) == {"cost to grad_norm"}


@pytest.mark.slow
def test_an_eps_that_float32_hides_is_reported(tmp_path: Path) -> None:
    """1e-6 for 1e-5 below activations of variance 4: float32 cannot show it, and the sentence says so."""
    config, start = begun(tmp_path)
    weights = load_file(start / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 20
    save_file(weights, start / "model.safetensors")
    script, loads = EXAMPLE.read_text(encoding="utf-8"), "from_pretrained(start, "
    assert script.count(loads) == 1
    example = tmp_path / "loop.py"
    example.write_text(script.replace(loads, f"{loads}rms_norm_eps=1e-6, "), encoding="utf-8")
    run = looped(config, start, tmp_path / "run", example)
    verdict = proved(run, tmp_path / "proof")
    assert verdict["verdict"] == "equivalent"
    assert "model.norm_eps (a tenth is within the noise of float32)" in verdict["not_compared"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("within", "word"), [("in_dtype(experiment)", "equivalent"), ("nullcontext(torch.float64)", "not_equivalent")]
)
def test_a_loop_in_float64(tmp_path: Path, within: str, word: str) -> None:
    """transformers' norms and rotation cast to float32; the README says how to run them in float64."""
    script = EXAMPLE.read_text(encoding="utf-8").replace(
        "import torch\n", "from contextlib import nullcontext\n\nimport torch\n"
    )
    assert script.count("in_dtype(experiment)") == 1
    example = tmp_path / "loop.py"
    example.write_text(script.replace("in_dtype(experiment)", within), encoding="utf-8")
    run = looped(*begun(tmp_path, "fp64"), tmp_path / "run", example)
    verdict = proved(run, tmp_path / "proof")
    assert verdict["verdict"] == word, verdict["sentence"]
    assert any("computes partly in float32" in note for note in verdict["notes"]) is (word != "equivalent")


def cut(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text("\n".join(metrics.read_text(encoding="utf-8").splitlines()[:-1]) + "\n", encoding="utf-8")


def half_a_line(run: Path) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text(encoding="utf-8")[:-20], encoding="utf-8")


def not_a_number(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    records[3]["loss"] = math.nan
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")


def no_states(run: Path) -> None:
    shutil.rmtree(run / "record")


def no_numbers(run: Path) -> None:
    (run / "record" / f"{STEPS}.safetensors").write_bytes(b"no safetensors")


def no_start(run: Path) -> None:
    shutil.rmtree(run / "start")


def no_config(run: Path) -> None:
    (run / "config.toml").unlink()


def no_json(run: Path) -> None:
    (run / "summary.json").write_text("{", encoding="utf-8")


def no_list(run: Path) -> None:
    (run / "summary.json").write_text('{"collectives": 3}', encoding="utf-8")


def no_kind(run: Path) -> None:
    file = run / "record" / f"{STEPS}.safetensors"
    save_file(load_file(file) | {"grad/norm.weight": np.ones(3, np.float32)}, file)


def no_tensors(run: Path) -> None:
    save_file({}, run / "record" / "2.safetensors")


def no_toml(run: Path) -> None:
    (run / "config.toml").write_text("[train", encoding="utf-8")


BAD: dict[Callable[[Path], None], str] = {
    cut: "has 5 complete steps, from 1 to 5, where train.steps = 6",
    half_a_line: "has 5 complete steps, from 1 to 5, where train.steps = 6",
    not_a_number: "loss = nan at step 4",
    no_states: "neither a checkpoint nor a record of weights",
    no_numbers: "is damaged",
    no_start: "give the weights that it started from by --init",
    no_json: "summary.json is damaged",
    no_list: "collectives is not a list",
    no_kind: r"has tensors of unknown kind 'grad'; did you mean 'gradient'\\?",
    no_tensors: "2.safetensors has no tensors; name them KIND/NAME",
    no_toml: r"--against .*config.toml: .*; give a readable TOML file",
    no_config: "not a run folder, it lacks config.toml",
}


@pytest.mark.long
@pytest.mark.parametrize("damage", BAD)
def test_a_folder_that_cannot_be_judged(
    loop: tuple[Path, Path], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """Exit 2 with one message, and nothing is written."""
    run, output = tmp_path / "run", tmp_path / "proof"
    shutil.copytree(loop[1], run)
    damage(run)
    with pytest.raises(ConfigError, match=BAD[damage]):
        main(["--against", str(run), "--output", str(output)])
    assert not output.exists()


@pytest.mark.long
def test_a_folder_of_another_experiment(loop: tuple[Path, Path], tmp_path: Path) -> None:
    config, run = loop
    line = ["--against", str(run), "--output", str(tmp_path / "proof"), "--config", str(config)]
    with pytest.raises(ConfigError, match=r"is a run with optimizer.learning_rate = 0.01, not 0.02"):
        main([*line, "--optimizer.learning_rate", "0.02"])
    with pytest.raises(
        ConfigError, match=rf"is a run of {STEPS} steps, not {2 * STEPS}; give --steps {STEPS}, or leave out"
    ):
        main([*line[:4], "--steps", str(2 * STEPS), "--optimizer.decay_steps", str(STEPS)])
    with pytest.raises(ConfigError, match=r"--first 20: of .* all steps are proved; leave it out"):
        main([*line[:4], "--first", "20"])
    with pytest.raises(ConfigError, match=r"--output .*proof is in the run to be proved, .*; give another folder"):
        main([*line[:3], str(run / "proof")])
    # names the run's number of layers, not 4
    with pytest.raises(ConfigError, match=r"remat_every = 3 does not divide model.layers = 2"):
        main([*line[:4], "--memory.remat_every", "3"])
    refused = r"--against .*nowhere: not a run folder, .* give torch, transformers, or a run"
    with pytest.raises(ConfigError, match=refused):
        main(["--against", str(tmp_path / "nowhere"), "--output", str(tmp_path / "proof")])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "zero1"], "--strategy"),
        (["--strategy", "ddp", "--precision", "bf16"], "--strategy"),
        (["--memory.loss_chunks", "4"], r"memory.loss_chunks = 4: .*; leave it out, or use --against torch"),
    ],
)
def test_fields_that_transformers_lacks(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main(["--against", "transformers", "--mesh", "2x1", "--output", str(tmp_path / "proof"), *more])


def test_a_run_folder_by_hand(tmp_path: Path) -> None:
    """The proof reads what a loop writes through RunFolder."""
    experiment = Experiment.parse({"train": {"steps": 1}}, source="test")
    folder = RunFolder(tmp_path / "run", experiment)
    folder.create(experiment)
    folder.log({"step": 1, "loss": 1.0, "grad_norm": 1.0, "learning_rate": 0.1})
    folder.record(1, {f"{kind}/w": np.ones(2) for kind in ("weights", "exp_avg", "exp_avg_sq")})
    Run("mine", folder.path).check()
