"""torchtitan's distributed checkpoints: current and earlier key names, persistent buffers, other parts of a run."""

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import PARAMETERS, Content, Leaf
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.foreign_sources_test import config
from jaxdist.convert.kinds.formats_test import content_of
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.optimizers.fused import unfused
from jaxdist.convert.stream import Conversion
from jaxdist.families.llama.config import Llama
from jaxdist.formats.dcp_index import read_index
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.sources import kind_of
from jaxdist.runs.checkpoints import checkpoint_in

torch = pytest.importorskip("torch")
dcp = importlib.import_module("torch.distributed.checkpoint")

LLAMA = MODELS["LlamaForCausalLM"]
UPDATES, STEP = 7, 9
GROUP = {
    "lr": 1e-4, "initial_lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": True,
}  # fmt: skip


def drawn() -> dict[str, dict[str, Any]]:
    """Group -> name -> tensor, under the earlier names."""
    groups = Conversion(content_of(LLAMA), "meta").groups
    return {
        group: {name: torch.from_numpy(np.array(leaf.read())) for name, leaf in leaves.items()}
        for group, leaves in groups.items()
    }


def early_2026(name: str) -> str:
    return re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name)


def current_name(name: str) -> str:
    """torchtitan's current name of a parameter."""
    return re.sub(r"^output\.", "lm_head.", early_2026(name))


def same(name: str) -> str:
    return name


def joined(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state under `fuse_qkv`: for each group of heads the queries, the key and the value."""
    assert isinstance(LLAMA, Llama)
    groups, found = LLAMA.kv_heads, dict[str, Any]()
    for key, value in state.items():
        fused = re.sub(r"\.w[qkv]\.", ".wqkv.", key)
        if key.endswith((".exp_avg", ".exp_avg_sq")) and fused != key:
            parts = [state[fused.replace(".wqkv.", f".{w}.")] for w in ("wq", "wk", "wv")]
            shaped = [part.reshape(groups, -1, part.shape[-1]) for part in parts]
            value = torch.cat(shaped, dim=1).reshape(-1, parts[0].shape[-1])
        found[fused] = value
    return found


def saved(folder: Path, names: Any, nested: bool = False, training: bool = True, fused: bool = False) -> Path:
    """A checkpoint as torchtitan's CheckpointManager saves it; `nested`: weights below `model.`, as earlier; `fused`:
    with the optimizer's state of `fuse_qkv`."""
    tensors = drawn()
    model = {names(name): tensor for name, tensor in tensors[PARAMETERS].items()}
    model["freqs_cis"] = torch.polar(torch.ones(12, 3), torch.arange(36.0).reshape(12, 3))
    optimizer: dict[str, Any] = {}
    for name in tensors[PARAMETERS]:
        optimizer[f"state.{names(name)}.step"] = torch.tensor(float(UPDATES))
        optimizer |= {f"state.{names(name)}.{kind}": tensors[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
        optimizer |= {f"param_groups.{names(name)}.{key}": value for key, value in GROUP.items()}
    run = {
        "optimizer": joined(optimizer) if fused else optimizer,
        "lr_scheduler": {"last_epoch": STEP, "base_lrs": [3e-4], "_step_count": STEP + 1, "_last_lr": [1e-4]},
        "dataloader": {"dp_rank_0": b"a pickle", "world_size": 1},
        "train_state": {"step": torch.tensor(STEP, dtype=torch.int32), "ntokens_seen": torch.tensor(1000)},
    }
    tree = ({"model": model} if nested else model) | (run if training else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def read_content(path: Path) -> Content:
    return KINDS[kind_of(path)].format.read_content(path, experiment_for(LLAMA.model_dump(), "test"))


@pytest.mark.long
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("names", [current_name, early_2026, same])
def test_weights_optimizer_and_step(names: Any, nested: bool, tmp_path: Path) -> None:
    content = read_content(saved(tmp_path / "step-9", names, nested))
    for group, tensors in drawn().items():
        assert content.groups[group].keys() == {names(name) for name in tensors}
        for name, tensor in tensors.items():
            assert np.array_equal(content.groups[group][names(name)].read(), tensor.numpy()), (group, name)
    assert (content.step, content.updates, content.experiment.optimizer.learning_rate) == (STEP, UPDATES, 1e-4)
    assert list(content.origin.buffers) == ["freqs_cis"]
    ours, expected = Conversion(content, "huggingface"), Conversion(content_of(LLAMA), "huggingface")
    for group, leaves in expected.groups.items():
        for name, leaf in leaves.items():
            assert np.array_equal(ours.groups[group][name].read(), leaf.read()), (group, name)


@pytest.mark.long
def test_moments_of_queries_keys_and_values_in_one(tmp_path: Path) -> None:
    """Converted both ways."""
    first = saved(tmp_path / "step-9", current_name, fused=True)
    main([str(first), str(tmp_path / "there"), *config(tmp_path, LLAMA), "--to", "dcp"])
    for content in (read_content(first), read_content(tmp_path / "there")):
        assert content.updates == UPDATES
        for group, tensors in drawn().items():
            for name, tensor in tensors.items():
                assert np.array_equal(content.groups[group][current_name(name)].read(), tensor.numpy()), (group, name)
    index = read_index(checkpoint_in(tmp_path / "there"))
    assert not any("wqkv" in name for name in {*index.state_dict_metadata, *index.planner_data})
    odd = Leaf((30, 2), np.dtype(np.float32), lambda: np.ones((30, 2), np.float32))
    with pytest.raises(ConfigError, match=r"30 rows, which do not match model.heads .* --to hf"):
        unfused("there", {"a.qkv_linear.wqkv.weight.exp_avg": odd}, LLAMA)


def test_its_qwen3(tmp_path: Path) -> None:
    """It normalizes queries and keys, and rotates like Hugging Face: heads are not reordered."""
    model = MODELS["Qwen3ForCausalLM"]
    content = content_of(model)
    leaves = Conversion(content, "torchtitan_qwen3").groups[PARAMETERS]
    tensors = {name: torch.from_numpy(np.array(leaf.read())) for name, leaf in leaves.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save(tensors, checkpoint_id=tmp_path / "step-9", no_dist=True)
    read = KINDS["dcp"].format.read_content(tmp_path / "step-9", experiment_for(model.model_dump(), "test"))
    assert read.naming == "torchtitan_qwen3"
    ours, expected = (Conversion(c, "huggingface").groups[PARAMETERS] for c in (read, content))
    assert all(np.array_equal(ours[name].read(), leaf.read()) for name, leaf in expected.items())
    query = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(expected[query].read(), tensors["layers.0.attention.qkv_linear.wq.weight"].numpy())


@pytest.mark.long
def test_there_and_back(tmp_path: Path) -> None:
    """The same entries under the same names, including the buffer and counters."""
    first = saved(tmp_path / "step-9", current_name)
    main([str(first), str(tmp_path / "there"), *config(tmp_path, LLAMA), "--to", "dcp"])
    before, after = (read_index(checkpoint_in(path)).state_dict_metadata for path in (first, tmp_path / "there"))
    assert before.keys() == after.keys()
    back = read_content(tmp_path / "there")
    assert (back.step, back.updates) == (STEP, UPDATES)


def test_weights_alone(tmp_path: Path) -> None:
    """Checkpoint of `last_save_model_only`."""
    content = read_content(saved(tmp_path / "step-9", current_name, training=False))
    assert (content.step, content.updates, [*content.groups]) == (0, None, [PARAMETERS])
    main([str(tmp_path / "step-9"), str(tmp_path / "hf"), "--to", "hf", *config(tmp_path, LLAMA)])
