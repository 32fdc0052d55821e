"""LoRA adapters are merged into their base as by PEFT, or refused with a reason."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SETTINGS = {
    "peft_type": "LORA", "base_model_name_or_path": "meta-llama/Llama", "r": 4, "lora_alpha": 8, "use_rslora": False,
    "use_dora": False, "fan_in_fan_out": False, "bias": "none", "alpha_pattern": {}, "rank_pattern": {},
}  # fmt: skip
RANDOM = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def adapter(path: Path, tensors: dict[str, np.ndarray], **settings: Any) -> Path:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, path / "adapter_model.safetensors"
    )
    return path


def pair(module: str, outputs: int, inputs: int, rank: int = 4) -> dict[str, np.ndarray]:
    return {f"{module}.lora_A.weight": drawn(rank, inputs), f"{module}.lora_B.weight": drawn(outputs, rank)}


QUERY, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("settings", "scales"),
    [
        ({}, (2.0, 2.0)),
        ({"use_rslora": True}, (4.0, 4.0)),
        ({"alpha_pattern": {"q_proj": 16}}, (4.0, 2.0)),
        ({"alpha_pattern": {r"layers\.0\.mlp\.down_proj": 2}}, (2.0, 0.5)),
        ({"r": 16, "rank_pattern": {"q_proj": 4, "down_proj": 4}}, (2.0, 2.0)),
    ],
    ids=str,
)
def test_merged_weights(settings: Any, scales: tuple[float, float], llama: Path, tmp_path: Path) -> None:
    tensors = pair(QUERY, 32, 32) | pair(DOWN, 32, 48)
    found, base = merged(llama, adapter(tmp_path / "a", tensors, **settings), tmp_path)
    for module, scale in zip((QUERY, DOWN), scales, strict=True):
        b, a = (tensors[f"{module}.lora_{one}.weight"].astype(np.float64) for one in "BA")
        close(found.pop(f"{module}.weight"), base[f"{module}.weight"] + scale * b @ a)
    assert all(np.array_equal(tensor, base[name]) for name, tensor in found.items())


def close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Within float32's rounding of a sum of products of rank 4, against float64."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2.0**-24 * np.abs(wanted).max() * 8)


def product(tensors: dict[str, np.ndarray], b: str, a: str) -> np.ndarray:
    return 2 * tensors[b].astype(np.float64) @ tensors[a].astype(np.float64)


def merged(
    base: Path, adapter: Path, tmp_path: Path, *more: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors of a base with an adapter, merged by the command, and those without."""
    main([str(base), str(tmp_path / "out"), "--to", "hf", "--adapter", str(adapter), "--verify"])
    return load_file(tmp_path / "out" / "model.safetensors"), load_file(base / "model.safetensors")


@pytest.mark.long
def test_conv1d_embeddings_and_tensors_saved_whole(gpt2: Path, llama: Path, tmp_path: Path) -> None:
    fused = "transformer.h.0.attn.c_attn"
    tensors = pair(fused, 96, 32)
    found, base = merged(gpt2, adapter(tmp_path / "a", tensors, fan_in_fan_out=True), tmp_path)
    delta = product(tensors, f"{fused}.lora_B.weight", f"{fused}.lora_A.weight")
    close(found[f"{fused}.weight"], base[f"{fused}.weight"] + delta.T)
    table, head = "model.embed_tokens", "lm_head"
    tensors = {f"{table}.lora_embedding_A": drawn(4, 96), f"{table}.lora_embedding_B": drawn(32, 4)}
    full = {f"{head}.weight": drawn(96, 32), f"{table}.base_layer.weight": drawn(96, 32)}  # PEFT saves both so
    (tmp_path / "b").mkdir()
    found, base = merged(llama, adapter(tmp_path / "c", tensors | full), tmp_path / "b")
    delta = product(tensors, f"{table}.lora_embedding_B", f"{table}.lora_embedding_A")
    close(found[f"{table}.weight"], full[f"{table}.base_layer.weight"] + delta.T)
    assert np.array_equal(found[f"{head}.weight"], full[f"{head}.weight"])


def test_a_bfloat16_base_is_rounded_once(llama: Path, tmp_path: Path) -> None:
    """The sum is computed in float32, without rounding the delta first."""
    main([str(llama), str(tmp_path / "half"), "--to", "hf", "--dtype", "bfloat16"])
    tensors = pair(QUERY, 32, 32)
    found, base = merged(tmp_path / "half", adapter(tmp_path / "a", tensors), tmp_path)
    name = f"{QUERY}.weight"
    b, a = (tensors[f"{QUERY}.lora_{one}.weight"] for one in "BA")
    wanted = (base[name].astype(np.float32) + np.float32(2) * (b @ a)).astype(base[name].dtype)
    assert found[name].dtype == base[name].dtype and np.array_equal(found[name], wanted)


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (pair(QUERY, 32, 32), {"peft_type": "IA3"}, "peft_type = 'IA3': not merged here; merge it by PEFT's merge_and"),
        (pair(QUERY, 32, 32), {"use_dora": True}, "use_dora = True: not merged here"),
        (pair(QUERY, 32, 32), {"init_lora_weights": "pissa_niter_4"}, "= 'pissa_niter_4': not merged"),
        (pair(QUERY, 32, 32), {"use_new": True, "kasa_config": {"a": 1}}, "use_new = True, kasa_config = .*: not"),
        (pair(QUERY, 32, 32), {"lora_alpha": None}, "lora_alpha = None; give a number"),
        (pair("model.layers.7.self_attn.q_proj", 32, 32), {}, r"belongs to no tensor of the base model; give the"),
        (pair(QUERY, 64, 32), {}, r"is of a tensor \(64, 32\), and \S+.q_proj.weight of .* \(32, 32"),
        (pair(DOWN, 32, 48), {"fan_in_fan_out": True}, r"is of a tensor \(48, 32\)"),
        ({f"{QUERY}.lora_A.weight": drawn(4, 32)}, {}, r"q_proj has lora_A alone; give a complete adapter"),
        (pair(QUERY, 32, 32), {"rank_pattern": {"q_proj": 8}}, r"lora_A of rank 4 and .* where .* has 8 \(r, r"),
        (pair(QUERY, 32, 32, 2), {}, r"lora_A of rank 2 and lora_B of rank 2, where adapter_config.json has 4 \(r"),
        (pair(QUERY, 32, 32) | {f"{QUERY}.lora_A.weight": np.full((4, 32), np.nan, np.float32)}, {},
         r"a: \S+q_proj makes finite weights infinite or NaN; give an adapter whose"),
    ],
)  # fmt: skip
def test_adapters_that_do_not_fit(tensors: Any, settings: Any, message: str, llama: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", tensors, **settings)
    with pytest.raises(ConfigError, match=message):
        main([str(llama), str(tmp_path / "out"), "--adapter", str(folder)])
    assert not (tmp_path / "out").exists()


def test_a_head_that_the_base_ties_is_named(gpt2: Path, tmp_path: Path) -> None:
    """Saved in full, or changed by factors: neither changes the embedding."""
    for name, tensors in (("whole", {"lm_head.weight": drawn(96, 32)}), ("factors", pair("lm_head", 96, 32))):
        folder = adapter(tmp_path / name, tensors)
        with pytest.raises(ConfigError, match="is of a head that the base model ties to its embedding: not merged"):
            main([str(gpt2), str(tmp_path / "merged"), "--to", "hf", "--adapter", str(folder)])


def test_an_adapter_is_recognized(llama: Path, tmp_path: Path) -> None:
    """Following the message's fix merges it."""
    folder = adapter(tmp_path / "a", pair(QUERY, 32, 32))
    message = (
        rf"PEFT adapter \(LORA, r = 4\) of meta-llama/Llama, and no model; .*jaxdist.convert BASE MERGED --adapter "
        rf"{folder}`, and give MERGED"
    )
    with pytest.raises(ConfigError, match=message):
        main([str(folder), str(tmp_path / "out")])
    main([str(llama), str(tmp_path / "out"), "--adapter", str(folder)])
    with pytest.raises(ConfigError, match=r"--adapter .* has other names than transformers; give a Hugging"):
        main([str(tmp_path / "out"), str(tmp_path / "again"), "--adapter", str(folder)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alpha": True}, "lora_alpha = True; give a number"),
        ({"r": None}, "r = None; give a number"),
        ({"rank_pattern": {"q_proj(": 8}}, r"rank_pattern has 'q_proj\(', no pattern"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern = .*; give numbers by names of modules"),
        ({"alpha_pattern": {"q_proj": None}}, "q_proj = None; give a number"),
        ({"alpha_pattern": {"q_proj": 1e308}}, r"q_proj = 1e\+308; give a number below"),
        ({"alpha_pattern": {"q_proj(": 8}}, r"alpha_pattern has 'q_proj\(', no pattern"),
        ({"alpha_pattern": {"(([a-z_.0-9])+)+!": 8}}, "no pattern of a module's name that is read here"),
    ],
)
def test_an_absurd_scale_is_named(llama: Path, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "adapter", pair(QUERY, 32, 32), **settings)
    with pytest.raises(ConfigError, match=rf"adapter_config.json: .*{message}"):
        main([str(llama), str(tmp_path / "merged"), "--adapter", str(folder)])
    assert not (tmp_path / "merged").exists()
