"""False headers, indexes that point elsewhere and absurd config.json files give a ConfigError without allocating."""

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdist.config import ConfigError, bounded
from jaxdist.config.decoder import MOST_LAYERS
from jaxdist.convert.__main__ import main
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.families.mixtral.config import MOST_EXPERTS, Mixture
from jaxdist.families.resnet.config import ResNet
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.hf import read_model, to_settings
from jaxdist.formats.safetensors_files import Tensors

Header = dict[str, Any] | str


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def file_of(header: Header, data: int = 8, length: int | None = None) -> bytes:
    """A safetensors file with `data` bytes after its header, whose length field may be wrong."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


TWO = '"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
# Refused by the library. A release that accepts one fails here.
BY_THE_LIBRARY: dict[str, bytes] = {
    "no JSON": file_of("{{"),
    "no table": file_of("[]"),
    "two tables": file_of("{" + TWO + "}{}"),
    "not UTF-8": file_of("{\udcff: 1}"),
    "overlap": file_of({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}),
    "half an overlap": file_of({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12),
    "gap": file_of({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20),
    "data left over": file_of({"a": entry([2], 0, 8)}, 9),
    "data missing": file_of({"a": entry([2], 0, 8)}, 7),
    "negative offset": file_of({"a": entry([2], -8, 0)}),
    "end before begin": file_of({"a": entry([2], 8, 0)}),
    "offset of 2**62": file_of({"a": entry([2**60], 0, 2**62)}),
    "offset of 2**64": file_of({"a": entry([2], 0, 2**64)}),
    "1e12 elements": file_of({"a": entry([10**12], 0, 8)}),
    "1e12 elements and their offsets": file_of({"a": entry([10**12], 0, 4 * 10**12)}),
    "elements beyond 64 bits": file_of({"a": entry([2**33, 2**33], 0, 0)}, 0),
    "bytes beyond 64 bits": file_of({"a": entry([2**62 + 2], 0, 8)}),
    "negative size": file_of({"a": entry([-2], 0, 8)}),
    "half a size": file_of({"a": {**entry([2], 0, 8), "shape": [2.5]}}),
    "size as text": file_of({"a": {**entry([2], 0, 8), "shape": ["2"]}}),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "unknown dtype": file_of({"a": entry([2], 0, 8, "F31")}),
    "shape given twice": file_of("{" + TWO.replace("[2],", '[2],"shape":[1,2],') + "}"),
    "metadata that is not a text": file_of({"__metadata__": {"format": 1}, "a": entry([2], 0, 8)}),
}
# Accepted by the library, or failing with a foreign error.
BY_US: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "a header of 0 bytes in a file of 0"),
    "seven bytes": (b"1234567", "in a file of 7"),
    "header beyond the file": (file_of({"a": entry([2], 0, 8)}, length=10**6), "a header of 1,000,000 bytes"),
    "header of 2**63": (file_of({"a": entry([2], 0, 8)}, length=2**63), "a header of 9,223,372,036,854,775,808 bytes"),
    "tensor given twice": (file_of("{" + TWO + "," + TWO + "}"), "'a' twice"),
    "metadata given twice": (file_of('{"__metadata__":{"x":"1","x":"2"},' + TWO + "}"), "'x' twice"),
    "deep": (file_of("[" * 100_000), "nested too deeply"),
    "dtype of no numbers": (file_of({"a": entry([1], 0, 8, "C64")}), "tensor a is C64; give one of"),
    "two numbers in a byte": (file_of({"a": entry([16], 0, 8, "F4")}), "tensor a is F4; give one of"),
}
# Can be listed, but not read.
UNREADABLE = {
    "2**63 empty rows": (file_of({"a": entry([0, 2**63], 0, 0)}, 0), r"float32\[0, 9223372036854775808\]: Maximum"),
    "65 dimensions": (file_of({"a": entry([1] * 65, 0, 4)}, 4), "64, found 65; give a tensor"),
}


def refused(tmp_path: Path, content: bytes) -> str:
    """The message about a folder with this file."""
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        Tensors(tmp_path)
    assert str(tmp_path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("lie", BY_THE_LIBRARY)
def test_a_false_header(lie: str, tmp_path: Path) -> None:
    refused(tmp_path, BY_THE_LIBRARY[lie])


@pytest.mark.parametrize("lie", BY_US)
def test_a_false_header_that_the_library_accepts(lie: str, tmp_path: Path) -> None:
    content, message = BY_US[lie]
    assert message in refused(tmp_path, content)


@pytest.mark.parametrize("lie", ["tensor given twice", "metadata given twice"])
def test_without_our_check_the_library_takes_it(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_object", dict)
    (tmp_path / SINGLE).write_bytes(BY_US[lie][0])
    tensors = Tensors(tmp_path)
    assert tensors.read("a").shape == (2,)


@pytest.mark.parametrize("lie", UNREADABLE)
def test_a_tensor_that_numpy_cannot_hold(lie: str, tmp_path: Path) -> None:
    content, message = UNREADABLE[lie]
    (tmp_path / SINGLE).write_bytes(content)
    tensors = Tensors(tmp_path)
    with pytest.raises(ConfigError, match=message):
        tensors.read("a")


def test_a_tensor_beyond_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file of 4 TB. The library would panic, which is no Exception."""
    shape = 10**12
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(file_of({"a": entry([shape], 0, 4 * shape)}, 0))
        file.truncate(file.tell() + 4 * shape)

    def full(*_: Any, **__: Any) -> None:  # replaces overcommitted memory
        raise MemoryError("Unable to allocate 3.64 TiB")

    tensors = Tensors(tmp_path)
    monkeypatch.setattr(np, "empty", full)
    with pytest.raises(ConfigError, match=r"tensor a, float32.*3.64 TiB; give a tensor"):
        tensors.read("a")


def test_a_folder_or_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Reading a pipe would wait for ever."""
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(ConfigError, match=f"{SINGLE}: it is not a file; give"):
        Tensors(tmp_path)
    (tmp_path / SINGLE).rmdir()
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=f"{SINGLE}: it is not a file; give"):
        Tensors(tmp_path)


def shards(folder: Path, second: str) -> Path:
    """A folder of two shards, whose index names the second one `second`."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"a": np.ones(2)}, folder / "1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": second}}))
    return folder


def test_an_index_of_files_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside.safetensors"
    save_file({"b": np.ones(3)}, outside)
    (shards(folder, "") / "link.safetensors").symlink_to(outside)
    names = ("../outside.safetensors", str(outside), "link.safetensors")
    for name in names:
        with pytest.raises(ConfigError, match=rf"{INDEX}: .*{re.escape(name)}' is outside of .*; give an index"):
            Tensors(shards(folder, name))
    monkeypatch.setattr("jaxdist.formats.foreign.file_within", lambda folder, name: folder / name)
    for name in names:
        tensors = Tensors(shards(folder, name))
        assert tensors.read("b").shape == (3,)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": "2", "b": "1"}, "tensor a in 2.safetensors, and it is in 1.safetensors"),
        ({"a": "1", "b": "2", "c": "1"}, "tensor c in 1.safetensors, and no file of the folder has it"),
    ],
)
def test_a_false_index(places: dict[str, str], message: str, tmp_path: Path) -> None:
    save_file({"a": np.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": np.ones(3)}, tmp_path / "2.safetensors")
    right = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": right}))
    assert sorted(Tensors(tmp_path).described) == ["a", "b"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {n: f"{file}.safetensors" for n, file in places.items()}}))
    with pytest.raises(ConfigError, match=rf"{INDEX}: its weight_map has {message}; give the index that belongs"):
        Tensors(tmp_path)


def test_an_index_of_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, revision = tmp_path / "blobs", tmp_path / "snapshots" / "c0ffee"
    blobs.mkdir()
    save_file({"b": np.ones(3)}, blobs / "5ad1")
    (shards(revision, "2.safetensors") / "2.safetensors").symlink_to("../../blobs/5ad1")
    (revision / INDEX).rename(blobs / "1dec5")
    (revision / INDEX).symlink_to("../../blobs/1dec5")
    tensors = Tensors(revision)
    assert sorted(tensors.described) == ["a", "b"] and tensors.read("b").shape == (3,)


MODEL = Llama(layers=2, dim=8, heads=4, kv_heads=2, head_dim=2, hidden=6, vocab=7, positions=12)
LLAMA = to_settings(MODEL, "float32")
QWEN2 = to_settings(MODEL.model_copy(update={"qkv_bias": True, "window": 3}), "float32")
GPT = to_settings(GPT2(family="gpt2", layers=2, dim=8, heads=4, hidden=6, vocab=7, positions=12), "float32")
COUNTS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "num_key_value_heads", "head_dim",
)  # fmt: skip
NUMBERS = ("rms_norm_eps", "initializer_range", "rope_theta")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
NO_COUNTS: list[Any] = [0, -1, "4", 4.0, True, [4], {}, 10**12, 2**31]
NO_NUMBERS: list[Any] = ["1", True, [], {}]
NO_KINDS: list[Any] = [[], {}, "full", ["sliding_attention"], ["chunked_attention"] * 2, [["sliding_attention"]] * 2]
ABSURD: list[tuple[dict[str, Any], str]] = [
    *((LLAMA | {key: value}, f"{key} = {value!r}; give a whole number from 1") for key in COUNTS
      for value in NO_COUNTS),
    *((GPT | {key: value}, f"{key} = {value!r}; give a whole number from 1") for key in ("n_layer", "n_head", "n_inner")
      for value in NO_COUNTS),
    *((LLAMA | {key: value}, f"{key} = {value!r}; give a number") for key in NUMBERS for value in NO_NUMBERS),
    *((LLAMA | {key: value}, f"{key} = {value!r}; give true or false") for key in FLAGS for value in (1, 0, "false")),
    *((LLAMA | {key: 0}, " = 0: ") for key in ("initializer_range", "rope_theta")),
    (LLAMA | {"num_hidden_layers": MOST_LAYERS + 1}, "num_hidden_layers = 10001; give a whole number from 1 to 10,000"),
    (LLAMA | {"vocab_size": 10**4000}, "vocab_size = 1000"),
    (LLAMA | {"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
    (LLAMA | {"vocab_size": None}, "vocab_size is missing"),
    (LLAMA | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": None}, "head_dim = 0"),
    (LLAMA | {"model_type": ["llama"]}, "model_type = ['llama']; choose"),
    (LLAMA | {"model_type": "x" * 10**6}, "model_type = 'xxx"),
    (LLAMA | {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'; jaxdist reads"),
    (LLAMA | {"architectures": {"LlamaForCausalLM": 1}}, "architectures = {'LlamaForCausalLM': 1}; jaxdist reads"),
    (LLAMA | {"hidden_act": ["silu"]}, "hidden_act = ['silu']; jaxdist computes 'silu'"),
    (LLAMA | {"hidden_act": None}, "hidden_act = None"),
    (LLAMA | {"rope_scaling": "linear"}, "rope_scaling = 'linear'; give a table"),
    (LLAMA | {"rope_scaling": None, "rope_parameters": [1]}, "rope_parameters = [1]; give a table"),
    (LLAMA | {"rope_scaling": {"rope_type": ["llama3"]}}, "rope_type = ['llama3']; jaxdist computes"),
    *((LLAMA | {"rope_scaling": {"rope_type": kind, "factor": 2.0}}, f"rope_type = '{kind}'; jaxdist computes")
      for kind in ("yarn", "longrope", "dynamic", "linear", "mrope")),
    (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": "8"}}, "factor = '8'; give a number"),
    (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}; jaxdist computes models"),
    (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0; jaxdist computes models without it"),
    (LLAMA | {"is_causal": False}, "is_causal = False; jaxdist computes True only"),
    (QWEN2 | {"sliding_window": -3}, "sliding_window = -3; give a whole number from 0"),
    (QWEN2 | {"use_sliding_window": "true"}, "use_sliding_window = 'true'; give true or false"),
    (QWEN2 | {"layer_types": None, "max_window_layers": -1}, "max_window_layers = -1; give a whole number from 0"),
    *((QWEN2 | {"layer_types": kinds}, f"layer_types = {kinds!r}; give full_attention or sliding_attention for")
      for kinds in NO_KINDS),
    (GPT | {"num_attention_heads": 2}, "num_attention_heads = 2; give it as n_head"),
    (GPT | {"scale_attn_weights": False}, "scale_attn_weights = False; jaxdist computes True only"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "expected"), ABSURD, ids=[expected for _, expected in ABSURD])
def test_an_absurd_config_names_its_key(settings: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError) as error:
        read_model(tmp_path)
    assert expected in str(error.value) and str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert len(str(error.value)) < 500


def test_keys_that_change_nothing_pass(tmp_path: Path) -> None:
    """transformers writes many; null is the same as absent."""
    more = {"pretraining_tp": 2, "use_cache": False, "attention_dropout": 0.1, "torch_dtype": "bfloat16", "mine": [1]}
    absent = {"quantization_config": None, "attn_logit_softcapping": None, "rope_scaling": None, "is_causal": True}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | more | absent))
    assert read_model(tmp_path) == MODEL


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "Expecting value"),
    "not UTF-8": (b'{"model_type": "\xff"}', "invalid start byte"),
    "deep": (b'{"model_type": ' + b"[" * 100_000, "nested too deeply"),
    "NaN": (json.dumps(LLAMA | {"rms_norm_eps": float("nan")}).encode(), "NaN is not a number"),
    "Infinity": (json.dumps(LLAMA | {"rope_theta": float("inf")}).encode(), "Infinity is not a number"),
    "1e400": (json.dumps(LLAMA).replace("1e-05", "1e400").encode(), "rms_norm_eps = inf; give a number"),
    "5000 digits": (json.dumps(LLAMA).replace(": 7", ": " + "9" * 5000).encode(), "4300 digits"),
    "a key twice": (json.dumps(LLAMA)[:-1].encode() + b', "rope_theta": 1.0}', "'rope_theta' twice"),
    "no table": (b"[]", r"\[\] is not a table of settings"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_an_invalid_config(name: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[name]
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"config.json: .*{message}"):
        read_model(tmp_path)


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config.json: it is not a file; give a Hugging Face folder"):
        read_model(tmp_path)
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config.json: it is not a file; give a Hugging Face folder"):
        read_model(tmp_path)


MIXTRAL = to_settings(Mixture(**MODEL.model_dump(exclude={"family", "mlp_bias"}), family="mixtral"), "float32")
QWEN3_MOE = to_settings(
    Mixture(**MODEL.model_dump(exclude={"family", "mlp_bias"}) | {"qk_norm": True}, family="qwen3_moe"), "float32"
)
RESNET = to_settings(ResNet(family="resnet", block="basic", stem=8, depths=(1,), widths=(8,), classes=2), "float32")


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LLAMA | {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647; give"),
        (LLAMA | {"num_hidden_layers": MOST_LAYERS}, "absent there"),  # the most layers accepted; fails at once
        (LLAMA | {"vocab_size": 2**31 - 1}, r"\(2147483647, 8\) in the model"),
        (GPT | {"n_layer": 300_000}, "n_layer = 300000; give a whole number from 1 to 10,000"),
        pytest.param(GPT | {"n_layer": MOST_LAYERS}, "absent there", marks=pytest.mark.slow),
        (MIXTRAL | {"num_local_experts": 2**31 - 1}, "num_local_experts = 2147483647 is absurd; use at most 10,000"),
        (MIXTRAL | {"num_local_experts": MOST_EXPERTS + 1}, "num_local_experts = 10001 is absurd"),
        pytest.param(
            MIXTRAL | {"num_hidden_layers": 10, "num_local_experts": MOST_EXPERTS},
            "absent there",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MIXTRAL | {"num_hidden_layers": MOST_LAYERS, "num_local_experts": 10},
            "absent there",
            marks=pytest.mark.slow,
        ),
        (
            MIXTRAL | {"num_hidden_layers": 11, "num_local_experts": MOST_EXPERTS},
            "num_local_experts = 10000 in each of num_hidden_layers = 11 are 110,000 experts, more than 100,000; use "
            "at most num_local_experts = 9090",
        ),
        (QWEN3_MOE | {"num_experts": 300_000}, "num_experts = 300000 is absurd"),
        (RESNET | {"depths": [10_000] * 4, "hidden_sizes": [8] * 4}, "are 40,000 blocks; use at most 1,000"),
        (RESNET | {"depths": [2**31 - 1], "hidden_sizes": [8]}, "are 2,147,483,647 blocks; use at most 1,000"),
        (RESNET | {"depths": [1] * 1001, "hidden_sizes": [8] * 1001}, "give a list of 1 to 1,000 whole numbers"),
        pytest.param(RESNET | {"depths": [250] * 4, "hidden_sizes": [8] * 4}, "absent there", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.timeout(30)
def test_the_command_line_refuses_an_absurd_model_at_once(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings))
    save_file({"model.norm.weight": np.ones(8, np.float32)}, tmp_path / "hf" / SINGLE)
    with pytest.raises(ConfigError, match=rf"hf.*{message}"):
        main([str(tmp_path / "hf"), str(tmp_path / "run")])
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
