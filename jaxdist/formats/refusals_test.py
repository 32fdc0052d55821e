"""Unsupported files are named by their content, whatever their names, with a fix."""

from pathlib import Path

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.data.encoding import make_encoder
from jaxdist.formats.foreign import check_header
from jaxdist.formats.hf import read_model

pytest.importorskip("torch")

from jaxdist.convert.kinds import torch_files


def test_pointers_of_git_lfs_are_reported(tmp_path: Path) -> None:
    """A clone without Git LFS has a pointer in place of each large file."""
    pointer, message = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a2146' * 8}\nsize 9\n",
        "by git lfs pull",
    )
    for name in ("model.safetensors", "config.json", "tokenizer.json", "optimizer.pt"):
        (tmp_path / name).write_text(pointer)
    with pytest.raises(ConfigError, match=message):
        check_header(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_encoder(str(tmp_path), "auto")
    with pytest.raises(ConfigError, match=message):
        torch_files.load(tmp_path / "optimizer.pt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"GGUF\x03\0\0\0", "GGUF of llama.cpp"),
        ("renamed.bin", b"GGUF\x03\0\0\0", "GGUF of llama.cpp"),
        ("folder/q4.gguf", b"GGUF\x03\0\0\0", "GGUF of llama.cpp"),
        ("folder/flax_model.msgpack", b"\x81", "a msgpack file of flax"),
        ("tf_model.h5", b"\x89HDF", "a model of TensorFlow or Keras"),
        ("model.onnx", b"\x08", "a graph of ONNX"),
    ],
)
def test_formats_that_are_not_read(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    source = tmp_path / name.partition("/")[0]
    with pytest.raises(ConfigError, match=f"{source.name} is {message}.*; give the weights as safetensors"):
        main([str(source), str(tmp_path / "out")])


@pytest.mark.parametrize("file", ["_METADATA", "items/_METADATA", "manifest.ocdbt", "model/lm_head/weight/.zarray"])
def test_a_tree_of_arrays_is_pointed_to_mappings(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=r"it is a tree of arrays by Orbax or TensorStore: .* --mapping FILE"):
        main([str(tmp_path), str(tmp_path / "out")])
