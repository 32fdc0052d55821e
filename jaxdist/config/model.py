"""The model section of an experiment, one class per family, and the kinds of numbers that all sections are made of."""

import ast
import inspect
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from jaxdist.config.errors import ConfigError, OtherShapes


def _number(value: Any) -> Any:
    """Python counts true and false among the integers; a config does not."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number, not true or false")
    return value


NUMBER = pydantic.BeforeValidator(_number)
Count = Annotated[int, NUMBER, Field(ge=1, lt=2**31)]  # steps are counted in int32
CountOrZero = Annotated[int, NUMBER, Field(ge=0, lt=2**31)]
Seed = Annotated[int, NUMBER, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, NUMBER, Field(ge=0, lt=1)]
Share = Annotated[float, NUMBER, Field(ge=0, le=1)]
Positive = Annotated[float, NUMBER, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, NUMBER, Field(ge=0, allow_inf_nan=False)]

# Far above any model: the tensors of each layer, expert and block are looked for by name.
MOST_LAYERS = MOST_EXPERTS = 10_000
MOST_EXPERTS_IN_ALL = 100_000
MOST_BLOCKS = 1_000  # of a ResNet, whose blocks are modules of their own


class Section(pydantic.BaseModel):
    """A frozen table of fields; a key that it lacks is an error. A field's docstring is its help."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @classmethod
    @cache
    def docstrings(cls) -> dict[str, str]:
        """Those of its fields and of what it inherits, from the source. Pydantic would read it at every start."""
        found: dict[str, str] = {}
        for table in (table for table in reversed(cls.__mro__) if issubclass(table, Section)):
            try:
                source = inspect.getsource(table)
            except OSError:  # where modules are installed without it
                continue
            (definition,) = ast.parse(source).body
            assert isinstance(definition, ast.ClassDef)
            for pair in pairwise(definition.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = inspect.cleandoc(text)
        return found


def listed(value: Any) -> Any:
    """The parts of a text with commas between; any other value itself."""
    return [part for part in value.replace(" ", "").split(",") if part] if isinstance(value, str) else value


LISTED = pydantic.BeforeValidator(listed)
Counts = Annotated[tuple[Count, ...], LISTED]


class Model(Section):
    """What every model has. `input_kind` is the data that it is trained on."""

    input_kind: ClassVar[Literal["tokens", "images"]] = "tokens"

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
        @property
        def head_dim(self) -> int: ...

    @property
    def vocab_rows(self) -> int:
        """Rows of the output head."""
        return self.vocab

    @property
    def mixes_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its microbatch."""
        return False

    def input_shape(self, sequence: int) -> tuple[int, ...]:
        """Shape of one row of a batch, where sequences have `sequence` tokens."""
        return (sequence,)

    def describe(self) -> str:
        """Its sizes in a few words."""
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
    """What every decoder has."""

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

    def describe(self) -> str:
        return f"{self.layers} layers, D {self.dim}, H {self.heads}, F {self.hidden}, V {self.vocab}"

    def keys(self, times: int) -> float:
        """How many keys a query of a sequence sees under the causal mask, the mean over its times: half of them."""
        return times / 2

    @model_validator(mode="after")
    def _depth(self) -> Self:
        if self.layers > MOST_LAYERS:
            raise ValueError(f"model.layers = {self.layers} is absurd; use at most {MOST_LAYERS:,}")
        return self


class Rotary(Decoder):
    """Decoders with rotary positions, grouped queries, RMSNorm and gated MLPs."""

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
        """How many keys a query sees: with a window of w, w of them but for the first w queries, which see half."""
        window = min(self.window or times, times)
        return window - window**2 / (2 * times)

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads = {self.kv_heads} does not divide model.heads = {self.heads}; "
                "each key and value head serves a whole number of query heads; use model.kv_heads = "
                f"{_divisor(self.heads, self.kv_heads)}, or model.heads = {self.kv_heads}"
            )
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            raise ValueError(
                f"model.rope_low_freq_factor = {self.rope_low_freq_factor} must be below "
                f"model.rope_high_freq_factor = {self.rope_high_freq_factor}; Llama 3.1 has "
                "model.rope_low_freq_factor = 1.0 and model.rope_high_freq_factor = 4.0"
            )
        return self


class Llama(Rotary):
    """Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, gated MLP."""

    family: Literal["llama"] = "llama"
    """llama (covers Llama, Mistral, Qwen2 and Qwen3), mixtral, qwen3_moe, gpt2 or resnet."""
    mlp_bias: bool = False
    """Biases in the MLP."""


class Mixture(Rotary):
    """Mixtral and Qwen3-MoE: Llama's blocks with E gated MLPs, of which a router chooses a few for each token."""

    family: Literal["mixtral", "qwen3_moe"]
    """mixtral or qwen3_moe: the same model, with Hugging Face's names of either."""
    experts: Count = 8
    """Experts, E, in each block; each is an MLP of width `hidden`."""
    top_k: Count = 2
    """Experts that each token goes to: those of the highest probabilities of the router."""
    norm_topk_prob: bool = True
    """Divide the probabilities of a token's experts by their sum (Mixtral always)."""
    balance: NotNegative = 0.001
    """Weight of the load-balance loss, which is added to that of the tokens (arXiv:2101.03961, eq. 4): E · the sum over
    experts of the share of tokens that go there times their mean probability, over all blocks and a microbatch. Tokens
    whose target has no loss, such as padding, are not counted."""
    capacity: NotNegative = 0.0
    """Tokens of a sequence that an expert takes at most, in multiples of its even share of them, top_k · T / E, T being
    the tokens before the padding; those that come later in time go without it. 0: all are taken."""
    mlp_bias: ClassVar[bool] = False

    @model_validator(mode="after")
    def _chosen(self) -> "Mixture":
        if self.top_k > self.experts:
            raise ValueError(
                f"model.top_k = {self.top_k} is more than model.experts = {self.experts}; use at most {self.experts}"
            )
        if self.experts > MOST_EXPERTS:
            raise ValueError(f"model.experts = {self.experts} is absurd; use at most {MOST_EXPERTS:,}")
        if (total := self.layers * self.experts) > MOST_EXPERTS_IN_ALL:
            raise ValueError(
                f"model.experts = {self.experts} in each of model.layers = {self.layers} are {total:,} experts, "
                f"more than {MOST_EXPERTS_IN_ALL:,}; use at most model.experts = {MOST_EXPERTS_IN_ALL // self.layers}"
            )
        return self

    @property
    def mixes_rows(self) -> bool:
        return bool(self.balance or self.capacity)

    def describe(self) -> str:
        return f"{super().describe()}, E {self.experts}, {self.top_k} a token"

    def room(self, times: int) -> int:
        """Tokens of a sequence of so many times that an expert takes at most; no more than all."""
        return min(times, math.ceil(self.capacity * self.top_k * times / self.experts)) if self.capacity else times


class GPT2(Decoder):
    """GPT-2 and nanoGPT: LayerNorm, learned positions, biases everywhere or nowhere, GELU by tanh or exact."""

    family: Literal["gpt2"]
    """gpt2: learned positions, LayerNorm, biases."""
    tied: bool = True
    """The output head is the embedding itself."""
    gelu: Literal["tanh", "exact"] = "tanh"
    """GELU (arXiv:1606.08415): tanh, its approximation, as OpenAI, Hugging Face's gelu_new and llm.c compute it; exact,
    by the error function, as nanoGPT and torch's default do."""
    bias: bool = True
    """Biases of every projection and LayerNorm; false: none of them has one (nanoGPT's bias=False)."""
    qk_norm: ClassVar[bool] = False

    @model_validator(mode="after")
    def _heads(self) -> "GPT2":
        if self.dim % self.heads:
            raise ValueError(
                f"model.heads = {self.heads} does not divide model.dim = {self.dim}; "
                f"GPT-2 splits its width evenly among the heads; use model.heads = {_divisor(self.dim, self.heads)}, "
                f"or model.dim = {math.ceil(self.dim / self.heads) * self.heads}"
            )
        return self

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def qkv_bias(self) -> bool:
        return self.bias

    @property
    def mlp_bias(self) -> bool:
        return self.bias

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


class ImageModel(Model):
    """What every model from images to classes has."""

    input_kind: ClassVar[Literal["tokens", "images"]] = "images"
    tied: ClassVar[bool] = False
    head_dim: ClassVar[int] = 0

    channels: Count = 3
    """Channels of an image: 3 for colours, 1 for grey."""
    image: Count = 224
    """Height and width of an image, in pixels."""
    classes: Count = 1000
    """Classes, V."""

    @property
    def vocab(self) -> int:
        """What the head tells apart, V."""
        return self.classes

    @property
    def least_places(self) -> int:
        """Least number of places of an image over which a batch norm takes its statistics."""
        return 1

    @property
    def sharded_widths(self) -> frozenset[int]:
        """Widths that fsdp has to divide."""
        return frozenset()

    def input_shape(self, sequence: int) -> tuple[int, ...]:
        return (self.image, self.image, self.channels)

    def describe_rows(self, sequence: int) -> str:
        return f"images of {self.image}×{self.image}×{self.channels}"


class ResNet(ImageModel):
    """ResNet (arXiv:1512.03385) as torchvision and Hugging Face compute it, the stride of a bottleneck in its 3×3."""

    family: Literal["resnet"]
    """resnet: images to classes, with batch norm."""
    block: Literal["basic", "bottleneck"] = "bottleneck"
    """basic: two 3×3 convolutions (ResNet-18, 34); bottleneck: 1×1, 3×3, 1×1 (50, 101, 152)."""
    depths: Counts = (3, 4, 6, 3)
    """Blocks of each stage; each stage but the first halves height and width. 3,4,6,3 is ResNet-50, 2,2,2,2 with basic
    blocks ResNet-18."""
    widths: Counts = (256, 512, 1024, 2048)
    """Channels that each stage puts out; 64,128,256,512 with basic blocks."""
    stem: Count = 64
    """Channels of the first convolution, which is 7×7 with a stride of 2, before the max-pooling."""
    momentum: Share = 0.1
    """Share of a batch's statistics in the new running ones, torch's momentum: flax's is 1 minus it."""

    @model_validator(mode="after")
    def _stages(self) -> "ResNet":
        if not self.depths or len(self.depths) != len(self.widths):
            depths = self.depths or (1,)
            widths = [*self.widths[: len(depths)]] or [64]
            while len(widths) < len(depths):
                widths.append(2 * widths[-1])
            raise ValueError(
                f"model.widths = {listing(self.widths)} are not as many as model.depths = {listing(self.depths)}: each "
                f"stage has one of each; use model.widths = {listing(tuple(widths))}"
                + ("" if self.depths else f" with model.depths = {listing(depths)}")
            )
        if self.layers > MOST_BLOCKS:
            shown = reprlib.repr(list(self.depths))
            raise ValueError(f"model.depths = {shown} are {self.layers:,} blocks; use at most {MOST_BLOCKS:,}")
        if self.block == "bottleneck" and (odd := [width for width in self.widths if width % 4]):
            raise ValueError(
                f"model.widths = {listing(self.widths)}: {odd[0]} is no multiple of 4, a bottleneck's width within; "
                f"use model.widths = {listing(tuple(math.ceil(width / 4) * 4 for width in self.widths))}"
            )
        return self

    @property
    def layers(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def dim(self) -> int:
        """Width of what the head takes, D."""
        return self.widths[-1]

    @property
    def mixes_rows(self) -> bool:
        return True

    @property
    def least_places(self) -> int:
        return self.sizes[-1] ** 2

    @property
    def sharded_widths(self) -> frozenset[int]:
        within = (width // 4 for width in self.widths if self.block != "basic")
        return frozenset({self.stem, *self.widths, *within})

    def describe(self) -> str:
        return f"{'+'.join(map(str, self.depths))} {self.block} blocks, D {self.dim}, V {self.classes}"

    def places(self, path: str) -> int:
        """How often the kernel of a module is applied to an image: the places of what it puts out."""
        if path == "head":
            return 1
        if path.startswith("stem."):
            return halved(self.image) ** 2
        _, stage, block, part, *layer = path.split(".")
        before_stride = self.block == "bottleneck" and stage != "0" and (block, part, layer[0]) == ("0", "layer", "0")
        return self.sizes[int(stage) - before_stride] ** 2

    @property
    def sizes(self) -> list[int]:
        """Height and width of what each stage puts out: the first's is that after the stem and its pooling."""
        found = [halved(halved(self.image))]
        while len(found) < len(self.depths):
            found.append(halved(found[-1]))
        return found


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def halved(size: int) -> int:
    """Of a height or width, what a stride of 2 leaves, padded as torch's convolutions are."""
    return (size + 1) // 2


def listing(values: tuple[int, ...]) -> str:
    """As a command line gives them."""
    return ",".join(map(str, values))


Shape = tuple[int, ...]


def held_by_weights(model: Model) -> set[str]:
    """Fields in which a model cannot differ from weights of it.

    How weights were drawn and are trained, and how far rotary positions may reach, is no property of the weights. A
    vocabulary may be padded.
    """
    free = {"init_std", "balance", "capacity", "momentum", "image", "vocab_multiple"}
    return {*type(model).model_fields} - free - ({"positions"} if isinstance(model, Rotary) else set())


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


def check_shapes(source: str, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises ConfigError naming the first tensor of `source` that is transposed, or OtherShapes naming the first one
    that is missing, unexpected or of another shape, and the layers that are missing as a whole."""
    bad = [name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name)]
    turned = [name for name in bad if len(found.get(name, ())) == 2 and wanted.get(name) == found[name][::-1]]
    if turned:
        name, others = turned[0], len(bad) - len(turned)
        more = f", and so are {len(turned) - 1} more" if len(turned) > 1 else ""
        more += f"; {others} others differ in name or shape" if others else ""
        raise ConfigError(
            f"{source}: tensor {name} is transposed: {tuple(found[name])} there, {tuple(wanted[name])} in the "
            f"model{more}; save its transpose (tensor.T), as torch's Linear has (outputs, inputs)"
        )
    if bad:
        there, here = (str(tuple(shapes[bad[0]])) if bad[0] in shapes else "absent" for shapes in (found, wanted))
        more = f" ({len(bad) - 1} more differ)" if len(bad) > 1 else ""
        layers = sorted(_layers(wanted) - _layers(found))
        lacking = "".join(f"{', ' if i else ''}{name}{number}" for i, (name, number) in enumerate(layers[:5]))
        more += f"; it has nothing of {lacking}{', ...' if layers[5:] else ''}" if layers else ""
        raise OtherShapes(
            f"{source}: tensor {bad[0]} is {there} there, and {here} in the model{more}; "
            "give weights that belong to their config"
        )


def _layers(names: Iterable[str]) -> set[tuple[str, int]]:
    """The numbered parts of a model, by the first number in its tensors' names: what stands before it, and it."""
    matches = (re.match(r"(\D*)(\d{1,9})\.", name) for name in names)
    return {(match[1], int(match[2])) for match in matches if match}
