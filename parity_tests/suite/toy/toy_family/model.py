"""The family in JAX. Twin: torch_model.py."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.families.layers import ColumnLinear, RMSNorm, RotaryDecoder, RowLinear, scan_layers
from jaxdist.families.loss import head
from jaxdist.ops.rotary import rotary, rotate
from toy_family.config import Wide as Config


class Attention(nnx.Module):
    def __init__(self, c: Config):
        H, K = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = ColumnLinear(c.dim, H, ("embed", "heads"), c.init_std)
        self.k_proj = ColumnLinear(c.dim, K, ("embed", "kv_heads"), c.init_std)
        self.v_proj = ColumnLinear(c.dim, K, ("embed", "kv_heads"), c.init_std)
        self.o_proj = RowLinear(H, c.dim, ("heads", "embed"), c.init_std)
        self.head_dim, self.rotated = c.head_dim, c.rotated

    def turned(self, par: Any, name: str, x_BTHC: jax.Array, rotation: Any) -> jax.Array:
        turned, rest = jnp.split(x_BTHC, [self.rotated], axis=-1)
        return jnp.concatenate([par.tap(name, rotate(turned, rotation)), rest], -1)

    def __call__(self, par: Any, x_BTD: jax.Array, rotation: Any) -> jax.Array:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.turned(par, "q_rotated", self.q_proj(x_BTD).reshape(heads), rotation)
        k_BTKC = self.turned(par, "k_rotated", self.k_proj(x_BTD).reshape(heads), rotation)
        y_BTHC = par.attend(q_BTHC, k_BTKC, self.v_proj(x_BTD).reshape(heads), 0)
        return self.o_proj(par, y_BTHC.reshape(*x_BTD.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, c: Config):
        self.up_proj = ColumnLinear(c.dim, c.hidden, ("embed", "hidden"), c.init_std)
        self.down_proj = RowLinear(c.hidden, c.dim, ("hidden", "embed"), c.init_std)

    def __call__(self, par: Any, x_BTD: jax.Array) -> jax.Array:
        return self.down_proj(par, jax.nn.silu(self.up_proj(x_BTD)))


class Block(nnx.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, c: Config):
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention, self.mlp = Attention(c), MLP(c)

    def __call__(self, par: Any, x_BTD: jax.Array, rotation: Any) -> jax.Array:
        h_BTD = par.enter(self.attention_norm(x_BTD))
        return x_BTD + self.attention(par, h_BTD, rotation) + self.mlp(par, h_BTD)


class Wide(RotaryDecoder):
    def __init__(self, c: Config):
        super().__init__(c, Block)

    def __call__(self, par: Any, tokens_BT: jax.Array, rematerialize: Any, targets_SN: Any = None) -> jax.Array:
        embed, c = par.use(self.embed), self.config
        x_BTD = embed(par, tokens_BT) * c.dim**0.5
        of_part = c.model_copy(update={"head_dim": c.rotated})
        rotation = jax.tree.map(par.context.rows, rotary(of_part, par.length(tokens_BT), x_BTD.dtype))
        x_BTD = scan_layers(par, self.layers, x_BTD, rematerialize, rotation)
        return head(par, self, embed, par.use(self.norm)(x_BTD), targets_SN)
