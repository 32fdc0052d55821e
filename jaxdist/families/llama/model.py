"""Llama (arXiv:2302.13971), and by config Llama 3, Mistral, Qwen2 and Qwen3. Twin: torch_ref/families/llama.py."""

import jax
from flax import nnx

from jaxdist.config import Rotary
from jaxdist.families.layers import ColumnLinear, RMSNorm, RotaryDecoder, RowLinear, scan_layers
from jaxdist.families.llama.config import Llama as Config
from jaxdist.families.loss import head
from jaxdist.ops.rotary import Rotation, rotary, rotate
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.rematerialization import Rematerialize


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions and an optional window."""

    def __init__(self, c: Rotary):
        out_std = c.init_std / (2 * c.layers) ** 0.5
        H, K = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.q_proj = ColumnLinear(c.dim, H, ("embed", "heads"), c.init_std, c.qkv_bias)
        self.k_proj = ColumnLinear(c.dim, K, ("embed", "kv_heads"), c.init_std, c.qkv_bias)
        self.v_proj = ColumnLinear(c.dim, K, ("embed", "kv_heads"), c.init_std, c.qkv_bias)
        self.o_proj = RowLinear(H, c.dim, ("heads", "embed"), out_std, c.output_bias)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, "head_dim") if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, "head_dim") if c.qk_norm else None
        self.head_dim, self.window = c.head_dim, c.window

    def __call__(self, par: Parallel, x_BTD: jax.Array, rotation: Rotation) -> jax.Array:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.q_proj(x_BTD).reshape(heads)
        k_BTKC = self.k_proj(x_BTD).reshape(heads)
        v_BTKC = self.v_proj(x_BTD).reshape(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        q_BTHC = par.tap("q_rotated", rotate(q_BTHC, rotation))
        k_BTKC = par.tap("k_rotated", rotate(k_BTKC, rotation))
        y_BTHC = par.attend(q_BTHC, k_BTKC, v_BTKC, self.window)
        return self.o_proj(par, y_BTHC.reshape(*x_BTD.shape[:2], -1))


class MLP(nnx.Module):
    """Gated MLP, SwiGLU (arXiv:2002.05202)."""

    def __init__(self, c: Config):
        out_std = c.init_std / (2 * c.layers) ** 0.5
        self.gate_proj = ColumnLinear(c.dim, c.hidden, ("embed", "hidden"), c.init_std, c.mlp_bias)
        self.up_proj = ColumnLinear(c.dim, c.hidden, ("embed", "hidden"), c.init_std, c.mlp_bias)
        self.down_proj = RowLinear(c.hidden, c.dim, ("hidden", "embed"), out_std, c.mlp_bias)

    def __call__(self, par: Parallel, x_BTD: jax.Array) -> jax.Array:
        h_BTF = jax.nn.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)
        return self.down_proj(par, h_BTF)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, c: Config):
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = Attention(c)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = MLP(c)

    def __call__(self, par: Parallel, x_BTD: jax.Array, rotation: Rotation) -> jax.Array:
        x_BTD = x_BTD + self.attention(par, par.enter(self.attention_norm(x_BTD)), rotation)
        return x_BTD + self.mlp(par, par.enter(self.mlp_norm(x_BTD)))


class Llama(RotaryDecoder):
    """Decoder: embedding, blocks, norm, head. Tokens int32 [B, T] -> this device's logits."""

    def __init__(self, c: Config):
        super().__init__(c, Block)

    def __call__(
        self, par: Parallel, tokens_BT: jax.Array, rematerialize: Rematerialize, targets_SN: jax.Array | None = None
    ) -> jax.Array:
        embed = par.use(self.embed)
        x_BTD = embed(par, tokens_BT)
        rotation = jax.tree.map(par.context.rows, rotary(self.config, par.length(tokens_BT), x_BTD.dtype))
        x_BTD = scan_layers(par, self.layers, x_BTD, rematerialize, rotation)
        return head(par, self, embed, par.use(self.norm)(x_BTD), targets_SN)
