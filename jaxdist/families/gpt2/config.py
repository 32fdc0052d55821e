"""The model section of GPT-2 and nanoGPT."""

import math
from typing import Literal

from pydantic import model_validator

from jaxdist.config.decoder import Decoder
from jaxdist.config.fitting import largest_divisor


class GPT2(Decoder):
    """GPT-2 and nanoGPT: LayerNorm, learned positions, biases everywhere or nowhere, GELU by tanh or exact."""

    family: Literal["gpt2"]
    """gpt2: learned positions, LayerNorm, biases."""
    tied: bool = True
    """The output head is the embedding itself."""
    gelu: Literal["tanh", "exact"] = "tanh"
    """GELU (arXiv:1606.08415): tanh, its approximation, as OpenAI, Hugging Face's gelu_new and llm.c compute it; exact,
    by the error function, as nanoGPT and torch's default do."""
    bias: bool = True
    """Biases of every projection and LayerNorm; false: none of them has one (nanoGPT's bias=False)."""

    @model_validator(mode="after")
    def _heads(self) -> "GPT2":
        if self.dim % self.heads:
            raise ValueError(
                f"model.heads = {self.heads} does not divide model.dim = {self.dim}; "
                "GPT-2 splits its width evenly among the heads; use model.heads = "
                f"{largest_divisor(self.dim, self.heads)}, or model.dim = "
                f"{math.ceil(self.dim / self.heads) * self.heads}"
            )
        return self

    @property
    def qkv_bias(self) -> bool:
        return self.bias

    @property
    def mlp_bias(self) -> bool:
        return self.bias
