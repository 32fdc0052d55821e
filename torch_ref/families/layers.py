"""The parts that decoders are made of, beside torch's own Linear.

Shape letters: B batch, T time (S for keys), D model, H heads, K kv heads, G = H/K, C head_dim, F hidden, V
vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from jaxdist.config import Rotary

Rotation = tuple[Tensor, Tensor]


def at_least_f32(x: Tensor) -> Tensor:
    """`x` in float32 or wider: what norms, softmax, rotations, the loss and every sum over tokens are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Rows(torch.autograd.Function):
    """The rows [..., D] of a table [V, D]; their gradients are added in float32 or wider and rounded once.

    The gradient of a frequent token is a sum over all its places: torch's CPU kernel adds it in the table's dtype, in
    bfloat16 with an error of half its size. Rows, and what of them crosses devices, keep that dtype.
    """

    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocab = len(table_VD)
        return functional.embedding(tokens, table_VD)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        (tokens,), (outer_D,) = ctx.saved_tensors, outer
        inner_VD = torch.ops.aten.embedding_dense_backward(at_least_f32(outer_D), tokens, ctx.vocab, -1, False)
        return inner_VD.to(outer_D.dtype), None


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` with accurate gradients in low precision."""

    def forward(self, tokens: Tensor) -> Tensor:
        rows: Tensor = Rows.apply(self.weight, tokens)  # type: ignore[no-untyped-call]
        return rows


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight (arXiv:1910.07467), in float32 or wider, rounded once at the end.

    `torch.nn.RMSNorm` leaves the inner precision to its kernel.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = at_least_f32(x)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps)
        return (y * at_least_f32(self.weight)).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) · weight + bias (arXiv:1607.06450), in float32 or wider, rounded once."""

    def __init__(self, size: int, eps: float, bias: bool = True):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = at_least_f32(x)
        y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps)
        y = y * at_least_f32(self.weight)
        return (y if self.bias is None else y + at_least_f32(self.bias)).to(x.dtype)


def rotary_frequencies(c: Rotary, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position [C/2], of each rotated pair; llama3 scaling as in Llama 3.1's reference code."""
    frequency = c.rope_theta ** -(torch.arange(0, c.head_dim, 2, dtype=dtype, device=device) / c.head_dim)
    if c.rope_scaling == "none":
        return frequency
    turns = c.rope_original_positions * frequency / (2 * math.pi)  # full turns within the original context
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: fast, left alone; 0: slow, stretched in full
    return frequency * (kept + (1 - kept) / c.rope_factor)


def rotary(c: Rotary, length: int, like: Tensor) -> Rotation:
    """cos and sin [T, 1, C/2] of every position (arXiv:2104.09864), in float32 or wider.

    Computed from the config in each forward pass: a buffer would not survive initialization on the meta
    device.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    position = torch.arange(length, dtype=dtype, device=like.device)
    angle = position[:, None] * rotary_frequencies(c, dtype, like.device)
    return angle.cos()[:, None], angle.sin()[:, None]


def rotate(x_BTHC: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + C/2), Hugging Face's layout of the halves."""
    cos, sin = rotation
    first, second = at_least_f32(x_BTHC).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BTHC.dtype)


def attend(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, window: int = 0, first: int = 0) -> Tensor:
    """Causal softmax attention; token t sees s with t - window < s <= t (all s <= t without a window).

    Query head h reads key/value head h // (H/K). Scores are scaled by 1/sqrt(C), in float32 or wider. The queries are
    those of the times from `first` on. On GPUs, for all times and without a window: torch's fused kernel, the same
    mathematics with another rounding; of tensors that are split over time, its ring.
    """
    B, T, H, C = q_BTHC.shape
    S, K = k_BSKC.shape[1:3]
    if q_BTHC.is_cuda and not window and S == T:
        q_BHTC, k_BKSC, v_BKSC = (x.transpose(1, 2) for x in (q_BTHC, k_BSKC, v_BSKC))
        y_BHTC = functional.scaled_dot_product_attention(q_BHTC, k_BKSC, v_BKSC, is_causal=True, enable_gqa=H != K)
        y_BTHC = y_BHTC.transpose(1, 2)
        return y_BTHC.to_local() if isinstance(y_BTHC, DTensor) else y_BTHC
    q_BTKGC = q_BTHC.reshape(B, T, K, H // K, C)
    scores = torch.einsum("btkgc,bskc->bkgts", at_least_f32(q_BTKGC), at_least_f32(k_BSKC)) * C**-0.5
    position = torch.arange(S, device=scores.device)
    behind = position[first : first + T, None] - position
    seen = (behind >= 0) & (behind < (window or S))
    probabilities = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bkgts,bskc->btkgc", probabilities.to(v_BSKC.dtype), v_BSKC).reshape(B, T, H, C)


class RotaryDecoder(nn.Module):
    """The modules of a decoder with rotary positions: embedding, blocks, norm, head. A family adds its `forward`."""

    def __init__(self, c: Rotary, block: Callable[[Any], nn.Module]):
        super().__init__()
        self.embed = Embedding(c.vocab_rows, c.dim)
        self.layers = nn.ModuleList(block(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = None if c.tied else nn.Linear(c.dim, c.vocab_rows, bias=False)
        self.logits = nn.Identity()  # for records, of a loss in chunks
        self.config: Any = c
