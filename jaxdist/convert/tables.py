"""Which tensor of Hugging Face is which parameter of ours: a table per family, read in both directions."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """One kind of tensor. `{layer}` in `theirs` is the layer's number, our leading axis L.

    Several parameters of ours are one tensor of theirs, joined along the last axis, the outputs.
    A transpose is its own inverse.
    """

    ours: tuple[str, ...]
    theirs: str
    transpose: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.theirs

    def names(self, layers: int) -> list[str]:
        """Their names, in the order of the layers."""
        return [self.theirs.format(layer=i) for i in range(layers)] if self.stacked else [self.theirs]

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of one of their tensors, given the shapes of our parameters."""
        *rest, _ = shapes[self.ours[0]][1:] if self.stacked else shapes[self.ours[0]]
        shape = (*rest, sum(shapes[name][-1] for name in self.ours))
        return shape[::-1] if self.transpose else shape

    def to_ours(self, tensors: list[np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Our parameters from their tensors, one tensor a layer."""
        turned = [tensor.T if self.transpose else tensor for tensor in tensors]
        ends = np.cumsum([shapes[name][-1] for name in self.ours])[:-1]
        parts = zip(*(np.split(tensor, ends, axis=-1) for tensor in turned), strict=True)
        return {n: np.stack(p) if self.stacked else p[0] for n, p in zip(self.ours, parts, strict=True)}

    def to_theirs(self, parameters: Mapping[str, np.ndarray], layer: int) -> np.ndarray:
        """Their tensor of one layer (0 for what has no layers) from our parameters."""
        parts = [parameters[name][layer] if self.stacked else parameters[name] for name in self.ours]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return np.ascontiguousarray(whole.T if self.transpose else whole)


def _linear(ours: str, theirs: str) -> list[Row]:
    """torch.nn.Linear: its weight is (out, in), our kernel (in, out)."""
    return [
        Row((f"{ours}.kernel",), f"{theirs}.weight", transpose=True),
        Row((f"{ours}.bias",), f"{theirs}.bias"),
    ]


def _conv1d(ours: tuple[str, ...], theirs: str) -> list[Row]:
    """transformers' Conv1D, GPT-2 alone: its weight is (in, out), as our kernel."""
    return [
        Row(tuple(f"{name}.kernel" for name in ours), f"{theirs}.weight"),
        Row(tuple(f"{name}.bias" for name in ours), f"{theirs}.bias"),
    ]


def _norm(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}.scale",), f"{theirs}.weight"), Row((f"{ours}.bias",), f"{theirs}.bias")]


def _embedding(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}.embedding",), f"{theirs}.weight")]


class Table(NamedTuple):
    """A family's rows; those whose parameters a model lacks (biases, norms, an untied head) are left out.

    `prefix` is missing in files of a model without its head; names matching `ignored` hold no weights.
    """

    rows: list[Row]
    prefix: str
    ignored: re.Pattern[str]

    def rows_of(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Row]:
        """The rows of a model with these parameters."""
        return [row for row in self.rows if row.ours[0] in shapes]

    def full_name(self, name: str) -> str:
        """`name` with the family's prefix."""
        return name if name.startswith((self.prefix, HEAD)) else self.prefix + name


HEAD = "lm_head.weight"
EMBEDDING = "embed.embedding"

TABLES = {
    "llama": Table(
        [
            *_embedding("embed", "model.embed_tokens"),
            *_norm("layers.attention_norm", "model.layers.{layer}.input_layernorm"),
            *_linear("layers.attention.q_proj", "model.layers.{layer}.self_attn.q_proj"),
            *_linear("layers.attention.k_proj", "model.layers.{layer}.self_attn.k_proj"),
            *_linear("layers.attention.v_proj", "model.layers.{layer}.self_attn.v_proj"),
            *_linear("layers.attention.o_proj", "model.layers.{layer}.self_attn.o_proj"),
            *_norm("layers.attention.q_norm", "model.layers.{layer}.self_attn.q_norm"),
            *_norm("layers.attention.k_norm", "model.layers.{layer}.self_attn.k_norm"),
            *_norm("layers.mlp_norm", "model.layers.{layer}.post_attention_layernorm"),
            *_linear("layers.mlp.gate_proj", "model.layers.{layer}.mlp.gate_proj"),
            *_linear("layers.mlp.up_proj", "model.layers.{layer}.mlp.up_proj"),
            *_linear("layers.mlp.down_proj", "model.layers.{layer}.mlp.down_proj"),
            *_norm("norm", "model.norm"),
            *_linear("lm_head", "lm_head"),
        ],
        prefix="model.",
        ignored=re.compile(r"\.rotary_emb\.inv_freq$"),
    ),
    "gpt2": Table(
        [
            *_embedding("embed", "transformer.wte"),
            *_embedding("positions", "transformer.wpe"),
            *_norm("layers.attention_norm", "transformer.h.{layer}.ln_1"),
            *_conv1d(
                ("layers.attention.q_proj", "layers.attention.k_proj", "layers.attention.v_proj"),
                "transformer.h.{layer}.attn.c_attn",
            ),
            *_conv1d(("layers.attention.o_proj",), "transformer.h.{layer}.attn.c_proj"),
            *_norm("layers.mlp_norm", "transformer.h.{layer}.ln_2"),
            *_conv1d(("layers.mlp.up_proj",), "transformer.h.{layer}.mlp.c_fc"),
            *_conv1d(("layers.mlp.down_proj",), "transformer.h.{layer}.mlp.c_proj"),
            *_norm("norm", "transformer.ln_f"),
            *_linear("lm_head", "lm_head"),
        ],
        prefix="transformer.",
        ignored=re.compile(r"\.attn\.(bias|masked_bias)$"),  # causal masks
    ),
}
