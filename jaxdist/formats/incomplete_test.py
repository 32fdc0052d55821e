"""Folders of weights without a needed file: the message names it before anything is read."""

import json
import zipfile
from pathlib import Path

import pytest

from jaxdist.config import ConfigError
from jaxdist.formats.folders import BIN_INDEX
from jaxdist.formats.foreign import INDEX, indexed
from jaxdist.formats.refusals import loading
from jaxdist.formats.sources import kind_of

SHARD, BIN_SHARD = "model-00001-of-00002.safetensors", "pytorch_model-00001-of-00002.bin"


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (["model.safetensors"], "config.json, which says what model the weights are of, is missing"),
        (["pytorch_model.bin"], "config.json, "),
        (["pytorch_model.bin", "tokenizer.json"], "config.json, "),
        ([SHARD], f"config.json, .* and {INDEX}, which says which file has which tensors, are missing"),
        (["config.json", BIN_SHARD], f"{BIN_INDEX}, "),
        ([BIN_SHARD], f"config.json, .* and {BIN_INDEX}, "),
        (["consolidated.00.pth"], "params.json, which says what model"),
        (["adapter_model.safetensors"], "adapter_config.json, which says how to merge them, is missing"),
        (["__0_0.distcp"], ".metadata, which says which file"),
    ],
)
def test_the_missing_file_is_named(files: list[str], missing: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=f"{tmp_path}: {missing}.*; copy it there, or download the folder again"):
        kind_of(tmp_path)


def test_a_config_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json is there, without weights; copy model.safetensors"):
        kind_of(tmp_path)


@pytest.mark.parametrize(("index", "shard"), [(INDEX, SHARD), (BIN_INDEX, BIN_SHARD)])
def test_a_missing_shard(index: str, shard: str, tmp_path: Path) -> None:
    others = [shard.replace("00001", number) for number in ("00002", "00003")]
    places = {"a": shard, "b": others[0], "c": others[1]}
    (tmp_path / index).write_text(json.dumps({"weight_map": places}))
    fix = "missing; copy that there, or download it again"
    with pytest.raises(ConfigError, match=f"{tmp_path}: {index} names {shard} and 2 more, which are {fix}"):
        indexed(tmp_path, index)
    if index == INDEX:  # a folder of unknown kind, as it has no safetensors file
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ConfigError, match=f"{index} names {shard} and 2 more"):
            kind_of(tmp_path)
    (tmp_path / shard).write_bytes(b"x")
    (tmp_path / others[0]).write_bytes(b"x")
    with pytest.raises(ConfigError, match=f"{tmp_path}: {index} names {others[1]}, which is {fix}"):
        indexed(tmp_path, index)
    (tmp_path / others[1]).write_bytes(b"x")
    assert indexed(tmp_path, index) == {name: tmp_path / file for name, file in places.items()}


def test_a_missing_file_is_not_called_damaged(tmp_path: Path) -> None:
    message = r"a.pt: the file is missing; copy it there, or download it again$"
    with pytest.raises(ConfigError, match=message), loading(tmp_path / "a.pt"):
        (tmp_path / "a.pt").read_bytes()


@pytest.mark.parametrize("kept", [0.3, 0.99])
def test_a_zip_without_its_end_is_called_cut(kept: float, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "whole.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 1000)
    content = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "a.pt"
    path.write_bytes(content[: int(kept * len(content))])
    message = r"a.pt: it is cut: its end, .* is missing; copy it there, or download it again$"
    with pytest.raises(ConfigError, match=message), loading(path):
        zipfile.ZipFile(path)
