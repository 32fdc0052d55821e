"""The model section of an experiment, one class per family."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from jaxdist.config.errors import ConfigError, OtherShapes
from jaxdist.config.section import NUMBER, Count, CountOrZero, Positive, Section, fallback

if TYPE_CHECKING:
    from jaxdist.config.parallel import Parallel

SHARDS = ("fsdp", "expert", "context")  # mesh axes over which parameters are sharded
# Far above any model: the tensors of each layer are looked for by name.
MOST_LAYERS = 10_000


class Size(NamedTuple):
    """A size of a model that mesh axes divide."""

    name: str
    """Its field, or fields as `heads × head_dim`."""
    value: int
    parameter: str
    """A parameter with a dimension of this size."""
    axes: tuple[str, ...]


class Model(Section):
    """Fields of every model. `input_kind` is the kind of its training data.

    `free`: fields in which a model may differ from weights of it: how they were drawn and are trained.
    """

    input_kind: ClassVar[Literal["tokens", "images"]] = "tokens"
    free: ClassVar[frozenset[str]] = frozenset({"init_std"})

    if TYPE_CHECKING:  # fields, properties or class variables of a family's own class

        @property
        def family(self) -> str: ...
        @property
        def layers(self) -> int: ...
        @property
        def dim(self) -> int: ...
        @property
        def vocab(self) -> int: ...
        @property
        def tied(self) -> bool: ...

    @fallback
    def heads(self) -> int:
        """Query heads, H; 0: no attention."""
        return 0

    @fallback
    def kv_heads(self) -> int:
        """Key and value heads, K."""
        return self.heads

    @fallback
    def head_dim(self) -> int:
        """Width of one head; 0: no attention."""
        return self.dim // self.heads if self.heads else 0

    @fallback
    def hidden(self) -> int:
        """Width of the MLP, F; 0: none."""
        return 0

    @fallback
    def window(self) -> int:
        """Sliding attention window in tokens; 0: none."""
        return 0

    @fallback
    def positions(self) -> int:
        """Longest sequence in tokens; 0 for models of images."""
        return 0

    @fallback
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections have biases."""
        return False

    @fallback
    def mlp_bias(self) -> bool:
        """Whether the MLP has biases."""
        return False

    @fallback
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalized."""
        return False

    @fallback
    def gelu(self) -> str:
        """Variant of GELU, `tanh` or `exact`; empty: the model has no such choice."""
        return ""

    @fallback
    def experts(self) -> int:
        """Experts of each block, E; 0: none."""
        return 0

    @fallback
    def capacity(self) -> float:
        """Most tokens of an expert, in multiples of its even share; 0: no limit."""
        return 0.0

    @fallback
    def balance(self) -> float:
        """Weight of a load-balance loss over each microbatch; 0: none."""
        return 0.0

    @fallback
    def vocab_multiple(self) -> int:
        """Number of which the rows of the embedding and the output head are a multiple."""
        return 1

    @property
    def vocab_rows(self) -> int:
        """Rows of the output head."""
        return self.vocab

    @property
    def vocabulary(self) -> tuple[int, int] | None:
        """Tokens, and rows of the embedding; None for models of images."""
        return None

    def without_padding(self) -> Self:
        """The model, its vocabulary without padding."""
        return self

    def mesh_sizes(self, parallel: "Parallel") -> Iterator[Size]:
        """Sizes that mesh axes divide; batch, sequences and layers apart."""
        yield from ()

    @property
    def mixes_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its microbatch."""
        return False

    def input_shape(self, sequence: int) -> tuple[int, ...]:
        """Shape of one row of a batch, where sequences have `sequence` tokens."""
        return (sequence,)

    def describe(self) -> str:
        """The sizes of the model in a few words."""
        return f"{self.layers} layers, D {self.dim}, V {self.vocab}"

    def describe_rows(self, sequence: int) -> str:
        """Kind and size of the rows of a batch."""
        return f"sequences of {sequence} tokens"

    norm_eps: Positive = 1e-5
    """Term added to the variance (LayerNorm, batch norm) or mean square (RMSNorm)."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; residual projections are divided by a further sqrt(2L). In a ResNet it
    is the output head's, and convolutions are scaled by their fan-out (arXiv:1502.01852)."""


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


class ImageModel(Model):
    """Fields of every image classifier."""

    input_kind: ClassVar[Literal["tokens", "images"]] = "images"
    free: ClassVar[frozenset[str]] = Model.free | {"image"}
    tied: ClassVar[bool] = False

    channels: Count = 3
    """Channels of an image: 3 for colours, 1 for grey."""
    image: Count = 224
    """Height and width of an image, in pixels."""
    classes: Count = 1000
    """Classes, V."""

    @property
    def vocab(self) -> int:
        """Outputs of the head, V."""
        return self.classes

    @property
    def least_places(self) -> int:
        """Smallest number of spatial positions per image over which a batch norm computes statistics."""
        return 1

    @property
    def sharded_widths(self) -> frozenset[int]:
        """Channel counts that the fsdp axis size must divide."""
        return frozenset()

    def input_shape(self, sequence: int) -> tuple[int, ...]:
        return (self.image, self.image, self.channels)

    def describe_rows(self, sequence: int) -> str:
        return f"images of {self.image}×{self.image}×{self.channels}"


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


Shape = tuple[int, ...]


def held_by_weights(model: Model) -> set[str]:
    """Fields in which a model cannot differ from weights of it: all but its family's `free` ones."""
    return {*type(model).model_fields} - model.free


def model_differences(wanted: Model, found: Model) -> dict[str, tuple[Any, Any]]:
    """Field -> (its value in `wanted`, in `found`), for every field in which the weights of one do not fit the other;
    `family` alone where that differs. A vocabulary may be larger than that of the weights, by new tokens."""
    here, there = wanted.model_dump(), found.model_dump()
    if here["family"] != there["family"]:
        return {"family": (here["family"], there["family"])}
    held = held_by_weights(wanted) - ({"vocab"} if here.get("vocab", 0) > there.get("vocab", math.inf) else set())
    return {name: (here[name], there[name]) for name in sorted(held) if here[name] != there[name]}


def same_model(wanted: Model, found: Model, source: str, fix: str = "") -> None:
    """Raises ConfigError naming every field in which `wanted` is not the model of `source`, and the `fix`."""
    if not (different := model_differences(wanted, found)):
        return
    mine = ", ".join(f"model.{name} = {here!r}" for name, (here, _) in different.items())
    theirs = ", ".join(repr(there) for _, there in different.values())
    assignments = (f"model.{name} = {there!r}" for name, (_, there) in different.items())
    fix = fix or f"set {', '.join(assignments)}"
    raise ConfigError(f"{mine}, but {source} holds another model, with {theirs}; {fix}")


def check_shapes(
    source: str, found: Mapping[str, Shape], wanted: Mapping[str, Shape], names: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError naming the first tensor of `source` that is transposed, or OtherShapes naming the first one
    that is missing, unexpected or of another shape, and the layers that are missing as a whole. `names`: name -> that
    in the file, where they differ."""
    in_file = names or {}
    bad = [name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name)]
    turned = [name for name in bad if len(found.get(name, ())) == 2 and wanted.get(name) == found[name][::-1]]
    if turned:
        name, others = turned[0], len(bad) - len(turned)
        more = f", and so are {len(turned) - 1} more" if len(turned) > 1 else ""
        more += f"; {others} others differ in name or shape" if others else ""
        raise ConfigError(
            f"{source}: tensor {in_file.get(name, name)} is transposed: {tuple(found[name])} there, "
            f"{tuple(wanted[name])} in the model{more}; save its transpose (tensor.T), as torch's Linear has (outputs, "
            "inputs)"
        )
    if bad:
        there, here = (str(tuple(shapes[bad[0]])) if bad[0] in shapes else "absent" for shapes in (found, wanted))
        more = f" ({len(bad) - 1} more differ)" if len(bad) > 1 else ""
        layers = sorted(_layers(wanted) - _layers(found))
        lacking = "".join(f"{', ' if i else ''}{name}{number}" for i, (name, number) in enumerate(layers[:5]))
        more += f"; it has nothing of {lacking}{', ...' if layers[5:] else ''}" if layers else ""
        fix = "give weights that belong to their config"
        if wanted.keys() <= found.keys() and not {*bad} & wanted.keys():
            fix = f"remove {'them' if more else 'it'} from the file, or {fix}"
        raise OtherShapes(
            f"{source}: tensor {in_file.get(bad[0], bad[0])} is {there} there, and {here} in the model{more}; {fix}"
        )


def _layers(names: Iterable[str]) -> set[tuple[str, int]]:
    """The numbered parts of a model, by the first number in its tensors' names: what stands before it, and it."""
    matches = (re.match(r"(\D*)(\d{1,9})\.", name) for name in names)
    return {(match[1], int(match[2])) for match in matches if match}
