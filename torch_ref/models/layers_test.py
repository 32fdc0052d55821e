"""bfloat16 costs digits of bfloat16, not more."""

import pytest
import torch
from torch import Tensor, nn

from torch_ref.models.layers import Embedding, attend

UNIT = 2.0**-8


def gradient(embedding: nn.Embedding) -> Tensor:
    """The gradient of its table from 4096 tokens, three in four of them the same one."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (4096,), generator=random)
    tokens[torch.rand(4096, generator=random) < 0.75] = 3
    outer = (0.05 + 0.1 * torch.randn(4096, 40, generator=random)).bfloat16()
    embedding(tokens).backward(outer.to(embedding.weight.dtype))
    assert embedding.weight.grad is not None
    return embedding.weight.grad.double()


def test_embedding_gradients_are_rounded_once() -> None:
    exact = gradient(Embedding(64, 40, dtype=torch.float64))

    def error(embedding: nn.Embedding) -> float:
        return float((gradient(embedding) - exact).norm() / exact.norm())

    assert error(Embedding(64, 40, dtype=torch.bfloat16)) <= UNIT
    assert error(nn.Embedding(64, 40, dtype=torch.bfloat16)) > 10 * UNIT  # torch's own, on the CPU


def test_rows_are_those_of_torch() -> None:
    ours = Embedding(64, 40, dtype=torch.bfloat16)
    tokens = torch.arange(64).flip(0)
    assert torch.equal(ours(tokens), nn.functional.embedding(tokens, ours.weight))


def scores_error(q: Tensor, k: Tensor, v: Tensor) -> float:
    exact = attend(q.double(), k.double(), v.double())
    return float((attend(q, k, v).double() - exact).norm() / exact.norm())


def test_scores_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score of 50 rounded to bfloat16 would be off by up to 0.1, and its probability by as much of itself."""
    q, k, v = ((3 * torch.randn(2, 16, 4, 32, generator=torch.Generator().manual_seed(i))).bfloat16() for i in range(3))
    assert scores_error(q, k, v) <= 2 * UNIT
    monkeypatch.setattr("torch_ref.models.layers.wide", lambda x: x)
    assert scores_error(q, k, v) > 2 * UNIT
