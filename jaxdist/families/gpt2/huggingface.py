"""GPT-2's names in other formats: config.json, and the tensors of each naming. Neutral."""

import re
from typing import Any

from jaxdist.config.errors import ConfigError, shown
from jaxdist.formats.hf_decisions import DECODER, HONOURED, NONE, HuggingFace, ModelType, dropout, each, fixed, read
from jaxdist.formats.hf_keys import COUNT, FLAG, LAYERS, NUMBER, Key, Settings, value, values
from jaxdist.formats.tables import Table, TensorRow, embedding, linear, norm

ARCHITECTURE = "GPT2LMHeadModel"
KEYS = {
    "layers": Key("n_layer", LAYERS, 12),
    "dim": Key("n_embd", COUNT, 768),
    "heads": Key("n_head", COUNT, 12),
    "vocab": Key("vocab_size", COUNT, 50257),
    "positions": Key("n_positions", COUNT, 1024),
    "norm_eps": Key("layer_norm_epsilon", NUMBER, 1e-5),
    "tied": Key("tie_word_embeddings", FLAG, True),
    "init_std": Key("initializer_range", NUMBER, 0.02),
}
# A key of our own: transformers' class has biases always, and makes those that a file lacks zero, as it does new ones.
BIAS = Key("bias", FLAG, True)
# Names of GELU in transformers -> model.gelu; those of one value differ in rounding alone. quick_gelu and gelu_10 are
# other functions. The first of each is written.
GELUS = {
    "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_python_tanh": "tanh", "gelu_fast": "tanh",
    "gelu_accurate": "tanh", "gelu": "exact", "gelu_python": "exact",
}  # fmt: skip
# Other names of the same keys, which transformers reads too; the number of heads shows in no tensor.
OTHER_NAMES = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
DECISIONS = {
    **DECODER,
    **read(KEYS),
    **each(HONOURED, f"n_inner {BIAS.name} {' '.join(OTHER_NAMES)}"),
    **each(dropout(0.1), " ".join(DROPOUTS)),
    **each(
        NONE,
        """
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
        reorder_and_upcast_attn n_ctx predict_special_tokens output_past
        """,
    ),
    "activation_function": fixed(*GELUS),
    "scale_attn_weights": fixed(True),
    "scale_attn_by_inverse_layer_idx": fixed(False),
}


def _read(settings: Settings) -> Settings:
    """The fields of the model section. Raises ConfigError."""
    found = values(settings, KEYS)
    for other, name in OTHER_NAMES.items():
        if other in settings and settings[other] != settings.get(name):
            raise ConfigError(f"{other} = {shown(settings[other])}; give it as {name}, as transformers writes it")
    activation = settings.get("activation_function", "gelu_new")
    gelu = next((ours for theirs, ours in GELUS.items() if theirs == activation), None)  # `check` refuses others
    hidden, bias = value(settings, "n_inner", COUNT, 4 * found["dim"]), value(settings, *BIAS)
    return {**found, "hidden": hidden, "gelu": gelu, "bias": bias}


def _write(model: Any) -> Settings:
    settings = {key.name: getattr(model, field) for field, key in KEYS.items()}
    named: Settings = {"architectures": [ARCHITECTURE], "model_type": "gpt2"}
    gelu = next(name for name, gelu in GELUS.items() if gelu == model.gelu)
    without = {} if model.bias else {BIAS.name: False}
    dropouts = dict.fromkeys(DROPOUTS, 0.0)  # transformers' default is 0.1
    return named | settings | {"n_inner": model.hidden, "activation_function": gelu} | dropouts | without


NAMES = {field: key.name for field, key in KEYS.items()}
HUGGINGFACE = HuggingFace({"gpt2": ModelType(ARCHITECTURE, DECISIONS, _read, NAMES)}, _write)


def _products(ours: tuple[str, ...], theirs: str, transpose: bool) -> list[TensorRow]:
    """One product for several of ours: the weight of torch's Linear is (out, in), of transformers' Conv1D (in, out)."""
    return [
        TensorRow(tuple(f"{name}.kernel" for name in ours), f"{theirs}.weight", transpose=transpose),
        TensorRow(tuple(f"{name}.bias" for name in ours), f"{theirs}.bias"),
    ]


def _table(linears: bool) -> Table:
    """GPT-2's tensors, its products Conv1D as in transformers, or Linear."""
    block = "transformer.h.{layer}"
    queries_keys_values = ("layers.attention.q_proj", "layers.attention.k_proj", "layers.attention.v_proj")
    return Table(
        [
            *embedding("embed", "transformer.wte"),
            *embedding("positions", "transformer.wpe"),
            *norm("layers.attention_norm", f"{block}.ln_1"),
            *_products(queries_keys_values, f"{block}.attn.c_attn", linears),
            *_products(("layers.attention.o_proj",), f"{block}.attn.c_proj", linears),
            *norm("layers.mlp_norm", f"{block}.ln_2"),
            *_products(("layers.mlp.up_proj",), f"{block}.mlp.c_fc", linears),
            *_products(("layers.mlp.down_proj",), f"{block}.mlp.c_proj", linears),
            *norm("norm", "transformer.ln_f"),
            *linear("lm_head", "lm_head"),
        ],
        head="lm_head.weight",
        prefix="transformer.",
        ignored=re.compile(r"\.attn\.(bias|masked_bias)$"),  # causal masks
    )


# nanoGPT has transformers' names, and Linear where that has Conv1D.
TABLES: dict[str, Table] = {"huggingface": _table(linears=False), "nanogpt": _table(linears=True)}
