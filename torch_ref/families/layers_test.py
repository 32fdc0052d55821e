"""Computing in bfloat16 costs no more than the rounding of bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from torch_ref.families.layers import Embedding, attend
from torch_ref.families.loss import cross_entropy
from torch_ref.families.models import build
from torch_ref.parallel.weights import draw, fill, named

# A gradient's longest path: about 12 roundings a block forward, as many backward, through two blocks; independent
# roundings of relative size u add up like a random walk, to √48 u. Sums in bfloat16 err by up to the number of terms.
UNIT = 2.0**-8
BOUND = 48**0.5 * UNIT


def gradient(embedding: nn.Embedding) -> Tensor:
    """Gradient of the embedding's table for 4096 tokens, three in four of them the same."""
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


SIZES: dict[str, Any] = {"layers": 2, "dim": 32, "heads": 4, "hidden": 48, "vocab": 64, "init_std": 0.2}
MODELS = {
    "llama": Llama(**SIZES, kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True),
    "gpt2": GPT2(**SIZES, family="gpt2", tied=False),
}


def gradients(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of all parameters for 2048 tokens, three in four the same, at weights exact in bfloat16."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (16, 129), generator=random)
    tokens[torch.rand(tokens.shape, generator=random) < 0.75] = 3
    model = build(config).to(dtype)
    fill(model, lambda name, shape: draw(config, 0, name, shape).bfloat16())
    (cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / 2048).backward()
    return {name: p.grad.double() for name, p in named(model) if p.grad is not None}


def inaccurate(config: Any) -> set[str]:
    """Parameters whose gradient in bfloat16 is off by more than BOUND."""
    exact, rounded = gradients(config, torch.float64), gradients(config, torch.bfloat16)
    # GPT-2's key bias has a true gradient of zero.
    names = [name for name in exact if isinstance(config, Llama) or not name.endswith("k_proj.bias")]
    return {n for n in names if (rounded[n] - exact[n]).norm() > BOUND * exact[n].norm()}


@pytest.mark.parametrize("family", MODELS)
def test_every_gradient_is_accurate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inaccurate(MODELS[family]) == set()
    monkeypatch.setattr(Embedding, "forward", nn.Embedding.forward)
    assert inaccurate(MODELS[family]) == {"embed.weight"}


def test_rows_are_those_of_torch() -> None:
    ours = Embedding(64, 40, dtype=torch.bfloat16)
    tokens = torch.arange(64).flip(0)
    assert torch.equal(ours(tokens), nn.functional.embedding(tokens, ours.weight))


def scores_error(q: Tensor, k: Tensor, v: Tensor) -> float:
    exact = attend(q.double(), k.double(), v.double())
    return float((attend(q, k, v).double() - exact).norm() / exact.norm())


def test_scores_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A score of 50 rounded to bfloat16 is off by up to 0.1, and its probability relatively as much."""
    q, k, v = ((3 * torch.randn(2, 16, 4, 32, generator=torch.Generator().manual_seed(i))).bfloat16() for i in range(3))
    assert scores_error(q, k, v) <= 2 * UNIT
    monkeypatch.setattr("torch_ref.families.layers.at_least_f32", lambda x: x)
    assert scores_error(q, k, v) > 2 * UNIT
