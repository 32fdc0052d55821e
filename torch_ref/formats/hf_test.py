"""Models and their name mapping against transformers, in float32."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jaxdist.config import ConfigError, Model
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.formats import headers
from jaxdist.formats.foreign import INDEX, SINGLE
from jaxdist.formats.hf import to_settings
from torch_ref.families.models import build
from torch_ref.formats import hf
from torch_ref.parallel.weights import fill

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}
LLAMA3: dict[str, Any] = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODEL_SIZES: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 4, "hidden": 48, "vocab": 64, "positions": 64}
LLAMA_SIZES = MODEL_SIZES | {"kv_heads": 2, "head_dim": 8}
CASES: dict[str, tuple[Any, Model]] = {
    "llama3": (
        transformers.LlamaConfig(
            **SIZES,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 16, **LLAMA3
            },
        ),
        Llama(**LLAMA_SIZES, rope_scaling="llama3", rope_original_positions=16),
    ),
    "mistral": (
        transformers.MistralConfig(
            **SIZES, head_dim=8, rms_norm_eps=1e-5, sliding_window=7,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        Llama(**LLAMA_SIZES, window=7),
    ),
    "qwen2": (
        transformers.Qwen2Config(
            **SIZES, rms_norm_eps=1e-6, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        Llama(**LLAMA_SIZES, qkv_bias=True, norm_eps=1e-6, rope_theta=1e6, tied=True),
    ),
    "qwen3": (
        transformers.Qwen3Config(
            **SIZES, head_dim=16, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
        Llama(**MODEL_SIZES | {"kv_heads": 2, "head_dim": 16}, qk_norm=True, norm_eps=1e-6),
    ),
    "gpt2": (
        transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_inner=48, vocab_size=64, n_positions=64, initializer_range=0.3,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        GPT2(**MODEL_SIZES, family="gpt2"),
    ),
}  # fmt: skip
TOKENS = torch.arange(48).reshape(2, 24) * 7 % 64


def logits_of_both(case: str, folder: Path) -> tuple[Tensor, Tensor]:
    """Logits of transformers' model and of ours with the weights it saved."""
    config, ours = CASES[case]
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in theirs.parameters():  # initial biases and norms would hide a mistake
        nn.init.normal_(p, 0.5 if p.ndim == 1 else 0.0, 0.3)
    theirs.save_pretrained(folder)
    weights = hf.Weights(folder, ours)
    model = build(ours)
    fill(model, lambda name, _: weights.read(name))
    with torch.no_grad():
        return theirs(TOKENS).logits, model(TOKENS)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs, ours = logits_of_both(case, tmp_path)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("field", ["window", "rope_scaling"])
def test_a_forgotten_field_is_found(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"window": "mistral", "rope_scaling": "llama3"}[field]
    config, ours = CASES[case]
    forgotten = ours.model_copy(update={field: Llama.model_fields[field].default})
    monkeypatch.setitem(CASES, case, (config, forgotten))
    monkeypatch.setattr(hf, "same_model", lambda *_: None)
    theirs, without = logits_of_both(case, tmp_path)
    assert (theirs - without).abs().max() > 1e-2 * theirs.abs().max()


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("qwen2", "rope_theta", 1e4),
        ("qwen2", "qkv_bias", False),
        ("gpt2", "heads", 2),
        ("mistral", "window", 0),
        ("llama3", "rope_factor", 4.0),
        ("llama3", "rope_scaling", "none"),
    ],
)
def test_a_config_that_contradicts_the_folder_is_refused(case: str, field: str, value: Any, tmp_path: Path) -> None:
    logits_of_both(case, tmp_path)
    _, ours = CASES[case]
    with pytest.raises(ConfigError, match=rf"model\.{field} = \S+, but \S+ holds another model"):
        hf.Weights(tmp_path, ours.model_copy(update={field: value}))


def test_shapes_are_those_of_the_tensors_read(tmp_path: Path) -> None:
    for case in ("gpt2", "qwen2"):
        logits_of_both(case, tmp_path / case)
        weights = hf.Weights(tmp_path / case, CASES[case][1])
        weights.check()
        assert {n: target.shape for n, target in weights.targets.items()} == {
            name: tuple(weights.read(name).shape) for name in weights.targets
        }


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("model.safetensors", "{"),
        (INDEX, "[]"),
        (INDEX, '{"weight_map": 3}'),
    ],
)
def test_damage_is_named(file: str, content: str, tmp_path: Path) -> None:
    logits_of_both("qwen2", tmp_path)
    if file == INDEX:
        (tmp_path / SINGLE).unlink()
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        hf.Weights(tmp_path, CASES["qwen2"][1])


def test_one_file_goes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    logits_of_both("qwen2", tmp_path)
    model, right = CASES["qwen2"][1], load_file(tmp_path / SINGLE)
    save_file({name: w + 1 for name, w in right.items()}, tmp_path / "other.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(right, "other.safetensors")}))
    assert torch.equal(hf.Weights(tmp_path, model).read("norm.weight"), right["model.norm.weight"])


def test_an_index_that_misplaces_tensors_is_refused(tmp_path: Path) -> None:
    """An index that places tensors in files without them is refused."""
    logits_of_both("qwen2", tmp_path)
    model, right = CASES["qwen2"][1], load_file(tmp_path / SINGLE)
    (tmp_path / SINGLE).unlink()
    parts = {
        "a": {n: w for n, w in right.items() if "norm" in n},
        "b": {n: w for n, w in right.items() if "norm" not in n},
    }
    for name, part in parts.items():
        save_file(part, tmp_path / f"{name}.safetensors")
    places = {n: f"{'a' if 'norm' in n else 'b'}.safetensors" for n in right}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    assert torch.equal(hf.Weights(tmp_path, model).read("norm.weight"), right["model.norm.weight"])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(right, "a.safetensors")}))
    with pytest.raises(ConfigError, match=r"its weight_map has tensor .* give the index that belongs to these files"):
        hf.Weights(tmp_path, model)
    swapped = {n: "b.safetensors" if file == "a.safetensors" else "a.safetensors" for n, file in places.items()}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(ConfigError, match=r"in [ab].safetensors, and it is in [ab].safetensors; give the index"):
        hf.Weights(tmp_path, model)
    save_file(right, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="is in another file of the folder too"):
        hf.Weights(tmp_path, model)


def folder_of(folder: Path, case: str, tensors: dict[str, Tensor]) -> hf.Weights:
    """Weights of a folder with these tensors and a right config.json."""
    folder.mkdir(exist_ok=True)
    model = CASES[case][1]
    assert isinstance(model, Llama | GPT2)
    (folder / "config.json").write_text(json.dumps(to_settings(model, "float32")))
    save_file(tensors, folder / SINGLE)
    return hf.Weights(folder, model)


def test_an_index_of_files_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, folder, outside = "model.norm.weight", tmp_path / "folder", tmp_path / "outside.safetensors"
    folder_of(folder, "qwen2", {})
    (folder / SINGLE).unlink()
    save_file({name: torch.ones(32)}, outside)
    (folder / "link.safetensors").symlink_to(outside)
    places = ("../outside.safetensors", str(outside), "link.safetensors")

    def weights(place: str) -> hf.Weights:
        (folder / INDEX).write_text(json.dumps({"weight_map": {name: place}}))
        return hf.Weights(folder, CASES["qwen2"][1])

    for place in places:
        with pytest.raises(ConfigError, match=rf"{INDEX}: .* is outside of .*; give an index"):
            weights(place)
    monkeypatch.setattr("jaxdist.formats.foreign.file_within", lambda folder, name: folder / name)
    for place in places:
        assert weights(place).read("norm.weight").shape == (32,)


def test_an_index_of_the_hugging_face_cache(tmp_path: Path) -> None:
    blobs, revision = tmp_path / "blobs", tmp_path / "snapshots" / "c0ffee"
    blobs.mkdir()
    revision.mkdir(parents=True)
    folder_of(revision, "qwen2", {"model.norm.weight": torch.ones(32)})
    (revision / SINGLE).rename(blobs / "5ad1")
    (revision / "1.safetensors").symlink_to("../../blobs/5ad1")
    (revision / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": "1.safetensors"}}))
    assert hf.Weights(revision, CASES["qwen2"][1]).read("norm.weight").shape == (32,)


def test_a_tensor_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = '"model.norm.weight":{"dtype":"F32","shape":[32],"data_offsets":[0,128]}'
    folder_of(tmp_path, "qwen2", {})
    header = f"{{{entry},{entry}}}".encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(128))
    with pytest.raises(ConfigError, match=rf"{SINGLE}: it gives 'model.norm.weight' twice"):
        hf.Weights(tmp_path, CASES["qwen2"][1])
    starts = {"model.norm.weight": 8 + len(header)}
    monkeypatch.setattr(headers, "check_header", lambda path: starts)
    assert hf.Weights(tmp_path, CASES["qwen2"][1]).plan.names == {"model.norm.weight": "model.norm.weight"}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Quantized weights are refused: they would be read without their scales."""
    logits_of_both("qwen2", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    weights = folder_of(tmp_path, "qwen2", tensors | {"model.norm.weight": tensors["model.norm.weight"].to(dtype)})
    with pytest.raises(ConfigError, match=r"tensor model.norm.weight is \w+; give float64, float32, float16, bfloat16"):
        weights.check()


def test_a_parameter_under_two_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tensors \S+ and \S+ are the same parameter; give each once"):
        folder_of(tmp_path, "gpt2", {"ln_f.weight": torch.ones(32), "transformer.ln_f.weight": torch.ones(32)})


@pytest.mark.parametrize("shape", [(), (2,), (1,) * 70])
def test_a_shape_that_cannot_be_turned_into_ours(shape: tuple[int, ...], tmp_path: Path) -> None:
    """The shape of GPT-2's fused query, key and value is checked before it is split."""
    name = "transformer.h.0.attn.c_attn.weight"
    logits_of_both("gpt2", tmp_path)
    tensors = load_file(tmp_path / SINGLE) | {name: torch.ones(shape)}
    with pytest.raises(ConfigError, match=rf"{name} is {re.escape(str(shape))} there, and \(32, 96\) in the model"):
        folder_of(tmp_path, "gpt2", tensors).check()
