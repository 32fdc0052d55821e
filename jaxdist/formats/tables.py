"""Which tensor of a file is which parameter: a table per naming and family, read in both directions by both sides.

Parameters of jaxdist are stacked: all layers along the first axis, L, experts along the second, E. What every naming
shares are the *atoms*: one layer of one parameter, and of experts one of them. A tensor of a naming holds one atom or
several, and two namings meet in their atoms. Names and shapes only: how a tensor is cut is each side's own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

from jaxdist.config import Model

Shape = tuple[int, ...]
Atom = tuple[str, int]  # a parameter and its layer, or the number of another piece; 0 for one that is whole
STACKED = "layers."  # how the names of our stacked parameters begin
EXPERTS = ".experts."  # what those have in their names that are stacked by experts too, [L, E, ...]


# Of torch's Linear (out, in) and Conv2d (out, in, Y, X), the axes in the order of our kernels, and the other way.
TURNED, RETURNED = {2: (1, 0), 4: (2, 3, 1, 0)}, {2: (1, 0), 4: (3, 2, 0, 1)}


class Row(NamedTuple):
    """One kind of tensor. `{layer}` in `theirs` is the layer's number, our leading axis L; `{expert}` the expert's, E.
    `{stage}` and `{block}` in both are numbers in our names too, where blocks are not stacked; `{number}` is stage + 1.

    Several parameters of ours are one tensor of theirs: equal parts of its last axis, the outputs. `interleaved` are
    queries and keys in whose heads the two numbers that a rotation turns are neighbours; in ours they are half a head
    apart.
    """

    ours: tuple[str, ...]
    theirs: str
    transpose: bool = False
    interleaved: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.theirs

    @property
    def by_expert(self) -> bool:
        """Whether theirs are a tensor for each expert, where ours stacks them."""
        return "{expert}" in self.theirs

    def numbered(self, shapes: Mapping[str, Shape], blocks: Iterable[tuple[int, int]]) -> Iterator["Row"]:
        """Itself, or a row for each (stage, block) of a model with these parameters; none where it has not this."""
        ours, *_ = self.ours
        if "{stage}" not in ours:
            yield from [self] if ours in shapes else []
            return
        for stage, block in blocks:
            there: dict[str, Any] = {"stage": stage, "block": block, "number": stage + 1}
            if ours.format(**there) in shapes:
                yield self._replace(ours=(ours.format(**there),), theirs=self.theirs.format(**there))

    def names(self, layers: int, experts: int = 1) -> list[str]:
        """Their names, in the order of the layers, and within one of its experts."""
        each = range(experts if self.by_expert else 1)
        return [self.theirs.format(layer=i, expert=e) for i in range(layers if self.stacked else 1) for e in each]

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        """The shape of one of their tensors, given the shapes of our parameters."""
        shape = shapes[self.ours[0]]
        stack, of_layer = self.stack(shape), shape[1:] if self.stacked else shape
        matrix = [*of_layer[len(stack) :]]
        if len(self.ours) > 1:
            matrix[-1] = sum(shapes[name][-1] for name in self.ours)
        if self.transpose:
            matrix = [matrix[axis] for axis in RETURNED[len(matrix)]]
        return (*(() if self.by_expert else stack), *matrix)

    def stack(self, shape: Shape) -> Shape:
        """(E,) where one layer of a parameter of ours with this shape holds all experts, else ()."""
        return shape[1:2] if EXPERTS in self.ours[0] else ()

    def tensors(self, layer: int, shapes: Mapping[str, Shape]) -> Iterator["Stored"]:
        """Their tensors of one layer."""
        shape, experts = self.shape(shapes), self.stack(shapes[self.ours[0]])
        if not experts:
            yield Stored(self.theirs.format(layer=layer), tuple((name, layer) for name in self.ours), shape, self)
            return
        numbers = range(layer * experts[0], (layer + 1) * experts[0])
        if self.by_expert:
            for e, number in enumerate(numbers):
                yield Stored(self.theirs.format(layer=layer, expert=e), ((self.ours[0], number),), shape, self)
            return
        atoms = tuple((name, number) for name in self.ours for number in numbers)
        yield Stored(self.theirs.format(layer=layer), atoms, shape, self)


class Stored(NamedTuple):
    """One tensor of a naming and the atoms that it holds: those of a parameter together, experts in their order."""

    name: str
    atoms: tuple[Atom, ...]
    shape: Shape
    row: Row


def _linear(ours: str, theirs: str, interleaved: bool = False) -> list[Row]:
    """torch.nn.Linear: its weight is (out, in), our kernel (in, out)."""
    return [
        Row((f"{ours}.kernel",), f"{theirs}.weight", transpose=True, interleaved=interleaved),
        Row((f"{ours}.bias",), f"{theirs}.bias", interleaved=interleaved),
    ]


def _products(ours: tuple[str, ...], theirs: str, linear: bool) -> list[Row]:
    """One product for several of ours: the weight of torch's Linear is (out, in), of transformers' Conv1D (in, out)."""
    return [
        Row(tuple(f"{name}.kernel" for name in ours), f"{theirs}.weight", transpose=linear),
        Row(tuple(f"{name}.bias" for name in ours), f"{theirs}.bias"),
    ]


def _norm(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}.scale",), f"{theirs}.weight"), Row((f"{ours}.bias",), f"{theirs}.bias")]


def _embedding(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}.embedding",), f"{theirs}.weight")]


class Table(NamedTuple):
    """A family's rows, in the order of its modules; those whose parameters a model lacks are left out.

    `prefix` is missing in files of a model without its head; names matching `ignored` hold no weights.
    """

    rows: list[Row]
    head: str
    prefix: str = ""
    ignored: re.Pattern[str] = re.compile(r"(?!)")

    def rows_of(self, shapes: Mapping[str, Shape]) -> list[Row]:
        """The rows of a model with these parameters."""
        places = [re.match(r"stages\.(\d+)\.(\d+)\.", name) for name in shapes]
        blocks = sorted({(int(place[1]), int(place[2])) for place in places if place})
        return [found for row in self.rows for found in row.numbered(shapes, blocks)]

    def full_name(self, name: str) -> str:
        """`name` with the family's prefix."""
        return name if name.startswith((self.prefix, self.head)) else self.prefix + name


def _attention(theirs: str) -> list[Row]:
    """Llama's and all that have it."""
    return [
        *_linear("layers.attention.q_proj", f"{theirs}.q_proj"),
        *_linear("layers.attention.k_proj", f"{theirs}.k_proj"),
        *_linear("layers.attention.v_proj", f"{theirs}.v_proj"),
        *_linear("layers.attention.o_proj", f"{theirs}.o_proj"),
        *_norm("layers.attention.q_norm", f"{theirs}.q_norm"),
        *_norm("layers.attention.k_norm", f"{theirs}.k_norm"),
    ]


def _mixture(block: str, gate: str, up: str, down: str) -> Table:
    """A mixture's, whose MLPs are called `block`, and an expert's projections so."""
    theirs = f"model.layers.{{layer}}.{block}"
    return Table(
        [
            *_embedding("embed", "model.embed_tokens"),
            *_attention("model.layers.{layer}.self_attn"),
            *_linear("layers.mlp.router", f"{theirs}.gate"),
            *_linear("layers.mlp.experts.gate_proj", f"{theirs}.experts.{{expert}}.{gate}"),
            *_linear("layers.mlp.experts.up_proj", f"{theirs}.experts.{{expert}}.{up}"),
            *_linear("layers.mlp.experts.down_proj", f"{theirs}.experts.{{expert}}.{down}"),
            *_norm("layers.attention_norm", "model.layers.{layer}.input_layernorm"),
            *_norm("layers.mlp_norm", "model.layers.{layer}.post_attention_layernorm"),
            *_norm("norm", "model.norm"),
            *_linear("lm_head", "lm_head"),
        ],
        head="lm_head.weight",
        prefix="model.",
        ignored=re.compile(r"\.rotary_emb\.inv_freq$"),
    )


def _fused(separate: Table, gate_first: bool) -> Table:
    """A mixture as transformers 5 holds it in memory: its experts stacked, gate and up in one, without biases.

    `gate_first`: whether the router comes before the experts among its parameters, which an optimizer numbers.
    """
    theirs, kept = "model.layers.{layer}.mlp", [row for row in separate.rows if not row.by_expert]
    rows = [row._replace(theirs=re.sub(r"\.\w+\.gate\.", ".mlp.gate.", row.theirs)) for row in kept]
    names = [f"layers.mlp.experts.{name}_proj.kernel" for name in ("gate", "up", "down")]
    experts = [
        Row((*names[:2],), f"{theirs}.experts.gate_up_proj", transpose=True),
        Row((names[2],), f"{theirs}.experts.down_proj", transpose=True),
    ]
    gate = next(i for i, row in enumerate(rows) if row.ours == ("layers.mlp.router.kernel",))
    at = gate + 2 if gate_first else gate  # after its bias
    return separate._replace(rows=[*rows[:at], *experts, *rows[at:]])


def _gpt2(linear: bool) -> Table:
    """GPT-2's, its products Conv1D as in transformers, or Linear."""
    block = "transformer.h.{layer}"
    queries_keys_values = ("layers.attention.q_proj", "layers.attention.k_proj", "layers.attention.v_proj")
    return Table(
        [
            *_embedding("embed", "transformer.wte"),
            *_embedding("positions", "transformer.wpe"),
            *_norm("layers.attention_norm", f"{block}.ln_1"),
            *_products(queries_keys_values, f"{block}.attn.c_attn", linear),
            *_products(("layers.attention.o_proj",), f"{block}.attn.c_proj", linear),
            *_norm("layers.mlp_norm", f"{block}.ln_2"),
            *_products(("layers.mlp.up_proj",), f"{block}.mlp.c_fc", linear),
            *_products(("layers.mlp.down_proj",), f"{block}.mlp.c_proj", linear),
            *_norm("norm", "transformer.ln_f"),
            *_linear("lm_head", "lm_head"),
        ],
        head="lm_head.weight",
        prefix="transformer.",
        ignored=re.compile(r"\.attn\.(bias|masked_bias)$"),  # causal masks
    )


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _conv_norm(ours: str, conv: str, norm: str) -> list[Row]:
    """torch.nn.Conv2d and BatchNorm2d: a kernel is (out, in, Y, X), ours (Y, X, in, out)."""
    kernel = Row((f"{ours}.conv.kernel",), f"{conv}.weight", transpose=True)
    running = [Row((f"{ours}.norm.{name}",), f"{norm}.{name}") for name in STATISTICS]
    return [kernel, *_norm(f"{ours}.norm", norm), *running]


def _in_transformers(ours: str, theirs: str) -> list[Row]:
    return _conv_norm(ours, f"{theirs}.convolution", f"{theirs}.normalization")


BLOCK, THEIR_BLOCK = "stages.{stage}.{block}", "resnet.encoder.stages.{stage}.layers.{block}"
VISION_BLOCK = "layer{number}.{block}"

HUGGINGFACE = {
    "llama": Table(
        [
            *_embedding("embed", "model.embed_tokens"),
            *_attention("model.layers.{layer}.self_attn"),
            *_linear("layers.mlp.gate_proj", "model.layers.{layer}.mlp.gate_proj"),
            *_linear("layers.mlp.up_proj", "model.layers.{layer}.mlp.up_proj"),
            *_linear("layers.mlp.down_proj", "model.layers.{layer}.mlp.down_proj"),
            *_norm("layers.attention_norm", "model.layers.{layer}.input_layernorm"),
            *_norm("layers.mlp_norm", "model.layers.{layer}.post_attention_layernorm"),
            *_norm("norm", "model.norm"),
            *_linear("lm_head", "lm_head"),
        ],
        head="lm_head.weight",
        prefix="model.",
        ignored=re.compile(r"\.rotary_emb\.inv_freq$"),
    ),
    "gpt2": _gpt2(linear=False),
    "mixtral": _mixture("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": _mixture("mlp", "gate_proj", "up_proj", "down_proj"),
    "resnet": Table(
        [
            *_in_transformers("stem", "resnet.embedder.embedder"),
            *_in_transformers(f"{BLOCK}.shortcut", f"{THEIR_BLOCK}.shortcut"),
            *[r for i in range(3) for r in _in_transformers(f"{BLOCK}.layer.{i}", f"{THEIR_BLOCK}.layer.{i}")],
            *_linear("head", "classifier.1"),
        ],
        head="classifier.",
        prefix="resnet.",
    ),
}

# nanoGPT has transformers' names, and Linear where that has Conv1D.
NANOGPT = {"gpt2": _gpt2(linear=True)}

# What torchvision calls a ResNet's, as do most scripts.
TORCHVISION = {
    "resnet": Table(
        [
            *_conv_norm("stem", "conv1", "bn1"),
            *_conv_norm(f"{BLOCK}.layer.0", f"{VISION_BLOCK}.conv1", f"{VISION_BLOCK}.bn1"),
            *_conv_norm(f"{BLOCK}.layer.1", f"{VISION_BLOCK}.conv2", f"{VISION_BLOCK}.bn2"),
            *_conv_norm(f"{BLOCK}.layer.2", f"{VISION_BLOCK}.conv3", f"{VISION_BLOCK}.bn3"),
            *_conv_norm(f"{BLOCK}.shortcut", f"{VISION_BLOCK}.downsample.0", f"{VISION_BLOCK}.downsample.1"),
            *_linear("head", "fc"),
        ],
        head="fc.weight",
    ),
}

# The code that Meta published with Llama 1 to 3: complex rotations, so interleaved queries and keys.
META = {
    "llama": Table(
        [
            *_embedding("embed", "tok_embeddings"),
            *_linear("layers.attention.q_proj", "layers.{layer}.attention.wq", interleaved=True),
            *_linear("layers.attention.k_proj", "layers.{layer}.attention.wk", interleaved=True),
            *_linear("layers.attention.v_proj", "layers.{layer}.attention.wv"),
            *_linear("layers.attention.o_proj", "layers.{layer}.attention.wo"),
            *_linear("layers.mlp.gate_proj", "layers.{layer}.feed_forward.w1"),
            *_linear("layers.mlp.down_proj", "layers.{layer}.feed_forward.w2"),
            *_linear("layers.mlp.up_proj", "layers.{layer}.feed_forward.w3"),
            *_norm("layers.attention_norm", "layers.{layer}.attention_norm"),
            *_norm("layers.mlp_norm", "layers.{layer}.ffn_norm"),
            *_norm("norm", "norm"),
            *_linear("lm_head", "output"),
        ],
        head="output.weight",
        ignored=re.compile(r"(^|\.)(freqs_cis|rope\.(freqs|freqs_cis|cache))$"),  # of the rotation; torchtitan's too
    )
}


def _renamed(tables: Mapping[str, Table], pattern: str, now: str) -> dict[str, Table]:
    """Tables in whose names `now` is in place of what matches the pattern."""
    return {
        family: table._replace(
            rows=[row._replace(theirs=re.sub(pattern, now, row.theirs)) for row in table.rows],
            head=re.sub(pattern, now, table.head),
        )
        for family, table in tables.items()
    }


# torchtitan has Meta's names and rotations. Since 2026 queries, keys and values are within a module of their own, and
# later the head was renamed.
TORCHTITAN_OUTPUT = _renamed(META, r"\.attention\.(?=w[qkv]\.)", ".attention.qkv_linear.")
TORCHTITAN = _renamed(TORCHTITAN_OUTPUT, r"^output\.", "lm_head.")
# Its Qwen3 norms queries and keys, and turns halves of a head as Hugging Face does.
TORCHTITAN_QWEN3 = {
    family: table._replace(
        rows=[
            *(row._replace(interleaved=False) for row in table.rows),
            *_norm("layers.attention.q_norm", "layers.{layer}.attention.q_norm"),
            *_norm("layers.attention.k_norm", "layers.{layer}.attention.k_norm"),
        ]
    )
    for family, table in TORCHTITAN.items()
}


SAME = ("bias", *STATISTICS)


def _in_torch_ref(ours: str) -> Row:
    """`torch_ref` has our modules, a layer each, as plain torch ones."""
    module, _, kind = ours.rpartition(".")
    name = module.replace("layers.", "layers.{layer}.", 1) if module.startswith(STACKED) else module
    return Row((ours,), f"{name}.{kind if kind in SAME else 'weight'}", transpose=kind == "kernel")


TORCH_REF = {
    family: Table([_in_torch_ref(name) for row in table.rows for name in row.ours], head="lm_head.weight")
    for family, table in HUGGINGFACE.items()
}

IN_MEMORY = "transformers in memory"
# By name of the naming, then family. Our own need no table, see `entries`: arrays as they are, and a layer at a time.
NAMINGS = {
    "huggingface": HUGGINGFACE,
    IN_MEMORY: {family: _fused(HUGGINGFACE[family], family == "mixtral") for family in ("mixtral", "qwen3_moe")},
    "torch_ref": TORCH_REF,
    "meta": META,
    "torchtitan": TORCHTITAN,
    "torchtitan_output": TORCHTITAN_OUTPUT,
    "torchtitan_qwen3": TORCHTITAN_QWEN3,
    "torchvision": TORCHVISION,
    "nanogpt": NANOGPT,
}
OWN, LAYERS = "jaxdist", "jaxdist by layers"


def stored(naming: str, model: Model, shapes: Mapping[str, Shape]) -> dict[str, Stored]:
    """Every tensor that a model has under one of NAMINGS, by name; a layer's together, in the order of its modules.

    `shapes`: those of the parameters of jaxdist, all of them or some.
    """
    found: dict[str, Stored] = {}
    for stacked, rows in groupby(NAMINGS[naming][model.family].rows_of(shapes), lambda row: row.stacked):
        block = list(rows)
        for layer in range(model.layers if stacked else 1):
            found |= {tensor.name: tensor for row in block for tensor in row.tensors(layer, shapes)}
    return found
