"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases or none, GELU by tanh or exact.

Twin: jaxdist/families/gpt2/model.py.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.families.gpt2.config import GPT2 as Config
from torch_ref.families.accounting import Accounting, flops_of_decoder
from torch_ref.families.layers import Embedding, LayerNorm, attend
from torch_ref.families.loss import head
from torch_ref.parallel.context import Context


class Attention(nn.Module):
    """Multi-head attention."""

    context = Context()

    def __init__(self, c: Config):
        super().__init__()
        self.q_proj = nn.Linear(c.dim, c.dim, bias=c.bias)
        self.k_proj = nn.Linear(c.dim, c.dim, bias=c.bias)
        self.v_proj = nn.Linear(c.dim, c.dim, bias=c.bias)
        self.o_proj = nn.Linear(c.dim, c.dim, bias=c.bias)
        self.attended = nn.Identity()  # for records
        self.head_dim = c.head_dim

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.q_proj(x_BTD).reshape(heads)
        k_BTHC = self.k_proj(x_BTD).reshape(heads)
        v_BTHC = self.v_proj(x_BTD).reshape(heads)
        q_BTHC, k_BSHC, v_BSHC = self.context.across(q_BTHC, k_BTHC, v_BTHC)
        y_BTHC = self.attended(attend(q_BTHC, k_BSHC, v_BSHC, 0, self.context.first(q_BTHC)))
        z_BTD: Tensor = self.o_proj(y_BTHC.reshape(*x_BTD.shape[:2], -1))
        return z_BTD


class MLP(nn.Module):
    """Two products with GELU between them."""

    def __init__(self, c: Config):
        super().__init__()
        self.up_proj = nn.Linear(c.dim, c.hidden, bias=c.bias)
        self.down_proj = nn.Linear(c.hidden, c.dim, bias=c.bias)
        self.approximate = "tanh" if c.gelu == "tanh" else "none"

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down_proj(functional.gelu(self.up_proj(x_BTD), approximate=self.approximate))
        return y_BTD


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm = LayerNorm(c.dim, c.norm_eps, c.bias)
        self.attention = Attention(c)
        self.mlp_norm = LayerNorm(c.dim, c.norm_eps, c.bias)
        self.mlp = MLP(c)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        y_BTD: Tensor = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + y_BTD


class GPT2(nn.Module):
    """Decoder: embedding and positions, blocks, norm, head. Tokens [B, T] -> logits [B, T, V]."""

    context = Context()

    def __init__(self, c: Config):
        super().__init__()
        self.embed = Embedding(c.vocab_rows, c.dim)
        self.positions = Embedding(c.positions, c.dim)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = LayerNorm(c.dim, c.norm_eps, c.bias)
        self.lm_head = None if c.tied else nn.Linear(c.dim, c.vocab_rows, bias=False)
        self.logits = nn.Identity()  # for records, of a loss in chunks
        self.config = c

    def forward(self, tokens_BT: Tensor, targets_SN: Tensor | None = None) -> Tensor:
        """In a pipeline, parts after the first take the residual of the previous part, and parts without the final norm
        return theirs."""
        x_BTD = tokens_BT if tokens_BT.is_floating_point() else self.embedded(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD)
        if self.norm is None:
            return x_BTD
        return head(self, self.norm(x_BTD), targets_SN)

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        positions = torch.arange(self.context.size * tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.embed(tokens_BT) + self.positions(self.context.rows(positions))
        return x_BTD


# As Llama's, with one product into the MLP.
SAVED = {"R": (0, 4), "D": (2, 0), "Q": (1, 1), "K": (1, 1), "S": (1, 1), "F": (2, 0)}
ACCOUNTING = Accounting(flops_of_decoder, SAVED)
