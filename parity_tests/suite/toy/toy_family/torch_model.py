"""The family in torch. Twin: model.py."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_ref.families.layers import RMSNorm, RotaryDecoder, attend, rotary, rotate
from torch_ref.families.loss import head
from torch_ref.parallel.context import Context
from toy_family.config import Wide as Config


class Attention(nn.Module):
    context = Context()

    def __init__(self, c: Config):
        super().__init__()
        H, K = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.dim, H, bias=False)
        self.k_proj = nn.Linear(c.dim, K, bias=False)
        self.v_proj = nn.Linear(c.dim, K, bias=False)
        self.o_proj = nn.Linear(H, c.dim, bias=False)
        self.q_rotated, self.k_rotated, self.attended = nn.Identity(), nn.Identity(), nn.Identity()  # for records
        self.head_dim, self.rotated = c.head_dim, c.rotated

    def turned(self, x_BTHC: Tensor, rotation: Any, seen: nn.Module) -> Tensor:
        turned, rest = x_BTHC.split([self.rotated, self.head_dim - self.rotated], dim=-1)
        return torch.cat([seen(rotate(turned, rotation)), rest], -1)

    def forward(self, x_BTD: Tensor, rotation: Any) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.turned(self.q_proj(x_BTD).reshape(heads), rotation, self.q_rotated)
        k_BTKC = self.turned(self.k_proj(x_BTD).reshape(heads), rotation, self.k_rotated)
        q_BTHC, k_BSKC, v_BSKC = self.context.across(q_BTHC, k_BTKC, self.v_proj(x_BTD).reshape(heads))
        y_BTHC = self.attended(attend(q_BTHC, k_BSKC, v_BSKC, 0, self.context.first(q_BTHC)))
        return self.o_proj(y_BTHC.reshape(*x_BTD.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.up_proj = nn.Linear(c.dim, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.up_proj(x_BTD)))


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, c: Config):
        super().__init__()
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention, self.mlp = Attention(c), MLP(c)

    def forward(self, x_BTD: Tensor, rotation: Any) -> Tensor:
        h_BTD = self.attention_norm(x_BTD)
        return x_BTD + self.attention(h_BTD, rotation) + self.mlp(h_BTD)


class Wide(RotaryDecoder):
    context = Context()

    def __init__(self, c: Config):
        super().__init__(c, Block)

    def forward(self, tokens_BT: Tensor, targets_SN: Tensor | None = None) -> Tensor:
        x_BTD = self.embed(tokens_BT) * self.config.dim**0.5
        of_part = self.config.model_copy(update={"head_dim": self.config.rotated})
        cos, sin = rotary(of_part, self.context.size * tokens_BT.shape[1], like=x_BTD)
        rotation = self.context.rows(cos), self.context.rows(sin)
        for block in self.layers:
            x_BTD = block(x_BTD, rotation)
        return head(self, self.norm(x_BTD), targets_SN)
