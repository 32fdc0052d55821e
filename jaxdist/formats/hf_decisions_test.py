"""Every key of a config.json is decided, in agreement with transformers' own classes."""

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.families.llama.huggingface import ROPE
from jaxdist.formats.hf import from_settings, model_types, notes_on, read_folder, to_settings
from jaxdist.formats.hf_decisions import Effect, check

DECISIONS = {model_type: reader.decisions for model_type, (_, reader) in model_types().items()}
TINY: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "intermediate_size": 24, "vocab_size": 40, "max_position_embeddings": 32,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mistral": TINY,
    "qwen2": TINY | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    "qwen3": TINY | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    "mixtral": TINY | EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": TINY | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 8, "use_sliding_window": True},
    "gpt2": {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 32},
    "resnet": {"depths": [1, 1], "hidden_sizes": [16, 16], "embedding_size": 8},
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Another value for each key that sets a field.
OTHERS: dict[str, Any] = {
    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 8, "num_key_value_heads": 1,
    "sliding_window": 5, "use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"],
    "max_window_layers": 2, "rope_theta": 7.0, "rope_scaling": {"rope_theta": 9.0}, "rope_parameters": LLAMA3,
    "model_type": "nothing", "architectures": ["Nothing"], "output_router_logits": False, "norm_topk_prob": True,
    "id2label": {"0": "a"}, "num_labels": 7, "depths": [2, 1], "hidden_sizes": [16, 32], "num_experts": 8,
    "num_local_experts": 8, "bias": False,
}  # fmt: skip


def of(model_type: str, /, **more: Any) -> dict[str, Any]:
    """Copies, as transformers may change them."""
    return copy.deepcopy({"model_type": model_type} | SETTINGS[model_type] | more)


def values_of(settings: dict[str, Any]) -> dict[str, Any] | str:
    """The model section, or the message of a refusal."""
    try:
        return from_settings(settings)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("model_type", DECISIONS)
def test_every_key_of_transformers_is_decided(model_type: str) -> None:
    """Keys of the installed version. For a new one read the model's code, and add it to the family's huggingface.py."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type)
    keys = {*config.to_dict(), *(field.name for field in dataclasses.fields(config)), *config.attribute_map}
    keys |= {
        *transformers.PreTrainedConfig().to_dict(),
        *transformers.GenerationConfig._get_default_generation_params(),
    }
    assert not keys - DECISIONS[model_type].keys(), "not decided"
    # The defaults are computed: no wrong value is pinned.
    check(json.loads(config.to_json_string()), DECISIONS[model_type])
    for name, decision in DECISIONS[model_type].items():
        if decision.effect is Effect.NOTED:
            assert getattr(config, name, None) == decision.default, name


def test_every_key_of_a_rotation_is_decided() -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    assert not rope.RopeParameters.__annotations__.keys() - ROPE.keys()


def test_an_undecided_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    less = {name: d for name, d in DECISIONS["llama"].items() if name != "attention_dropout"}
    monkeypatch.setitem(DECISIONS, "llama", less)
    with pytest.raises(AssertionError, match="not decided"):
        test_every_key_of_transformers_is_decided("llama")


@pytest.mark.parametrize("model_type", DECISIONS)
def test_keys_that_are_read_change_the_model_or_are_refused(model_type: str) -> None:
    right = values_of(of(model_type))
    assert isinstance(right, dict), right
    for name, decision in DECISIONS[model_type].items():
        if decision.effect is Effect.HONOURED and name != "original_max_position_embeddings":
            before = of(model_type).get(name, 5)
            other = OTHERS.get(name, before * 2 if isinstance(before, int | float) else None)
            if name == "tie_word_embeddings":
                other = not right["tied"]
            changed = values_of(of(model_type, **{name: other}))
            assert changed != right, (name, other)


@pytest.mark.parametrize("model_type", DECISIONS)
def test_keys_with_one_supported_value_are_refused_by_name_and_all_at_once(model_type: str) -> None:
    fixed = {name: d for name, d in DECISIONS[model_type].items() if d.effect is Effect.FIXED}
    wrong = dict.fromkeys(fixed, "x")
    message = values_of(of(model_type, **wrong))
    assert isinstance(message, str)
    for name, decision in fixed.items():
        assert f"{name} = 'x'; jaxdist computes " in message
        for value in decision.values:
            assert not isinstance(values_of(of(model_type, **{name: value})), str), (name, value)


@pytest.mark.parametrize("model_type", [name for name in DECISIONS if name != "resnet"])
def test_ignored_keys_change_no_logit_of_transformers(model_type: str) -> None:
    """Includes keys for training alone, such as dropout and the padding's embedding. Changes all at once."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ids = torch.arange(24).reshape(2, 12)

    def logits(**more: Any) -> Any:
        config = transformers.AutoConfig.for_model(**of(model_type, **more))
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return model(ids, use_cache=False).logits

    changed: dict[str, Any] = {}
    free = {name for name, d in DECISIONS[model_type].items() if d.effect in (Effect.NONE, Effect.NOTED)}
    for name, value in transformers.AutoConfig.for_model(**of(model_type)).to_dict().items():
        if name in free and type(value) in (bool, int, float) and name != "return_dict":
            changed[name] = not value if isinstance(value, bool) else 0.5 if isinstance(value, float) else value + 3
    assert len(changed) > 4
    assert torch.allclose(logits(**changed), logits(), rtol=1e-5, atol=1e-5)  # one key reorders GPT-2's sums
    scaled = {"rope_parameters": LLAMA3} if model_type != "gpt2" else {"activation_function": "gelu"}
    assert not torch.allclose(logits(**scaled), logits(), rtol=1e-5, atol=1e-5)  # a key that is read does


def test_dropout_is_reported() -> None:
    """An absent GPT-2 key counts too: transformers' default is 0.1."""
    assert notes_on(of("llama", attention_dropout=0.1)) == ["attention_dropout = 0.1: jaxdist trains without dropout"]
    assert not notes_on(of("qwen3", attention_dropout=0.0))
    (line,) = notes_on(of("gpt2", embd_pdrop=0.0))
    assert line == "resid_pdrop = 0.1, attn_pdrop = 0.1: jaxdist trains without dropout"
    assert not notes_on(of("gpt2", resid_pdrop=0, embd_pdrop=0.0, attn_pdrop=0.0, summary_first_dropout=0.1))


def test_keys_that_are_not_known_are_reported() -> None:
    (line,) = notes_on(of("mistral", alibi=True, rope_scaling={"rope_type": "default", "wobble": 3}))
    assert line == "'alibi', 'rope_scaling.wobble': not known, and taken to change nothing"
    (line,) = notes_on(of("qwen2", pad_token_id=0))
    assert line.startswith("pad_token_id = 0: transformers never trains the input embedding of that token")
    (line,) = notes_on(of("llama", auto_map={"AutoModel": "x.Y"}))
    assert "code in the folder is not executed" in line


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_without_router_logits_there_is_no_balance_loss(model_type: str) -> None:
    """False is transformers' default; converts both ways."""
    for keys, balance in (({"output_router_logits": True}, 0.02), ({"output_router_logits": False}, 0.0), ({}, 0.0)):
        settings = {n: v for n, v in of(model_type).items() if n != "output_router_logits"} | keys
        assert from_settings(settings | {"router_aux_loss_coef": 0.02})["balance"] == balance
        (line,) = [*notes_on(settings | {"router_aux_loss_coef": 0.02}), ""][:1]
        assert line.startswith("output_router_logits = false") == (not balance)


def test_a_top_level_original_length_has_priority(tmp_path: Path) -> None:
    """transformers 5 does so, and its frequencies are right."""
    for within in ({}, {"original_max_position_embeddings": 16}):
        for key in ("rope_scaling", "rope_parameters"):
            settings = of("llama", original_max_position_embeddings=8, **{key: LLAMA3 | within})
            assert from_settings(settings)["rope_original_positions"] == 8
            assert any("at the top" in line for line in notes_on(settings)) == bool(within)
    transformers = pytest.importorskip("transformers")
    rope = pytest.importorskip("transformers.modeling_rope_utils")

    def frequencies(within: int, **top: int) -> Any:
        settings = of("llama", rope_parameters=LLAMA3 | {"original_max_position_embeddings": within}, **top)
        return rope.ROPE_INIT_FUNCTIONS["llama3"](transformers.LlamaConfig(**settings), "cpu")[0]

    both = frequencies(16, original_max_position_embeddings=8)
    assert both.equal(frequencies(8)) and not both.equal(frequencies(16))


@pytest.mark.parametrize(
    ("model_type", "more", "expected"),
    [
        ("llama", {"layer_types": ["sliding_attention"] * 2}, r"layer_types = .* leave layer_types out"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2, "sliding_window": 4},
            r"every layer is sliding_attention here, by sliding_w",
        ),
        (
            "llama",
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"every layer is full_attention here; leave",
        ),
        ("qwen3_moe", {"layer_types": ["chunked_attention"] * 2}, r"layer_types = "),
        ("llama", {"per_layer_config": {"1": {"num_key_value_heads": 4}}}, r"per_layer_config = .* without it"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, r"pruned_heads = .* without it"),
        ("mistral", {"sliding_window": 0}, r"sliding_window = 0; give a whole number from 1, or null for no window"),
        ("qwen2", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping = 30.0"),
        ("llama", {"attention_bias": "qkv"}, r"attention_bias = 'qkv'; give true or false"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_fac"),
        ("llama", {"logits_scaling": 8.0, "residual_multiplier": 0.2}, r"residual_multiplier = 0.2(.|\n)*logits_scal"),
    ],
)
def test_keys_that_change_the_numbers_are_refused(model_type: str, more: dict[str, Any], expected: str) -> None:
    message = values_of(of(model_type, **more))
    assert isinstance(message, str) and re.search(expected, message), message


def test_a_fix_that_leaves_a_key_out_is_right(tmp_path: Path) -> None:
    for kinds in (["full_attention"] * 2, None):
        (tmp_path / "config.json").write_text(json.dumps(of("llama", layer_types=kinds)))
        model, notes = read_folder(tmp_path)
        assert not notes and to_settings(model, "float32")["num_hidden_layers"] == 2


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
    """One line per key, each naming the file; following all of them makes it readable."""
    wrong = {"hidden_size": "64", "vocab_size": 0, "num_hidden_layers": None, "hidden_act": "relu"}
    wrong |= {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(of("llama", **wrong)))
    with pytest.raises(ConfigError) as error:
        read_folder(tmp_path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{tmp_path / 'config.json'}: ") for line in lines)
    assert sorted(line.split(": ")[1].split()[0] for line in lines) == [
        "hidden_act", "hidden_size", "num_hidden_layers", "rope_type", "vocab_size",
    ]  # fmt: skip
    right = {name: of("llama").get(name, "silu" if name == "hidden_act" else None) for name in wrong}
    assert not isinstance(values_of(of("llama", **right)), str)
    for other in ("quick_gelu", ["gelu"], None):
        assert "activation_function = " in str(values_of(of("gpt2", activation_function=other, n_head=0)))


def test_ignored_keys_of_a_rotation_are_reported() -> None:
    """transformers 5 uses the default rotation without a rope_type."""
    settings = of("qwen2", rope_theta=1e6, rope_parameters={"rope_theta": 5e5, "factor": 4.0})
    assert (values := from_settings(settings))["rope_theta"] == 5e5 and "rope_scaling" not in values
    assert notes_on(settings) == [
        "rope_theta = 500000.0 within, where transformers 5 reads it, and 1000000.0 at the top",
        "factor = 4.0: without effect, as rope_type is default",
    ]
    assert not notes_on(of("llama", rope_theta=5e5, rope_parameters=LLAMA3 | {"rope_theta": 5e5}))
    transformers = pytest.importorskip("transformers")
    read = transformers.AutoConfig.for_model(**settings).rope_parameters
    assert (read["rope_theta"], read["rope_type"]) == (5e5, "default")


def test_labels_of_a_resnet_are_counted() -> None:
    """transformers has two by default, or num_labels."""
    for more, classes in (({}, 2), ({"num_labels": 7}, 7), ({"id2label": {"0": "a"}, "num_labels": 7}, 1)):
        assert from_settings(of("resnet", **more))["classes"] == classes
