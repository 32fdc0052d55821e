"""A padded vocabulary gives the same model, new tokens a larger one: on both sides, exported and imported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tomli_w
import torch
from safetensors.numpy import load_file

from jaxdist import evaluate
from jaxdist.config import ConfigError, Experiment, Model
from jaxdist.convert import write_hf
from jaxdist.convert.__main__ import main as convert
from jaxdist.convert.content import PARAMETERS
from jaxdist.convert.entries import shapes_of
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.formats.foreign import SINGLE
from jaxdist.formats.hf import read_model
from jaxdist.formats.sources import kind_of
from jaxdist.train import main as train
from jaxdist.training import step as jax_step
from parity_tests.conftest import run
from parity_tests.runs.run import Run
from torch_ref.families.loss import cross_entropy
from torch_ref.families.models import build
from torch_ref.training import step as torch_step

pytestmark = pytest.mark.long

TwoRuns = Callable[[str], tuple[Path, Path]]
V = 61  # no mesh divides it
SIZES: dict[str, Any] = {"layers": 1, "dim": 16, "heads": 2, "hidden": 24, "vocab": V, "positions": 16}
MODELS: dict[str, Model] = {
    "llama": Llama(**SIZES, kv_heads=2, head_dim=8, init_std=0.3),
    "gpt2": GPT2(**SIZES, family="gpt2", init_std=0.3),
}
SIDES = ("jaxdist", "torch_ref")
PLAIN: dict[str, Any] = {"mesh": "1x1"}
PADDED: dict[str, Any] = {"mesh": "1x2", "model.vocab_multiple": 4}
SAME = 1e-12
OF_TOKENS = ("model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TwoRuns:
    """made(model) -> a config, and a Hugging Face folder with weights of its model."""
    paths = {}
    for name, model in MODELS.items():
        folder, rng = tmp_path_factory.mktemp(name), np.random.default_rng(0)
        write_hf(folder / "hf", model, {n: rng.normal(0, 0.3, shape) for n, shape in shapes_of(model).items()})
        np.save(folder / "ids.npy", rng.integers(0, V, 4000).astype(np.uint16))
        values = {
            "model": model.model_dump(),
            "data": {"path": str(folder / "ids.npy"), "sequence": 16, "validation": 0.1},
            "train": {"batch": 4, "steps": 3, "validation_batches": 2},
            "optimizer": {"warmup": 0, "learning_rate": 0.01},
            "precision": {"policy": "fp64"},
        }
        (folder / "config.toml").write_text(tomli_w.dumps(values))
        paths[name] = folder / "config.toml", folder / "hf"
    return paths.__getitem__


def curve(done: Run) -> np.ndarray:
    steps = [[record["loss"], record["grad_norm"]] for record in done.metrics]
    return np.array([*steps, [done.summary["validation_loss"], 0.0]])


def exported(source: Path, folder: Path) -> dict[str, np.ndarray]:
    """A run's weights as in its Hugging Face folder."""
    convert([str(source), str(folder), "--to", "hf"])
    return load_file(folder / SINGLE)


def rows(tensors: dict[str, np.ndarray]) -> set[int]:
    """Numbers of rows of the vocabulary's tensors."""
    return {len(tensors[name]) for name in OF_TOKENS if name in tensors}


def check_grown(found: dict[str, np.ndarray], old: dict[str, np.ndarray], size: int) -> None:
    """Old rows are unchanged, and new rows are the mean of the old."""
    assert rows(found) == {size}
    for name, array in old.items():
        np.testing.assert_array_equal(found[name][: len(array)], array)
        new = found[name][len(array) :]
        np.testing.assert_allclose(new, np.broadcast_to(array.mean(0), new.shape), rtol=SAME, atol=1e-15)


@pytest.mark.parametrize(("name", "chunks"), [("llama", 1), ("gpt2", 3)])
@pytest.mark.slow
def test_padding_changes_nothing(name: str, chunks: int, made: TwoRuns, tmp_path: Path) -> None:
    """Losses, norms and weights under tensor parallelism, with the loss at once or in chunks."""
    config, hf = made(name)
    padded = PADDED | {"memory.loss_chunks": chunks}
    plain = run("jaxdist", tmp_path / "plain", config, PLAIN, "--init", str(hf))
    right, weights = curve(plain), exported(plain.path, tmp_path / "plain-hf")
    for side in SIDES:
        done = run(side, tmp_path / side, config, padded, "--init", str(hf))
        np.testing.assert_allclose(curve(done), right, rtol=SAME)
        found = exported(done.path, tmp_path / f"{side}-hf")
        assert rows(found) == {V} and read_model(tmp_path / f"{side}-hf").vocab == V
        for tensor, array in weights.items():
            np.testing.assert_allclose(found[tensor], array, rtol=1e-9, atol=1e-11, err_msg=f"{side} {tensor}")


@pytest.mark.slow
@pytest.mark.parametrize("sides", [("jaxdist",), SIDES], ids="-".join)
def test_new_tokens_begin_as_the_mean_and_are_trained(sides: tuple[str, ...], made: TwoRuns, tmp_path: Path) -> None:
    config, hf = made("llama")
    larger, old, found = PADDED | {"model.vocab": V + 2}, load_file(hf / SINGLE), {}
    for side in sides:
        begun = run(side, tmp_path / side / "begun", config, larger | {"steps": 0}, "--init", str(hf))
        start = exported(begun.path, tmp_path / side / "begun-hf")
        check_grown(start, old, V + 2)
        done = run(side, tmp_path / side / "done", config, larger, "--init", str(begun.path))
        end = exported(done.path, tmp_path / side / "done-hf")
        assert all((end[name][V:] != start[name][V:]).all() for name in OF_TOKENS[:2])  # each token has a probability
        found[side] = curve(done)
    for other in sides[1:]:
        np.testing.assert_allclose(found[other], found["jaxdist"], rtol=SAME)


@pytest.mark.slow
def test_a_checkpoint_is_padded_otherwise(made: TwoRuns, tmp_path: Path) -> None:
    """A run's checkpoint starts one with more tokens and other padding; removing the padding restores it."""
    config, hf = made("gpt2")
    four = tmp_path / "four.toml"
    four.write_text(config.read_text().replace("vocab_multiple = 1", "vocab_multiple = 4"))
    old = load_file(hf / SINGLE)
    for side, kind in zip(SIDES, ("orbax", "dcp"), strict=True):
        convert([str(hf), str(tmp_path / side / "source"), "--to", kind, "--model", str(four)])
        check_grown(exported(tmp_path / side / "source", tmp_path / side / "source-hf"), old, V)
        settings = {"model.vocab": V + 3, "model.vocab_multiple": 32, "steps": 0}
        line = ("--init", str(tmp_path / side / "source"))
        other = run(side, tmp_path / side / "other", config, settings, *line)
        check_grown(exported(other.path, tmp_path / side / "other-hf"), old, V + 3)


def test_moments_go_out_and_come_back(made: TwoRuns, tmp_path: Path) -> None:
    """A torch file has no padding; read back, padding has no moments, and the run continues."""
    config, hf = made("llama")
    line = ["--config", str(config), "--mesh", "1x2", "--model.vocab_multiple", "4", "--device", "cpu"]
    line += ["--train.validation_batches", "0", "--optimizer.decay_steps", "5"]
    train([*line, "--init", str(hf), "--output", str(tmp_path / "run")])
    convert([str(tmp_path / "run"), str(tmp_path / "file.pt")])
    saved = torch.load(tmp_path / "file.pt", weights_only=True)["model"]
    assert {len(saved[name]) for name in OF_TOKENS[:2]} == {V}
    own = str(tmp_path / "run" / "config.toml")
    convert([str(tmp_path / "file.pt"), str(tmp_path / "back"), "--to", "orbax", "--model", own])
    before, after = (KINDS[kind_of(path)].format.read_content(path) for path in (tmp_path / "run", tmp_path / "back"))
    assert before.groups.keys() == after.groups.keys() > {PARAMETERS}
    assert before.experiment.model == after.experiment.model
    for group, leaves in before.groups.items():
        for name, axis in (("embed.embedding", 0), ("lm_head.kernel", 1)):
            one, other = (np.moveaxis(leaf.read(), axis, 0) for leaf in (leaves[name], after.groups[group][name]))
            assert len(one) == len(other) == 64
            np.testing.assert_array_equal(one[:V], other[:V])
            assert other[V:].any() == (group == PARAMETERS)
    train([*line, "--steps", "5", "--output", str(tmp_path / "back"), "--resume"])


def test_logits_are_those_of_tokens(made: TwoRuns, tmp_path: Path) -> None:
    config, hf = made("gpt2")
    four = tmp_path / "four.toml"
    four.write_text(config.read_text().replace("vocab_multiple = 1", "vocab_multiple = 4"))
    convert([str(hf), str(tmp_path / "padded"), "--to", "orbax", "--model", str(four)])
    np.save(tmp_path / "tokens.npy", np.arange(24).reshape(2, 12))
    found = []
    for i, (source, mesh) in enumerate([(hf, "1x1"), (tmp_path / "padded", "1x2")]):
        files = ["--tokens", str(tmp_path / "tokens.npy"), "--logits", str(tmp_path / f"{i}.npy")]
        evaluate.main(["--checkpoint", str(source), *files, "--mesh", mesh, "--device", "cpu", "--precision", "fp64"])
        found.append(np.load(tmp_path / f"{i}.npy"))
    assert {array.shape for array in found} == {(2, 12, V)}
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_without_the_mask_padding_takes_probability(
    made: TwoRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, hf = made("llama")
    line = ["--config", str(config), "--model.vocab_multiple", "4", "--device", "cpu", "--steps", "1"]
    line += ["--train.validation_batches", "0", "--checkpoint.final", "false", "--init", str(hf)]
    losses = []
    for name in ("masked", "not"):
        train([*line, "--output", str(tmp_path / name)])
        losses.append(Run("jaxdist", tmp_path / name).metrics[0]["loss"])
        monkeypatch.setattr(jax_step, "mask_padded_vocab", lambda logits, model: logits)
        jax.clear_caches()
    assert losses[1] > losses[0] + 0.01

    model = Llama(**SIZES, kv_heads=2, head_dim=8, vocab_multiple=4)
    tokens = torch.arange(24).reshape(2, 12)
    logits = build(model)(tokens)
    right = cross_entropy(logits[..., :V], tokens)
    torch.testing.assert_close(torch_step.nats(logits, tokens, model), right)
    assert cross_entropy(logits, tokens) > right + 0.1


@pytest.mark.parametrize(("mesh", "multiple", "fix"), [("1x2", 1, 2), ("1x4", 1, 4), ("1x4", 6, 12)])
def test_the_fix_that_a_mesh_asks_for_is_followed(mesh: str, multiple: int, fix: int) -> None:
    model = MODELS["gpt2"].model_dump() | {"heads": 4, "vocab_multiple": multiple}
    values: dict[str, Any] = {"data": {"sequence": 16}, "parallel": {"mesh": mesh}, "train": {"batch": 8}}
    experiment = Experiment.parse(values | {"model": model}, "test")
    with pytest.raises(ConfigError, match=rf"pad it by model.vocab_multiple = {fix}$"):
        experiment.check_mesh(experiment.parallel.axes(None))
    experiment = Experiment.parse(values | {"model": model | {"vocab_multiple": fix}}, "test")
    experiment.check_mesh(experiment.parallel.axes(None))


@pytest.mark.parametrize("name", MODELS)
def test_verification_with_new_tokens_compares_the_old_ones(
    name: str, made: TwoRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers computes the source's logits for the source's tokens."""
    _, hf = made(name)
    larger = {"model": MODELS[name].model_dump() | {"vocab": V + 5, "vocab_multiple": 4}, "data": {"sequence": 16}}
    (tmp_path / "larger.toml").write_text(tomli_w.dumps(larger))
    for target, *options in (("run",), ("hf", "--to", "hf")):
        convert([str(hf), str(tmp_path / target), "--model", str(tmp_path / "larger.toml"), "--verify", *options])
        assert f"×{V}, of SOURCE by transformers and of TARGET by" in capsys.readouterr().out
