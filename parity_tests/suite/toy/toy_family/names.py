"""The family's names in files, and its config.json."""

from typing import Any

from jaxdist.formats.hf_decisions import DECODER, HONOURED, HuggingFace, ModelType, each
from jaxdist.formats.tables import Table, embedding, linear, norm

BLOCK = "blocks.{layer}"
PROJECTIONS = {
    "attention.q_proj": "query", "attention.k_proj": "key", "attention.v_proj": "value", "attention.o_proj": "mix",
    "mlp.up_proj": "wide", "mlp.down_proj": "narrow",
}  # fmt: skip
TABLES = {
    "wide": Table(
        [
            *embedding("embed", "tokens"),
            *norm("layers.attention_norm", f"{BLOCK}.norm"),
            *(row for ours, theirs in PROJECTIONS.items() for row in linear(f"layers.{ours}", f"{BLOCK}.{theirs}")),
            *norm("norm", "last_norm"),
            *linear("lm_head", "logits"),
        ],
        head="logits.weight",
    )
}
FIELDS = (
    "layers", "dim", "heads", "kv_heads", "head_dim", "hidden", "vocab", "positions", "rotated", "rope_theta",
    "norm_eps", "tied", "init_std",
)  # fmt: skip


def read(settings: dict[str, Any]) -> dict[str, Any]:
    return {field: settings[field] for field in FIELDS}


def write(model: Any) -> dict[str, Any]:
    fields = {field: getattr(model, field) for field in FIELDS}
    return {"model_type": "wide", "architectures": ["WideForCausalLM"], **fields}


DECISIONS = {**DECODER, **each(HONOURED, " ".join(FIELDS))}
HUGGINGFACE = HuggingFace({"wide": ModelType("WideForCausalLM", DECISIONS, read, {})}, write)
