"""A ResNet by its command lines: training, resume, evaluation, and other programs' files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.convert.__main__ import main as convert
from jaxdist.evaluate import main as evaluate
from jaxdist.runs.folder import read_metrics
from jaxdist.train import main as train
from jaxdist.training import checkpoint

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")

LINE = [
    "--model.family", "resnet", "--model.block", "basic", "--model.depths", "1,1", "--model.widths", "8,16",
    "--model.stem", "8", "--model.channels", "1", "--model.image", "6", "--model.classes", "3", "--device", "cpu",
    "--train.batch", "8", "--train.accumulation", "2", "--optimizer.ema", "0.5", "--data.validation", "0.25",
    "--checkpoint.every", "2",
]  # fmt: skip


def weights(path: Path) -> dict[str, np.ndarray]:
    return checkpoint.read(path).parameters


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two devices."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    np.savez(folder / "a.npz", images=random.random((64, 6, 6), np.float32), labels=random.integers(3, size=64))
    train(
        [*LINE, "--mesh", "2x1", "--data.path", str(folder / "a.npz"), "--steps", "4", "--output", str(folder / "run")]
    )
    return folder / "run"


@pytest.mark.slow
def test_statistics_are_kept_and_resume_is_bitwise(run: Path) -> None:
    found = weights(run)
    memory = json.loads((run / "summary.json").read_text())["memory"]
    assert memory["gradients"] == memory["parameters"]
    counts = {int(n) for name, n in found.items() if name.endswith("num_batches_tracked")}
    assert counts == {8}  # two microbatches per step
    kept = checkpoint.kept_in(checkpoint.read(run).optimizer)
    assert kept.keys() == {"exp_avg", "exp_avg_sq", "ema"}
    assert not any("running" in name or "tracked" in name for arrays in kept.values() for name in arrays)
    again, line = run.parent / "again", [*LINE, "--mesh", "2x1", "--data.path", str(run.parent / "a.npz")]
    train([*line, "--steps", "2", "--optimizer.decay_steps", "4", "--output", str(again)])
    train([*line, "--steps", "4", "--optimizer.decay_steps", "4", "--output", str(again), "--resume"])
    resumed = weights(again)
    assert found.keys() == resumed.keys()
    assert all(found[name].tobytes() == resumed[name].tobytes() for name in found)
    assert [r["loss"] for r in read_metrics(again)] == [r["loss"] for r in read_metrics(run)]
    assert read_metrics(run)[-1]["tokens"] == 32, "images"
    assert json.loads((run / "summary.json").read_text())["memory"]["statistics"] > 0


def test_evaluation_by_running_statistics(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def evaluated(*more: str) -> Any:
        capsys.readouterr()
        evaluate(["--checkpoint", str(run), "--json", "--device", "cpu", *more])
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    found = evaluated()
    assert found.keys() == {"loss", "accuracy", "images"} and found["images"] == 16
    assert 0 <= found["accuracy"] <= 1
    assert evaluated("--batch", "2")["loss"] == pytest.approx(found["loss"], rel=1e-5), "no statistics of the batch"
    assert evaluated("--ema")["loss"] != found["loss"]


def test_other_programs_have_the_same(run: Path, tmp_path: Path) -> None:
    """The bits survive a torch file with its optimizer, torch_ref's checkpoint, and the way back."""
    convert([str(run), str(tmp_path / "a.pt")])
    convert([str(tmp_path / "a.pt"), str(tmp_path / "dcp"), "--to", "dcp"])
    convert([str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "orbax"])
    here, there = checkpoint.read(run), checkpoint.read(tmp_path / "back")
    pairs = [(here.parameters, there.parameters)]
    pairs += [(a, checkpoint.kept_in(there.optimizer)[k]) for k, a in checkpoint.kept_in(here.optimizer).items()]
    for a, b in pairs:
        assert a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def test_names_of_torchvision(run: Path, tmp_path: Path) -> None:
    """A state dict of torchvision's models becomes the same weights."""
    convert([str(run), str(tmp_path / "hf"), "--to", "hf"])
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    renamed = {vision(name): t for name, t in theirs.items()}
    assert renamed["bn1.num_batches_tracked"].dtype is torch.int64
    torch.save(renamed, tmp_path / "resnet.pt")
    assert {"conv1.weight", "bn1.running_mean", "layer2.0.downsample.1.weight", "fc.bias"} < renamed.keys()
    convert([str(tmp_path / "resnet.pt"), str(tmp_path / "ours"), "--to", "orbax", "--model", str(run / "config.toml")])
    here, there = weights(run), weights(tmp_path / "ours")
    assert all(np.array_equal(here[name], there[name]) for name in here)
    convert([str(tmp_path / "ours"), str(tmp_path / "back.pt")])
    back = torch.load(tmp_path / "back.pt")
    assert back.keys() == renamed.keys() and all(torch.equal(back[name], t) for name, t in renamed.items())
    assert all(back[name].dtype == t.dtype for name, t in renamed.items())


def vision(name: str) -> str:
    """torchvision's name of a tensor of Hugging Face's."""
    if name.startswith("classifier.1."):
        return name.replace("classifier.1", "fc")
    name = name.replace("resnet.embedder.embedder.", "stem.").replace("resnet.encoder.stages.", "")
    place, _, rest = name.rpartition(".")
    module, _, kind = place.rpartition(".")
    conv = kind == "convolution"
    if module == "stem":
        return f"{'conv1' if conv else 'bn1'}.{rest}"
    stage, _, block, *part = module.split(".")
    if part == ["shortcut"]:
        return f"layer{int(stage) + 1}.{block}.downsample.{0 if conv else 1}.{rest}"
    return f"layer{int(stage) + 1}.{block}.{'conv' if conv else 'bn'}{int(part[1]) + 1}.{rest}"
