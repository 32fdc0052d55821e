"""What jaxdist does about each key of a config.json, for every model class of transformers that it computes.

A test compares these lists with transformers' own config classes, and fails when a key is not decided.
"""

import reprlib
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from jaxdist.config.errors import ConfigError
from jaxdist.formats.hf_keys import (
    GELUS,
    GPT2_BIAS,
    GPT2_KEYS,
    GPT2_OTHER_NAMES,
    LLAMA_KEYS,
    MIXTURE_KEYS,
    ORIGINAL,
    RESNET_KEYS,
    Key,
    Settings,
)

SHOWN = reprlib.Repr()  # a value may be as long and as deep as its file
SHOWN.maxstring = SHOWN.maxother = 80


class Effect(Enum):
    """What a key means to jaxdist."""

    HONOURED = auto()  # a field of the model follows from it
    FIXED = auto()  # refused unless it has one of the values that jaxdist computes
    TOLD = auto()  # changes training alone, in which jaxdist differs and says so
    NONE = auto()  # changes no number of these models


class Decision(NamedTuple):
    """The effect of a key, the values that need no refusal or note, and what transformers takes where it is absent."""

    effect: Effect
    values: tuple[Any, ...] = ()
    default: Any = None
    note: str = ""


Decisions = Mapping[str, Decision]
ABSENT: tuple[Any, ...] = (None, False, 0, 0.0, "", {}, [])
NO_DROPOUT = "jaxdist trains without dropout"
PADDING = "transformers never trains the input embedding of that token, jaxdist trains it as any other"
HONOURED, NONE = Decision(Effect.HONOURED), Decision(Effect.NONE)


def fixed(*values: Any) -> Decision:
    """One of these, or refused."""
    return Decision(Effect.FIXED, values)


def dropout(default: float) -> Decision:
    """A probability, which transformers' training applies."""
    return Decision(Effect.TOLD, ABSENT, default, NO_DROPOUT)


def each(decision: Decision, names: str) -> dict[str, Decision]:
    return dict.fromkeys(names.split(), decision)


def read(keys: Mapping[str, Key]) -> dict[str, Decision]:
    """Those of which a field of ours is read."""
    return dict.fromkeys((key.name for key in keys.values()), HONOURED)


# What transformers takes for settings of generation, which has a file of its own.
GENERATION = """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens
    target_lookbehind temperature top_k top_p typical_p use_cache
"""
EVERY: Decisions = {
    **each(HONOURED, "model_type architectures"),
    **each(NONE, GENERATION),
    **each(
        NONE,
        """
        transformers_version dtype torch_dtype return_dict use_return_dict output_hidden_states output_attentions
        id2label label2id num_labels problem_type _name_or_path name_or_path _commit_hash chunk_size_feed_forward
        bos_token_id eos_token_id sep_token_id decoder_start_token_id pad_token_id tokenizer_class prefix
        task_specific_params finetuning_task torchscript use_bfloat16 tf_legacy_loss is_decoder tie_encoder_decoder
        cross_attention_hidden_size attn_implementation _attn_implementation _attn_implementation_autoset
        experts_implementation gradient_checkpointing
        """,
    ),
    # The last six are of other classes, and would change the model if this one had them.
    **each(
        fixed(*ABSENT),
        """
        quantization_config per_layer_config pruned_heads is_encoder_decoder add_cross_attention
        attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar clip_qkv no_rope_layers
        attn_temperature_tuning
        """,
    ),
    **each(
        fixed(None, 1, 1.0),
        "attention_multiplier residual_multiplier embedding_multiplier logits_scaling logit_scale",
    ),
    "auto_map": Decision(Effect.TOLD, ABSENT, note="code of the folder is not run; the model is that of model_type"),
}
DECODER: Decisions = {**EVERY, "is_causal": fixed(True)}
ROTARY: Decisions = {
    **DECODER,
    **read(LLAMA_KEYS),
    **each(
        HONOURED,
        "num_key_value_heads head_dim rope_theta rope_scaling rope_parameters original_max_position_embeddings",
    ),
    "hidden_act": fixed("silu", "swish"),
    "partial_rotary_factor": fixed(None, 1, 1.0),
    "attention_dropout": dropout(0.0),
    "pad_token_id": Decision(Effect.TOLD, (None,), note=PADDING),
    "pretraining_tp": NONE,
}
QWEN: Decisions = {
    **ROTARY,
    **each(HONOURED, "use_sliding_window sliding_window max_window_layers layer_types"),
}
MIXTURE: Decisions = {
    **ROTARY,
    **each(HONOURED, "sliding_window num_experts num_local_experts output_router_logits layer_types"),
}
DECISIONS: Mapping[str, Decisions] = {
    "llama": {**ROTARY, **each(HONOURED, "attention_bias mlp_bias layer_types")},
    "mistral": {**ROTARY, **each(HONOURED, "sliding_window layer_types")},
    "qwen2": QWEN,
    "qwen3": {**QWEN, "attention_bias": HONOURED},
    "mixtral": {**MIXTURE, **read(MIXTURE_KEYS["mixtral"]), "router_jitter_noise": fixed(None, 0, 0.0)},
    "qwen3_moe": {
        **MIXTURE,
        **read(MIXTURE_KEYS["qwen3_moe"]),
        **each(HONOURED, "attention_bias use_sliding_window"),
        "max_window_layers": NONE,
        "decoder_sparse_step": fixed(None, 1),
        "mlp_only_layers": fixed(None, []),
        "intermediate_size": NONE,  # of blocks without experts, which are refused
    },
    "gpt2": {
        **DECODER,
        **read(GPT2_KEYS),
        **each(HONOURED, f"n_inner {GPT2_BIAS.name} {' '.join(GPT2_OTHER_NAMES)}"),
        **each(dropout(0.1), "resid_pdrop embd_pdrop attn_pdrop"),
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
    },
    "resnet": {
        **EVERY,
        **read(RESNET_KEYS),
        **each(HONOURED, "id2label num_labels"),
        "layer_type": fixed("basic", "bottleneck"),
        **each(NONE, "stage_names out_features out_indices tie_word_embeddings"),
        "hidden_act": fixed("relu"),
        **each(fixed(False), "downsample_in_first_stage downsample_in_bottleneck"),
    },
}
# Those that scale the rotation of another rope_type than the default.
SCALING = (
    "factor", "low_freq_factor", "high_freq_factor", "short_factor", "long_factor", "attention_factor", "beta_fast",
    "beta_slow",
)  # fmt: skip
# Keys within rope_parameters (transformers 5) or rope_scaling (4). The kinds that read those without effect here are
# refused by their rope_type.
ROPE: Decisions = {
    **each(HONOURED, "rope_type type rope_theta factor low_freq_factor high_freq_factor"),
    "original_max_position_embeddings": HONOURED,
    "partial_rotary_factor": fixed(None, 1, 1.0),
    "mrope_section": fixed(*ABSENT),
    **each(
        NONE, "attention_factor beta_fast beta_slow short_factor long_factor mscale mscale_all_dim truncate finetuned"
    ),
}


def check(settings: Settings, decisions: Decisions) -> None:
    """Raises ConfigError naming every key whose value jaxdist does not compute."""
    wrong = [
        f"{name} = {SHOWN.repr(settings[name])}; jaxdist computes {_allowed(decision.values)} only"
        for name, decision in decisions.items()
        if decision.effect is Effect.FIXED and name in settings and settings[name] not in decision.values
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _allowed(values: tuple[Any, ...]) -> str:
    if values == ABSENT:
        return "models without it"
    return " or ".join(dict.fromkeys(repr(value) for value in values))


def notes_on(settings: Settings) -> list[str]:
    """Notes on a config.json that jaxdist reads: keys that change its training in transformers and not here, keys
    without effect, and unknown keys."""
    decisions = DECISIONS[settings["model_type"]]
    told: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        value = settings.get(name, decision.default)
        if decision.effect is Effect.TOLD and value not in decision.values:
            told.setdefault(decision.note, []).append(f"{name} = {SHOWN.repr(value)}")
    lines = [f"{', '.join(keys)}: {note}" for note, keys in told.items()]
    unbalanced = "output_router_logits" in decisions and not settings.get("output_router_logits")
    if unbalanced and settings.get("router_aux_loss_coef", 0.001):
        lines.append("output_router_logits = false: no load-balance loss, as in transformers; --model.balance adds one")
    rotary = "rope_scaling" in decisions
    rope = (rotary and (settings.get("rope_scaling") or settings.get("rope_parameters"))) or {}
    if (top := settings.get(ORIGINAL)) is not None and rope.get(ORIGINAL, top) != top:
        lines.append(f"{ORIGINAL} = {top} at the top, where transformers 5 reads it, and {rope[ORIGINAL]} within")
    if (top := settings.get("rope_theta")) is not None and rope.get("rope_theta", top) != top:
        lines.append(f"rope_theta = {rope['rope_theta']} within, where transformers 5 reads it, and {top} at the top")
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        idle = [f"{name} = {SHOWN.repr(rope[name])}" for name in SCALING if rope.get(name) is not None]
        lines += [f"{', '.join(idle)}: without effect, as rope_type is default"] if idle else []
    unknown = [name for name in settings if name not in decisions]
    if unknown := unknown + [f"rope_parameters.{name}" for name in rope if name not in ROPE]:
        lines.append(f"{', '.join(map(SHOWN.repr, unknown[:8]))}: not known, and taken to change nothing")
    return lines
