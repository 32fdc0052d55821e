"""The state of every optimizer, and averages of weights, through every kind of checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from jaxdist.config import ConfigError
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import PARAMETERS
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.scripts_test import same
from jaxdist.evaluate import main as evaluate
from jaxdist.families.resnet.config import ResNet
from jaxdist.formats.sources import kind_of

torch = pytest.importorskip("torch", reason="torch files need torch: pip install 'jaxdist[torch]'")

MODEL = MODELS["LlamaForCausalLM"]
IMAGES = ResNet(family="resnet", block="basic", depths=(1, 1), widths=(16, 32), stem=8, image=8, classes=10)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"ema": 0.999},
    "adam": {"name": "adam"},
    "sgd": {"name": "sgd", "momentum": 0.8, "nesterov": True},
    "plain sgd": {"name": "sgd", "momentum": 0.0, "ema": 0.99},
    "lion": {"name": "lion", "beta2": 0.99, "ema": 0.999},
    "adafactor": {"name": "adafactor", "ema": 0.999},
    "muon": {"name": "muon", "momentum": 0.95, "nesterov": True},
}
CLASSES: dict[str, Any] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.8, 0.99)),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "sgd without momentum": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3, d=2.0),
}


def settings_of(path: Path) -> dict[str, Any]:
    return KINDS[kind_of(path)].format.read_content(path).experiment.optimizer.model_dump()


@pytest.mark.long
@pytest.mark.parametrize("name", often(OPTIMIZERS, ["adamw"]))
def test_there_and_back(name: str, tmp_path: Path) -> None:
    first = written(tmp_path / "first", "orbax", content_of(MODEL, **OPTIMIZERS[name]))
    main([str(first), str(tmp_path / "dcp"), "--to", "dcp", "--verify"])
    main([str(tmp_path / "dcp"), str(tmp_path / "file.pt"), "--verify"])
    main([str(tmp_path / "file.pt"), str(tmp_path / "back"), "--to", "orbax", "--verify"])
    assert tensors(tmp_path / "back") == tensors(first)
    for path in ("dcp", "file.pt", "back"):
        assert settings_of(tmp_path / path) == settings_of(first)


@pytest.mark.long
@pytest.mark.parametrize("name", often(["adafactor", "muon"], ["muon"]))
def test_states_of_experts(name: str, tmp_path: Path) -> None:
    """Stacked in jaxdist and torch_ref, separate in Hugging Face's files."""
    first = written(tmp_path / "first", "orbax", content_of(MODELS["MixtralForCausalLM"], name=name))
    main([str(first), str(tmp_path / "dcp"), "--to", "dcp"])
    main([str(tmp_path / "dcp"), str(tmp_path / "file.pt")])
    main([str(tmp_path / "file.pt"), str(tmp_path / "back"), "--to", "orbax"])
    assert tensors(tmp_path / "back") == tensors(first)


@pytest.mark.long
def test_factors_of_convolutions(tmp_path: Path) -> None:
    """torch factors the last two dimensions of [O, I, Y, X], the first two of our [Y, X, I, O]."""
    content = content_of(IMAGES, name="adafactor")
    stem = content.groups["row_var"]["stem.conv.kernel"].shape
    first = written(tmp_path / "first", "orbax", content)
    main([str(first), str(tmp_path / "dcp"), "--to", "dcp"])
    Y, _, I, O = stem  # noqa: E741
    there = KINDS["dcp"].format.read_content(tmp_path / "dcp").groups["row_var"]["stem.conv.weight"].shape
    assert (stem[1], there) == (1, (O, I, Y, 1))
    main([str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "orbax"])
    assert tensors(tmp_path / "back") == tensors(first)


@pytest.mark.long
@pytest.mark.slow
def test_factors_of_fused_matrices_are_refused(tmp_path: Path) -> None:
    """Hugging Face's GPT-2 fuses query, key and value: column means mix all three."""
    first = written(tmp_path / "first", "orbax", content_of(MODELS["GPT2LMHeadModel"], name="adafactor"))
    with pytest.raises(
        ConfigError, match=r"col_var of transformer.h.\{layer\}.attn.c_attn.weight|row_var of transformer"
    ):
        main([str(first), str(tmp_path / "a.pt")])
    assert not (tmp_path / "a.pt").exists()
    main([str(first), str(tmp_path / "dcp"), "--to", "dcp"])
    main([str(tmp_path / "dcp"), str(tmp_path / "back"), "--to", "orbax"])
    assert tensors(tmp_path / "back") == tensors(first)


def module_of(file: Path) -> Any:
    """A module with a torch file's parameters."""
    module = torch.nn.Module()
    for name, tensor in torch.load(file, weights_only=True)["model"].items():
        module.register_parameter(name.replace(".", "-"), torch.nn.Parameter(tensor))
    return module


def test_torch_takes_an_average(tmp_path: Path) -> None:
    file = written(tmp_path / "a.pt", "torch", content_of(MODEL, ema=0.999))
    module = module_of(file)
    average = torch.load(file, weights_only=True)["ema"]
    averaged = torch.optim.swa_utils.AveragedModel(module)
    names = {n: n.replace(".", "-").replace("module-", "module.", 1) for n in average}
    averaged.load_state_dict({names[n]: tensor for n, tensor in average.items()})
    assert int(averaged.n_averaged) == 6


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_torch_takes_a_state(name: str, tmp_path: Path) -> None:
    file = written(tmp_path / "a.pt", "torch", content_of(MODEL, **OPTIMIZERS[name]))
    optimizer = CLASSES[name]([{"params": [p]} for p in module_of(file).parameters()])
    saved = torch.load(file, weights_only=True)["optimizer"]
    instance = CLASSES[name](list(module_of(file).parameters()))
    saved["param_groups"] = [saved["param_groups"][0] | {"params": [*saved["state"]], "weight_decay": 0.0}]
    del optimizer, saved["param_groups"][0]["param_names"]
    instance.load_state_dict(saved)
    kinds = {kind for state in instance.state.values() for kind in state}
    assert kinds == {"step", *content_of(MODEL, **OPTIMIZERS[name]).groups} - {PARAMETERS}


def script(file: Path, build: Any, folder: Path) -> Any:
    """A training script's file after two steps."""
    module = module_of(written(folder / "weights.pt", "torch", content_of(MODEL)))
    names = {parameter: name.replace("-", ".") for name, parameter in module.named_parameters()}
    optimizer = build([(names[p], p) for p in module.parameters()])
    for _ in range(2):
        for p in module.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    model = {names[p]: p.detach() for p in module.parameters()}
    torch.save({"model": model, "optimizer": optimizer.state_dict(), "step": 2}, file)
    return torch.load(file, weights_only=True)


@pytest.mark.long
@pytest.mark.parametrize("name", often(CLASSES, ["adam with decay", "sgd"]))
def test_a_script_gets_its_own_back(name: str, tmp_path: Path) -> None:
    """The run between has the same optimizer settings."""
    saved = script(tmp_path / "a.pt", CLASSES[name], tmp_path)
    config = tmp_path / "model.toml"
    experiment = KINDS["torch"].format.read_content(tmp_path / "weights.pt").experiment
    config.write_text(tomli_w.dumps(experiment.model_dump(include={"model", "data"}, exclude_none=True)))
    main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", str(config)])
    section = settings_of(tmp_path / "run")
    group = saved["optimizer"]["param_groups"][0]
    assert section["name"] == name.partition(" ")[0] and section["learning_rate"] == group["lr"]
    assert section["weight_decay"] == group["weight_decay"]
    if name == "sgd":
        assert section["momentum"] == 0.8 and section["nesterov"]
    main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
    same(torch.load(tmp_path / "b.pt", weights_only=True), saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"dampening": 0.1}, "dampening = 0.1"), ({"maximize": True}, "maximize = True")],
)
def test_another_sgd_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = {"lr": 0.1, "momentum": 0.8} | change
    script(tmp_path / "a.pt", lambda p: torch.optim.SGD(p, **settings), tmp_path)
    with pytest.raises(ConfigError, match=f"{message}, sgd of jaxdist has not"):
        main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", str(config_of(tmp_path))])


def config_of(folder: Path, **optimizer: Any) -> Path:
    file = folder / "config.toml"
    file.write_text(content_of(MODEL, **optimizer).experiment.to_toml())
    return file


def test_a_config_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    """Neither is extra state dropped nor missing state invented."""
    first = written(tmp_path / "first", "orbax", content_of(MODEL, **OPTIMIZERS["lion"]))
    with pytest.raises(ConfigError, match=r"its optimizer keeps ema, exp_avg, where optimizer.name = sgd"):
        main([str(first), str(tmp_path / "b"), "--to", "dcp", "--model", str(config_of(tmp_path, name="sgd"))])


@pytest.mark.long
@pytest.mark.parametrize("kind", often(["orbax", "dcp", "torch"], ["dcp"]))
def test_the_average_in_place_of_the_weights(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = content_of(MODEL, ema=0.999)
    source = written(tmp_path / ("a.pt" if kind == "torch" else "a"), kind, content)
    main([str(source), str(tmp_path / "average"), "--to", "hf", "--ema"])
    averages = {n: leaf.read() for n, leaf in content.groups["ema"].items()}
    main([str(tmp_path / "average"), str(tmp_path / "ours"), "--to", "orbax"])
    found = KINDS["orbax"].format.read_content(tmp_path / "ours").groups[PARAMETERS]
    for name, average in averages.items():
        layers = [leaf.read() for key, leaf in found.items() if key.partition("[")[0] == name]
        np.testing.assert_array_equal(np.stack(layers) if len(layers) > 1 else layers[0], average)
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.arange(6)[None])
    for path, more in ((source, ["--ema"]), (tmp_path / "average", [])):
        logits = [str(tmp_path / f"{path.name}.npy")]
        evaluate(["--checkpoint", str(path), "--tokens", str(tokens), "--logits", *logits, "--device", "cpu", *more])
    a, b = (np.load(tmp_path / f"{path.name}.npy") for path in (source, tmp_path / "average"))
    np.testing.assert_array_equal(a, b)


def test_no_average_to_take(tmp_path: Path) -> None:
    first = written(tmp_path / "first", "orbax", content_of(MODEL))
    with pytest.raises(ConfigError, match=r"--ema: .* has no average of its weights; train with --optimizer.ema"):
        main([str(first), str(tmp_path / "b"), "--to", "hf", "--ema"])
