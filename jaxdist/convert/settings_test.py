"""Hugging Face's config.json: the meaning of its keys, and refused settings."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert import read_hf
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS, SMALL, run_of
from jaxdist.families.llama.config import Llama
from jaxdist.formats.hf import from_settings, model_types, to_settings

pytestmark = pytest.mark.long


HF: dict[str, Any] = to_settings(MODELS["LlamaForCausalLM"], "float32")


QWEN: dict[str, Any] = to_settings(MODELS["Qwen3ForCausalLM biases window"], "float32")


HF_GPT2 = to_settings(MODELS["GPT2LMHeadModel"], "float32")


MIXED = to_settings(MODELS["Qwen3MoeForCausalLM"], "float32")


class TestConfig:
    @pytest.mark.parametrize("model_type", sorted({*model_types()} - {"resnet"}))
    def test_an_absent_key_has_transformers_default(self, model_type: str) -> None:
        """A file with sizes alone and the same file completed by transformers give one model."""
        transformers = pytest.importorskip("transformers")
        bare: dict[str, Any] = {"model_type": model_type}
        if model_type != "gpt2":
            bare |= {"vocab_size": 7, "hidden_size": 64, "intermediate_size": 10, "num_hidden_layers": 3}
            bare |= {"num_attention_heads": 32}
        full = transformers.AutoConfig.for_model(**bare).to_dict()
        assert from_settings(bare) == from_settings(full)

    def test_rotation_of_both_versions(self) -> None:
        four = {key: value for key, value in HF.items() if key != "rope_parameters"}
        five = {k: v for k, v in four.items() if k not in ("rope_theta", "rope_scaling")}
        five["rope_parameters"] = HF["rope_scaling"] | {"rope_theta": HF["rope_theta"]}
        old = four | {"rope_scaling": {"type" if k == "rope_type" else k: v for k, v in HF["rope_scaling"].items()}}
        assert from_settings(four) == from_settings(five) == from_settings(old)
        assert from_settings(four)["rope_scaling"] == "llama3" and from_settings(four)["rope_theta"] == 500.0
        default = five | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
        assert from_settings(default)["rope_theta"] == 7.0 and "rope_scaling" not in from_settings(default)

    def test_transformers_reads_the_rotation_that_is_written(self) -> None:
        transformers = pytest.importorskip("transformers")
        read = transformers.LlamaConfig(**HF).rope_parameters
        assert read == HF["rope_scaling"] | {"rope_theta": 500.0}

    def test_a_window_only_where_it_is_used(self) -> None:
        assert from_settings(QWEN)["window"] == 3
        assert from_settings(QWEN | {"use_sliding_window": False})["window"] == 0
        assert from_settings(QWEN | {"layer_types": None})["window"] == 3
        assert from_settings(QWEN | {"layer_types": None, "max_window_layers": 3})["window"] == 0
        assert from_settings(HF | {"sliding_window": 3})["window"] == 0
        assert (
            from_settings(HF | {"model_type": "mistral", "architectures": None, "sliding_window": None})["window"] == 0
        )

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (HF | {"model_type": "deepseek_v3"}, r"model_type = 'deepseek_v3'; choose"),
            (MIXED | {"decoder_sparse_step": 2}, r"decoder_sparse_step = 2; jaxdist computes None or 1 only"),
            (MIXED | {"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\]"),
            (MIXED | {"num_local_experts": 5}, r"num_experts and num_local_experts are \[4, 5\]; give one"),
            (
                MIXED | {"num_experts_per_tok": 5},
                r"num_experts_per_tok = 5 is more than num_experts = 4; use at most 4",
            ),
            (
                HF | {"architectures": ["LlamaForSequenceClassification"]},
                r"LlamaForSequenceClassification.*reads LlamaForCausalLM",
            ),
            (HF | {"hidden_act": "gelu"}, r"hidden_act = 'gelu'; jaxdist computes 'silu'"),
            (HF | {"hidden_size": None}, r"hidden_size is missing"),
            (HF | {"hidden_size": "six"}, r"hidden_size = 'six'; give a whole number"),
            (HF | {"num_key_value_heads": 3}, r"num_key_value_heads = 3 does not divide num_attention_heads"),
            (HF | {"rms_norm_eps": -1}, r": rms_norm_eps = -1"),
            (HF | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"rope_type = 'yarn'"),
            (HF | {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_type = 'linear'"),
            (HF | {"rope_scaling": {"rope_type": "llama3"}}, r"factor is missing"),
            (HF | {"rope_scaling": {"full_attention": {"rope_theta": 1.0}}}, r"differ by layer"),
            (HF | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
            (
                QWEN | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
                r"mix full_attention, sliding",
            ),
            (QWEN | {"layer_types": None, "max_window_layers": 1}, r"mix full_attention, sliding"),
            (
                HF_GPT2 | {"activation_function": "quick_gelu"},
                r"activation_function = 'quick_gelu'; jaxdist computes 'gelu_new'",
            ),
            (
                HF_GPT2 | {"scale_attn_by_inverse_layer_idx": True},
                r"scale_attn_by_inverse_layer_idx = True",
            ),
            (HF_GPT2 | {"n_embd": 7}, r"n_head = 3 does not divide n_embd = 7"),
            ([], r"is not a table of settings"),
        ],
    )
    def test_settings_that_cannot_be_computed_are_named(self, settings: Any, expected: str, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigError) as error:
            read_hf(tmp_path)
        assert re.search(expected, str(error.value)), str(error.value)
        assert "config.json" in str(error.value)

    @pytest.mark.parametrize(
        "fields",
        [
            {"output_bias": True},
            {"window": 3, "mlp_bias": True},
            {"qkv_bias": True, "mlp_bias": True},
            {"qk_norm": True, "qkv_bias": True},
            {"qk_norm": True, "mlp_bias": True},
            {"window": 3, "qkv_bias": True, "output_bias": True},
        ],
        ids=str,
    )
    def test_models_that_no_architecture_expresses(self, fields: dict[str, Any], tmp_path: Path) -> None:
        model = Llama(**SMALL, **fields)
        run_of(tmp_path / "run", model)
        with pytest.raises(ConfigError, match=r"none of LlamaForCausalLM, .* combines these"):
            main([str(tmp_path / "run"), str(tmp_path / "hf")])
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
