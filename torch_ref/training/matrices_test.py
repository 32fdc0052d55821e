"""Adafactor and Muon on whole tensors against torch's own classes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_ref.training.matrices import Adafactor, Muon, Pieces, orthogonal

SHAPES = {"tall": (6, 3), "wide": (3, 6), "square": (4, 4)}


def parameters(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def trained(optimizer: torch.optim.Optimizer, steps: int = 10) -> list[Tensor]:
    """Weights and optimizer state after some steps whose gradients include tiny ones."""
    generator, found = torch.Generator().manual_seed(1), list[Tensor]()
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for p in tensors:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 10.0 ** -(step % 4)
        optimizer.step()
    for p in tensors:
        found += [p.detach(), *(t for _, t in sorted(optimizer.state[p].items()))]
    return found


def same(ours: list[Tensor], theirs: list[Tensor], bound: float) -> bool:
    assert [t.shape for t in ours] == [t.shape for t in theirs]
    return all(torch.allclose(a, b, rtol=bound, atol=0) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("own", [{}, {"d": 2.0, "beta2_decay": -0.6}, {"eps": (1e-3, 0.5)}], ids=str)
def test_adafactor_is_torchs(own: dict[str, Any]) -> None:
    shapes = (*SHAPES.values(), (5,), (2, 3, 4))
    settings: dict[str, Any] = {
        "lr": 0.05,
        "weight_decay": 0.1,
        "beta2_decay": -0.8,
        "eps": (None, 1e-3),
        "d": 1.0,
    } | own
    theirs = trained(torch.optim.Adafactor(parameters(torch.float64, *shapes), **settings))
    ours = trained(Adafactor(parameters(torch.float64, *shapes), pieces=Pieces({}), **settings))
    assert same(ours, theirs, 1e-12)
    other = trained(Adafactor(parameters(torch.float64, *shapes), pieces=Pieces({}), **settings | {"lr": 0.0501}))
    assert not same(other, theirs, 1e-12)


@pytest.mark.parametrize("fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs(nesterov: bool, fn: str) -> None:
    """Equal to one rounding a step in bfloat16, in which torch always computes, one matrix at a time."""
    muon: dict[str, Any] = {"momentum": 0.95, "nesterov": nesterov, "ns_steps": 5, "adjust_lr_fn": fn}
    tensors = parameters(torch.float32, *SHAPES.values(), (5,))
    groups = [{"params": tensors[:-1], "use_muon": True}, {"params": tensors[-1:], "use_muon": False}]
    ours = trained(Muon(groups, Pieces({}, torch.bfloat16), muon, lr=0.02, weight_decay=0.1))
    matrices = parameters(torch.float32, *SHAPES.values(), (5,))[:-1]
    theirs = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, **muon)
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        for p in [*matrices, torch.empty(5)]:
            p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** -(step % 4)
        theirs.step()
    for i, p in enumerate(matrices):
        kept, steps, weights = ours[3 * i + 1], ours[3 * i + 2], ours[3 * i]
        assert steps == 10 and torch.equal(kept, theirs.state[p]["momentum_buffer"])
        factor = (0.2 * max(p.shape) ** 0.5) if fn == "match_rms_adamw" else max(1, p.shape[0] / p.shape[1]) ** 0.5
        assert (weights - p).abs().max() < 10 * 0.02 * factor * 2**-7  # spacing of bfloat16 near 1 is 2^-7


def test_orthogonal_in_float64() -> None:
    """Singular values come near 1; vectors stay unchanged."""
    x = parameters(torch.float64, (2, 6, 3))[0].detach()
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = torch.diagonal(u.mT @ orthogonal(x, 5) @ v.mT, dim1=-2, dim2=-1)
    assert 0.6 < values.min() <= values.max() < 1.3
    assert torch.allclose(u @ torch.diag_embed(values) @ v, orthogonal(x, 5), atol=1e-13)
