"""A folder with pytorch_model.bin gives the same tensors as with safetensors."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxdist.config import ConfigError, Model
from jaxdist.formats.folders import BIN, BIN_INDEX
from jaxdist.formats.hf import experiment_for, to_settings
from jaxdist.formats.tables import stored
from torch_ref.formats import hf
from torch_ref.formats.reader import READER

LLAMA: dict[str, Any] = {
    "family": "llama", "layers": 2, "dim": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "hidden": 10, "vocab": 7,
    "positions": 12,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "family": "gpt2", "layers": 2, "dim": 8, "heads": 2, "hidden": 10, "vocab": 7, "positions": 12
}  # fmt: skip
SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


def folders(folder: Path, values: dict[str, Any]) -> tuple[Model, Path, Path]:
    """The model, its folder with safetensors, and a copy with config.json alone."""
    model = experiment_for(values, "test").model
    first, second = folder / "safetensors", folder / "binaries"
    for path in (first, second):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(to_settings(model, "float32")))
    shapes = {name: tensor.shape for name, tensor in stored("huggingface", model, READER.shapes(model)).items()}
    torch.manual_seed(0)
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, first / "model.safetensors")
    return model, first, second


def same(model: Model, first: Path, second: Path) -> None:
    here, there = hf.Weights(first, model), hf.Weights(second, model)
    there.check()
    for name in here.targets:
        assert torch.equal(here.read(name), there.read(name)), name


@pytest.mark.parametrize("values", [LLAMA, GPT2])
@pytest.mark.parametrize("zipped", [True, False])
def test_one_file(values: dict[str, Any], zipped: bool, tmp_path: Path) -> None:
    """Written in today's format and that before torch 1.6; tied heads are stored too."""
    model, first, second = folders(tmp_path, values)
    tensors = load_file(first / "model.safetensors")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"]
    torch.save(tensors, second / BIN, _use_new_zipfile_serialization=zipped)
    same(model, first, second)


def test_shards(tmp_path: Path) -> None:
    model, first, second = folders(tmp_path, LLAMA)
    tensors = load_file(first / "model.safetensors")
    places = {name: SHARDS[i % 2] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        torch.save({name: t for name, t in tensors.items() if places[name] == shard}, second / shard)
    (second / BIN_INDEX).write_text(json.dumps({"weight_map": places}))
    same(model, first, second)
    moved = places | {"lm_head.weight": SHARDS[places["lm_head.weight"] == SHARDS[0]]}  # the shard that lacks it
    (second / BIN_INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ConfigError, match=r"index.json: its weight_map has tensor lm_head.weight in"):
        hf.Weights(second, model)


class Payload:
    """Runs a command when unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("should-not-exist",)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, _, second = folders(tmp_path, LLAMA)
    torch.save({"a": Payload()}, second / BIN)
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is refused: .*; save state dicts alone"):
        hf.Weights(second, model)
    assert not Path("should-not-exist").exists()


def test_safetensors_go_before_it(tmp_path: Path) -> None:
    model, first, _ = folders(tmp_path, LLAMA)
    torch.save({"model.norm.weight": torch.zeros(3)}, first / BIN)
    hf.Weights(first, model).check()
