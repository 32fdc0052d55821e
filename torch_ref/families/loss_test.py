"""The loss in chunks equals the loss at once, with gradients as accurate."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.data import IGNORED
from jaxdist.families.llama.config import Llama
from torch_ref.families.loss import chunked, cross_entropy, cross_entropy_of_chunks

UNIT = 2.0**-8  # bfloat16's relative rounding
B, T, D, V = 4, 64, 24, 96
MODEL = Llama(vocab=V)


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a head's weight and targets, some ignored; representable in bfloat16."""
    random = torch.Generator().manual_seed(0)
    x_BTD, weight_VD = (torch.randn(*shape, generator=random).bfloat16().to(dtype) for shape in ((B, T, D), (V, D)))
    targets_BT = torch.randint(0, V, (B, T), generator=random)
    targets_BT[0, 5:40] = IGNORED
    return x_BTD.requires_grad_(), (weight_VD / 4).detach().requires_grad_(), targets_BT


def graded(dtype: torch.dtype, chunks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients with respect to x and the weight; computed at once where `chunks` is 1."""
    x_BTD, weight_VD, targets_BT = inputs(dtype)
    if chunks == 1:
        loss = cross_entropy(functional.linear(x_BTD, weight_VD), targets_BT)
    else:
        loss = cross_entropy_of_chunks(x_BTD, weight_VD, chunked(targets_BT, chunks), MODEL, nn.Identity())
    x_bar, weight_bar = torch.autograd.grad(loss, (x_BTD, weight_VD))
    return loss.detach(), x_bar, weight_bar


@pytest.mark.parametrize("chunks", [2, 7, B * T])  # even, padded, and one token each
def test_chunks_are_the_whole(chunks: int) -> None:
    for found, right in zip(graded(torch.float64, chunks), graded(torch.float64, 1), strict=True):
        assert float((found - right).norm() / right.norm()) < 1e-14


def test_the_head_s_gradient_is_not_added_up_in_low_precision() -> None:
    """Any number of chunks is as accurate as one in bfloat16; a sum in bfloat16 is not."""
    exact = graded(torch.float64, 1)[2]

    def error(gradient: Tensor) -> float:
        return float((gradient.double() - exact).norm() / exact.norm())

    assert error(graded(torch.bfloat16, B * T)[2]) <= 2 * error(graded(torch.bfloat16, 1)[2])
    x_BTD, weight_VD, targets_BT = inputs(torch.bfloat16)
    rounded = torch.zeros_like(weight_VD)
    for x_D, target in zip(x_BTD.flatten(0, 1), targets_BT.flatten(), strict=True):
        loss = cross_entropy(functional.linear(x_D[None], weight_VD), target[None])
        rounded += torch.autograd.grad(loss, weight_VD)[0]
    assert error(rounded) > 2 * error(graded(torch.bfloat16, 1)[2])
