"""Names of mixtures in other formats: config.json of Mixtral and Qwen3-MoE, and the tensors of each naming. Neutral."""

import re
from functools import partial

from jaxdist.config.errors import ConfigError, shown
from jaxdist.families.llama.huggingface import (
    DECIDING,
    LAYER,
    ROTARY,
    Variant,
    in_transformers,
    notes_on_rotation,
    read_rotary,
    rotary_type,
    write_rotary,
)
from jaxdist.formats.hf_decisions import HONOURED, NONE, HuggingFace, each, fixed, read
from jaxdist.formats.hf_keys import COUNT, FLAG, NUMBER, Key, Settings, value
from jaxdist.formats.tables import IN_MEMORY, Table, TensorRow, linear

MIXTURE = {
    **ROTARY,
    **each(HONOURED, "sliding_window num_experts num_local_experts output_router_logits layer_types"),
}
BALANCE = Key("router_aux_loss_coef", NUMBER, 0.001)
MIXTRAL_KEYS = {
    "experts": Key("num_local_experts", COUNT, 8),
    "top_k": Key("num_experts_per_tok", COUNT, 2),
    "balance": BALANCE,
}
QWEN3_KEYS = {
    "hidden": Key("moe_intermediate_size", COUNT, 768),  # the width of an expert
    "experts": Key("num_experts", COUNT, 128),
    "top_k": Key("num_experts_per_tok", COUNT, 8),
    "norm_topk_prob": Key("norm_topk_prob", FLAG, False),
    "balance": BALANCE,
}
MIXTRAL = Variant(
    "mixtral",
    "MixtralForCausalLM",
    lambda m: m.norm_topk_prob and not (m.qk_norm or m.qkv_bias or m.output_bias),
    {**MIXTURE, **read(MIXTRAL_KEYS), "router_jitter_noise": fixed(None, 0, 0.0)},
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    keys=MIXTRAL_KEYS,
    # Without it transformers adds no balance loss.
    written=lambda m: {"output_router_logits": m.balance > 0},
)
QWEN3_MOE = Variant(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    lambda m: m.qk_norm and m.qkv_bias == m.output_bias,
    {
        **MIXTURE,
        **read(QWEN3_KEYS),
        **each(HONOURED, "attention_bias use_sliding_window"),
        "max_window_layers": NONE,
        "decoder_sparse_step": fixed(None, 1),
        "mlp_only_layers": fixed(None, []),
        "intermediate_size": NONE,  # of blocks without experts, which are refused
    },
    window="switched",
    defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096},
    keys=QWEN3_KEYS,
    attention_bias=True,
    qk_norm=True,
    written=lambda m: {
        "output_router_logits": m.balance > 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": bool(m.window),
    },
)


def _read(variant: Variant, settings: Settings) -> Settings:
    """The fields of the model section. Raises ConfigError."""
    found = read_rotary(variant, _one_count_of_experts(settings, variant.keys["experts"].name))
    balanced = value(settings, "output_router_logits", FLAG, False)
    return found if balanced else found | {"balance": 0.0}


def _one_count_of_experts(settings: Settings, experts: str) -> Settings:
    """The settings with the number of experts under that key. Raises ConfigError where two keys differ in it."""
    counts = [settings[name] for name in ("num_experts", "num_local_experts") if name in settings]  # transformers 4, 5
    if counts != counts[:1] * len(counts):
        raise ConfigError(f"num_experts and num_local_experts are {shown(counts)}; give one of them")
    return settings | {experts: counts[0]} if counts else settings


def _notes(settings: Settings) -> list[str]:
    """Notes on a load-balance loss that the file leaves out, and on the rotation."""
    lines = notes_on_rotation(settings)
    if not settings.get("output_router_logits") and settings.get(BALANCE.name, BALANCE.default):
        absent = "output_router_logits = false: no load-balance loss, as in transformers; --model.balance adds one"
        return [absent, *lines]
    return lines


def _huggingface(variant: Variant) -> HuggingFace:
    types = {variant.model_type: rotary_type(variant, _read, _notes)}
    return HuggingFace(types, partial(write_rotary, [variant], [*DECIDING, "norm_topk_prob"]))


MIXTRAL_HUGGINGFACE, QWEN3_MOE_HUGGINGFACE = _huggingface(MIXTRAL), _huggingface(QWEN3_MOE)


def _mixture(block: str, gate: str, up: str, down: str) -> Table:
    """A mixture's tensors in files: the modules of its MLP and of an expert's projections."""
    theirs = f"{LAYER}.{block}"
    return in_transformers(
        [
            *linear("layers.mlp.router", f"{theirs}.gate"),
            *linear("layers.mlp.experts.gate_proj", f"{theirs}.experts.{{expert}}.{gate}"),
            *linear("layers.mlp.experts.up_proj", f"{theirs}.experts.{{expert}}.{up}"),
            *linear("layers.mlp.experts.down_proj", f"{theirs}.experts.{{expert}}.{down}"),
        ]
    )


def _fused(separate: Table, gate_first: bool) -> Table:
    """A mixture as transformers 5 holds it in memory: its experts stacked, gate and up in one, without biases.

    `gate_first`: whether the router comes before the experts among its parameters, which an optimizer numbers.
    """
    theirs, kept = f"{LAYER}.mlp", [row for row in separate.rows if not row.by_expert]
    rows = [row._replace(theirs=re.sub(r"\.\w+\.gate\.", ".mlp.gate.", row.theirs)) for row in kept]
    names = [f"layers.mlp.experts.{name}_proj.kernel" for name in ("gate", "up", "down")]
    experts = [
        TensorRow((*names[:2],), f"{theirs}.experts.gate_up_proj", transpose=True),
        TensorRow((names[2],), f"{theirs}.experts.down_proj", transpose=True),
    ]
    gate = next(i for i, row in enumerate(rows) if row.ours == ("layers.mlp.router.kernel",))
    at = gate + 2 if gate_first else gate  # after its bias
    return separate._replace(rows=[*rows[:at], *experts, *rows[at:]])


def _tables(in_files: Table, gate_first: bool) -> dict[str, Table]:
    return {"huggingface": in_files, IN_MEMORY: _fused(in_files, gate_first)}


MIXTRAL_TABLES = _tables(_mixture("block_sparse_moe", "w1", "w3", "w2"), gate_first=True)
QWEN3_MOE_TABLES = _tables(_mixture("mlp", "gate_proj", "up_proj", "down_proj"), gate_first=False)
