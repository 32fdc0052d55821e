"""DeepSpeed's checkpoints without ZeRO: with fp16 or bf16 the wrapped optimizer holds fp32 weights without names; and
loss scales of all stages."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.deepspeed_folders import scaler_of
from jaxdist.convert.kinds.deepspeed_folders_test import (
    LLAMA,
    STEP,
    TIED,
    LossScaler,
    Trained,
    check,
    deepspeed,
    group_settings,
    read_content,
    save,
    zero_2,
)

torch = pytest.importorskip("torch")
load_torch = importlib.import_module("safetensors.torch").load_file

SCALE: dict[str, Any] = {
    "dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": STEP, "last_overflow_iter": STEP - 6,
    "scale_factor": 2.0, "scale_window": 1000,
}  # fmt: skip
LAYOUTS = ("fused, one group", "fused, two groups", "one group", "two groups", "fp32")


def saved(folder: Path, trained: Trained, layout: str, bits: str = "bfloat16", **kept: Any) -> Path:
    """Checkpoint of the engine without ZeRO: FP16_Optimizer's vectors, FP16_UnfusedOptimizer's lists, or torch's."""
    names = [*trained.tensors]
    groups = trained.groups if "two" in layout else [names]
    groups = [[name for name in names if name in group] for group in groups]
    flat = "fused" in layout

    def held(tensors: Mapping[str, Any], group: list[str]) -> list[Any]:
        parts = [tensors[name] for name in group]
        return [torch.cat([part.flatten() for part in parts])] if flat else parts

    state: list[dict[str, Any]] = []
    numbers: list[list[int]] = []
    for group in groups:
        moments = zip(*(held(tensors, group) for tensors in trained.moments.values()), strict=True)
        first = len(state)
        state += [
            dict(zip(trained.moments, pair, strict=True)) | {"step": torch.tensor(float(STEP))} for pair in moments
        ]
        numbers.append([*range(first, len(state))])
    decays = [0.1, 0.0][: len(groups)]
    optimizer: dict[str, Any] = {"state": dict(enumerate(state)), "param_groups": group_settings(decays, numbers)}
    masters = [held(trained.tensors, group) for group in groups]
    if layout != "fp32":
        where = {"fp32_groups_flat": [vector for (vector,) in masters]} if flat else {"fp32_groups": masters}
        optimizer = {"optimizer_state_dict": optimizer, "clip_grad": 1.0, **where, **kept}
    module = {n: t if layout == "fp32" else t.to(getattr(torch, bits)) for n, t in trained.tensors.items()}
    if "lm_head.weight" not in module:
        module["lm_head.weight"] = module["model.embed_tokens.weight"]
    tag = folder / f"global_step{STEP}"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    (folder / "config.json").write_bytes(trained.config)
    engine = trained.engine(groups, 1, param_shapes=None, shared_params=None, optimizer=optimizer)
    save(tag / "mp_rank_00_model_states.pt", engine | {"module": module})
    return tag


@pytest.mark.parametrize(("layout", "model"), [*((layout, LLAMA) for layout in LAYOUTS[1:]), (LAYOUTS[0], TIED)])
def test_fp32_weights_and_moments(layout: str, model: Any, tmp_path: Path) -> None:
    """The narrow copies are left behind; config.json is in the parent folder, as with ZeRO."""
    trained = Trained(tmp_path, model)
    tag = saved(tmp_path / "run", trained, layout)
    for path in (tag, tag.parent):
        content = read_content(path)
        check(content, trained)
        copies = [] if layout == "fp32" else ["the bfloat16 copy of the fp32 weights"]
        assert content.origin.left == copies


def test_the_way_to_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = Trained(tmp_path)
    main([str(saved(tmp_path / "run", trained, "fused, one group")), str(tmp_path / "hf"), "--to", "hf"])
    there = load_torch(tmp_path / "hf/model.safetensors")
    assert all(torch.equal(there[name], tensor) for name, tensor in trained.tensors.items())
    assert "the bfloat16 copy of the fp32 weights, the optimizer's state" in capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS[1:3])
def test_fp32_weights_of_an_unknown_order_are_refused(layout: str, tmp_path: Path) -> None:
    """Two parameters of one shape are swapped: only the narrow copies have names. The fix uses those."""
    trained = Trained(tmp_path)
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    tag = saved(tmp_path / "run", trained, layout)
    tree = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
    module = tree["module"]
    module[first], module[second] = module[second], module[first]
    save(tag / "mp_rank_00_model_states.pt", tree)
    with pytest.raises(ConfigError, match="which of its fp32 weights is which parameter is not in it") as error:
        read_content(tag)
    source, *flags = str(error.value).rpartition("for that copy give ")[2].split()
    main([source, str(tmp_path / "hf"), *flags])
    assert torch.equal(load_torch(tmp_path / "hf/model.safetensors")[first], module[first])


def grown(kept: dict[str, Any], steps: int) -> list[float]:
    """DeepSpeed's scale before each of the next good steps (fused_optimizer.py, `_update_scale`)."""
    scale, i, found = kept["cur_scale"], kept["cur_iter"], []
    for _ in range(steps):
        found.append(scale)
        stable = i - kept["last_overflow_iter"] - 1
        scale *= kept["scale_factor"] if stable > 0 and stable % kept["scale_window"] == 0 else 1
        i += 1
    return found


@pytest.mark.parametrize(("count", "overflow"), [(1, -1), (6, -1), (7, 4), (8, 6), (30, 11)])
def test_the_loss_scale_grows_when_theirs_does(count: int, overflow: int) -> None:
    """GradScaler's rule counts good steps instead."""
    kept = SCALE | {"cur_iter": count, "last_overflow_iter": overflow, "scale_window": 3}
    scaler, ours = scaler_of(Path("file"), kept), []
    scale, good = scaler["scale"], scaler["_growth_tracker"]
    for _ in range(12):
        ours.append(scale)
        good += 1
        if good == scaler["growth_interval"]:
            scale, good = scale * scaler["growth_factor"], 0
    assert ours == grown(kept, 12)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_loss_scale_of_fp16(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = Trained(tmp_path)
    if stage:
        tag = zero_2(tmp_path / "run", trained)
        for file in tag.glob("*_optim_states.pt"):
            with deepspeed():
                tree = torch.load(file, weights_only=False)
            scaler = LossScaler()
            scaler.__dict__ |= SCALE | {"delayed_shift": 2}
            tree["optimizer_state_dict"] |= {"loss_scaler": scaler, "dynamic_loss_scale": True}
            save(file, tree)
    else:
        tag = saved(tmp_path / "run", trained, "fused, one group", "float16", **SCALE)
    content = read_content(tag)
    assert content.scaling
    assert (float(content.scaling.scale), int(content.scaling.good)) == (512.0, 4)
    precision = content.experiment.precision
    assert (precision.policy, precision.growth_interval, precision.backoff_factor) == ("fp16", 1000, 0.5)
    assert ("falls at overflow 2 (hysteresis)" in capsys.readouterr().out) == bool(stage)
    main([str(tag), str(tmp_path / "out")])
    assert float(read_content(tmp_path / "out").scaling.scale) == 512.0  # type: ignore[union-attr]


def test_a_static_loss_scale_is_named(tmp_path: Path) -> None:
    static = {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": STEP}
    content = read_content(saved(tmp_path / "run", Trained(tmp_path), "one group", "float16", **static))
    assert content.scaling is None
    assert content.origin.left == ["the float16 copy of the fp32 weights", "the static loss scale of 128.0"]


def test_a_damaged_loss_scale_is_refused(tmp_path: Path) -> None:
    kept = SCALE | {"scale_window": "never"}
    with pytest.raises(ConfigError, match="loss scale"):
        read_content(saved(tmp_path / "run", Trained(tmp_path), "one group", "float16", **kept))
