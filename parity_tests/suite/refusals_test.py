"""Sources that neither side can start from: both refuse them in the same words."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from jaxdist.config import ConfigError
from jaxdist.convert.kinds import torch_files
from jaxdist.convert.kinds.deepspeed_folders_test import Trained, zero_2
from jaxdist.convert.kinds.torch_records_test import rezipped, with_content
from jaxdist.formats.foreign import INDEX, SINGLE
from parity_tests.suite.sources_test import (  # fmt: skip
    MODELS,
    NORM,
    Q,
    Tensors,
    folder_of,
    fused,
    read_by_jaxdist,
    read_by_torch_ref,
    refused,
    save,
)
from torch_ref.formats import reader

BAD: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "missing": ("llama", lambda t: {n: x for n, x in t.items() if n != Q}, f"{Q} is absent there"),
    "two missing": ("llama", lambda t: {n: x for n, x in t.items() if n not in (Q, NORM)}, "1 more differ"),
    "a layer is missing": (
        "gpt2", lambda t: {n: x for n, x in t.items() if ".h.0." not in n}, r"has nothing of transformer\.h\.0; give"
    ),
    "torchtitan's experts": (
        "llama", lambda t: t | {"layers.0.moe.experts.w1": torch.ones(2, 8, 8)}, r"convert_to_hf\.py, put the model's"
    ),
    "no untied head": ("llama", lambda t: {n: x for n, x in t.items() if n != "lm_head.weight"}, "lm_head"),
    "unexpected": ("llama", lambda t: t | {"model.extra.weight": torch.ones(2)}, "model.extra.weight is"),
    "a bias": ("llama", lambda t: t | {Q.replace("weight", "bias"): torch.ones(8)}, "absent in the model"),
    "a layer too many": ("gpt2", lambda t: t | {"transformer.h.2.ln_1.weight": torch.ones(8)}, "absent in the model"),
    "transposed": ("gpt2", lambda t: {n: x.t().contiguous() for n, x in t.items() if x.ndim == 2}, "tensor"),
    "another shape": ("llama", lambda t: t | {NORM: torch.ones(9)}, r"\(9,\) there, and \(8,\) in the model"),
    "no matrix": ("gpt2", lambda t: t | {"transformer.h.0.attn.c_attn.weight": torch.ones(())}, r"is \(\) there"),
    "quantized": ("llama", lambda t: t | {NORM: torch.ones(8, dtype=torch.int8)}, "int8; give float64"),
    "one parameter twice": ("llama", lambda t: t | {"norm.weight": t[NORM].clone()}, "are the same parameter"),
    "another head": ("qwen2", lambda t: t | {"lm_head.weight": torch.ones(16, 8)}, "differs from the embedding"),
    "a head of another size": ("gpt2", lambda t: t | {"lm_head.weight": torch.ones(3, 8)}, "differs from the embed"),
    "an expert too few": (
        "mixtral",
        lambda t: {n: x for n, x in t.items() if ".1.block_sparse_moe.experts.2." not in n},
        "is absent there",
    ),
    "an expert too few, fused": (
        "mixtral",
        lambda t: {n: x[:2].clone() if ".mlp.experts." in n else x for n, x in fused(t).items()},
        r"\(2, 8, 12\) there, and \(3, 8, 12\)",
    ),
    "no weights": ("llama", lambda t: {}, "absent there"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_both_refuse_in_the_same_words(name: str, tmp_path: Path) -> None:
    of, change, words = BAD[name]
    model = MODELS[of]
    save(tmp_path, change(folder_of(tmp_path, model)))
    message = refused(read_by_jaxdist, tmp_path, model)
    assert re.search(words, message), message
    assert refused(read_by_torch_ref, tmp_path, model) == message


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-9]), "intact safetensors file"),
    "no safetensors": (lambda f: (f / SINGLE).write_bytes(b"weights"), "intact safetensors file"),
    "another model": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("10000.0", "500000.0")),
        "model.rope_theta = 10000.0, but",
    ),
    "no config.json": (lambda f: (f / "config.json").write_text("{"), "readable config.json"),
    "an index of nothing": (
        lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}') and (f / SINGLE).rename(f / "x"),
        "b.safetensors",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_both_refuse_damaged_files_in_the_same_words(name: str, tmp_path: Path) -> None:
    damage, words = FILES[name]
    folder_of(tmp_path, MODELS["llama"])
    save_file({"unused": torch.ones(1)}, tmp_path / "other.safetensors")  # otherwise it is no folder with weights
    damage(tmp_path)
    message = refused(read_by_jaxdist, tmp_path, MODELS["llama"])
    assert re.search(words, message), message
    assert refused(read_by_torch_ref, tmp_path, MODELS["llama"]) == message


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "cut": lambda content: content[:-9],
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_both_refuse_a_damaged_distributed_checkpoint_in_the_same_words(damage: str, tmp_path: Path) -> None:
    """The advice, a copy of the damaged file, works."""
    model = MODELS["llama"]
    tensors = folder_of(tmp_path / "first", model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (file,) = (tmp_path / "dcp").glob("*.distcp")
    content = file.read_bytes()
    file.unlink()
    if (damaged := DAMAGE[damage](content)) is not None:
        file.write_bytes(damaged)
    messages = {refused(read, tmp_path / "dcp", model) for read in (read_by_jaxdist, read_by_torch_ref)}
    assert len(messages) == 1 and re.search(rf"{file.name}: (it|the file) is ", messages.pop())
    file.write_bytes(content)
    for read in (read_by_jaxdist, read_by_torch_ref):
        assert read(tmp_path / "dcp", model)


def holding(name: str, content: bytes) -> Callable[[Path], Path]:
    """A file of that name beside config.json."""

    def made(folder: Path) -> Path:
        (folder / SINGLE).unlink()
        (folder / name).write_bytes(content)
        return folder / name

    return made


def renamed(name: str, of_folder: bool = False) -> Callable[[Path], Path]:
    """The weights under another name."""

    def made(folder: Path) -> Path:
        (folder / SINGLE).rename(folder / name)
        return folder if of_folder else folder / name

    return made


def saved(tree: Any, name: str = "a.pt") -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        torch.save(tree, folder / name)
        return folder / name

    return made


def zipped(folder: Path) -> Path:
    np.savez(folder / "a.npz", weight=np.ones(3))
    return (folder / "a.npz").rename(folder / "a.pt")


def unlisted(folder: Path) -> Path:
    """Shards without their index."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    for i, name in enumerate((NORM, Q), 1):
        save_file({name: tensors[name]}, folder / f"model-{i:05}-of-00002.safetensors")
    return folder


def of_a_rank(folder: Path) -> Path:
    zero_2(folder / "zero", Trained(folder / "trained"))
    return next((folder / "zero").rglob("mp_rank_00_model_states.pt"))


def checkpoints(folder: Path) -> Path:
    for step in (9, 10):
        folder_of(folder / f"out/checkpoint-{step}", MODELS["llama"])
    return folder / "out"


def infinite(folder: Path) -> Path:
    """Two bad tensors, which the sides read in different orders."""
    tensors = load_file(folder / SINGLE)
    tensors[Q][1, 2], tensors["lm_head.weight"][0, 0] = float("nan"), float("inf")
    return saved(tensors)(folder)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
OTHERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "its weights alone": (lambda f: f / SINGLE, r"does not say .*; give its folder \S+, with config.json;"),
    "weights of another name": (renamed("a.safetensors"), r"with config.json and it as model.safetensors;"),
    "a variant": (renamed("model.fp16.safetensors", True), r"rename model.fp16.safetensors to model.safetensors"),
    "no index": (unlisted, r"it has model-00001-\S+, model-00002-\S+, and neither .* put model.safetensors.index.json"),
    "a shard": (lambda f: next(unlisted(f).glob("*-00002.safetensors")), r"is one of several shards .* its folder"),
    "safetensors as .bin": (renamed("pytorch_model.bin"), r"is a safetensors file; rename it to model.safetensors"),
    "safetensors as .bin, folder": (renamed("pytorch_model.bin", True), r"is a safetensors file; rename it to"),
    "GGUF as .bin": (holding("a.bin", b"GGUF" + bytes(60)), r"is GGUF of llama.cpp"),
    "a page": (holding("a.pt", b"<!DOCTYPE html><html>"), r"is a page of HTML.*; download it again"),
    "a pointer": (holding("a.pt", LFS), r"is a pointer of Git LFS"),
    "a pointer, folder": (lambda f: holding(SINGLE, LFS)(f).parent, r"is a pointer of Git LFS"),
    "ONNX": (holding("a.onnx", b"0"), r"is a graph of ONNX"),
    "Keras": (lambda f: holding("tf_model.h5", b"0")(f).parent, r"is a model of TensorFlow or Keras"),
    "a zip of numpy's": (zipped, r"is a zip that torch.save did not write"),
    "an optimizer": (saved({"state": {}}, "optimizer.pt"), r"is the optimizer's state of a trainer"),
    "no weights": (saved({"model": {}}), r"no state dict of a model; give one"),
    "a list": (saved([torch.ones(2)]), r"no state dict of a model; give one"),
    "DeepSpeed's narrow copy": (of_a_rank, r"is DeepSpeed's copy .* give its folder"),
    "a folder of checkpoints": (checkpoints, r"has 2 in it; give one, as \S+checkpoint-10"),
    "not finite": (infinite, r"tensor lm_head.weight has 1 of .*; so have model.layers.1.* --nonfinite zero --model C"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_both_refuse_other_files_than_sources_in_the_same_words(name: str, tmp_path: Path) -> None:
    made, words = OTHERS[name]
    folder_of(tmp_path, MODELS["llama"])
    path = made(tmp_path)
    message = refused(read_by_jaxdist, path, MODELS["llama"])
    assert re.search(words, message), message
    assert refused(read_by_torch_ref, path, MODELS["llama"]) == message


@pytest.mark.parametrize("load", [torch_files.load, reader.load], ids=["jaxdist", "torch_ref"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_a_storage_beyond_its_record(load: Callable[[Path], Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Mapped into memory, it would end in other tensors' numbers."""
    torch.save({"a": torch.arange(5.0).to(dtype), "b": torch.arange(100.0)}, tmp_path / "a.pt")
    load(tmp_path / "a.pt")
    size = 5 * dtype.itemsize
    rezipped(tmp_path / "a.pt", with_content("data/0", bytes(size - 1)))
    count = size if dtype == torch.float8_e4m3fn else 5  # stored as bytes
    with pytest.raises(ConfigError, match=rf"data/0 is to have {count} torch\.") as e:
        load(tmp_path / "a.pt")
    assert str(e.value).endswith(f"and has {size - 1} bytes; give a file that torch.save wrote")
