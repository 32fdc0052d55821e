"""Lightning's checkpoints: names within a larger module, schedules, averages; causes reported before consequences."""

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.kinds.reader import READER
from jaxdist.convert.optimizers.rates import rate_at
from jaxdist.formats import sources
from jaxdist.formats.hf import experiment_for, to_settings

torch = pytest.importorskip("torch")
schedulers = importlib.import_module("torch.optim.lr_scheduler")
MODEL, GPT2 = MODELS["Qwen2ForCausalLM"], MODELS["GPT2LMHeadModel"]
CASES = [
    ("model.", MODEL), ("model._orig_mod.", MODEL), ("lit.backbone.", MODEL),
    ("module.net.", GPT2), ("transformer.", GPT2),
]  # fmt: skip


def config(folder: Path, model: Any = MODEL) -> list[str]:
    file = folder / "model.toml"
    file.write_text(experiment_for(model.model_dump(), "test").to_toml())
    return ["--model", str(file)]


def lightning(path: Path, prefix: str, model: Any = MODEL, **parts: Any) -> dict[str, Any]:
    """Checkpoint of Lightning's Trainer for a LightningModule with the model as an attribute."""
    tree = torch.load(written(path.with_suffix(".pt"), "torch", content_of(model)), weights_only=True)
    found = {
        "epoch": 0, "global_step": tree["step"], "pytorch-lightning_version": "2.5.0", "loops": {}, "callbacks": {},
        "state_dict": {prefix + name: tensor for name, tensor in tree["model"].items()},
        "optimizer_states": [tree["optimizer"]], "lr_schedulers": [], "hparams_name": "kwargs",
    } | parts  # fmt: skip
    torch.save(found, path)
    return found


def same_as_without(folder: Path, model: Any = MODEL) -> None:
    """Weights, moments and step equal those of the file without a prefix."""
    for source, run in (("a.ckpt", "run"), ("a.pt", "right")):
        main([str(folder / source), str(folder / run), *config(folder, model)])
    assert tensors(folder / "run") == tensors(folder / "right")


@pytest.mark.long
@pytest.mark.parametrize("case", often(CASES, CASES[2:4]), ids=lambda case: f"{case[1].family} {case[0]}")
def test_prefixes_come_off_and_come_back(case: tuple[str, Any], tmp_path: Path) -> None:
    prefix, model = case
    before = lightning(tmp_path / "a.ckpt", prefix, model)
    same_as_without(tmp_path, model)
    assert (tmp_path / "run" / "checkpoints" / "7").is_dir()
    main([str(tmp_path / "run"), str(tmp_path / "b.ckpt")])
    after = torch.load(tmp_path / "b.ckpt", weights_only=True)
    assert list(after["state_dict"]) == list(before["state_dict"]) and after["global_step"] == 7


@pytest.mark.long
def test_a_base_model_within(tmp_path: Path) -> None:
    """transformers' names have no prefix of their own without a head."""
    tied = MODELS["Qwen3ForCausalLM"]
    found = lightning(tmp_path / "a.ckpt", "", tied)
    base = {n.removeprefix("model."): t for n, t in found["state_dict"].items() if n != "lm_head.weight"}
    found["state_dict"] = {f"net.{name}": tensor for name, tensor in base.items()}
    torch.save(found, tmp_path / "a.ckpt")
    same_as_without(tmp_path, tied)


@pytest.mark.long
@pytest.mark.parametrize("prefix", ["", "net."])
def test_an_optimizer_with_names_of_either_module(prefix: str, tmp_path: Path) -> None:
    """Names from `self.named_parameters()` or from the model alone, in an order that follows no rule."""
    found = lightning(tmp_path / "a.ckpt", "net.")
    (optimizer,) = found["optimizer_states"]
    keys = [key for group in optimizer["param_groups"] for key in group["params"]]
    called = [prefix + name for group in optimizer["param_groups"] for name in group["param_names"]]
    order = sorted(range(len(keys)), key=lambda i: called[i][::-1])
    one = {**optimizer["param_groups"][0], "params": [keys[i] for i in order]}
    optimizer["param_groups"] = [one | {"param_names": [called[i] for i in order]}]
    torch.save(found, tmp_path / "a.ckpt")
    same_as_without(tmp_path)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([str(folder / "a.ckpt"), str(folder / "run"), *config(folder)])
    assert not (folder / "run").exists()


def test_weights_are_checked_before_the_optimizer(tmp_path: Path) -> None:
    """Missing or extra tensors, a second copy of the model, or another shape are not reported as a wrong order."""
    found = lightning(tmp_path / "a.ckpt", "net.")
    state = dict(found["state_dict"])
    norm = "net.model.norm.weight"
    for wrong, expected in (
        (
            {n: t for n, t in state.items() if n != norm},
            "tensor model.norm.weight is absent there, and .*; give weights",
        ),
        (
            state | {"loss.weight": torch.ones(2)},
            r"tensor loss.weight is \(2,\) there, and absent in the model; remove it from the file, or give",
        ),
        (
            state | {"teacher" + n[3:]: t for n, t in state.items()},
            r"tensor teacher.lm_head.weight is .*, and absent in the model .*; remove them from the file",
        ),
        (state | {norm: torch.ones(9)}, r"tensor net.model.norm.weight is \(9,\) there, and \(8,\) in the model"),
    ):
        torch.save(found | {"state_dict": wrong}, tmp_path / "a.ckpt")
        refused(tmp_path, expected)


@pytest.mark.long
def test_a_transposed_weight_is_reported_as_such(tmp_path: Path) -> None:
    """The message's fix gives the right weights."""
    found = lightning(tmp_path / "a.ckpt", "net.")
    state = found["state_dict"]
    turned = [name for name in state if name.endswith("up_proj.weight")]
    torch.save(found | {"state_dict": state | {n: state[n].T.contiguous() for n in turned}}, tmp_path / "a.ckpt")
    refused(
        tmp_path,
        r"net.model.layers.0.mlp.up_proj.weight is transposed: "
        r"\(8, 10\) there, \(10, 8\) in the model, and so are 2 more; save",
    )
    wrong = torch.load(tmp_path / "a.ckpt", weights_only=True)
    wrong["state_dict"] |= {name: wrong["state_dict"][name].T for name in turned}
    torch.save(wrong, tmp_path / "a.ckpt")
    same_as_without(tmp_path)


SCHEDULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cosine": (lambda o: schedulers.CosineAnnealingLR(o, 20, 1e-4), ""),
    "linear": (lambda o: schedulers.LinearLR(o, 1.0, 0.2, 20), ""),
    "warm-up": (
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 16)], [4]
        ),
        "",
    ),
    "polynomial": (lambda o: schedulers.PolynomialLR(o, 30, 1.0), ""),
    "constant": (lambda o: schedulers.ConstantLR(o, 0.5, 4), ""),
    "one cycle": (lambda o: schedulers.OneCycleLR(o, 2e-3, 20, pct_start=0.25, cycle_momentum=False), ""),
    "one cycle, linear": (
        lambda o: schedulers.OneCycleLR(o, 2e-3, 20, pct_start=0.2, anneal_strategy="linear", cycle_momentum=False),
        "",
    ),
    "lambda": (lambda o: schedulers.LambdaLR(o, lambda k: 1 / (1 + k)), "the rule of its scheduler is not in it"),
    "steps": (
        lambda o: schedulers.StepLR(o, 3),
        r"is StepLR (step_size = 3, gamma = 0.1), which does not continue here",
    ),
    "restarts": (lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5), "is CosineAnnealingWarmRestarts (T_0 = 5"),
    "exponential": (lambda o: schedulers.ExponentialLR(o, 0.9), "is ExponentialLR (gamma = 0.9), which does not"),
    "one cycle, warming": (lambda o: schedulers.OneCycleLR(o, 2e-3, 40, cycle_momentum=False), "is OneCycleLR (total_"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", often(SCHEDULES, ["warm-up", "one cycle", "lambda", "steps"]))
def test_the_rule_of_a_scheduler_goes_on(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rule in its state gives each later step's rate; without one the config's is taken, and reported."""
    make, unlike = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of schedulers that step without their optimizer
        scheduler = make(optimizer)
        for _ in range(7):
            scheduler.step()
        now = optimizer.param_groups[0]
        group = {key: now[key] for key in ("lr", "initial_lr", "max_lr", "min_lr") if key in now}
        found = lightning(tmp_path / "a.ckpt", "net.", lr_schedulers=[scheduler.state_dict()])
        right = []
        for _ in range(12):
            right.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    for theirs in found["optimizer_states"][0]["param_groups"]:
        theirs |= group
    torch.save(found, tmp_path / "a.ckpt")
    (tmp_path / "config.json").write_text(json.dumps(to_settings(MODEL, "float32")))
    main([str(tmp_path / "a.ckpt"), str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert ("its schedule continues" in output) == (not unlike) and unlike in output
    e = load(tmp_path / "run" / "config.toml", {})
    if unlike:  # the current rate stays
        assert [rate_at(e, 8 + k) for k in range(12)] == pytest.approx([right[0]] * 12)
    else:
        assert [rate_at(e, 8 + k) for k in range(12)] == pytest.approx(right, rel=1e-6)


def test_the_peak_of_one_cycle(tmp_path: Path) -> None:
    """OneCycleLR's initial_lr is a share of the peak; the run's learning rate is the peak, max_lr."""
    found = lightning(tmp_path / "a.ckpt", "net.")
    for group in found["optimizer_states"][0]["param_groups"]:
        group |= {"lr": 1e-3, "initial_lr": 8e-5, "max_lr": 2e-3, "min_lr": 8e-9}
    torch.save(found, tmp_path / "a.ckpt")
    main([str(tmp_path / "a.ckpt"), str(tmp_path / "run"), *config(tmp_path)])
    assert load(tmp_path / "run" / "config.toml", {}).optimizer.learning_rate == 2e-3


@pytest.mark.long
def test_averages_are_not_taken_for_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning's WeightAveraging keeps the trained weights beside the averages."""
    found = lightning(tmp_path / "a.ckpt", "net.")
    averages = {name: tensor + 1 for name, tensor in found["state_dict"].items()}
    current = found["state_dict"]
    torch.save(found | {"state_dict": averages, "current_model_state": current}, tmp_path / "a.ckpt")
    same_as_without(tmp_path)
    assert "its state_dict has averages of the weights, which stay behind" in capsys.readouterr().out
    assert "its state_dict has averages" in str(sources.found(tmp_path / "a.ckpt", READER).notes)
    main([str(tmp_path / "a.ckpt"), str(tmp_path / "ema"), "--to", "hf", "--ema", *config(tmp_path)])
    written = load_file(tmp_path / "ema" / "model.safetensors")
    ours = {name.removeprefix("net."): tensor for name, tensor in averages.items()}
    assert len(written) > 10 and all(torch.equal(tensor, ours[name]) for name, tensor in written.items())
