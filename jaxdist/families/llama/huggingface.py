"""Llama's names in other formats: config.json of Llama, Mistral, Qwen2 and Qwen3, and the tensors of each naming.

Neutral. The mixture, whose blocks are Llama's, reads and writes the shared keys and tensors here too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config.errors import ConfigError, shown
from jaxdist.formats.hf_decisions import (
    ABSENT,
    DECODER,
    HONOURED,
    NONE,
    PADDING,
    Decision,
    Decisions,
    Effect,
    HuggingFace,
    ModelType,
    check,
    dropout,
    each,
    fixed,
    read,
)
from jaxdist.formats.hf_keys import (
    COUNT,
    COUNT_OR_ZERO,
    FLAG,
    LAYERS,
    NUMBER,
    TABLE,
    Key,
    Kind,
    Settings,
    together,
    value,
    values,
)
from jaxdist.formats.tables import Table, TensorRow, embedding, linear, norm

KEYS = {
    "layers": Key("num_hidden_layers", LAYERS),
    "dim": Key("hidden_size", COUNT),
    "heads": Key("num_attention_heads", COUNT),
    "hidden": Key("intermediate_size", COUNT),
    "vocab": Key("vocab_size", COUNT),
    "positions": Key("max_position_embeddings", COUNT, 2048),
    "norm_eps": Key("rms_norm_eps", NUMBER, 1e-6),
    "tied": Key("tie_word_embeddings", FLAG, False),
    "init_std": Key("initializer_range", NUMBER, 0.02),
}
ORIGINAL = "original_max_position_embeddings"
LLAMA3_KEYS = {
    "rope_factor": Key("factor", NUMBER),
    "rope_low_freq_factor": Key("low_freq_factor", NUMBER),
    "rope_high_freq_factor": Key("high_freq_factor", NUMBER),
    "rope_original_positions": Key(ORIGINAL, COUNT),
}
# Our field -> the key of those whose default depends on the model type.
OTHER_NAMES = {
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "rope_theta": "rope_theta", "window": "sliding_window",
}  # fmt: skip
WINDOW = Kind("a whole number from 1, or null for no window", COUNT.holds)
WINDOWS = ("full_attention", "sliding_attention")

# Keys that scale the rotation of another rope_type than the default.
SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor", "beta_fast",
    "beta_slow",
)  # fmt: skip
# Keys within rope_parameters (transformers 5) or rope_scaling (4). A rope_type that reads the keys without effect is
# refused.
ROPE: Decisions = {
    **each(HONOURED, "rope_type type rope_theta factor low_freq_factor high_freq_factor"),
    "original_max_position_embeddings": HONOURED,
    "partial_rotary_factor": fixed(None, 1, 1.0),
    "mrope_section": fixed(*ABSENT),
    **each(
        NONE, "attention_factor beta_fast beta_slow short_factor long_factor mscale mscale_all_dim truncate finetuned"
    ),
}
ROTARY: Decisions = {
    **DECODER,
    **read(KEYS),
    **each(
        HONOURED,
        "num_key_value_heads head_dim rope_theta rope_scaling rope_parameters original_max_position_embeddings",
    ),
    "hidden_act": fixed("silu", "swish"),
    "partial_rotary_factor": fixed(None, 1, 1.0),
    "attention_dropout": dropout(0.0),
    "pad_token_id": Decision(Effect.NOTED, (None,), note=PADDING),
    "pretraining_tp": NONE,
}
QWEN: Decisions = {
    **ROTARY,
    **each(HONOURED, "use_sliding_window sliding_window max_window_layers layer_types"),
}


class Variant(NamedTuple):
    """A model type of transformers with rotary positions: which models it expresses, and how it differs from others.

    `window`: how it says the sliding window; "never" has none, "always" uses sliding_window, "switched" only where
    use_sliding_window is true, "layered" besides by layer_types or max_window_layers. `defaults`: its own, of keys that
    a file leaves out. `attention_bias`, `mlp_bias`: whether it has that key; `qkv_bias`: whether it always has biases.
    `written`: further settings that express a model.
    """

    model_type: str
    architecture: str
    expresses: Callable[[Any], bool]
    decisions: Decisions
    window: str = "always"
    defaults: Mapping[str, Any] = MappingProxyType({})
    keys: Mapping[str, Key] = MappingProxyType({})
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    written: Callable[[Any], Settings] = lambda model: {}


# The first that expresses a model is written.
VARIANTS = (
    Variant(
        "llama",
        "LlamaForCausalLM",
        lambda m: not (m.qk_norm or m.window or m.dim % m.heads) and m.qkv_bias == m.output_bias,
        {**ROTARY, **each(HONOURED, "attention_bias mlp_bias layer_types")},
        window="never",
        attention_bias=True,
        mlp_bias=True,
    ),
    Variant(
        "mistral",
        "MistralForCausalLM",
        lambda m: not (m.qk_norm or m.qkv_bias or m.output_bias or m.mlp_bias),
        {**ROTARY, **each(HONOURED, "sliding_window layer_types")},
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    Variant(
        "qwen2",
        "Qwen2ForCausalLM",
        lambda m: m.qkv_bias and not (m.qk_norm or m.output_bias or m.mlp_bias),
        QWEN,
        window="layered",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
        qkv_bias=True,
    ),
    Variant(
        "qwen3",
        "Qwen3ForCausalLM",
        lambda m: m.qk_norm and m.qkv_bias == m.output_bias and not m.mlp_bias,
        {**QWEN, "attention_bias": HONOURED},
        window="layered",
        defaults={
            "num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128, "sliding_window": 4096,
        },
        attention_bias=True,
        qk_norm=True,
    ),
)  # fmt: skip


def read_rotary(variant: Variant, settings: Settings) -> Settings:
    """The fields of the model section from a config.json of this type. Raises ConfigError."""
    defaulted = {**variant.defaults, **settings}
    keys = {**KEYS, **variant.keys}
    found, rotation = together(partial(values, defaulted, keys), partial(read_rotation, defaulted))
    heads, window = found["heads"], _window(variant, defaulted, found["layers"])
    _check_layer_types(variant, settings, window, found["layers"])
    biased = value(settings, "attention_bias", FLAG, False) and variant.attention_bias
    mlp_bias = {"mlp_bias": value(settings, "mlp_bias", FLAG, False)} if variant.mlp_bias else {}
    return {
        **found,
        **mlp_bias,
        "kv_heads": value(defaulted, "num_key_value_heads", COUNT, heads),
        "head_dim": value(defaulted, "head_dim", COUNT, found["dim"] // heads),
        "qkv_bias": variant.qkv_bias or biased,
        "output_bias": biased,
        "qk_norm": variant.qk_norm,
        "window": window,
        **rotation,
    }


def write_rotary(variants: Sequence[Variant], fields: Sequence[str], model: Any) -> Settings:
    """The settings of the first of these types that expresses the model; `fields` decide it, for the message. Raises
    ConfigError where none does."""
    variant = next((variant for variant in variants if variant.expresses(model)), None)
    if variant is None:
        raise ConfigError(
            ", ".join(f"model.{field} = {getattr(model, field)}" for field in fields)
            + f": none of {', '.join(variant.architecture for variant in variants)} combines these; keep the weights "
            "as an Orbax checkpoint"
        )
    settings: Settings = {"architectures": [variant.architecture], "model_type": variant.model_type}
    settings["hidden_act"] = "silu"
    settings |= {key.name: getattr(model, field) for field, key in {**KEYS, **variant.keys}.items()}
    # transformers 4 reads these two keys; transformers 5 makes its rope_parameters of them.
    settings |= {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_scaling == "llama3":
        scaling = {key.name: getattr(model, field) for field, key in LLAMA3_KEYS.items()}
        settings["rope_scaling"] = {"rope_type": "llama3", **scaling}
    settings |= {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    if variant.attention_bias:
        settings["attention_bias"] = model.qkv_bias
    settings |= variant.written(model)
    if variant.mlp_bias:
        settings["mlp_bias"] = model.mlp_bias
    if variant.window != "never":
        settings["sliding_window"] = model.window or None
    if variant.window == "layered":
        settings["use_sliding_window"] = bool(model.window)
        settings["max_window_layers"] = 0 if model.window else model.layers
        settings["layer_types"] = [WINDOWS[bool(model.window)]] * model.layers
    return settings


def _window(variant: Variant, settings: Settings, layers: int) -> int:
    """The window of all layers, 0 for none. Raises ConfigError where the layers differ."""
    if variant.window == "never":
        return 0
    # A null means no window; only an absent key means the default. A window of 0 would leave nothing to attend to.
    kind = WINDOW if variant.window == "always" else COUNT_OR_ZERO
    window: int = value(settings, "sliding_window", kind, 0)
    if variant.window == "always" or not window:
        return window
    if not value(settings, "use_sliding_window", FLAG, False):
        return 0
    if variant.window == "switched":
        return window
    if (kinds := settings.get("layer_types")) is None:
        full = min(value(settings, "max_window_layers", COUNT_OR_ZERO, 28), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in WINDOWS for kind in kinds):
        raise ConfigError(f"layer_types = {shown(kinds)}; give {' or '.join(WINDOWS)} for each of {layers} layers")
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"layer_types or max_window_layers mix {', '.join(sorted(set(kinds)))}; "
            "jaxdist has one window for all layers"
        )
    return window if kinds[0] == "sliding_attention" else 0


def _check_layer_types(variant: Variant, settings: Settings, window: int, layers: int) -> None:
    """Raises ConfigError where layer_types contradict what transformers computes by other keys."""
    kinds, kind = settings.get("layer_types"), WINDOWS[bool(window)]
    if variant.window != "layered" and kinds is not None and kinds != [kind] * layers:
        raise ConfigError(
            f"layer_types = {shown(kinds)}; in transformers' {variant.model_type} every layer is {kind} here"
            f"{', by sliding_window' if window else ''}; leave layer_types out"
        )


def read_rotation(settings: Settings) -> Settings:
    """The rotary fields, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4). Raises
    ConfigError."""
    rope = value(settings, "rope_scaling", TABLE, {}) or value(settings, "rope_parameters", TABLE, {})
    if any(isinstance(part, dict) for part in rope.values()):
        raise ConfigError(
            f"rope_parameters differ by layer ({', '.join(rope)}); jaxdist has one rotation for all layers"
        )
    check(rope, ROPE)
    rope = {name: part for name, part in rope.items() if part is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope_type = {shown(kind)}; jaxdist computes 'default' or 'llama3' only")
    theta = value(settings | rope, "rope_theta", NUMBER, 10000.0)
    if kind == "default":
        return {"rope_theta": theta}
    # transformers 5 gives the top-level key priority.
    top = {name: settings[name] for name in (ORIGINAL,) if settings.get(name) is not None}
    rope = {ORIGINAL: value(settings, *KEYS["positions"])} | rope | top
    return {"rope_theta": theta, "rope_scaling": kind} | values(rope, LLAMA3_KEYS)


def notes_on_rotation(settings: Settings) -> list[str]:
    """Notes on keys of the rotation that contradict each other or have no effect."""
    rope, lines = settings.get("rope_scaling") or settings.get("rope_parameters") or {}, list[str]()
    if (top := settings.get(ORIGINAL)) is not None and rope.get(ORIGINAL, top) != top:
        lines.append(f"{ORIGINAL} = {top} at the top, where transformers 5 reads it, and {rope[ORIGINAL]} within")
    if (top := settings.get("rope_theta")) is not None and rope.get("rope_theta", top) != top:
        lines.append(f"rope_theta = {rope['rope_theta']} within, where transformers 5 reads it, and {top} at the top")
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        idle = [f"{name} = {shown(rope[name])}" for name in SCALING if rope.get(name) is not None]
        lines += [f"{', '.join(idle)}: without effect, as rope_type is default"] if idle else []
    return lines


def rotary_type(
    variant: Variant,
    read: Callable[[Variant, Settings], Settings] = read_rotary,
    notes: Callable[[Settings], list[str]] = notes_on_rotation,
) -> ModelType:
    """A type of config.json with rotary positions."""
    keys = {**KEYS, **LLAMA3_KEYS, **variant.keys}
    names = {field: key.name for field, key in keys.items()} | OTHER_NAMES
    nested = {"rope_scaling": ROPE, "rope_parameters": ROPE}
    return ModelType(variant.architecture, variant.decisions, partial(read, variant), names, nested=nested, notes=notes)


DECIDING = ("dim", "heads", "window", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")
HUGGINGFACE = HuggingFace(
    {variant.model_type: rotary_type(variant) for variant in VARIANTS},
    partial(write_rotary, VARIANTS, DECIDING),
)

LAYER, IGNORED = "model.layers.{layer}", re.compile(r"\.rotary_emb\.inv_freq$")


def attention(theirs: str) -> list[TensorRow]:
    """The attention of Llama and of the mixture in transformers."""
    return [
        *linear("layers.attention.q_proj", f"{theirs}.q_proj"),
        *linear("layers.attention.k_proj", f"{theirs}.k_proj"),
        *linear("layers.attention.v_proj", f"{theirs}.v_proj"),
        *linear("layers.attention.o_proj", f"{theirs}.o_proj"),
        *norm("layers.attention.q_norm", f"{theirs}.q_norm"),
        *norm("layers.attention.k_norm", f"{theirs}.k_norm"),
    ]


def in_transformers(mlp: Sequence[TensorRow]) -> Table:
    """Llama's tensors in transformers, with the rows of its MLP."""
    return Table(
        [
            *embedding("embed", "model.embed_tokens"),
            *attention(f"{LAYER}.self_attn"),
            *mlp,
            *norm("layers.attention_norm", f"{LAYER}.input_layernorm"),
            *norm("layers.mlp_norm", f"{LAYER}.post_attention_layernorm"),
            *norm("norm", "model.norm"),
            *linear("lm_head", "lm_head"),
        ],
        head="lm_head.weight",
        prefix="model.",
        ignored=IGNORED,
    )


# The code that Meta published with Llama 1 to 3: complex rotations, so interleaved queries and keys.
META = Table(
    [
        *embedding("embed", "tok_embeddings"),
        *linear("layers.attention.q_proj", "layers.{layer}.attention.wq", interleaved=True),
        *linear("layers.attention.k_proj", "layers.{layer}.attention.wk", interleaved=True),
        *linear("layers.attention.v_proj", "layers.{layer}.attention.wv"),
        *linear("layers.attention.o_proj", "layers.{layer}.attention.wo"),
        *linear("layers.mlp.gate_proj", "layers.{layer}.feed_forward.w1"),
        *linear("layers.mlp.down_proj", "layers.{layer}.feed_forward.w2"),
        *linear("layers.mlp.up_proj", "layers.{layer}.feed_forward.w3"),
        *norm("layers.attention_norm", "layers.{layer}.attention_norm"),
        *norm("layers.mlp_norm", "layers.{layer}.ffn_norm"),
        *norm("norm", "norm"),
        *linear("lm_head", "output"),
    ],
    head="output.weight",
    ignored=re.compile(r"(^|\.)(freqs_cis|rope\.(freqs|freqs_cis|cache))$"),  # the rotation; torchtitan's too
)
# torchtitan has Meta's names and rotations. Since 2026 queries, keys and values are within a module of their own, and
# later the head was renamed.
TORCHTITAN_OUTPUT = META.renamed(r"\.attention\.(?=w[qkv]\.)", ".attention.qkv_linear.")
TORCHTITAN = TORCHTITAN_OUTPUT.renamed(r"^output\.", "lm_head.")
# Its Qwen3 norms queries and keys, and turns halves of a head as Hugging Face does.
TORCHTITAN_QWEN3 = TORCHTITAN._replace(
    rows=[
        *(row._replace(interleaved=False) for row in TORCHTITAN.rows),
        *norm("layers.attention.q_norm", "layers.{layer}.attention.q_norm"),
        *norm("layers.attention.k_norm", "layers.{layer}.attention.k_norm"),
    ]
)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TABLES: dict[str, Table] = {
    "huggingface": in_transformers([r for n in PROJECTIONS for r in linear(f"layers.mlp.{n}", f"{LAYER}.mlp.{n}")]),
    "meta": META,
    "torchtitan": TORCHTITAN,
    "torchtitan_output": TORCHTITAN_OUTPUT,
    "torchtitan_qwen3": TORCHTITAN_QWEN3,
}
