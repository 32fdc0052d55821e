"""Model sections of decoders: fields that all of them have, those of rotary ones, and their checks."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from jaxdist.config import checks
from jaxdist.config.fitting import SHARDS, largest_divisor
from jaxdist.config.model import Model, Size
from jaxdist.config.section import NUMBER, Count, CountOrZero, Positive

if TYPE_CHECKING:
    from jaxdist.config.experiment import Experiment
    from jaxdist.config.parallel import Parallel

# Far above any model: the tensors of each layer are looked for by name.
MOST_LAYERS = 10_000


class Decoder(Model):
    """Fields of every decoder. Its vocabulary may be padded otherwise than that of its weights."""

    free: ClassVar[frozenset[str]] = Model.free | {"vocab_multiple"}

    layers: Count = 4
    """Number of blocks, L."""
    dim: Count = 128
    """Width of the residual stream, D."""
    heads: Count = 8
    """Query heads, H."""
    hidden: Count = 384
    """Width of the MLP, F."""
    vocab: Count = 256
    """Vocabulary size, V, in tokens; bytes need 256. If it exceeds the vocabulary of the starting weights, rows of new
    tokens start as the mean of the others, and are trained."""
    vocab_multiple: Count = 1
    """Pad the embedding and the output head to a multiple of this number of rows, as the mesh axis tensor needs.
    Padding does not change the model: it has no probability, no gradient, and is not exported."""
    positions: Count = 1024
    """Longest sequence that the model accepts, in tokens."""
    tied: bool = False
    """Use the embedding as the output head."""

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the output head: V, padded to a multiple of vocab_multiple."""
        return math.ceil(self.vocab / self.vocab_multiple) * self.vocab_multiple

    @property
    def vocabulary(self) -> tuple[int, int] | None:
        return self.vocab, self.vocab_rows

    def without_padding(self) -> Self:
        return self.model_copy(update={"vocab_multiple": 1})

    def mesh_sizes(self, parallel: "Parallel") -> Iterator[Size]:
        attention, mlp = "layers.attention", "layers.mlp"
        heads = ("tensor", "context") if parallel.context == "ulysses" else ("tensor",)
        yield Size("heads", self.heads, f"{attention}.q_proj", heads)
        yield Size("kv_heads", self.kv_heads, f"{attention}.k_proj", heads)
        up_proj = f"{mlp}.experts.up_proj" if self.experts else f"{mlp}.up_proj"
        yield Size("hidden", self.hidden, up_proj, ("tensor",))
        yield Size("vocab", self.vocab_rows, "embed", ("tensor",))
        if not parallel.row.optimizer:
            return
        yield Size("dim", self.dim, "embed", SHARDS)
        vector = ("tensor", *SHARDS)  # split along the one dimension that it has
        if self.qkv_bias:
            yield Size("heads × head_dim", self.heads * self.head_dim, f"{attention}.q_proj.bias", vector)
            yield Size("kv_heads × head_dim", self.kv_heads * self.head_dim, f"{attention}.k_proj.bias", vector)
        if self.mlp_bias:
            yield Size("hidden", self.hidden, f"{mlp}.up_proj.bias", vector)
        if self.qk_norm:
            yield Size("head_dim", self.head_dim, f"{attention}.q_norm.scale", SHARDS)

    def describe(self) -> str:
        return f"{self.layers} layers, D {self.dim}, H {self.heads}, F {self.hidden}, V {self.vocab}"

    def keys(self, times: int) -> float:
        """Mean number of keys that a query of a sequence sees under the causal mask: half of them."""
        return times / 2

    def check(self, e: "Experiment") -> None:
        if e.data.sequence > self.positions:
            longer = "" if "model.positions" in e.pinned else f", or model.positions = {e.data.sequence}"
            raise ValueError(
                f"data.sequence = {e.data.sequence} is longer than model.positions = {self.positions}; "
                f"use data.sequence = {self.positions}{longer}"
            )

    def check_mesh(self, e: "Experiment", axes: Mapping[str, int]) -> None:
        checks.check_experts(e, axes)
        checks.check_stages(e, axes)
        checks.check_rows(e, axes)
        checks.check_times(e, axes, e.data.sequence)
        checks.check_chunks(e, axes)
        checks.check_sizes(e, axes)

    @model_validator(mode="after")
    def _depth(self) -> Self:
        if self.layers > MOST_LAYERS:
            raise ValueError(f"model.layers = {self.layers} is absurd; use at most {MOST_LAYERS:,}")
        return self


class Rotary(Decoder):
    """Decoders with rotary positions, grouped queries, RMSNorm and gated MLPs. No weights belong to positions."""

    free: ClassVar[frozenset[str]] = Decoder.free | {"positions"}

    kv_heads: Count = 4
    """Key and value heads, K; each serves H/K query heads."""
    head_dim: Annotated[int, NUMBER, Field(ge=2, multiple_of=2)] = 16
    """Width of one head; may differ from D/H."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "llama3"] = "none"
    """llama3: divide low rotary frequencies by rope_factor, as Llama 3.1 does."""
    rope_factor: Positive = 8.0
    """llama3: divisor of the lowest frequencies."""
    rope_low_freq_factor: Positive = 1.0
    """llama3: frequencies with wavelengths above rope_original_positions divided by this are scaled in full."""
    rope_high_freq_factor: Positive = 4.0
    """llama3: frequencies with wavelengths below rope_original_positions divided by this are not scaled."""
    rope_original_positions: Count = 8192
    """llama3: the context length of the original training, in tokens."""
    window: CountOrZero = 0
    """Sliding attention window in tokens, including the token itself; 0: no window (Mistral, Qwen)."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    output_bias: bool = False
    """Bias on the attention's output projection."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotation (Qwen3)."""

    def keys(self, times: int) -> float:
        """Mean number of keys that a query sees: with a window of w, w keys, except the first w queries, which see
        half."""
        window = min(self.window or times, times)
        return window - window**2 / (2 * times)

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}; "
                "each key and value head serves a whole number of query heads; use model.kv_heads = "
                f"{largest_divisor(self.heads, self.kv_heads)}, or model.heads = {self.kv_heads}"
            )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"model.rope_low_freq_factor = {self.rope_low_freq_factor} must be below "
                f"model.rope_high_freq_factor = {self.rope_high_freq_factor}; Llama 3.1 has "
                "model.rope_low_freq_factor = 1.0 and model.rope_high_freq_factor = 4.0"
            )
        return self
