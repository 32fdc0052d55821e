"""Llama (arXiv:2302.13971), and by config Llama 3, Mistral, Qwen2 and Qwen3.

Twin: jaxdist/families/llama/model.py.
"""

from torch import Tensor, nn
from torch.nn import functional

from jaxdist.config import Rotary
from jaxdist.families.llama.config import Llama as Config
from torch_ref.families.accounting import Accounting, flops_of_decoder
from torch_ref.families.layers import RMSNorm, RotaryDecoder, Rotation, attend, rotary, rotate
from torch_ref.families.loss import head
from torch_ref.parallel.context import Context


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions and an optional window."""

    context = Context()

    def __init__(self, c: Rotary):
        super().__init__()
        H, K = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.dim, H, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.dim, K, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.dim, K, bias=c.qkv_bias)
        self.o_proj = nn.Linear(H, c.dim, bias=c.output_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else None
        self.q_rotated, self.k_rotated, self.attended = nn.Identity(), nn.Identity(), nn.Identity()  # for records
        self.head_dim, self.window = c.head_dim, c.window

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.q_proj(x_BTD).reshape(heads)
        k_BTKC = self.k_proj(x_BTD).reshape(heads)
        v_BTKC = self.v_proj(x_BTD).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        q_BTHC, k_BTKC = self.q_rotated(rotate(q_BTHC, rotation)), self.k_rotated(rotate(k_BTKC, rotation))
        q_BTHC, k_BSKC, v_BSKC = self.context.across(q_BTHC, k_BTKC, v_BTKC)
        y_BTHC = self.attended(attend(q_BTHC, k_BSKC, v_BSKC, self.window, self.context.first(q_BTHC)))
        z_BTD: Tensor = self.o_proj(y_BTHC.reshape(*x_BTD.shape[:2], -1))
        return z_BTD


class MLP(nn.Module):
    """Gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, c: Config):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.hidden, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.dim, c.hidden, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.hidden, c.dim, bias=c.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        y_BTD: Tensor = self.down_proj(h_BTF)
        return y_BTD


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = MLP(c)

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        y_BTD: Tensor = self.mlp(self.mlp_norm(x_BTD))
        return x_BTD + y_BTD


class Llama(RotaryDecoder):
    """Decoder: embedding, blocks, norm, head. Tokens [B, T] -> logits [B, T, V]."""

    context = Context()

    def __init__(self, c: Config):
        super().__init__(c, Block)

    def forward(self, tokens_BT: Tensor, targets_SN: Tensor | None = None) -> Tensor:
        """In a pipeline, parts after the first take the residual of the previous part, and parts without the final norm
        return theirs."""
        x_BTD = tokens_BT if tokens_BT.is_floating_point() else self.embed(tokens_BT)
        cos, sin = rotary(self.config, self.context.size * tokens_BT.shape[1], like=x_BTD)
        rotation = self.context.rows(cos), self.context.rows(sin)
        for block in self.layers:
            x_BTD = block(x_BTD, rotation)
        if self.norm is None:
            return x_BTD
        return head(self, self.norm(x_BTD), targets_SN)


# S: the softmax, and a copy in the order that its product with the values reads; F: the products alone.
SAVED = {"R": (0, 4), "D": (2, 0), "Q": (1, 1), "K": (1, 1), "S": (1, 1), "F": (4, 0)}
ACCOUNTING = Accounting(flops_of_decoder, SAVED)
