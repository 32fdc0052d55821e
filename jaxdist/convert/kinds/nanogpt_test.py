"""nanoGPT's checkpoints: Linear layout, model_args, its loop's schedule, and the learning rate on its resume."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError, Experiment
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.formats_test import tensors
from jaxdist.convert.kinds.nanogpt import filled
from jaxdist.convert.optimizers.rates import rate_at

torch = pytest.importorskip("torch")
L, H, D, V, T = 2, 4, 16, 64, 12
LOOP: dict[str, Any] = {
    "learning_rate": 6e-4, "max_iters": 50, "batch_size": 3, "gradient_accumulation_steps": 2, "grad_clip": 0.5,
    "decay_lr": True, "warmup_iters": 4, "lr_decay_iters": 40, "min_lr": 6e-5, "dtype": "float32", "dataset": "x",
}  # fmt: skip


def get_lr(it: int) -> float:
    """nanoGPT's function for LOOP."""
    if it < LOOP["warmup_iters"]:
        return float(LOOP["learning_rate"] * (it + 1) / (LOOP["warmup_iters"] + 1))
    if it > LOOP["lr_decay_iters"]:
        return float(LOOP["min_lr"])
    ratio = (it - LOOP["warmup_iters"]) / (LOOP["lr_decay_iters"] - LOOP["warmup_iters"])
    return float(LOOP["min_lr"] + 0.5 * (1 + math.cos(math.pi * ratio)) * (LOOP["learning_rate"] - LOOP["min_lr"]))


def test_a_precision_that_is_partly_given_keeps_the_policy_of_the_loop() -> None:
    values = {"model": {"family": "gpt2"}, "precision": {"policy": "fp16"}}
    for settings, policy, compute in (
        ({"growth_interval": 9}, "fp16", "float16"),
        ({"parameters": "float16"}, "fp16", "float16"),
        ({"policy": "bf16"}, "bf16", "bfloat16"),
        ({"compute": "float32"}, "fp16", "float32"),
    ):
        wanted = Experiment.parse({"model": {"family": "gpt2"}, "precision": settings}, "x")
        found = filled(values, wanted, "x").precision
        assert (found.policy, found.compute) == (policy, compute)
        assert {name: getattr(found, name) for name in settings} == settings


def weights(bias: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    block = {
        "ln_1": (D,), "attn.c_attn": (3 * D, D), "attn.c_proj": (D, D), "ln_2": (D,), "mlp.c_fc": (4 * D, D),
        "mlp.c_proj": (D, 4 * D),
    }  # fmt: skip
    modules = {f"transformer.h.{i}.{name}": shape for i in range(L) for name, shape in block.items()}
    found = {"transformer.wte.weight": torch.randn(V, D), "transformer.wpe.weight": torch.randn(T, D)}
    for name, shape in {**modules, "transformer.ln_f": (D,)}.items():
        found[f"{name}.weight"] = torch.randn(*shape)
        found |= {f"{name}.bias": torch.randn(shape[0])} if bias else {}
    return found | {"lm_head.weight": found["transformer.wte.weight"]}


def checkpoint(path: Path, it: int = 9, bias: bool = True, alphabetical: bool = False, **parts: Any) -> dict[str, Any]:
    """File saved by train.py before its iteration `it`; `alphabetical`: the order of its groups before mid-2023."""
    model = weights(bias)
    names = [name for name in model if name != "lm_head.weight"]
    groups = [[n for n in names if (model[n].ndim >= 2) == wide] for wide in (True, False)]
    groups = [sorted(group) for group in groups] if alphabetical else groups
    optimizer = torch.optim.AdamW(
        [
            {"params": [torch.nn.Parameter(model[n].clone()) for n in group], "weight_decay": decay}
            for group, decay in zip(groups, (0.1, 0.0), strict=True)
        ],
        lr=get_lr(it), betas=(0.9, 0.95),
    )  # fmt: skip
    for name, p in zip(
        (n for g in groups for n in g), (p for g in optimizer.param_groups for p in g["params"]), strict=True
    ):
        optimizer.state[p] = {
            "step": torch.tensor(float(it)), "exp_avg": model[name] / 2, "exp_avg_sq": model[name].square(),
        }  # fmt: skip
    arguments = {"n_layer": L, "n_head": H, "n_embd": D, "block_size": T, "bias": bias, "vocab_size": V, "dropout": 0.0}
    found = {
        "model": {f"_orig_mod.{name}": tensor for name, tensor in model.items()}, "optimizer": optimizer.state_dict(),
        "model_args": arguments, "iter_num": it, "best_val_loss": torch.tensor(3.1), "config": LOOP,
    } | parts  # fmt: skip
    torch.save(found, path)
    return found


@pytest.mark.long
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alphabetical", often([False, True], [True]))
def test_model_optimizer_and_schedule_are_read(bias: bool, alphabetical: bool, tmp_path: Path) -> None:
    """They also come back unchanged."""
    before = checkpoint(tmp_path / "ckpt.pt", bias=bias, alphabetical=alphabetical)
    main([str(tmp_path / "ckpt.pt"), str(tmp_path / "run"), "--verify"])
    e = load(tmp_path / "run" / "config.toml", {})
    model, o = e.model.model_dump(), e.optimizer
    assert {
        "gelu": "exact",
        "bias": bias,
        "tied": True,
        "hidden": 4 * D,
        "vocab": V,
        "positions": T,
    }.items() <= model.items()
    assert (e.train.steps, e.train.batch, e.train.accumulation, e.data.sequence) == (50, 6, 2, T)
    assert (o.clip, o.weight_decay, o.beta2, e.precision.policy) == (0.5, 0.1, 0.95, "fp32")
    for it in (0, 3, 4, 5, 9, 22, 39, 40, 41, 49):
        assert rate_at(e, it + 1) == pytest.approx(get_lr(it), rel=1e-12)
    found = tensors(tmp_path / "run")
    assert found["", "steps"] == (9, 9)
    c_attn = before["model"]["_orig_mod.transformer.h.1.attn.c_attn.weight"]
    for group, right in (("parameters", c_attn), ("exp_avg", c_attn / 2), ("exp_avg_sq", c_attn.square())):
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            _, shape, there = found[group, f"layers.attention.{name}.kernel[1]"]
            assert shape == (D, D) and np.array_equal(
                np.frombuffer(there, np.float32).reshape(D, D).T, right[i * D : (i + 1) * D]
            )
    main([str(tmp_path / "run"), str(tmp_path / "back.pt")])
    after = torch.load(tmp_path / "back.pt", weights_only=True)
    assert list(after) == list(before) and list(after["model"]) == list(before["model"])
    assert all(torch.equal(after["model"][name], tensor) for name, tensor in before["model"].items())
    assert after["iter_num"] == 9 and after["config"] == LOOP


def config(folder: Path, *lines: str) -> list[str]:
    sizes = {"layers": L, "dim": D, "heads": H, "hidden": 4 * D, "vocab": V, "positions": T}
    text = '[model]\nfamily = "gpt2"\n' + "".join(f"{field} = {size}\n" for field, size in sizes.items())
    (folder / "model.toml").write_text(text + "\n".join([*lines, "[data]", f"sequence = {T}"]))
    return ["--model", str(folder / "model.toml")]


def converted(folder: Path, *arguments: str) -> Experiment:
    main([str(folder / "ckpt.pt"), str(folder / "run"), "--force", *arguments])
    return load(folder / "run" / "config.toml", {})


@pytest.mark.long
def test_a_model_section_is_completed_from_the_file(tmp_path: Path) -> None:
    """GELU, biases, schedule. A contradiction is refused, except for GELU, which the file does not state."""
    checkpoint(tmp_path / "ckpt.pt", bias=False)
    e = converted(tmp_path, *config(tmp_path))
    assert e == converted(tmp_path)
    assert converted(tmp_path, *config(tmp_path, 'gelu = "tanh"')).model.gelu == "tanh"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"model.bias = True, but .*ckpt.pt holds another model, with False"):
        converted(tmp_path, *config(tmp_path, "bias = true"))


def test_without_its_loop_the_rate_of_now_stays(tmp_path: Path) -> None:
    checkpoint(tmp_path / "ckpt.pt", config={"dataset": "x"})
    assert rate_at(converted(tmp_path), 30) == pytest.approx(get_lr(9))


SCHEDULE = ["[optimizer]", "learning_rate = 6e-4", "warmup = 5", "decay_steps = 41", "final = 0.1"]


@pytest.mark.parametrize("late", [0, 1])
def test_a_schedule_with_the_current_rate_is_kept(late: int, tmp_path: Path) -> None:
    """A loop may set the rate before a step, or a scheduler the next step's."""
    found = checkpoint(tmp_path / "ckpt.pt", config={})
    for group in found["optimizer"]["param_groups"]:
        group["lr"] = get_lr(9 - late)
    torch.save(found, tmp_path / "ckpt.pt")
    e = converted(tmp_path, *config(tmp_path, *SCHEDULE))
    assert e.optimizer.learning_rate == 6e-4 and rate_at(e, 31) == pytest.approx(get_lr(30))


def another_rate(folder: Path) -> None:
    found = checkpoint(folder / "ckpt.pt")
    for group in found["optimizer"]["param_groups"]:
        group["lr"] = 1e-5
    torch.save(found, folder / "ckpt.pt")


@pytest.mark.long
@pytest.mark.parametrize("whose", ["--model", "its config"])
def test_another_rate_is_refused_and_a_flag_decides(
    whose: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both fixes in the message work."""
    another_rate(tmp_path)
    model = config(tmp_path, *SCHEDULE) if whose == "--model" else []
    expected = (
        rf"current rate is 1e-05, and the schedule of {whose} has .* at step 9 and .* at step 10; give --peak schedule"
    )
    with pytest.raises(ConfigError, match=expected):
        converted(tmp_path, *model)
    assert not (tmp_path / "run").exists()
    assert rate_at(converted(tmp_path, *model, "--peak", "schedule"), 10) == pytest.approx(get_lr(9))
    assert converted(tmp_path, *model, "--peak", "now").optimizer.learning_rate == 1e-5
    message = f"its current rate, 1e-05, becomes the peak of the schedule of {whose}, which has 0.000"
    assert message in capsys.readouterr().out


def test_weights_that_do_not_fit_its_arguments(tmp_path: Path) -> None:
    """Vocabulary padding counts; missing tensors are named."""
    found = checkpoint(tmp_path / "ckpt.pt")
    torch.save(found | {"model_args": found["model_args"] | {"vocab_size": V - 1}}, tmp_path / "ckpt.pt")
    with pytest.raises(
        ConfigError, match=rf"tensor _orig_mod.transformer.wte.weight is \({V}, {D}\) there, and \({V - 1}, {D}\)"
    ):
        converted(tmp_path)
    del found["model_args"]["block_size"]
    torch.save(found, tmp_path / "ckpt.pt")
    with pytest.raises(ConfigError, match=r"its model_args have no block_size"):
        converted(tmp_path)


@pytest.mark.long
def test_a_schedule_is_mended_on_the_resume(tmp_path: Path) -> None:
    """The first resume after a conversion may set the schedule; the run then trains by it."""
    from jaxdist.train import main as train

    checkpoint(tmp_path / "ckpt.pt", config={})
    np.random.default_rng(0).integers(0, V, 3000).astype(np.uint16).tofile(tmp_path / "train.bin")
    e = converted(tmp_path)
    assert e.optimizer.decay == "constant"
    going = ["--config", str(tmp_path / "run" / "config.toml"), "--resume", "--output", str(tmp_path / "run")]
    going += ["--data.path", str(tmp_path / "train.bin"), "--train.validation_batches", "0", "--device", "cpu"]
    mend = "--optimizer.learning_rate 6e-4 --optimizer.warmup 5 --optimizer.decay cosine --optimizer.decay_steps 41"
    train([*going, "--steps", "10", *mend.split(), "--optimizer.final", "0.1"])
    assert rate_at(load(tmp_path / "run" / "config.toml", {}), 31) == pytest.approx(get_lr(30))
    with pytest.raises(
        ConfigError, match=r"holds a run with optimizer.learning_rate = 0.0006, not 0.001; resume it with"
    ):
        train([*going, "--steps", "11", "--optimizer.learning_rate", "1e-3"])
