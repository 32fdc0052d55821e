"""Adafactor and Muon over pieces of parameters: torch's formulas, with means and matrices of full parameters.

torch's own classes take their parameters for unsharded. Here a mean is all-reduced over the axes that split what it is
taken over, and a matrix gathered by each rank that has a piece of it.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from jaxdist.config.optimizer import REDUCED_DIMS
from torch_ref.parallel.weights import local, place

QUINTIC = 3.4445, -4.7750, 2.0315  # torch.optim.Muon's
LEAST = 1e-7  # a norm that is divided by


def kept(parameter: Tensor, kind: str) -> Tensor:
    """Zeros for what an optimizer keeps of a parameter, laid out as it: of its shape, or one of a row or a column."""
    if kind not in REDUCED_DIMS:
        return torch.zeros_like(parameter)
    dim = REDUCED_DIMS[kind] % parameter.ndim
    zeros = local(parameter).narrow(dim, 0, 0).sum(dim, keepdim=True)
    if not isinstance(parameter, DTensor):
        return zeros
    placements = [p if p.is_replicate() or p.dim != dim else Replicate() for p in parameter.placements]  # type: ignore[attr-defined]
    full = torch.empty([1 if i == dim else size for i, size in enumerate(parameter.shape)], device="meta")
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


class Pieces:
    """The parameters to which an optimizer's local tensors belong; a tensor that it does not have is unsharded.
    Products of matrices are computed in `dtype`."""

    def __init__(self, parameters: Mapping[Tensor, Tensor], dtype: torch.dtype = torch.float32):
        self.parameters, self.dtype = parameters, dtype

    def mean(self, piece: Tensor, x: Tensor, *dims: int) -> Tensor:
        """The mean along `dims`, which are kept, all where none are given, of what `x` is of, as `piece` is."""
        dims = tuple(dim % x.ndim for dim in dims or range(x.ndim))
        parameter = self.parameters.get(piece, piece)
        total = x.sum(dims, keepdim=True)
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate() and placement.dim in dims:  # type: ignore[attr-defined]
                    dist.all_reduce(total, group=parameter.device_mesh.get_group(axis))
        return total / math.prod(parameter.shape[dim] for dim in dims)

    def rms(self, piece: Tensor, x: Tensor) -> float:
        """The root mean square of the full parameter."""
        return math.sqrt(self.mean(piece, x * x).item())

    def gathered(self, piece: Tensor, x: Tensor) -> Tensor:
        """The unsharded tensor of `x`, which is sharded as `piece` is."""
        parameter = self.parameters.get(piece, piece)
        if not isinstance(parameter, DTensor):
            return x
        mesh, placements = parameter.device_mesh, parameter.placements
        shape, stride = parameter.shape, parameter.stride()
        return DTensor.from_local(x, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()

    def piece_of(self, piece: Tensor, full: Tensor) -> Tensor:
        """This rank's shard of the unsharded `full`."""
        return full[place(self.parameters.get(piece, piece))]


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (arXiv:1804.04235)."""

    def __init__(self, groups: Any, lr: float, pieces: Pieces, weight_decay: float = 0.0, **settings: Any):
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, **settings})
        self.pieces = pieces

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """g/√v, v of a matrix by rows and columns, scaled by the parameter's size; the rate is 1/√t at most."""
        mean, rms = self.pieces.mean, self.pieces.rms
        for group in self.param_groups:
            eps1, eps2 = group["eps"]
            for p in (p for p in group["params"] if p.grad is not None):
                if not (state := self.state[p]):
                    kinds = REDUCED_DIMS if p.ndim > 1 else ("variance",)
                    state |= {"step": torch.tensor(0.0)} | {kind: kept(p, kind) for kind in kinds}
                state["step"] += 1
                t, lr, g = state["step"].item(), group["lr"], p.grad
                taken, least = t ** group["beta2_decay"], eps1 or torch.finfo(p.dtype).eps
                size = max(eps2, rms(p, p)) * min(lr, 1 / math.sqrt(t))
                p.mul_(1 - lr * group["weight_decay"])
                if "variance" in state:
                    v = state["variance"].lerp_(g * g, taken)
                else:
                    rows, columns = (
                        state[kind].lerp_(mean(p, g * g, dim), taken) for kind, dim in REDUCED_DIMS.items()
                    )
                    v = rows * columns / mean(p, rows, -2).clamp(min=least)
                update = v.clamp(min=least * least).rsqrt() * g
                p.add_(update, alpha=-size / max(1.0, rms(p, update) / group["d"]))


class Muon(torch.optim.AdamW):
    """torch.optim.Muon of groups that `use_muon`, also of the matrices of all experts, which are made orthogonal in the
    dtype of products where torch has bfloat16; AdamW of the other groups."""

    def __init__(self, groups: Any, pieces: Pieces, muon: Mapping[str, Any], **adamw: Any):
        super().__init__(groups, **adamw)
        self.pieces = pieces
        for group in self.param_groups:
            group |= muon if group["use_muon"] else {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Both, each with its decoupled decay."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["use_muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            for p in group["params"] if group["use_muon"] else ():
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, g: Tensor, group: Mapping[str, Any]) -> None:
        if not (state := self.state[p]):
            state |= {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(p)}
        state["step"] += 1
        m = state["momentum_buffer"].lerp_(g, 1 - group["momentum"])
        along = g.lerp(m, group["momentum"]) if group["nesterov"] else m
        full = orthogonal(self.pieces.gathered(p, along.to(self.pieces.dtype)), group["ns_steps"])
        p.mul_(1 - group["lr"] * group["weight_decay"])
        rate = group["lr"] * ADJUSTED[group["adjust_lr_fn"]](*full.shape[-2:])
        p.add_(self.pieces.piece_of(p, full).to(p.dtype), alpha=-rate)


ADJUSTED = {
    "original": lambda outputs, inputs: math.sqrt(max(1, outputs / inputs)),
    "match_rms_adamw": lambda outputs, inputs: 0.2 * math.sqrt(max(outputs, inputs)),
}


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """U·Vᵀ of each matrix U·S·Vᵀ, its singular values from about 0.7 to 1.2: Newton-Schulz iterations of
    a·X + (b·X·Xᵀ + c·(X·Xᵀ)²)·X (https://kellerjordan.github.io/posts/muon, torch.optim.Muon)."""
    a, b, c = QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=LEAST)
    for _ in range(steps):  # rounded as often as torch's
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)
