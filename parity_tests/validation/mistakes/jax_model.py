"""Mistakes in jaxdist's models."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.families import layers, loss
from jaxdist.families.gpt2 import model as gpt2
from jaxdist.families.llama import model as llama
from jaxdist.ops import attention, linear, rotary
from jaxdist.ops.varying import at_least_f32
from jaxdist.parallel.collectives import Parallel
from parity_tests.validation.mistakes import altered, everywhere, mistake, plant

planted = partial(mistake, "jaxdist")
FIRST = "activation/layers.0"


@planted("llama", "mathematics", f"{FIRST}.attention.q_rotated")
def rope_of_neighbours() -> None:
    """Rope turns neighbouring pairs, the layout of Meta's files, not the two halves."""

    def rotate(x: jax.Array, rotation: rotary.Rotation) -> jax.Array:
        (cos, sin), even, odd = rotation, x[..., ::2], x[..., 1::2]
        return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)

    everywhere(rotary.rotate, rotate)


@planted("llama", "mathematics", f"{FIRST}.attention.q_rotated")
def rope_scaling_left_out() -> None:
    """The config asks for llama3's scaling of the frequencies, the model has none."""
    right = rotary.rotary_frequencies
    everywhere(right, lambda c, dtype: right(c.model_copy(update={"rope_scaling": "none"}), dtype))


@planted("llama", "mathematics", f"{FIRST}.attention.q_rotated")
def rope_angles_in_float32() -> None:
    """A float64 run takes the angles of rope in float32."""
    right = rotary.rotary
    everywhere(right, lambda c, length, dtype: right(c, length, jnp.float32))


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def rope_on_values() -> None:
    """Values are rotated as queries and keys are."""
    rotate, attend = rotary.rotate, attention.attend
    rotations: list[rotary.Rotation] = []

    def noting(x: jax.Array, rotation: rotary.Rotation) -> jax.Array:
        rotations[:] = [rotation]
        return rotate(x, rotation)

    def rotated(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
        return attend(q, k, rotate(v, rotations[0]), window)

    everywhere(rotate, noting)
    everywhere(attend, rotated)


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def scores_scaled_by_the_width() -> None:
    """Scores are divided by sqrt(D/H), where head_dim is another."""
    right = attention.attend

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
        return right(q * (8 / (40 / 12)) ** 0.5, k, v, window)

    everywhere(right, attend)


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def window_one_short() -> None:
    """A window of w tokens sees w - 1, the token itself left out of the count."""
    right = attention.attend
    everywhere(right, lambda q, k, v, window=0: right(q, k, v, window and window - 1))


@planted("llama", "mathematics", f"{FIRST}.attention.attended")
def kv_heads_interleaved() -> None:
    """Query head h reads kv head h mod K, not h // G."""
    right = attention.attend

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
        times = (1, 1, q.shape[2] // k.shape[2], 1)
        return right(q, jnp.tile(k, times), jnp.tile(v, times), window)

    everywhere(right, attend)


@planted("llama", "mathematics", f"{FIRST}.attention.q_norm")
def qk_norm_after_rope() -> None:
    """Queries and keys are normalized after the rotation, not before."""

    def call(self: Any, par: Parallel, x_BTD: jax.Array, rotation: rotary.Rotation) -> jax.Array:
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q, k, v = (p(x_BTD).reshape(heads) for p in (self.q_proj, self.k_proj, self.v_proj))
        q = par.tap("q_rotated", rotary.rotate(q, rotation))
        k = par.tap("k_rotated", rotary.rotate(k, rotation))
        y = par.attend(self.q_norm(q), self.k_norm(k), v, self.window)
        return self.o_proj(par, y.reshape(*x_BTD.shape[:2], -1))

    plant(llama.Attention, "__call__", call)


@planted("llama", "mathematics", f"{FIRST}.attention_norm")
def eps_outside_the_root_of_a_norm() -> None:
    """RMSNorm divides by sqrt(mean) + eps, not by sqrt(mean + eps)."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        y = at_least_f32(x)
        y = y / (jnp.sqrt(jnp.mean(y * y, -1, keepdims=True)) + self.eps)
        return (y * at_least_f32(self.scale[...])).astype(x.dtype)

    plant(layers.RMSNorm, "__call__", call)


@planted("llama", "mathematics", f"{FIRST}.attention_norm")
def norm_scales_by_one_more() -> None:
    """RMSNorm multiplies by 1 + w, as Gemma's weights ask for."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        y = at_least_f32(x)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * (1 + at_least_f32(self.scale[...]))).astype(x.dtype)

    plant(layers.RMSNorm, "__call__", call)


@planted("gpt2", "mathematics", f"{FIRST}.attention_norm")
def layer_norm_not_centred() -> None:
    """LayerNorm does not subtract the mean."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        y = at_least_f32(x)
        y = y * lax.rsqrt(jnp.var(y, -1, keepdims=True) + self.eps)
        return (y * at_least_f32(self.scale[...]) + at_least_f32(self.bias[...])).astype(x.dtype)

    plant(layers.LayerNorm, "__call__", call)


@planted("llama", "mathematics", f"{FIRST}.mlp.down_proj")
def gelu_for_silu() -> None:
    """The MLP's gate passes through GELU."""
    plant(llama, "jax", altered(jax, nn=altered(jax.nn, silu=jax.nn.gelu)))


@planted("llama", "mathematics", f"{FIRST}.mlp.down_proj")
def gate_and_up_exchanged() -> None:
    """silu(up) · gate."""

    def call(self: Any, par: Parallel, x: jax.Array) -> jax.Array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(par, gate * jax.nn.silu(up))

    plant(llama.MLP, "__call__", call)


@planted("llama", "mathematics", f"{FIRST}.mlp_norm")
def residual_of_the_normed() -> None:
    """The residual around attention is taken after the norm."""

    def call(self: Any, par: Parallel, x_BTD: jax.Array, rotation: rotary.Rotation) -> jax.Array:
        normed = self.attention_norm(x_BTD)
        x_BTD = normed + self.attention(par, par.enter(normed), rotation)
        return x_BTD + self.mlp(par, par.enter(self.mlp_norm(x_BTD)))

    plant(llama.Block, "__call__", call)


@planted("llama", "mathematics", "activation/embed")
def embedding_times_root_of_width() -> None:
    """Embeddings are multiplied by sqrt(D), as Gemma's are."""
    right = layers.Embedding.__call__
    plant(layers.Embedding, "__call__", lambda self, par, tokens: right(self, par, tokens) * 40**0.5)


@planted("llama", "mathematics", f"{FIRST}.attention.o_proj")
def output_bias_dropped() -> None:
    """The output projection has a bias in the file and uses none."""
    plant(layers.RowLinear, "__call__", lambda self, par, x: par.leave(linear.dot(x, self.kernel[...])))


@planted("gpt2", "mathematics", f"{FIRST}.attention_norm")
def positions_from_one() -> None:
    """The first token has the second position."""
    right = linear.add_bias
    plant(gpt2, "add_bias", lambda x, rows: right(x, jnp.roll(rows, -1, 0)))


@planted("gpt2", "mathematics", "gradient/embed.weight")
def tied_head_without_gradient() -> None:
    """The tied head reads the embedding and sends no gradient to it."""
    right = linear.dot
    plant(loss, "dot", lambda x, kernel: right(x, lax.stop_gradient(kernel)))


@planted("llama", "mathematics", f"{FIRST}.attention_norm")
def blocks_in_reverse() -> None:
    """The scan runs through the blocks from the last to the first."""
    right = lax.scan
    plant(layers, "lax", altered(lax, scan=lambda body, x, blocks: right(body, x, blocks, reverse=True)))


@planted("bf16", "precision", f"{FIRST}.attention.attended", "precision/*: exp in bfloat16")
def softmax_in_bfloat16() -> None:
    """Scores and softmax are not upcast under the bf16 policy."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, window: int = 0) -> jax.Array:
        B, T, H, C = q.shape
        K = k.shape[2]
        scores = jnp.einsum("BTKGC,BSKC->BKGTS", q.reshape(B, T, K, H // K, C), k) * C**-0.5
        behind = jnp.arange(T)[:, None] - jnp.arange(T)
        seen = (behind >= 0) & (behind < (window or T))
        weights = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(scores.dtype).min), axis=-1)
        return jnp.einsum("BKGTS,BSKC->BTKGC", weights, v).reshape(B, T, H, C)

    everywhere(attention.attend, attend)


@planted("fp32", "precision", f"{FIRST}.attention.q_proj")
def products_in_bfloat16() -> None:
    """Matrix products run in bfloat16 under the fp32 policy, as a TPU's default precision does."""
    right = linear.dot

    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return right(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16)).astype(x.dtype)

    everywhere(right, dot)
