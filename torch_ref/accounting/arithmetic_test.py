"""The meter finds the narrowest dtype of precision-sensitive operations."""

import pytest
import torch

from torch_ref.accounting.arithmetic import Arithmetic
from torch_ref.conftest import Train

pytestmark = pytest.mark.long

NORMS = """
import torch
from torch_ref.families import layers
right = layers.RMSNorm.forward
def forward(self, x):
    y = x.bfloat16()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight
layers.RMSNorm.forward = forward
"""


@pytest.mark.parametrize(
    ("policy", "dtype"), [pytest.param("fp64", "float64", marks=pytest.mark.slow), ("bf16", "float32")]
)
def test_a_step_computes_them_in_float32_at_least(train: Train, policy: str, dtype: str) -> None:
    found = train(f"--mesh 2x1 --precision {policy}").summary["arithmetic"]
    assert found.keys() >= {"rsqrt", "_softmax", "_log_softmax"} and set(found.values()) == {dtype}


def test_a_norm_in_bfloat16_is_found(train: Train) -> None:
    found = train("--mesh 2x1 --precision bf16", before=NORMS).summary["arithmetic"]
    assert found["rsqrt"] == "bfloat16" and found["_softmax"] == "float32"


def test_the_narrowest_counts() -> None:
    x = torch.ones(3, requires_grad=True)
    with Arithmetic() as meter:
        torch.exp(x.double()), torch.exp(x).sum().backward(), torch.exp(x.half()), torch.tanh(x.bfloat16())
    assert meter.narrowest() == {"exp": "float16"}
