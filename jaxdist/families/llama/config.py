"""The model section of Llama, and by its fields of Llama 3, Mistral, Qwen2 and Qwen3."""

from typing import Literal

from jaxdist.config.decoder import Rotary


class Llama(Rotary):
    """Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped queries, gated MLP."""

    family: Literal["llama"] = "llama"
    """Family of models."""
    mlp_bias: bool = False
    """Biases in the MLP."""
