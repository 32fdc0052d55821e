"""Weights of a Hugging Face folder for all families, by their safetensors files."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jaxdist.config import ConfigError, Model, same_model
from jaxdist.config.foreign import SINGLE, check_header, check_index, indexed
from jaxdist.config.hf import read_model

# Our name -> theirs; "#" is the layer's number, a second one that of an expert, of which our tensors hold all. GPT-2
# keeps (in, out) matrices, and query, key and value in one.
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
EXPERTS = ".mlp.experts."


def mixture(block: str, **projections: str) -> dict[str, str]:
    """A mixture's names, whose MLPs are called `block`; `projections` of an expert: ours -> theirs."""
    kept = {ours: theirs for ours, theirs in LLAMA.items() if ".mlp." not in ours}
    experts = {ours: f"model.layers.#.{block}.experts.#.{theirs}" for ours, theirs in projections.items()}
    router = {"layers.#.mlp.router": f"model.layers.#.{block}.gate"}
    return kept | router | {f"layers.#{EXPERTS}{ours}": theirs for ours, theirs in experts.items()}


TABLES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "mixtral": mixture("block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2"),
    "qwen3_moe": mixture("mlp", gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj"),
    "resnet": {
        "stem.conv": "resnet.embedder.embedder.convolution",
        "stem.norm": "resnet.embedder.embedder.normalization",
        "stages.#.#.layer.#.conv": "resnet.encoder.stages.#.layers.#.layer.#.convolution",
        "stages.#.#.layer.#.norm": "resnet.encoder.stages.#.layers.#.layer.#.normalization",
        "stages.#.#.shortcut.conv": "resnet.encoder.stages.#.layers.#.shortcut.convolution",
        "stages.#.#.shortcut.norm": "resnet.encoder.stages.#.layers.#.shortcut.normalization",
        "head": "classifier.1",
    },
}
THIRDS = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
DTYPES = ("F64", "F32", "F16", "BF16")  # others hold quantized weights, whose scales lie elsewhere
COUNTED, COUNTS = "num_batches_tracked", ("I64", "I32")


def stacked(name: str) -> str:
    """The name of the tensor of all experts, of which `name` may be that of one."""
    return re.sub(rf"{re.escape(EXPERTS)}\d+\.", EXPERTS, name)


class Weights:
    """The tensors of a Hugging Face folder under our names, read one at a time."""

    def __init__(self, path: Path, model: Model):
        """Raises ConfigError when the files cannot be read or their config.json describes another model."""
        self.path, found = path, read_model(path)
        same_model(model, found, f"--init {path}")
        self.gpt2, self.experts = found.family == "gpt2", getattr(found, "experts", 0)
        with self._reading():
            self.files = self._index()
        self.names = self._names(TABLES[found.family], found.tied)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, TypeError, IndexError, SafetensorError) as error:  # also torch's, of shapes
            raise ConfigError(f"--init {self.path}: {error!r}; give a folder with whole safetensors weights") from None

    def _index(self) -> dict[str, Path]:
        """Their tensor name -> file."""
        single = self.path / SINGLE
        places = None if single.exists() else indexed(self.path)  # as transformers, which takes it before an index
        found: dict[str, Path] = {}
        for path in [single] if places is None else sorted(set(places.values())):
            check_header(path)
            with safe_open(path, framework="pt") as file:
                names = set(file.keys())
            if twice := found.keys() & names:
                raise ConfigError(f"{path}: tensor {min(twice)} is in another file of the folder too; give it once")
            found |= dict.fromkeys(names, path)
        check_index(self.path, places, found)
        return found

    def _names(self, table: dict[str, str], tied: bool) -> dict[str, str]:
        """Our name -> their name as it is in the files, for every tensor that is a parameter. Raises ConfigError."""
        theirs: dict[str, list[str]] = {}
        for ours, name in table.items():
            theirs.setdefault(name, []).append(ours)
        found: dict[str, str] = {}
        for name in self.files:
            # GPT-2 files of old have no prefix, and attention masks beside the weights.
            full = name if not self.gpt2 or name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
            module, _, kind = full.rpartition(".")
            numbers = re.findall(r"\.(\d+)(?=\.)", module)
            expert = numbers[1] if len(numbers) > 1 else ""
            if tied and module == "lm_head":
                continue
            for ours in theirs.get(re.sub(r"\.\d+(?=\.)", ".#", module), ()):
                # Of experts, which ours has in one tensor, each by its number.
                single = ours.replace(EXPERTS, f"{EXPERTS}{expert}.")
                for number in numbers:
                    single = single.replace("#", number, 1)
                known = found.setdefault(f"{single}.{kind}", name)
                if known != name:
                    raise ConfigError(
                        f"--init {self.path}: tensors {known} and {name} are the same parameter; give each once"
                    )
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Our name -> shape, from the files' headers. Raises ConfigError, also where one is of no weights' dtype."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, theirs in self.names.items():
            with self._reading(), safe_open(self.files[theirs], framework="pt") as file:
                view = file.get_slice(theirs)
                known = COUNTS if name.endswith(COUNTED) else DTYPES
                if (dtype := view.get_dtype()) not in known:
                    raise ConfigError(f"--init {self.path}: tensor {theirs} is {dtype}; give {', '.join(known)}")
                shape = tuple(self._ours(name, torch.empty(view.get_shape(), device="meta")).shape)
            shapes |= {stacked(name): (len(self._parts(name)), *shape) if EXPERTS in name else shape}
        return shapes

    def _parts(self, name: str) -> list[str]:
        """The tensors of all experts, in their order, of which `name` is one or stands for all."""
        before, _, after = stacked(name).partition(EXPERTS)
        numbered = (f"{before}{EXPERTS}{e}.{after}" for e in range(self.experts))
        return [part for part in numbered if part in self.names]

    def read(self, name: str) -> Tensor:
        """The tensor that we call `name`, in our layout and the file's dtype. Raises ConfigError."""
        if EXPERTS in name:
            return torch.stack([self._read(part) for part in self._parts(name)])
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        theirs = self.names[name]
        with self._reading(), safe_open(self.files[theirs], framework="pt") as file:
            return self._ours(name, file.get_tensor(theirs))

    def _ours(self, name: str, theirs: Tensor) -> Tensor:
        """The parameter `name` of ours, out of the tensor of theirs that holds it."""
        layer, kind = name.split(".")[-2:]
        if not (self.gpt2 and layer.endswith("_proj")):
            return theirs
        ours = theirs.t() if kind == "weight" else theirs
        return ours.chunk(3)[THIRDS[layer]] if layer in THIRDS else ours
