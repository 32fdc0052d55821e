"""A vision transformer in flax nnx (arXiv:2010.11929), written as by a user, without anything of jaxdist.

Shape letters: B batch, P patches + 1, D model, H heads, C head_dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Attention(nnx.Module):
    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.query = nnx.LinearGeneral(dim, (heads, dim // heads), rngs=rngs)
        self.key = nnx.LinearGeneral(dim, (heads, dim // heads), rngs=rngs)
        self.value = nnx.LinearGeneral(dim, (heads, dim // heads), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, dim // heads), dim, axis=(-2, -1), rngs=rngs)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        q_BPHC, k_BPHC, v_BPHC = self.query(x_BPD), self.key(x_BPD), self.value(x_BPD)
        scores = jnp.einsum("bqhc,bkhc->bhqk", q_BPHC, k_BPHC) / q_BPHC.shape[-1] ** 0.5
        return self.out(jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores, axis=-1), v_BPHC))


class MLP(nnx.Module):
    def __init__(self, dim: int, hidden: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(dim, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


class Block(nnx.Module):
    def __init__(self, dim: int, heads: int, hidden: int, eps: float, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(dim, epsilon=eps, rngs=rngs)
        self.attention = Attention(dim, heads, rngs)
        self.mlp_norm = nnx.LayerNorm(dim, epsilon=eps, rngs=rngs)
        self.mlp = MLP(dim, hidden, rngs)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPD = x_BPD + self.attention(self.attention_norm(x_BPD))
        return x_BPD + self.mlp(self.mlp_norm(x_BPD))


class ViT(nnx.Module):
    """Images [B, height, width, 3] -> logits [B, classes]."""

    def __init__(
        self, size: int, patch: int, dim: int, layers: int, heads: int, hidden: int, classes: int, **more: Any
    ):
        rngs, eps = nnx.Rngs(more.get("seed", 0)), more.get("eps", 1e-12)
        patches = (size // patch) ** 2
        self.patch_embedding = nnx.Conv(3, dim, (patch, patch), (patch, patch), padding="VALID", rngs=rngs)
        self.cls_token = nnx.Param(0.02 * rngs.params.normal((1, 1, dim)))
        self.position_embedding = nnx.Param(0.02 * rngs.params.normal((1, patches + 1, dim)))
        self.blocks = nnx.List([Block(dim, heads, hidden, eps, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(dim, epsilon=eps, rngs=rngs)
        self.head = nnx.Linear(dim, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        patches = self.patch_embedding(images)
        x_BPD = patches.reshape(len(images), -1, patches.shape[-1])
        cls = jnp.broadcast_to(self.cls_token[...], (len(images), 1, x_BPD.shape[-1]))
        x_BPD = jnp.concatenate([cls, x_BPD], axis=1) + self.position_embedding[...]
        for block in self.blocks:
            x_BPD = block(x_BPD)
        return self.head(self.norm(x_BPD)[:, 0])
