"""config.json of Hugging Face <-> the model section, for Llama, Mistral, Qwen2, Qwen3 and GPT-2.

A key that a file leaves out has the default of transformers' own config class.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config import GPT2, ConfigError, Data, Experiment, Llama

Settings = dict[str, Any]
REQUIRED = object()


class Key(NamedTuple):
    """A key of config.json and what its absence means."""

    name: str
    default: Any = REQUIRED


class Architecture(NamedTuple):
    """A model class of transformers: its model_type, and which of our models it can express."""

    model_type: str
    expresses: Callable[[Any], bool]
    defaults: Mapping[str, Any] = MappingProxyType({})


# The first that fits is written.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        "llama", lambda m: not (m.qk_norm or m.window or m.dim % m.heads) and m.qkv_bias == m.output_bias
    ),
    "MistralForCausalLM": Architecture(
        "mistral",
        lambda m: not (m.qk_norm or m.qkv_bias or m.output_bias or m.mlp_bias),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        lambda m: m.qkv_bias and not (m.qk_norm or m.output_bias or m.mlp_bias),
        {"num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        lambda m: m.qk_norm and m.qkv_bias == m.output_bias and not m.mlp_bias,
        {"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    ),
}
GPT2_ARCHITECTURE = "GPT2LMHeadModel"

# Our field -> their key. What depends on the architecture (head_dim, window, biases, rotation) is below.
LLAMA_KEYS = {
    "layers": Key("num_hidden_layers"),
    "dim": Key("hidden_size"),
    "heads": Key("num_attention_heads"),
    "hidden": Key("intermediate_size"),
    "vocab": Key("vocab_size"),
    "positions": Key("max_position_embeddings", 2048),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "tied": Key("tie_word_embeddings", False),
    "init_std": Key("initializer_range", 0.02),
}
GPT2_KEYS = {
    "layers": Key("n_layer", 12),
    "dim": Key("n_embd", 768),
    "heads": Key("n_head", 12),
    "vocab": Key("vocab_size", 50257),
    "positions": Key("n_positions", 1024),
    "norm_eps": Key("layer_norm_epsilon", 1e-5),
    "tied": Key("tie_word_embeddings", True),
    "init_std": Key("initializer_range", 0.02),
}
LLAMA3_KEYS = {
    "rope_factor": Key("factor"),
    "rope_low_freq_factor": Key("low_freq_factor"),
    "rope_high_freq_factor": Key("high_freq_factor"),
    "rope_original_positions": Key("original_max_position_embeddings"),
}


def read_model(path: Path) -> Llama | GPT2:
    """The model that `path`/config.json describes. Raises ConfigError for what jaxdist cannot compute."""
    file = path / "config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; give a Hugging Face folder with a readable config.json") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: {settings!r} is no table of settings; give a Hugging Face config.json")
    try:
        values = from_settings(settings)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    except (AttributeError, IndexError, TypeError) as error:  # a value of another kind than its key's
        raise ConfigError(f"{file}: {error}; give the config.json that transformers wrote") from None
    return experiment_for(values, source=str(file)).model


def experiment_for(model: Settings, source: str) -> Experiment:
    """The default experiment around a model section, its sequences within positions. Raises ConfigError."""
    return Experiment.parse({"model": model, "data": {"sequence": min(Data().sequence, model["positions"])}}, source)


def from_settings(settings: Settings) -> Settings:
    """The model section, not yet validated, from the settings of a config.json. Raises ConfigError."""
    model_type, named = settings.get("model_type"), settings.get("architectures") or []
    known = {a.model_type: name for name, a in ARCHITECTURES.items()} | {"gpt2": GPT2_ARCHITECTURE}
    if model_type not in known:
        raise ConfigError(f"model_type = {model_type!r}; choose a model of type {', '.join(known)}")
    name = known[model_type]
    base = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    if named and named[0] not in (name, base):
        raise ConfigError(f"architectures = {named}; jaxdist reads {name} of model_type {model_type}")
    return _from_gpt2(settings) if model_type == "gpt2" else _from_llama(settings, ARCHITECTURES[name])


def to_settings(model: Llama | GPT2, dtype: str) -> Settings:
    """Settings of a config.json that transformers 4 and 5 read alike. Raises ConfigError if none fits."""
    settings = _to_gpt2(model) if isinstance(model, GPT2) else _to_llama(model)
    # Token ids belong to a tokenizer; left out, transformers would assume those of its own.
    return settings | {"bos_token_id": None, "eos_token_id": None, "torch_dtype": dtype}


def _value(settings: Settings, key: Key) -> Any:
    if settings.get(key.name) is not None:
        return settings[key.name]
    if key.default is REQUIRED:
        raise ConfigError(f"{key.name} is missing; give a complete config.json")
    return key.default


def _count(name: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r}; give a whole number from 1")


def _demand(settings: Settings, name: str, *allowed: Any) -> None:
    """Raises ConfigError unless `name` is absent or has one of the values that jaxdist computes."""
    if name in settings and settings[name] not in allowed:
        values = " or ".join(repr(value) for value in allowed)
        raise ConfigError(f"{name} = {settings[name]!r}; jaxdist computes {values} only")


def _from_gpt2(settings: Settings) -> Settings:
    _demand(settings, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _demand(settings, "scale_attn_weights", True)
    _demand(settings, "scale_attn_by_inverse_layer_idx", False)
    _demand(settings, "add_cross_attention", False)
    values = {field: _value(settings, key) for field, key in GPT2_KEYS.items()}
    for field in ("dim", "positions"):
        _count(GPT2_KEYS[field].name, values[field])
    hidden = settings.get("n_inner") or 4 * values["dim"]
    return {"family": "gpt2", **values, "hidden": hidden}


def _to_gpt2(model: GPT2) -> Settings:
    settings = {key.name: getattr(model, field) for field, key in GPT2_KEYS.items()}
    named: Settings = {"architectures": [GPT2_ARCHITECTURE], "model_type": "gpt2"}
    return named | settings | {"n_inner": model.hidden, "activation_function": "gelu_new"}


def _from_llama(settings: Settings, architecture: Architecture) -> Settings:
    _demand(settings, "hidden_act", "silu", "swish")
    defaulted = {**architecture.defaults, **settings}
    values = {field: _value(defaulted, key) for field, key in LLAMA_KEYS.items()}
    for field in ("layers", "dim", "heads", "positions"):
        _count(LLAMA_KEYS[field].name, values[field])
    heads = values["heads"]
    qwen2, llama = architecture.model_type == "qwen2", architecture.model_type == "llama"
    biased = bool(settings.get("attention_bias", False)) and architecture.model_type in ("llama", "qwen3")
    return {
        "family": "llama",
        **values,
        "kv_heads": defaulted.get("num_key_value_heads") or heads,
        "head_dim": defaulted.get("head_dim") or values["dim"] // heads,
        "qkv_bias": qwen2 or biased,
        "output_bias": biased,
        "mlp_bias": llama and bool(settings.get("mlp_bias", False)),
        "qk_norm": architecture.model_type == "qwen3",
        "window": _window(settings, architecture.model_type, values["layers"]),
        **_rotation(settings, values["positions"]),
    }


def _to_llama(model: Llama) -> Settings:
    name = next((name for name, a in ARCHITECTURES.items() if a.expresses(model)), None)
    if name is None:
        fields = ("dim", "heads", "window", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")
        raise ConfigError(
            ", ".join(f"model.{field} = {getattr(model, field)}" for field in fields)
            + f": none of {', '.join(ARCHITECTURES)} combines these; keep the weights as an Orbax checkpoint"
        )
    model_type = ARCHITECTURES[name].model_type
    settings: Settings = {"architectures": [name], "model_type": model_type, "hidden_act": "silu"}
    settings |= {key.name: getattr(model, field) for field, key in LLAMA_KEYS.items()}
    # transformers 4 reads these two keys; transformers 5 makes its rope_parameters of them.
    settings |= {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_scaling == "llama3":
        scaling = {key.name: getattr(model, field) for field, key in LLAMA3_KEYS.items()}
        settings["rope_scaling"] = {"rope_type": "llama3", **scaling}
    settings |= {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    if model_type in ("llama", "qwen3"):
        settings["attention_bias"] = model.qkv_bias
    if model_type == "llama":
        settings["mlp_bias"] = model.mlp_bias
    else:
        settings["sliding_window"] = model.window or None
    if model_type in ("qwen2", "qwen3"):
        kind = "sliding_attention" if model.window else "full_attention"
        settings["use_sliding_window"] = bool(model.window)
        settings["max_window_layers"] = 0 if model.window else model.layers
        settings["layer_types"] = [kind] * model.layers
    return settings


def _window(settings: Settings, model_type: str, layers: int) -> int:
    """The window of all layers, 0 for none. Raises ConfigError where the layers differ."""
    if model_type == "llama":
        return 0
    # A null means no window; only an absent key means the default.
    window = settings.get("sliding_window", 4096) or 0
    if model_type == "mistral" or not window:
        return window
    if not settings.get("use_sliding_window", False):
        return 0
    if (kinds := settings.get("layer_types")) is None:
        full = min(settings.get("max_window_layers", 28), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"layer_types or max_window_layers mix {', '.join(sorted(set(kinds)))}; "
            "jaxdist has one window for all layers"
        )
    return window if kinds[0] == "sliding_attention" else 0


def _rotation(settings: Settings, positions: int) -> Settings:
    """The rotary fields, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"rope_parameters differ by layer ({', '.join(rope)}); jaxdist has one rotation for all layers"
        )
    for source in (settings, rope):
        _demand(source, "partial_rotary_factor", None, 1, 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope_type = {kind!r}; jaxdist computes 'default' or 'llama3' only")
    theta = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": theta}
    rope = {"original_max_position_embeddings": positions} | rope
    return {"rope_theta": theta, "rope_scaling": kind} | {f: _value(rope, key) for f, key in LLAMA3_KEYS.items()}
