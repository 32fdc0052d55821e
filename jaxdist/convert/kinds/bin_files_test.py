"""Folders with pytorch_model.bin: a single file, shards, and either as SOURCE."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS, draw
from jaxdist.convert.kinds.hf import write_hf
from jaxdist.convert.weights import source_experiment
from jaxdist.formats.folders import BIN, BIN_INDEX
from jaxdist.formats.sources import kind_of, located

torch = pytest.importorskip("torch")
load_torch = importlib.import_module("safetensors.torch").load_file

LLAMA = MODELS["LlamaForCausalLM"]
SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """The same weights as safetensors."""
    write_hf(tmp_path / "original", LLAMA, draw(LLAMA))
    return tmp_path / "original"


def binary(original: Path, folder: Path, **changed: Any) -> Path:
    """The folder with pytorch_model.bin."""
    folder.mkdir()
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    torch.save(load_torch(original / "model.safetensors") | changed, folder / BIN)
    return folder


def sharded(original: Path, folder: Path) -> Path:
    """The folder with two shards and their index."""
    tensors = torch.load(binary(original, folder) / BIN, weights_only=True)
    (folder / BIN).unlink()
    names = sorted(tensors)
    places = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for shard in SHARDS:
        torch.save({name: tensors[name] for name in names if places[name] == shard}, folder / shard)
    (folder / BIN_INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": places}))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("layout", [binary, sharded])
def test_the_weights_are_those_of_safetensors(layout: Any, original: Path, tmp_path: Path) -> None:
    folder = layout(original, tmp_path / "bin")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    main([str(folder), str(tmp_path / "hf"), "--to", "hf", "--verify"])
    there, expected = load_file(tmp_path / "hf/model.safetensors"), load_file(original / "model.safetensors")
    assert there.keys() == expected.keys()
    assert all((there[name] == expected[name]).all() for name in expected)
    assert (tmp_path / "hf/tokenizer_config.json").read_text() == '{"eos_token": "</s>"}'
    assert not (tmp_path / "hf" / BIN_INDEX).exists()
    assert source_experiment(folder).model == LLAMA


@pytest.mark.long
def test_tied_gpt2(tmp_path: Path) -> None:
    """A torch file lists the tied head too."""
    model = MODELS["GPT2LMHeadModel"]
    write_hf(tmp_path / "original", model, draw(model))
    embedding = load_torch(tmp_path / "original/model.safetensors")["transformer.wte.weight"]
    folder = binary(tmp_path / "original", tmp_path / "bin", **{"lm_head.weight": embedding})
    main([str(folder), str(tmp_path / "orbax"), "--verify"])
    assert source_experiment(located(tmp_path / "orbax")).model == model


def test_the_single_file_goes_before_the_index(original: Path, tmp_path: Path) -> None:
    """transformers also prefers it."""
    folder = sharded(original, tmp_path / "bin")
    tensors = load_torch(original / "model.safetensors")
    torch.save({name: tensor + 1 for name, tensor in tensors.items()}, folder / BIN)
    main([str(folder), str(tmp_path / "hf"), "--to", "hf"])
    assert (
        load_file(tmp_path / "hf/model.safetensors")["model.norm.weight"] == tensors["model.norm.weight"].numpy() + 1
    ).all()


@pytest.mark.parametrize("name", [SHARDS[0], SHARDS[1], BIN_INDEX])
def test_a_part_names_its_folder(name: str, original: Path, tmp_path: Path) -> None:
    """A shard or an index as SOURCE is refused with its folder's name, which works."""
    folder = sharded(original, tmp_path / "bin")
    with pytest.raises(ConfigError, match=r"is (one of several shards|the index).*; give its folder (\S+)") as error:
        main([str(folder / name), str(tmp_path / "out")])
    main([str(error.value).rpartition(" ")[2], str(tmp_path / "out")])
    assert kind_of(tmp_path / "out") == "orbax"


def test_a_part_alone_names_the_missing_files(original: Path, tmp_path: Path) -> None:
    folder = sharded(original, tmp_path / "bin")
    (folder / BIN_INDEX).unlink()
    with pytest.raises(ConfigError, match=r"give a folder with config.json, pytorch_model.bin.index.json and all"):
        main([str(folder / SHARDS[0]), str(tmp_path / "out")])
    shard = original / "model-00001-of-00003.safetensors"
    (original / "model.safetensors").rename(shard)
    (original / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"one of several shards.*; give a folder with config.json, model.safetens"):
        main([str(shard), str(tmp_path / "out")])


def test_tensors_that_are_twice_or_missing_are_named(original: Path, tmp_path: Path) -> None:
    folder = sharded(original, tmp_path / "bin")
    first, second = (torch.load(folder / shard, weights_only=True) for shard in SHARDS)
    torch.save(first | {"model.norm.weight": torch.zeros(8)}, folder / SHARDS[0])
    torch.save(second | {"model.norm.weight": torch.zeros(8)}, folder / SHARDS[1])
    with pytest.raises(ConfigError, match=r"model.norm.weight is in pytorch_model-00001-of-00002.bin too"):
        main([str(folder), str(tmp_path / "out")])
    torch.save(dict(list(first.items())[1:]), folder / SHARDS[0])
    torch.save(second, folder / SHARDS[1])
    with pytest.raises(ConfigError, match=r"index.json: its weight_map has tensor .* no file of the folder has it"):
        main([str(folder), str(tmp_path / "out")])
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ConfigError, match=SHARDS[1]):
        main([str(folder), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
