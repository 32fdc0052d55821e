"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, biases or none, GELU by tanh or exact.

Twin: torch_ref/families/gpt2.py.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.families.gpt2.config import GPT2 as Config
from jaxdist.families.layers import ColumnLinear, Embedding, LayerNorm, RowLinear, scan_layers, stacked
from jaxdist.families.loss import head
from jaxdist.ops.linear import add_bias
from jaxdist.ops.varying import at_least_f32
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.rematerialization import Rematerialize


@jax.custom_vjp
def exact_gelu(x: jax.Array) -> jax.Array:
    """x·Φ(x), Φ the normal distribution's, in float32 or wider, rounded once.

    Its backward pass needs x alone; the one that JAX derives would keep exp(-x²/2) of every block as well.
    """
    return (at_least_f32(x) * _normal(at_least_f32(x))).astype(x.dtype)


def _normal(x: jax.Array) -> jax.Array:
    return 0.5 * lax.erfc(-math.sqrt(0.5) * x)


def _gelu_forward(x: jax.Array) -> Any:
    return exact_gelu(x), x


def _gelu_backward(x: jax.Array, outer: jax.Array) -> tuple[jax.Array]:
    y = at_least_f32(x)
    slope = _normal(y) + y * jnp.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
    return ((at_least_f32(outer) * slope).astype(x.dtype),)


exact_gelu.defvjp(_gelu_forward, _gelu_backward)


class Attention(nnx.Module):
    """Multi-head attention."""

    def __init__(self, c: Config):
        out_std = c.init_std / (2 * c.layers) ** 0.5
        self.q_proj = ColumnLinear(c.dim, c.dim, ("embed", "heads"), c.init_std, c.bias)
        self.k_proj = ColumnLinear(c.dim, c.dim, ("embed", "heads"), c.init_std, c.bias)
        self.v_proj = ColumnLinear(c.dim, c.dim, ("embed", "heads"), c.init_std, c.bias)
        self.o_proj = RowLinear(c.dim, c.dim, ("heads", "embed"), out_std, c.bias)
        self.head_dim = c.head_dim

    def __call__(self, par: Parallel, x_BTD: jax.Array) -> jax.Array:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.q_proj(x_BTD).reshape(heads)
        k_BTHC = self.k_proj(x_BTD).reshape(heads)
        v_BTHC = self.v_proj(x_BTD).reshape(heads)
        y_BTHC = par.attend(q_BTHC, k_BTHC, v_BTHC)
        return self.o_proj(par, y_BTHC.reshape(*x_BTD.shape[:2], -1))


class MLP(nnx.Module):
    """Two products with GELU between them."""

    def __init__(self, c: Config):
        out_std = c.init_std / (2 * c.layers) ** 0.5
        self.up_proj = ColumnLinear(c.dim, c.hidden, ("embed", "hidden"), c.init_std, c.bias)
        self.down_proj = RowLinear(c.hidden, c.dim, ("hidden", "embed"), out_std, c.bias)
        self.exact = c.gelu == "exact"

    def __call__(self, par: Parallel, x_BTD: jax.Array) -> jax.Array:
        up_BTF = self.up_proj(x_BTD)
        return self.down_proj(par, exact_gelu(up_BTF) if self.exact else jax.nn.gelu(up_BTF, approximate=True))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Config):
        self.attention_norm = LayerNorm(c.dim, c.norm_eps, c.bias)
        self.attention = Attention(c)
        self.mlp_norm = LayerNorm(c.dim, c.norm_eps, c.bias)
        self.mlp = MLP(c)

    def __call__(self, par: Parallel, x_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(par, par.enter(self.attention_norm(x_BTD)))
        return x_BTD + self.mlp(par, par.enter(self.mlp_norm(x_BTD)))


class GPT2(nnx.Module):
    """Decoder: embedding, positions, blocks, norm, head. Tokens int32 [B, T] -> this device's logits."""

    def __init__(self, c: Config):
        self.embed = Embedding(c.vocab_rows, c.dim, "vocab", c.init_std)
        self.positions = Embedding(c.positions, c.dim, "positions", c.init_std)
        self.layers = stacked(c.layers, Block(c))
        self.norm = LayerNorm(c.dim, c.norm_eps, c.bias)
        self.lm_head = None if c.tied else ColumnLinear(c.dim, c.vocab_rows, ("embed", "vocab"), c.init_std)
        self.config = c

    def __call__(
        self, par: Parallel, tokens_BT: jax.Array, rematerialize: Rematerialize, targets_SN: jax.Array | None = None
    ) -> jax.Array:
        embed = par.use(self.embed)
        x_BTD = embed(par, tokens_BT)
        positions_TD = par.context.rows(par.use(self.positions).embedding[: par.length(tokens_BT)])
        x_BTD = add_bias(x_BTD, par.slice_sequence(positions_TD))
        x_BTD = scan_layers(par, self.layers, x_BTD, rematerialize)
        return head(par, self, embed, par.use(self.norm)(x_BTD), targets_SN)
