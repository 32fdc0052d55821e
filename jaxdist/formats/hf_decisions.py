"""The effect of each key of a config.json on jaxdist, and the model types of transformers that a family reads.

A test compares these lists with transformers' own config classes, and fails when a key is not decided.
"""

from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxdist.config.errors import ConfigError, shown
from jaxdist.formats.hf_keys import Key, Settings


class Effect(Enum):
    """The decision on a key of config.json."""

    HONOURED = auto()  # a field of the model follows from it
    FIXED = auto()  # refused unless it has one of the values that jaxdist computes
    NOTED = auto()  # changes training alone, in which jaxdist differs and says so
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
    """Value must be one of these, else it is refused."""
    return Decision(Effect.FIXED, values)


def dropout(default: float) -> Decision:
    """A probability, which transformers' training applies."""
    return Decision(Effect.NOTED, ABSENT, default, NO_DROPOUT)


def each(decision: Decision, names: str) -> dict[str, Decision]:
    return dict.fromkeys(names.split(), decision)


def read(keys: Mapping[str, Key]) -> dict[str, Decision]:
    """Settings from which a field of ours is read."""
    return dict.fromkeys((key.name for key in keys.values()), HONOURED)


# Settings of generation in transformers, which has a file of its own.
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
    "auto_map": Decision(
        Effect.NOTED, ABSENT, note="code in the folder is not executed; model_type determines the model"
    ),
}
DECODER: Decisions = {**EVERY, "is_causal": fixed(True)}


def check(settings: Settings, decisions: Decisions) -> None:
    """Raises ConfigError naming every key whose value jaxdist does not compute."""
    wrong = [
        f"{name} = {shown(settings[name])}; jaxdist computes {_allowed(decision.values)} only"
        for name, decision in decisions.items()
        if decision.effect is Effect.FIXED and name in settings and settings[name] not in decision.values
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))


def _allowed(values: tuple[Any, ...]) -> str:
    if values == ABSENT:
        return "models without it"
    return " or ".join(dict.fromkeys(repr(value) for value in values))


class ModelType(NamedTuple):
    """One model_type of config.json: transformers' `architecture`, the class that computes it.

    `read`: settings -> the fields of the model section; raises ConfigError. `names`: our field -> its key, for
    messages. `nested`: key -> the decisions on the keys of its table. `notes`: notes on values that only this type has.
    """

    architecture: str
    decisions: Decisions
    read: Callable[[Settings], Settings]
    names: Mapping[str, str]
    nested: Mapping[str, Decisions] = MappingProxyType({})
    notes: Callable[[Settings], list[str]] = lambda settings: []


class HuggingFace(NamedTuple):
    """The config.json of a family: the types that it reads, by model_type, and the writer.

    `write`: model -> settings; raises ConfigError where no architecture expresses the model.
    """

    types: Mapping[str, ModelType]
    write: Callable[[Any], Settings]


def notes(settings: Settings, kind: ModelType) -> list[str]:
    """Notes on a config.json that jaxdist reads: keys that change its training in transformers and not here, keys
    without effect, and unknown keys."""
    noted: dict[str, list[str]] = {}
    for name, decision in kind.decisions.items():
        value = settings.get(name, decision.default)
        if decision.effect is Effect.NOTED and value not in decision.values:
            noted.setdefault(decision.note, []).append(f"{name} = {shown(value)}")
    lines = [f"{', '.join(keys)}: {note}" for note, keys in noted.items()] + kind.notes(settings)
    unknown = [name for name in settings if name not in kind.decisions]
    for key, decisions in kind.nested.items():
        unknown += [f"{key}.{name}" for name in settings.get(key) or {} if name not in decisions]
    if unknown:
        lines.append(f"{', '.join(map(shown, unknown[:8]))}: not known, and taken to change nothing")
    return lines
