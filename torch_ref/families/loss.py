"""The head and its cross-entropy, over a vocabulary that the mesh axis `tensor` splits, within torch's `loss_parallel`.

Twin: jaxdist/families/loss.py.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from jaxdist.config import ConfigError, Decoder
from jaxdist.config import Model as Config
from jaxdist.config.plugins import named
from jaxdist.data import IGNORED
from torch_ref.families.layers import Embedding, at_least_f32
from torch_ref.families.registry import FAMILIES


class Model(Protocol):
    """A decoder. Without `lm_head` it is tied to its embedding. Logits of a loss in chunks pass through `logits`."""

    @property
    def config(self) -> Decoder: ...

    embed: Embedding
    lm_head: nn.Linear | None
    logits: nn.Identity


def head(model: Model, x_BTD: Tensor, targets_SN: Tensor | None = None) -> Tensor:
    """Logits [B, T, V] of the last activations, those of padding too; or with targets, in chunks, their cross-entropy
    at once. Raises ConfigError for a plugin's module that lacks `logits`."""
    lm_head = model.lm_head
    if targets_SN is None:
        return functional.linear(x_BTD, model.embed.weight) if lm_head is None else lm_head(x_BTD)
    if not isinstance(logits := getattr(model, "logits", None), nn.Identity):
        raise ConfigError(
            f"{named(FAMILIES, model.config.family)}: its model has no logits = nn.Identity(), through "
            "which those of a loss in chunks pass; add it, or set memory.loss_chunks = 1"
        )
    return cross_entropy_of_chunks(x_BTD, (lm_head or model.embed).weight, targets_SN, model.config, logits)


def mask_padded_vocab(logits: Tensor, model: Config | None) -> Tensor:
    """Logits [..., V] with no probability for the padding of the vocabulary, and so no gradient."""
    if model is None or model.vocab == model.vocab_rows:
        return logits
    if not isinstance(logits, DTensor):
        return _masked(logits, model.vocab)
    mesh, local = logits.device_mesh, logits.to_local()
    begin = mesh.get_local_rank() * local.shape[-1] if logits.placements[0].is_shard() else 0
    return DTensor.from_local(_masked(local, model.vocab - begin), mesh, logits.placements, run_check=False)


def _masked(logits: Tensor, count: int) -> Tensor:
    """Mask columns from `count` on with the dtype's lowest value."""
    padding = torch.arange(logits.shape[-1], device=logits.device) >= count
    return logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of cross-entropy over this rank's valid tokens, in nats and float32 or wider, from logits [..., V].

    Logits split over the vocabulary stay split: the caller is within `loss_parallel`.
    """
    logits, targets = at_least_f32(logits).flatten(0, -2), targets.flatten()
    loss = functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


def chunked(targets_BT: Tensor, chunks: int) -> Tensor:
    """Targets [S, N] of S chunks of N tokens, the last filled up with IGNORED."""
    return functional.pad(targets_BT.flatten(), (0, -targets_BT.numel() % chunks), value=IGNORED).view(chunks, -1)


def cross_entropy_of_chunks(
    x_BTD: Tensor, weight_VD: Tensor, targets_SN: Tensor, model: Decoder, tap: nn.Module
) -> Tensor:
    """`cross_entropy` of the logits x · weight, one of the S chunks after the other, each checkpointed; targets as
    `chunked`. Each chunk's logits [1, N, V] pass through `tap`.

    A chunk's gradient of the weight is rounded as its product is; they are added up in float32 or wider.
    """
    exact_VD: Any = at_least_f32(weight_VD)

    def chunk(x_ND: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = mask_padded_vocab(functional.linear(x_ND, exact_VD.to(x_ND.dtype)), model)
        return cross_entropy(tap(logits_NV[None]), targets_N)

    x_ND = x_BTD.flatten(0, 1)
    x_SND = functional.pad(x_ND, (0, 0, 0, targets_SN.numel() - len(x_ND))).unflatten(0, targets_SN.shape)
    chunks = zip(x_SND, targets_SN, strict=True)
    return torch.stack([checkpoint(chunk, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]).sum()
