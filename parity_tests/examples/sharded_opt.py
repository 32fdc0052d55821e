"""OPT (arXiv:2205.01068) in jaxdist's sharding: each parameter declared once with its axes, written by the five verbs.

Shape letters: B batch, T time, D model, H heads, C head_dim, F hidden.
"""

import jax
from flax import nnx

from jaxdist.families.layers import ColumnLinear, Embedding, LayerNorm, RowLinear, scan_layers, stacked
from jaxdist.ops.attention import attend
from jaxdist.ops.linear import add_bias, dot
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.rematerialization import Rematerialize

OFFSET = 2  # positions start after an old padding


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) with ReLU."""

    def __init__(self, dim: int, heads: int, hidden: int, std: float):
        self.attention_norm = LayerNorm(dim, 1e-5)
        self.query = ColumnLinear(dim, dim, ("embed", "heads"), std, bias=True)
        self.key = ColumnLinear(dim, dim, ("embed", "heads"), std, bias=True)
        self.value = ColumnLinear(dim, dim, ("embed", "heads"), std, bias=True)
        self.out = RowLinear(dim, dim, ("heads", "embed"), std, bias=True)
        self.mlp_norm = LayerNorm(dim, 1e-5)
        self.up = ColumnLinear(dim, hidden, ("embed", "hidden"), std, bias=True)
        self.down = RowLinear(hidden, dim, ("hidden", "embed"), std, bias=True)
        self.head_dim = dim // heads

    def __call__(self, par: Parallel, x_BTD: jax.Array) -> jax.Array:
        y_BTD = par.enter(self.attention_norm(x_BTD))
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC, k_BTHC, v_BTHC = (part(y_BTD).reshape(heads) for part in (self.query, self.key, self.value))
        y_BTHC = attend(q_BTHC, k_BTHC, v_BTHC)
        x_BTD = x_BTD + self.out(par, y_BTHC.reshape(*x_BTD.shape[:2], -1))
        h_BTF = jax.nn.relu(self.up(par.enter(self.mlp_norm(x_BTD))))
        return x_BTD + self.down(par, h_BTF)


class OPT(nnx.Module):
    """Tokens [B, T] -> this device's logits, by the tied embedding."""

    def __init__(self, vocab: int, positions: int, dim: int, layers: int, heads: int, hidden: int, std: float = 0.02):
        self.embed = Embedding(vocab, dim, "vocab", std)
        self.positions = Embedding(positions + OFFSET, dim, "positions", std)
        self.layers = stacked(layers, Block(dim, heads, hidden, std))
        self.norm = LayerNorm(dim, 1e-5)

    def __call__(self, par: Parallel, tokens_BT: jax.Array, rematerialize: Rematerialize) -> jax.Array:
        embed, places = par.use(self.embed), slice(OFFSET, OFFSET + tokens_BT.shape[1])
        x_BTD = add_bias(embed(par, tokens_BT), par.use(self.positions).embedding[places])
        x_BTD = scan_layers(par, self.layers, x_BTD, rematerialize)
        return dot(par.enter(par.use(self.norm)(x_BTD)), embed.embedding[...].T)
