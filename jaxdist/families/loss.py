"""The head and its cross-entropy, over a vocabulary that the mesh axis `tensor` splits: no device ever sees all of a
token's logits. Twin: torch_ref/families/loss.py.

In float32 or wider. The logits are the only array of their size that is kept for the backward pass; in chunks not even
they are kept: one chunk's logits exist at a time, and the backward pass recomputes them.
"""

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.config import Decoder
from jaxdist.config import Model as Config
from jaxdist.data import IGNORED
from jaxdist.families.layers import ColumnLinear, Embedding
from jaxdist.ops.linear import dot, transposed
from jaxdist.ops.varying import at_least_f32, match_varying
from jaxdist.parallel.collectives import Parallel, mask_local_vocab, max_over_vocab, sum_over_vocab, to_local_ids


class Model(Protocol):
    """A decoder. Without `lm_head` it is tied to its embedding."""

    @property
    def config(self) -> Decoder: ...

    lm_head: ColumnLinear | None


def head(
    par: Parallel, model: Model, embed: Embedding, x_BTD: jax.Array, targets_SN: jax.Array | None = None
) -> jax.Array:
    """This device's logits [B, T, V] of the last activations, those of padding too; or with targets, in chunks, their
    cross-entropy at once. `embed` is the model's, already gathered.
    """
    x_BTD, lm_head = par.enter(x_BTD), model.lm_head
    if targets_SN is None:
        return dot(x_BTD, embed.embedding[...].T) if lm_head is None else par.use(lm_head)(x_BTD)
    kernel_DV = embed.embedding[...].T if lm_head is None else par.use(lm_head).kernel[...]
    return cross_entropy_of_chunks(x_BTD, kernel_DV, targets_SN, model.config)


def mask_padded_vocab(logits: jax.Array, model: Config | None) -> jax.Array:
    """This device's logits [..., V] with no probability for the padding of the vocabulary, and so no gradient."""
    if model is None or model.vocab == model.vocab_rows:
        return logits
    size = logits.shape[-1]
    return jnp.where(
        jnp.arange(size) < to_local_ids(jnp.asarray(model.vocab), size), logits, jnp.finfo(logits.dtype).min
    )


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Sum over this device's tokens of -log softmax(logits)[target], nats; IGNORED targets add 0."""
    index_BT = to_local_ids(targets_BT, logits_BTV.shape[-1])
    return valid(_nats(match_varying(logits_BTV, index_BT), index_BT), targets_BT)


def chunked(targets_BT: jax.Array, chunks: int) -> jax.Array:
    """Targets [S, N] of S chunks of N tokens, the last filled up with IGNORED."""
    return jnp.pad(targets_BT.reshape(-1), (0, -targets_BT.size % chunks), constant_values=IGNORED).reshape(chunks, -1)


def cross_entropy_of_chunks(x_BTD: jax.Array, kernel_DV: jax.Array, targets_SN: jax.Array, model: Decoder) -> jax.Array:
    """`cross_entropy` of the logits x · kernel, one of the S chunks after the other; targets as `chunked`.

    The kernel's gradient is added up in float32 or wider, and rounded once.
    """
    index_SN = to_local_ids(targets_SN, kernel_DV.shape[-1])
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    x_SND = jnp.pad(x_ND, ((0, targets_SN.size - len(x_ND)), (0, 0))).reshape(*targets_SN.shape, -1)
    x_SND, kernel_DV = match_varying(x_SND, kernel_DV, index_SN), match_varying(kernel_DV, x_SND, index_SN)
    return valid(_nats_of_chunks(model, x_SND, kernel_DV, index_SN), targets_SN)


def valid(nats: jax.Array, targets: jax.Array) -> jax.Array:
    """The sum of cross-entropies, without IGNORED targets."""
    return jnp.sum(jnp.where(targets == IGNORED, 0, nats))


@jax.custom_vjp
def _nats(logits_BTV: jax.Array, index_BT: jax.Array) -> jax.Array:
    """-log softmax(logits)[index] [B, T]."""
    nats_BT: jax.Array = _nats_forward(logits_BTV, index_BT)[0]
    return nats_BT


def _nats_forward(logits_BTV: jax.Array, index_BT: jax.Array) -> Any:
    x_BTV, (mine, index) = at_least_f32(logits_BTV), mask_local_vocab(index_BT, logits_BTV.shape[-1])
    highest_BT = max_over_vocab(x_BTV.max(-1))
    target_BT = jnp.take_along_axis(x_BTV, index[..., None], -1)[..., 0] - highest_BT
    total_BT = jnp.exp(x_BTV - highest_BT[..., None]).sum(-1)
    total_BT, target_BT = sum_over_vocab((total_BT, jnp.where(mine, target_BT, 0)))
    nats_BT = jnp.log(total_BT) - target_BT
    return nats_BT, (logits_BTV, index_BT, highest_BT, jnp.log(total_BT))


def _nats_backward(kept: Any, outer_BT: jax.Array) -> tuple[jax.Array, None]:
    # Softmax - one-hot is made at once.
    logits_BTV, index_BT, highest_BT, log_BT = kept
    softmax_BTV = jnp.exp(at_least_f32(logits_BTV) - highest_BT[..., None] - log_BT[..., None])  # large logits first
    hit_BTV = jnp.arange(logits_BTV.shape[-1]) == index_BT[..., None]
    return ((softmax_BTV - hit_BTV) * outer_BT[..., None]).astype(logits_BTV.dtype), None


_nats.defvjp(_nats_forward, _nats_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nats_of_chunks(model: Decoder, x_SND: jax.Array, kernel_DV: jax.Array, index_SN: jax.Array) -> jax.Array:
    """`_nats` [S, N] of the logits x · kernel."""
    nats_SN: jax.Array = _chunks_forward(model, x_SND, kernel_DV, index_SN)[0]
    return nats_SN


def _chunks_forward(model: Decoder, x_SND: jax.Array, kernel_DV: jax.Array, index_SN: jax.Array) -> Any:
    def chunk(_: None, of_chunk: Any) -> Any:
        x_ND, index_N = of_chunk
        nats_N, (_, _, highest_N, log_N) = _nats_forward(mask_padded_vocab(x_ND @ kernel_DV, model), index_N)
        return None, (nats_N, highest_N, log_N)

    _, (nats_SN, *sums) = lax.scan(chunk, None, (x_SND, index_SN))
    return nats_SN, (x_SND, kernel_DV, index_SN, *sums)


def _chunks_backward(model: Decoder, kept: Any, outer_SN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_SND, kernel_DV, *sums_SN = kept

    def chunk(kernel_bar: jax.Array, of_chunk: Any) -> Any:
        x_ND, outer_N, *of_tokens_N = of_chunk
        logits_bar, _ = _nats_backward((mask_padded_vocab(x_ND @ kernel_DV, model), *of_tokens_N), outer_N)
        own = jnp.matmul(transposed(x_ND), logits_bar, preferred_element_type=kernel_bar.dtype)
        return kernel_bar + own, logits_bar @ kernel_DV.T

    kernel_bar, x_bar = lax.scan(chunk, jnp.zeros_like(at_least_f32(kernel_DV)), (x_SND, outer_SN, *sums_SN))
    return x_bar, kernel_bar.astype(kernel_DV.dtype), None


_nats_of_chunks.defvjp(_chunks_forward, _chunks_backward)
