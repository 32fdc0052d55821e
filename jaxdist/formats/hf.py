"""config.json of Hugging Face <-> the model section: Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE,
GPT-2 and ResNet.

A key that a file leaves out has the default of transformers' own config class.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxdist.config import GPT2, ConfigError, Data, Experiment, Mixture, Model, ResNet
from jaxdist.config.bounded import read_json
from jaxdist.formats.hf_decisions import DECISIONS, ROPE, SHOWN, check, notes_on
from jaxdist.formats.hf_keys import (
    ARCHITECTURES,
    BATCH_NORM_EPS,
    BIASED,
    CLASSES,
    COUNT,
    COUNT_OR_ZERO,
    FLAG,
    GELUS,
    GPT2_ARCHITECTURE,
    GPT2_BIAS,
    GPT2_KEYS,
    GPT2_OTHER_NAMES,
    LABELS,
    LAYERED,
    LLAMA3_KEYS,
    LLAMA_KEYS,
    MIXTURE_KEYS,
    NUMBER,
    ORIGINAL,
    REQUIRED,
    RESNET_ARCHITECTURE,
    RESNET_KEYS,
    ROTARY_NAMES,
    TABLE,
    WINDOW,
    WINDOWS,
    Architecture,
    Key,
    Kind,
    Settings,
)


def read_model(path: Path) -> Model:
    """The model that `path`/config.json describes. Raises ConfigError for what jaxdist cannot compute."""
    return read_folder(path)[0]


def read_folder(path: Path) -> tuple[Model, list[str]]:
    """That model, and what is to be said of the file: see `notes_on`. Raises ConfigError."""
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
        raise ConfigError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
    try:
        return experiment_for(values, source=str(file)).model, [f"{file}: {note}" for note in notes_on(settings)]
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
    readers = {"resnet": _from_resnet, "gpt2": _from_gpt2}
    read = readers.get(model_type) or partial(_from_rotary, architecture=ARCHITECTURES[name])
    return _together(partial(check, settings, DECISIONS[model_type]), partial(read, settings))[1]


def to_settings(model: Model, dtype: str) -> Settings:
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


def _values(settings: Settings, keys: Mapping[str, Key]) -> Settings:
    """Field -> value of its key. Raises ConfigError naming all that are missing or of another kind."""
    return dict(zip(keys, _together(*(partial(_value, settings, *key) for key in keys.values())), strict=True))


def _together(*readers: Callable[[], Any]) -> list[Any]:
    """What each one returns. Raises ConfigError with all that is wrong, each in a line of its own."""
    found, wrong = [], []
    for read in readers:
        try:
            found.append(read())
        except ConfigError as error:
            wrong += str(error).splitlines()
    if wrong:
        raise ConfigError("\n".join(dict.fromkeys(wrong)))
    return found


def _from_gpt2(settings: Settings) -> Settings:
    values = _values(settings, GPT2_KEYS)
    for other, name in GPT2_OTHER_NAMES.items():
        if other in settings and settings[other] != settings.get(name):
            raise ConfigError(f"{other} = {SHOWN.repr(settings[other])}; give it as {name}, as transformers writes it")
    activation = settings.get("activation_function", "gelu_new")
    gelu = next((ours for theirs, ours in GELUS.items() if theirs == activation), None)  # `check` refuses others
    hidden, bias = _value(settings, "n_inner", COUNT, 4 * values["dim"]), _value(settings, *GPT2_BIAS)
    return {"family": "gpt2", **values, "hidden": hidden, "gelu": gelu, "bias": bias}


def _to_gpt2(model: GPT2) -> Settings:
    settings = {key.name: getattr(model, field) for field, key in GPT2_KEYS.items()}
    named: Settings = {"architectures": [GPT2_ARCHITECTURE], "model_type": "gpt2"}
    gelu = next(name for name, gelu in GELUS.items() if gelu == model.gelu)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # transformers' default is 0.1
    without = {} if model.bias else {GPT2_BIAS.name: False}
    return named | settings | {"n_inner": model.hidden, "activation_function": gelu} | dropouts | without


def _from_resnet(settings: Settings) -> Settings:
    values = _values(settings, RESNET_KEYS)
    classes = {"classes": len(_value(settings, *CLASSES)) or _value(settings, *LABELS)}
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
    if mixture:
        settings = _one_count_of_experts(settings, mixture["experts"].name)
    defaulted = {**architecture.defaults, **settings}
    values, rotation = _together(partial(_values, defaulted, LLAMA_KEYS | mixture), partial(_rotation, defaulted))
    if mixture and not _value(settings, "output_router_logits", FLAG, False):
        values["balance"] = 0.0
    heads, window = values["heads"], _window(settings, model_type, values["layers"])
    _check_layer_types(settings, model_type, window, values["layers"])
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
        "window": window,
        **rotation,
    }


def _one_count_of_experts(settings: Settings, experts: str) -> Settings:
    """The settings of a mixture, its number of experts by that key. Raises ConfigError where two keys differ in it."""
    given = [settings[name] for name in ("num_experts", "num_local_experts") if name in settings]  # transformers 4, 5
    if given != given[:1] * len(given):
        raise ConfigError(f"num_experts and num_local_experts are {SHOWN.repr(given)}; give one of them")
    return settings | {experts: given[0]} if given else settings


def _to_rotary(model: Any) -> Settings:
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
    if isinstance(model, Mixture):
        settings["output_router_logits"] = model.balance > 0  # without it transformers adds no balance loss
    if model_type == "qwen3_moe":
        settings |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": bool(model.window)}
    if model_type == "llama":
        settings["mlp_bias"] = model.mlp_bias
    else:
        settings["sliding_window"] = model.window or None
    if model_type in LAYERED:
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
    always = model_type in ("mistral", "mixtral")  # where a window of 0 would leave attention nothing to see
    window = _value({"sliding_window": absent} | settings, "sliding_window", WINDOW if always else COUNT_OR_ZERO, 0)
    if always or not window:
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


def _check_layer_types(settings: Settings, model_type: str, window: int, layers: int) -> None:
    """Raises ConfigError where layer_types contradict what transformers computes by other keys."""
    kinds, kind = settings.get("layer_types"), WINDOWS[bool(window)]
    if model_type not in LAYERED and kinds is not None and kinds != [kind] * layers:
        raise ConfigError(
            f"layer_types = {SHOWN.repr(kinds)}; in transformers' {model_type} every layer is {kind} here, by "
            "sliding_window; leave layer_types out"
        )


def _rotation(settings: Settings) -> Settings:
    """The rotary fields, from rope_parameters (transformers 5) or rope_theta and rope_scaling (4)."""
    rope = _value(settings, "rope_scaling", TABLE, {}) or _value(settings, "rope_parameters", TABLE, {})
    if any(isinstance(value, dict) for value in rope.values()):
        raise ConfigError(
            f"rope_parameters differ by layer ({', '.join(rope)}); jaxdist has one rotation for all layers"
        )
    check(rope, ROPE)
    rope = {name: value for name, value in rope.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ConfigError(f"rope_type = {SHOWN.repr(kind)}; jaxdist computes 'default' or 'llama3' only")
    theta = _value(settings | rope, "rope_theta", NUMBER, 10000.0)
    if kind == "default":
        return {"rope_theta": theta}
    # transformers 5 gives the top-level key priority.
    top = {name: settings[name] for name in (ORIGINAL,) if settings.get(name) is not None}
    rope = {ORIGINAL: _value(settings, *LLAMA_KEYS["positions"])} | rope | top
    return {"rope_theta": theta, "rope_scaling": kind} | _values(rope, LLAMA3_KEYS)
