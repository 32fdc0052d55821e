"""Weights of a Hugging Face folder for Llama, Mistral, Qwen2, Qwen3 and GPT-2, by their safetensors files."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jaxdist.config import ConfigError, Model, same_model
from jaxdist.config.hf import read_model

# Our name -> theirs; "#" is the layer's number. GPT-2 keeps (in, out) matrices, and query, key and value in one.
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
THIRDS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


class Weights:
    """The tensors of a Hugging Face folder under our names, read one at a time."""

    def __init__(self, path: Path, model: Model):
        """Raises ConfigError when the files cannot be read or their config.json describes another model."""
        self.path, found = path, read_model(path)
        same_model(model, found, f"--init {path}")
        self.gpt2 = found.family == "gpt2"
        with self._reading():
            self.files = self._index()
        self.names = self._names(TABLES[found.family], found.tied)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
            raise ConfigError(f"--init {self.path}: {error!r}; give a folder with whole safetensors weights") from None

    def _index(self) -> dict[str, Path]:
        """Their tensor name -> file."""
        index, single = self.path / "model.safetensors.index.json", self.path / "model.safetensors"
        if index.exists():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.path / file for name, file in places.items()}
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Our name -> shape, from the files' headers."""
        shapes = {}
        for name, theirs in self.names.items():
            with self._reading(), safe_open(self.files[theirs], framework="pt") as file:
                shape = file.get_slice(theirs).get_shape()
            shapes[name] = tuple(self._ours(name, torch.empty(shape, device="meta")).shape)
        return shapes

    def read(self, name: str) -> Tensor:
        """The tensor that we call `name`, in our layout and the file's dtype. Raises ConfigError."""
        theirs = self.names[name]
        with self._reading(), safe_open(self.files[theirs], framework="pt") as file:
            return self._ours(name, file.get_tensor(theirs))

    def _ours(self, name: str, theirs: Tensor) -> Tensor:
        """The parameter `name` of ours, out of the tensor of theirs that holds it."""
        layer, kind = name.split(".")[-2:]
        if not (self.gpt2 and layer.endswith("_proj")):
            return theirs
        ours = theirs.T if kind == "weight" else theirs
        return ours.chunk(3)[THIRDS[layer]] if layer in THIRDS else ours
