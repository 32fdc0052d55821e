"""The vocabulary of a Hugging Face config.json: its keys with the kinds of their values, and the model classes of
transformers that jaxdist computes."""

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config.model import MOST_BLOCKS, MOST_LAYERS

Settings = dict[str, Any]
REQUIRED = object()


class Kind(NamedTuple):
    """What a value must be. JSON keeps numbers, text and truth apart; Python would take one for another."""

    title: str
    holds: Callable[[Any], bool]


COUNT = Kind("a whole number from 1", lambda value: type(value) is int and 0 < value < 2**31)
COUNT_OR_ZERO = Kind("a whole number from 0", lambda value: type(value) is int and 0 <= value < 2**31)
WINDOW = Kind("a whole number from 1, or null for no window", COUNT.holds)
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
# A key of our own: transformers' class has biases always, and makes those that a file lacks zero, as it does new ones.
GPT2_BIAS = Key("bias", FLAG, True)
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
ORIGINAL = "original_max_position_embeddings"
LLAMA3_KEYS = {
    "rope_factor": Key("factor", NUMBER),
    "rope_low_freq_factor": Key("low_freq_factor", NUMBER),
    "rope_high_freq_factor": Key("high_freq_factor", NUMBER),
    "rope_original_positions": Key(ORIGINAL, COUNT),
}
# Keys of what depends on the architecture.
ROTARY_NAMES = {
    "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "rope_theta": "rope_theta", "window": "sliding_window",
}  # fmt: skip
WINDOWS = ("full_attention", "sliding_attention")
LAYERED = ("qwen2", "qwen3")  # read layer_types

RESNET_ARCHITECTURE = "ResNetForImageClassification"
RESNET_KEYS = {
    "channels": Key("num_channels", COUNT, 3),
    "stem": Key("embedding_size", COUNT, 64),
    "widths": Key("hidden_sizes", COUNTS, [256, 512, 1024, 2048]),
    "depths": Key("depths", COUNTS, [3, 4, 6, 3]),
}
CLASSES = Key("id2label", TABLE, {})  # left out, num_labels counts
LABELS = Key("num_labels", COUNT, 2)
BATCH_NORM_EPS = 1e-5  # no key of theirs
