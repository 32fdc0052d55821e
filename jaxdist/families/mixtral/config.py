"""The model section of Mixtral and Qwen3-MoE."""

import math
from typing import ClassVar, Literal

from pydantic import model_validator

from jaxdist.config.decoder import Rotary
from jaxdist.config.section import Count, NotNegative

# Far above any model: the tensors of each expert are looked for by name.
MOST_EXPERTS = 10_000
MOST_EXPERTS_IN_ALL = 100_000


class Mixture(Rotary):
    """Mixtral and Qwen3-MoE: Llama's blocks with E gated MLPs, of which a router chooses a few for each token."""

    free: ClassVar[frozenset[str]] = Rotary.free | {"balance", "capacity"}

    family: Literal["mixtral", "qwen3_moe"]
    """mixtral or qwen3_moe: the same model, with Hugging Face's names of either."""
    experts: Count = 8
    """Experts, E, in each block; each is an MLP of width `hidden`."""
    top_k: Count = 2
    """Experts that each token goes to: those of the highest probabilities of the router."""
    norm_topk_prob: bool = True
    """Divide the probabilities of a token's experts by their sum (Mixtral always)."""
    balance: NotNegative = 0.001
    """Weight of the load-balance loss, which is added to that of the tokens (arXiv:2101.03961, eq. 4): E · the sum over
    experts of the share of tokens that go there times their mean probability, over all blocks and a microbatch. Tokens
    whose target has no loss, such as padding, are not counted."""
    capacity: NotNegative = 0.0
    """Tokens of a sequence that an expert takes at most, in multiples of its even share of them, top_k · T / E, T being
    the tokens before the padding; those that come later in time go without it. 0: all are taken."""

    @model_validator(mode="after")
    def _chosen(self) -> "Mixture":
        if self.top_k > self.experts:
            raise ValueError(
                f"model.top_k = {self.top_k} is more than model.experts = {self.experts}; use at most {self.experts}"
            )
        if self.experts > MOST_EXPERTS:
            raise ValueError(f"model.experts = {self.experts} is absurd; use at most {MOST_EXPERTS:,}")
        if (total := self.layers * self.experts) > MOST_EXPERTS_IN_ALL:
            raise ValueError(
                f"model.experts = {self.experts} in each of model.layers = {self.layers} are {total:,} experts, "
                f"more than {MOST_EXPERTS_IN_ALL:,}; use at most model.experts = {MOST_EXPERTS_IN_ALL // self.layers}"
            )
        return self

    @property
    def mixes_rows(self) -> bool:
        return bool(self.balance or self.capacity)

    def describe(self) -> str:
        return f"{super().describe()}, E {self.experts}, {self.top_k} a token"

    def room(self, times: int) -> int:
        """Most tokens of a sequence of that length that an expert takes."""
        return min(times, math.ceil(self.capacity * self.top_k * times / self.experts)) if self.capacity else times
