"""Weights of a Hugging Face folder for Llama, Mistral, Qwen2, Qwen3 and GPT-2, by their safetensors files."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jaxdist.config import ConfigError, Model

# Our name -> theirs; "#" is the layer's number. GPT-2 keeps (in, out) matrices, and query, key and value in
# one.
LLAMA = {
    "embed": "model.embed_tokens",
    "layers.#.attention_norm": "model.layers.#.input_layernorm",
    "layers.#.attention.q_proj": "model.layers.#.self_attn.q_proj",
    "layers.#.attention.k_proj": "model.layers.#.self_attn.k_proj",
    "layers.#.attention.v_proj": "model.layers.#.self_attn.v_proj",
    "layers.#.attention.o_proj": "model.layers.#.self_attn.o_proj",
    "layers.#.attention.q_norm": "model.layers.#.self_attn.q_norm",
    "layers.#.attention.k_norm": "model.layers.#.self_attn.k_norm",
    "layers.#.mlp_norm": "model.layers.#.post_attention_layernorm",
    "layers.#.mlp.gate_proj": "model.layers.#.mlp.gate_proj",
    "layers.#.mlp.up_proj": "model.layers.#.mlp.up_proj",
    "layers.#.mlp.down_proj": "model.layers.#.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}
GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "layers.#.attention_norm": "transformer.h.#.ln_1",
    "layers.#.attention.q_proj": "transformer.h.#.attn.c_attn",
    "layers.#.attention.k_proj": "transformer.h.#.attn.c_attn",
    "layers.#.attention.v_proj": "transformer.h.#.attn.c_attn",
    "layers.#.attention.o_proj": "transformer.h.#.attn.c_proj",
    "layers.#.mlp_norm": "transformer.h.#.ln_2",
    "layers.#.mlp.up_proj": "transformer.h.#.mlp.c_fc",
    "layers.#.mlp.down_proj": "transformer.h.#.mlp.c_proj",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
TABLES = {"llama": LLAMA, "gpt2": GPT2}
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "llama", "gpt2": "gpt2"}
THIRDS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


class Weights:
    """The tensors of a Hugging Face folder under our names, read one at a time."""

    def __init__(self, path: Path, model: Model):
        """Raises ConfigError when the files cannot be read or their config.json contradicts `model`."""
        self.path, self.gpt2 = path, False
        settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
        check_settings(path, settings, model)
        self.gpt2 = FAMILIES[settings["model_type"]] == "gpt2"
        self.files = self._index()
        self.names = self._names(TABLES[FAMILIES[settings["model_type"]]], model.tied)

    def _index(self) -> dict[str, Path]:
        """Their tensor name -> file."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.path / file for name, file in places.items()}
        single = self.path / "model.safetensors"
        try:
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--init {single}: {error}; give a folder with safetensors weights") from None

    def _names(self, table: dict[str, str], tied: bool) -> dict[str, str]:
        """Our name -> their name as it is in the files, for every tensor that is a parameter of ours."""
        theirs: dict[str, list[str]] = {}
        for ours, name in table.items():
            theirs.setdefault(name, []).append(ours)
        found = {}
        for name in self.files:
            # GPT-2 files of old have no prefix, and attention masks beside the weights.
            full = name if not self.gpt2 or name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
            module, _, kind = full.rpartition(".")
            layer = next(iter(re.findall(r"\.(\d+)\.", module)), "")
            if tied and module == "lm_head":
                continue
            for ours in theirs.get(re.sub(r"\.\d+\.", ".#.", module), ()):
                found[f"{ours.replace('#', layer)}.{kind}"] = name
        return found

    def shapes(self) -> dict[str, torch.Size]:
        """Our name -> shape."""
        return {name: self.read(name).shape for name in self.names}

    def read(self, name: str) -> Tensor:
        """The tensor that we call `name`, in our layout and the file's dtype."""
        theirs = self.names[name]
        with safe_open(self.files[theirs], framework="pt") as file:
            tensor = file.get_tensor(theirs)
        layer, kind = name.split(".")[-2:]
        if self.gpt2 and layer.endswith("_proj"):
            if kind == "weight":
                tensor = tensor.T
            if layer in THIRDS:
                tensor = tensor.chunk(3)[THIRDS[layer]]
        return tensor


def check_settings(path: Path, settings: dict[str, Any], model: Model) -> None:
    """What shapes cannot show: raises ConfigError where config.json and the model section disagree."""
    kind = settings.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"--init {path}: model_type {kind!r} is none of {', '.join(FAMILIES)}")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    gpt2 = kind == "gpt2"
    there = {
        "family": FAMILIES[kind],
        "layers": settings.get("n_layer" if gpt2 else "num_hidden_layers"),
        "heads": settings.get("n_head" if gpt2 else "num_attention_heads"),
        "kv_heads": None if gpt2 else settings.get("num_key_value_heads"),
        "norm_eps": settings.get("layer_norm_epsilon" if gpt2 else "rms_norm_eps"),
        "tied": settings.get("tie_word_embeddings", gpt2),
        "rope_theta": rope.get("rope_theta", settings.get("rope_theta")),
        "rope_scaling": "llama3" if rope.get("rope_type", rope.get("type")) == "llama3" else None,
    }
    for field, value in there.items():
        here = getattr(model, field) if hasattr(model, field) else None
        if value is not None and here is not None and here != value:
            raise ConfigError(f"model.{field} = {here!r}, but --init {path} has {value!r}; set model.{field} to it")
