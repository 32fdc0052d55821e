"""Starting values: one full tensor at a time, of which each rank keeps its piece."""

import math
import re
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jaxdist.config import Model
from torch_ref.runtime.compat import compute_local_shape_and_global_offset

VOCABULARY = ("embed.weight", "lm_head.weight")  # with a row for each token


def draw(model: Model, seed: int, name: str, shape: torch.Size) -> Tensor:
    """The initial value of parameter `name`, float32: a function of seed and name, never of mesh or strategy.

    Matrices are drawn from N(0, init_std²), the residual projections from N(0, init_std² / 2L), convolutions from
    N(0, 2/(Y·X·outputs)) (arXiv:1502.01852); norms are 1, biases 0. Every policy starts from the same float32 numbers,
    fp64 too.
    """
    outer, _, kind = name.rpartition(".")
    layer = outer.rpartition(".")[-1]
    if kind in ("bias", "running_mean", "num_batches_tracked"):
        return torch.zeros(shape)
    if "norm" in layer:
        return torch.ones(shape)
    if layer == "conv":
        std = math.sqrt(2 / (shape[0] * shape[2] * shape[3]))
    else:
        std = model.init_std / (math.sqrt(2 * model.layers) if layer in ("o_proj", "down_proj") else 1)
    # One number of 32 bits: torch's CPU generator ignores the others.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    own = (model.vocab, *shape[1:]) if name in VOCABULARY else shape  # the same with any padding
    return extended(torch.normal(0.0, std, own, generator=generator), shape)


def extended(tensor: Tensor, shape: torch.Size) -> Tensor:
    """A tensor [V, ...] of the vocabulary with as many rows as `shape`: new rows are the mean of the others."""
    if tensor.shape[:1] == shape[:1]:  # counts, which have no rows, among them
        return tensor
    mean = tensor.mean(0, dtype=torch.float64).to(tensor.dtype)
    return torch.cat([tensor, mean.expand(shape[0] - len(tensor), -1)])


@torch.no_grad()
def fill(model: nn.Module, value: Callable[[str, torch.Size], Tensor]) -> None:
    """Give every parameter and running statistic its value; `value(name, global shape)` is full, freed after use."""
    for name, tensor in model_tensors(model):
        local(tensor).copy_(value(name, tensor.shape)[place(tensor)])


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and running statistics, by the names of `named`: the tensors of a checkpoint."""
    yield from named(model)
    for name, buffer in model.named_buffers():
        yield name.removeprefix("module."), buffer


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by their names in the plain model, also inside of DDP and in pipeline parts."""
    for name, parameter in model.named_parameters():
        yield re.sub(r"^(module|\d+)\.", "", name), parameter


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of `tensor`; shares its memory, outside the autograd graph."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place(tensor: Tensor) -> tuple[slice, ...]:
    """Slices of this rank's shard within the unsharded tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
