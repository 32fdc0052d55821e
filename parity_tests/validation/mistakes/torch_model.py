"""Mistakes in torch_ref's models."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parity_tests.validation.mistakes import altered, everywhere, mistake, plant
from torch_ref.families import gpt2, layers, llama, loss

planted = partial(mistake, "torch_ref")
FIRST = "activation/layers.0"


def attention(
    q: Tensor, k: Tensor, v: Tensor, window: int = 0, _: int = 0, *, nearest: int = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """`layers.attend` with two places to go wrong: the nearest key that is seen, the dtype of scores and softmax."""
    B, T, H, C = q.shape
    K = k.shape[2]
    q, k = q.to(dtype or q.dtype), k.to(dtype or k.dtype)
    scores = torch.einsum("btkgc,bskc->bkgts", q.reshape(B, T, K, H // K, C), k) * C**-0.5
    behind = torch.arange(T)[:, None] - torch.arange(T)
    seen = (behind >= nearest) & (behind < (window or T))
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bkgts,bskc->btkgc", weights.to(v.dtype), v).reshape(B, T, H, C)


@planted("llama", "mathematics", f"{FIRST}.attention.q_rotated")
def rope_of_another_base() -> None:
    """The base of rope is 500,000, Llama 3's, not the config's."""
    right = layers.rotary_frequencies
    everywhere(right, lambda c, *rest: right(c.model_copy(update={"rope_theta": 500_000.0}), *rest))


@planted("llama", "mathematics", f"{FIRST}.attention.k_rotated")
def rope_on_queries_only() -> None:
    """Keys are not rotated."""
    right = layers.rotate
    everywhere(right, lambda x, rotation: right(x, rotation) if x.shape[2] == 12 else x)


@planted("llama", "mathematics", f"{FIRST}.attention.k_rotated")
def keys_one_position_on() -> None:
    """Keys count positions from 1, queries from 0. (Counting both from 1 is no mistake: rope is relative.)"""
    rotary, rotate = layers.rotary, layers.rotate

    def shifted(x: Tensor, rotation: layers.Rotation) -> Tensor:
        cos, sin = rotation
        keys = int(x.shape[2] == 4)
        return rotate(x, (cos[keys : keys + x.shape[1]], sin[keys : keys + x.shape[1]]))

    everywhere(rotary, lambda c, length, like: rotary(c, length + 1, like))
    everywhere(rotate, shifted)


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def window_one_long() -> None:
    """A window of w tokens sees w + 1, the token itself not counted."""
    right = layers.attend
    everywhere(right, lambda q, k, v, window=0, first=0: right(q, k, v, window + 1, first))


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def the_next_token_is_seen() -> None:
    """The causal mask is off by one: a token sees the one that it is to predict."""
    everywhere(layers.attend, partial(attention, nearest=-1))


@planted("gpt2", "mathematics", f"{FIRST}.attention.attended")
def the_token_itself_is_not_seen() -> None:
    """The causal mask is strict."""
    everywhere(layers.attend, partial(attention, nearest=1))


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def kv_heads_interleaved() -> None:
    """Keys and values are repeated as a whole, not head by head: query head h reads kv head h mod K."""
    right = layers.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: int) -> Tensor:
        times = (1, 1, q.shape[2] // k.shape[2], 1)
        return right(q, k.repeat(times), v.repeat(times), *rest)

    everywhere(right, attend)


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def softmax_in_float32() -> None:
    """A float64 run takes scores and softmax in float32."""
    everywhere(layers.attend, partial(attention, dtype=torch.float32))


@planted("bf16", "precision", f"{FIRST}.attention.attended", "precision/*: _softmax in bfloat16")
def softmax_in_bfloat16() -> None:
    """Scores and softmax are not upcast under the bf16 policy."""
    everywhere(layers.attend, attention)


@planted("fp32", "precision", f"{FIRST}.attention.attended")
def attention_in_bfloat16() -> None:
    """Attention runs in bfloat16 under the fp32 policy."""
    everywhere(layers.attend, lambda q, k, v, *rest: attention(*(x.bfloat16() for x in (q, k, v)), *rest).to(v.dtype))


@planted("llama", "mathematics", f"{FIRST}.attention_norm")
def another_norm_eps() -> None:
    """The norms' eps is 1e-6, where the config says 1e-5."""
    right = layers.RMSNorm.__init__
    plant(layers.RMSNorm, "__init__", lambda self, size, eps: right(self, size, 1e-6))


@planted("llama", "mathematics", f"{FIRST}.attention_norm")
def norms_in_float32() -> None:
    """A float64 run takes its norms in float32: `.float()` in the place of an upcast."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)

    plant(layers.RMSNorm, "forward", forward)


@planted("bf16", "precision", f"{FIRST}.attention_norm", "precision/*: rsqrt in bfloat16")
def norms_in_bfloat16() -> None:
    """Norms are not upcast under the bf16 policy."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight

    plant(layers.RMSNorm, "forward", forward)


@planted("gpt2", "mathematics", f"{FIRST}.attention_norm")
def unbiased_variance() -> None:
    """LayerNorm divides the variance by n - 1, as `torch.var` does."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + self.eps)
        return y * self.weight + self.bias

    plant(layers.LayerNorm, "forward", forward)


@planted("llama", "mathematics", f"{FIRST}.attention.q_norm")
def qk_norm_over_all_heads() -> None:
    """Queries and keys are normalized over all heads at once, as OLMo 2 does, not each head."""
    right = layers.RMSNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return right(self, x)
        return x * torch.rsqrt((x * x).mean((-2, -1), keepdim=True) + self.eps) * self.weight

    plant(layers.RMSNorm, "forward", forward)


@planted("gpt2", "mathematics", f"{FIRST}.mlp.down_proj")
def exact_gelu() -> None:
    """GELU by the error function, where GPT-2's is by tanh."""
    exact = altered(functional, gelu=lambda x, approximate: functional.gelu(x))
    plant(gpt2, "functional", exact)


@planted("llama", "mathematics", f"{FIRST}.attention.q_proj")
def biases_dropped() -> None:
    """The projections have biases and use none."""
    plant(nn.Linear, "forward", lambda self, x: functional.linear(x, self.weight))


@planted("llama", "mathematics", f"{FIRST}.mlp_norm")
def residual_scaled() -> None:
    """Attention's output is divided by sqrt(2) before it is added to the residual."""

    def forward(self: Any, x_BTD: Tensor, rotation: layers.Rotation) -> Tensor:
        x_BTD = x_BTD + 0.5**0.5 * self.attention(self.attention_norm(x_BTD), rotation)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))

    plant(llama.Block, "forward", forward)


@planted("llama", "mathematics", f"{FIRST}.mlp")
def dropout_left_on() -> None:
    """The MLP's results pass through dropout of 10 %, which the config does not ask for."""
    right = llama.MLP.forward
    plant(llama.MLP, "forward", lambda self, x: functional.dropout(right(self, x), 0.1))


@planted("llama", "mathematics", "activation/norm", "activation/lm_head")
def last_norm_left_out() -> None:
    """The head reads the last block."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        rotation = layers.rotary(self.config, tokens.shape[1], like=x)
        for block in self.layers:
            x = block(x, rotation)
        return self.lm_head(x)

    plant(llama.Llama, "forward", forward)


@planted("gpt2", "mathematics", "gradient/embed.weight")
def lookup_without_gradient() -> None:
    """The tied embedding learns from the head alone."""
    right = layers.Rows.backward

    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        inner, _ = right(ctx, *outer)
        return inner * (ctx.vocab != 256), None

    plant(layers.Rows, "backward", staticmethod(backward))


@planted("gpt2", "mathematics", "activation/logits")
def head_of_another_scale() -> None:
    """Logits of a tied head are divided by sqrt(D), as T5's are."""
    scaled = altered(functional, linear=lambda x, weight: functional.linear(x, weight) * 40**-0.5)
    plant(loss, "functional", scaled)
