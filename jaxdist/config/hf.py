"""config.json of Hugging Face <-> the model section: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE,
GPT-2 and ResNet.

A key that a file leaves out has the default of transformers' own config class.
"""

import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config import GPT2, ConfigError, Data, Experiment, Family, Llama, Mixture, ResNet
from jaxdist.config.foreign import read_json
from jaxdist.config.model import MOST_BLOCKS, MOST_LAYERS

Settings = dict[str, Any]
REQUIRED = object()
SHOWN = reprlib.Repr()  # a value may be as long and as deep as its file
SHOWN.maxstring = SHOWN.maxother = 80


class Kind(NamedTuple):
    """What a value must be. JSON keeps numbers, text and truth apart; Python would take one for another."""

    title: str
    holds: Callable[[Any], bool]


COUNT = Kind("a whole number from 1", lambda value: type(value) is int and 0 < value < 2**31)
COUNT_OR_ZERO = Kind("a whole number from 0", lambda value: type(value) is int and 0 <= value < 2**31)
LAYERS = Kind(f"a whole number from 1 to {MOST_LAYERS:,}", lambda value: COUNT.holds(value) and value <= MOST_LAYERS)
COUNTS = Kind(
    f"a list of 1 to {MOST_BLOCKS:,} whole numbers from 1",
    lambda value: isinstance(value, list) and 0 < len(value) <= MOST_BLOCKS and all(map(COUNT.holds, value)),
)
NUMBER = Kind("a number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TABLE = Kind("a table of settings", lambda value: isinstance(value, dict))


class Key(NamedTuple):
    """A key of config.json, the kind of its value, and what its absence means."""

    name: str
    kind: Kind
    default: Any = REQUIRED


class Architecture(NamedTuple):
    """A model class of transformers: its model_type, and which of our models it can express."""

    model_type: str
    expresses: Callable[[Any], bool]
    defaults: Mapping[str, Any] = MappingProxyType({})
    family: str = "llama"


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
    "MixtralForCausalLM": Architecture(
        "mixtral",
        lambda m: m.norm_topk_prob and not (m.qk_norm or m.qkv_bias or m.output_bias),
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        "mixtral",
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        lambda m: m.qk_norm and m.qkv_bias == m.output_bias,
        {"num_key_value_heads": 4, "max_position_embeddings": 32768},
        "qwen3_moe",
    ),
}
GPT2_ARCHITECTURE = "GPT2LMHeadModel"

# Our field -> their key. What depends on the architecture (head_dim, window, biases, rotation) is below.
LLAMA_KEYS = {
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
# Of mixtures besides, by model_type; `hidden` is the width of an expert.
MIXTURE_KEYS = {
    "mixtral": {
        "experts": Key("num_local_experts", COUNT, 8),
        "top_k": Key("num_experts_per_tok", COUNT, 2),
        "balance": Key("router_aux_loss_coef", NUMBER, 0.001),
    },
    "qwen3_moe": {
        "hidden": Key("moe_intermediate_size", COUNT, 768),
        "experts": Key("num_experts", COUNT, 128),
        "top_k": Key("num_experts_per_tok", COUNT, 8),
        "norm_topk_prob": Key("norm_topk_prob", FLAG, False),
        "balance": Key("router_aux_loss_coef", NUMBER, 0.001),
    },
}
BIASED = ("llama", "qwen3", "qwen3_moe")  # have attention_bias
GPT2_KEYS = {
    "layers": Key("n_layer", LAYERS, 12),
    "dim": Key("n_embd", COUNT, 768),
    "heads": Key("n_head", COUNT, 12),
    "vocab": Key("vocab_size", COUNT, 50257),
    "positions": Key("n_positions", COUNT, 1024),
    "norm_eps": Key("layer_norm_epsilon", NUMBER, 1e-5),
    "tied": Key("tie_word_embeddings", FLAG, True),
    "init_std": Key("initializer_range", NUMBER, 0.02),
}
# Names of GELU in transformers -> model.gelu; those of one value differ in rounding alone. quick_gelu and gelu_10 are
# other functions. The first of each is written.
GELUS = {
    "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_python_tanh": "tanh", "gelu_fast": "tanh",
    "gelu_accurate": "tanh", "gelu": "exact", "gelu_python": "exact",
}  # fmt: skip
# Other names for the same of transformers, which reads them too; the number of heads shows in no tensor.
GPT2_OTHER_NAMES = {
    "num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
LLAMA3_KEYS = {
    "rope_factor": Key("factor", NUMBER),
    "rope_low_freq_factor": Key("low_freq_factor", NUMBER),
    "rope_high_freq_factor": Key("high_freq_factor", NUMBER),
    "rope_original_positions": Key("original_max_position_embeddings", COUNT),
}
# Keys of what depends on the architecture.
ROTARY_NAMES = {
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "rope_theta": "rope_theta", "window": "sliding_window",
}  # fmt: skip
# Of the many keys that transformers writes, these would change the computation in every family.
WITHOUT = ("quantization_config", "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
WINDOWS = ("full_attention", "sliding_attention")


RESNET_ARCHITECTURE = "ResNetForImageClassification"
RESNET_KEYS = {
    "channels": Key("num_channels", COUNT, 3),
    "stem": Key("embedding_size", COUNT, 64),
    "widths": Key("hidden_sizes", COUNTS, [256, 512, 1024, 2048]),
    "depths": Key("depths", COUNTS, [3, 4, 6, 3]),
}
CLASSES = Key("id2label", TABLE, {"0": "LABEL_0", "1": "LABEL_1"})
BATCH_NORM_EPS = 1e-5  # no key of theirs


def read_model(path: Path) -> Family:
    """The model that `path`/config.json describes. Raises ConfigError for what jaxdist cannot compute."""
    file = path / "config.json"
    try:
        settings = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; give a Hugging Face folder with a readable config.json") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file}: {SHOWN.repr(settings)} is no table of settings; give a Hugging Face config.json")
    try:
        values = from_settings(settings)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    try:
        return experiment_for(values, source=str(file)).model
    except ConfigError as error:
        raise ConfigError(in_their_words(str(error), settings["model_type"])) from None


def in_their_words(message: str, model_type: str) -> str:
    """What is wrong with a model section, with the keys of the config.json that it was read from for our fields."""
    families = {"gpt2": GPT2_KEYS, "resnet": RESNET_KEYS}
    keys = families.get(model_type, LLAMA_KEYS | LLAMA3_KEYS | MIXTURE_KEYS.get(model_type, {}))
    names = {field: key.name for field, key in keys.items()} | ({} if model_type in families else ROTARY_NAMES)
    return re.sub(r"\bmodel\.(\w+)", lambda found: names.get(found[1], found[0]), message)


def experiment_for(model: Settings, source: str) -> Experiment:
    """The default experiment around a model section, its sequences within positions. Raises ConfigError."""
    sequence = min(Data().sequence, model.get("positions", Data().sequence))
    return Experiment.parse({"model": model, "data": {"sequence": sequence}}, source)


def from_settings(settings: Settings) -> Settings:
    """The model section, not yet validated, from the settings of a config.json. Raises ConfigError."""
    model_type, named = settings.get("model_type"), settings.get("architectures") or []
    known = {a.model_type: name for name, a in ARCHITECTURES.items()}
    known |= {"gpt2": GPT2_ARCHITECTURE, "resnet": RESNET_ARCHITECTURE}
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(f"model_type = {SHOWN.repr(model_type)}; choose a model of type {', '.join(known)}")
    name = known[model_type]
    base = re.sub("(ForCausalLM|LMHeadModel|ForImageClassification)$", "Model", name)
    if not isinstance(named, list) or (named and named[0] not in (name, base)):
        raise ConfigError(f"architectures = {SHOWN.repr(named)}; jaxdist reads {name} of model_type {model_type}")
    for key in WITHOUT:
        if settings.get(key):
            raise ConfigError(f"{key} = {SHOWN.repr(settings[key])}; jaxdist computes models without it only")
    if model_type == "resnet":
        return _from_resnet(settings)
    _demand(settings, "is_causal", True)
    return _from_gpt2(settings) if model_type == "gpt2" else _from_rotary(settings, ARCHITECTURES[name])


def to_settings(model: Family, dtype: str) -> Settings:
    """Settings of a config.json that transformers 4 and 5 read alike. Raises ConfigError if none fits."""
    if isinstance(model, ResNet):
        return _to_resnet(model) | {"torch_dtype": dtype}
    settings = _to_gpt2(model) if isinstance(model, GPT2) else _to_rotary(model)
    # Token ids belong to a tokenizer; left out, transformers would assume those of its own.
    return settings | {"bos_token_id": None, "eos_token_id": None, "torch_dtype": dtype}


def _value(settings: Settings, name: str, kind: Kind, default: Any = REQUIRED) -> Any:
    """The value of a key; null is as good as absent. Raises ConfigError where it is missing or of another kind."""
    value = settings.get(name)
    if value is None and default is REQUIRED:
        raise ConfigError(f"{name} is missing; give a complete config.json")
    if value is None:
        return default
    if not kind.holds(value):
        raise ConfigError(f"{name} = {SHOWN.repr(value)}; give {kind.title}")
    return value


def _demand(settings: Settings, name: str, *allowed: Any) -> None:
    """Raises ConfigError unless `name` is absent or has one of the values that jaxdist computes."""
    if name in settings and settings[name] not in allowed:
        values = " or ".join(repr(value) for value in allowed)
        raise ConfigError(f"{name} = {SHOWN.repr(settings[name])}; jaxdist computes {values} only")


def _from_gpt2(settings: Settings) -> Settings:
    _demand(settings, "activation_function", *GELUS)
    _demand(settings, "scale_attn_weights", True)
    _demand(settings, "scale_attn_by_inverse_layer_idx", False)
    _demand(settings, "add_cross_attention", False)
    values = {field: _value(settings, *key) for field, key in GPT2_KEYS.items()}
    for other, name in GPT2_OTHER_NAMES.items():
        if other in settings and settings[other] != settings.get(name):
            raise ConfigError(f"{other} = {SHOWN.repr(settings[other])}; give it as {name}, as transformers writes it")
    gelu = GELUS[settings.get("activation_function", "gelu_new")]
    return {"family": "gpt2", **values, "hidden": _value(settings, "n_inner", COUNT, 4 * values["dim"]), "gelu": gelu}


def _to_gpt2(model: GPT2) -> Settings:
    if not model.bias:
        raise ConfigError(
            f"model.bias = false: {GPT2_ARCHITECTURE} has biases always; keep the weights as a torch file (--to torch) "
            "or an Orbax checkpoint (--to orbax)"
        )
    settings = {key.name: getattr(model, field) for field, key in GPT2_KEYS.items()}
    named: Settings = {"architectures": [GPT2_ARCHITECTURE], "model_type": "gpt2"}
    gelu = next(name for name, gelu in GELUS.items() if gelu == model.gelu)
    return named | settings | {"n_inner": model.hidden, "activation_function": gelu}


def _from_resnet(settings: Settings) -> Settings:
    _demand(settings, "hidden_act", "relu")
    _demand(settings, "downsample_in_first_stage", False)
    _demand(settings, "downsample_in_bottleneck", False)
    _demand(settings, "layer_type", "basic", "bottleneck")
    values = {field: _value(settings, *key) for field, key in RESNET_KEYS.items()}
    classes = {"classes": len(_value(settings, *CLASSES))}
    return {"family": "resnet", "block": settings.get("layer_type", "bottleneck"), **values, **classes}


def _to_resnet(model: ResNet) -> Settings:
    if model.norm_eps != BATCH_NORM_EPS:
        raise ConfigError(
            f"model.norm_eps = {model.norm_eps}: {RESNET_ARCHITECTURE} has {BATCH_NORM_EPS} always; keep the weights "
            "as an Orbax checkpoint"
        )
    settings = {key.name: getattr(model, field) for field, key in RESNET_KEYS.items()}
    labels = {str(i): f"LABEL_{i}" for i in range(model.classes)}
    named: Settings = {"architectures": [RESNET_ARCHITECTURE], "model_type": "resnet", "layer_type": model.block}
    named |= {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    named |= {"hidden_act": "relu", "downsample_in_first_stage": False, "downsample_in_bottleneck": False}
    return named | {CLASSES.name: labels, "label2id": {label: int(i) for i, label in labels.items()}}


def _from_rotary(settings: Settings, architecture: Architecture) -> Settings:
    model_type, mixture = architecture.model_type, MIXTURE_KEYS.get(architecture.model_type, {})
    _demand(settings, "hidden_act", "silu", "swish")
    if mixture:
        settings = _same_blocks(settings, mixture["experts"].name)
    defaulted = {**architecture.defaults, **settings}
    values = {field: _value(defaulted, *key) for field, key in (LLAMA_KEYS | mixture).items()}
    heads = values["heads"]
    biased = _value(settings, "attention_bias", FLAG, False) and model_type in BIASED
    mlp_bias = {} if mixture else {"mlp_bias": model_type == "llama" and _value(settings, "mlp_bias", FLAG, False)}
    return {
        "family": architecture.family,
        **values,
        **mlp_bias,
        "kv_heads": _value(defaulted, "num_key_value_heads", COUNT, heads),
        "head_dim": _value(defaulted, "head_dim", COUNT, values["dim"] // heads),
        "qkv_bias": model_type == "qwen2" or biased,
        "output_bias": biased,
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
        "window": _window(settings, model_type, values["layers"]),
        **_rotation(defaulted, values["positions"]),
    }


def _same_blocks(settings: Settings, experts: str) -> Settings:
    """The settings of a mixture, its number of experts by that key. Raises ConfigError where not all blocks are alike
    or routing is random."""
    _demand(settings, "router_jitter_noise", None, 0, 0.0)
    _demand(settings, "decoder_sparse_step", None, 1)
    _demand(settings, "mlp_only_layers", None, [])
    given = [settings[name] for name in ("num_experts", "num_local_experts") if name in settings]  # transformers 4, 5
    if given != given[:1] * len(given):
        raise ConfigError(f"num_experts and num_local_experts are {SHOWN.repr(given)}; give one of them")
    return settings | {experts: given[0]} if given else settings


def _to_rotary(model: Llama | Mixture) -> Settings:
    fitting = {name: a for name, a in ARCHITECTURES.items() if a.family == model.family}
    name = next((name for name, a in fitting.items() if a.expresses(model)), None)
    if name is None:
        fields = ["dim", "heads", "window", "qkv_bias", "output_bias", "mlp_bias", "qk_norm"]
        fields += ["norm_topk_prob"] * isinstance(model, Mixture)
        raise ConfigError(
            ", ".join(f"model.{field} = {getattr(model, field)}" for field in fields)
            + f": none of {', '.join(fitting)} combines these; keep the weights as an Orbax checkpoint"
        )
    model_type = ARCHITECTURES[name].model_type
    settings: Settings = {"architectures": [name], "model_type": model_type, "hidden_act": "silu"}
    keys = LLAMA_KEYS | MIXTURE_KEYS.get(model_type, {})
    settings |= {key.name: getattr(model, field) for field, key in keys.items()}
    # transformers 4 reads these two keys; transformers 5 makes its rope_parameters of them.
    settings |= {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_scaling == "llama3":
        scaling = {key.name: getattr(model, field) for field, key in LLAMA3_KEYS.items()}
        settings["rope_scaling"] = {"rope_type": "llama3", **scaling}
    settings |= {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    if model_type in BIASED:
        settings["attention_bias"] = model.qkv_bias
    if model_type == "qwen3_moe":
        settings |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": bool(model.window)}
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
    absent = None if model_type == "mixtral" else 4096
    window = _value({"sliding_window": absent} | settings, "sliding_window", COUNT_OR_ZERO, 0)
    if model_type in ("mistral", "mixtral") or not window:
        return window
    if not _value(settings, "use_sliding_window", FLAG, False):
        return 0
    if model_type == "qwen3_moe":
        return window
    if (kinds := settings.get("layer_types")) is None:
        full = min(_value(settings, "max_window_layers", COUNT_OR_ZERO, 28), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in WINDOWS for kind in kinds):
        raise ConfigError(f"layer_types = {SHOWN.repr(kinds)}; give {' or '.join(WINDOWS)} for each of {layers} layers")
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"layer_types or max_window_layers mix {', '.join(sorted(set(kinds)))}; "
            "jaxdist has one window for all layers"
        )
    return window if kinds[0] == "sliding_attention" else 0


def _rotation(settings: Settings, positions: int) -> Settings:
    """The rotary fields, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    rope = _value(settings, "rope_scaling", TABLE, {}) or _value(settings, "rope_parameters", TABLE, {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"rope_parameters differ by layer ({', '.join(rope)}); jaxdist has one rotation for all layers"
        )
    for source in (settings, rope):
        _demand(source, "partial_rotary_factor", None, 1, 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope_type = {SHOWN.repr(kind)}; jaxdist computes 'default' or 'llama3' only")
    theta = _value(settings | rope, "rope_theta", NUMBER, 10000.0)
    if kind == "default":
        return {"rope_theta": theta}
    rope = {"original_max_position_embeddings": positions} | rope
    return {"rope_theta": theta, "rope_scaling": kind} | {f: _value(rope, *key) for f, key in LLAMA3_KEYS.items()}
