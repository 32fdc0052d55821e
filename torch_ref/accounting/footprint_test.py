"""Reported memory, against tensors of known sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_ref.accounting.footprint import Peak
from torch_ref.conftest import Train

pytestmark = pytest.mark.long


class Wide(nn.Module):
    """A weight [4, 4], and an activation of 1000 numbers that the backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.linear(x.expand(250, 4)).sin().sum()
        return total


def peak_of(microbatches: int, extra: int) -> int:
    """Peak bytes of a step that allocates and frees a tensor of `extra` numbers."""
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (peak := Peak(model, optimizer, "cpu")):
        for _ in range(microbatches):
            model(torch.ones(4)).backward()
        memory = torch.empty(extra)
        del memory
        optimizer.step()
    assert peak.bytes is not None
    return peak.bytes


def test_a_peak_counts_what_is_allocated_at_once() -> None:
    weight, activation = 4 * 4 * 4, 4 * 250 * 4
    once = peak_of(1, extra=0)
    assert 2 * weight + 2 * activation <= once <= 2 * weight + 3 * activation + 100
    # a microbatch's activations are freed before the next
    assert peak_of(2, extra=0) == pytest.approx(once, abs=2 * weight)
    assert peak_of(1, extra=10_000) == 2 * weight + 40_000


# DDP allocates its buckets, which hold the gradients, in its first step; only the second step starts with them.
@pytest.mark.parametrize(("mesh", "standing"), [pytest.param("", 0, marks=pytest.mark.slow), ("--strategy ddp", 1)])
def test_a_step_holds_its_own_gradients_alone(train: Train, mesh: str, standing: int) -> None:
    """The second step starts with the first one's gradients allocated; the first starts without any."""
    first, second = (train(f"--mesh 2x1 {mesh} --steps {steps}").summary["memory"] for steps in (1, 2))
    assert 0 < first["gradients"] == second["gradients"]
    more = standing * first["gradients"]
    assert second["peak"] == pytest.approx(first["peak"] + more, abs=first["gradients"] / 4)


def test_memory_adds_up(train: Train) -> None:
    memory: dict[str, Any] = train("--mesh data=2,fsdp=2 --train.accumulation 2 --memory.remat selective").summary[
        "memory"
    ]
    assert memory["temporary"] > 0
    assert memory["peak"] == sum(bytes for kind, bytes in memory.items() if kind != "peak")


def test_rematerialization_shows_in_the_peak(train: Train) -> None:
    none, full = (train(f"--mesh 1x1 {mode}").summary["memory"] for mode in ("", "--memory.remat full"))
    assert full["temporary"] < none["temporary"]


@pytest.mark.slow
def test_gradients_that_wait_for_one_reduction_are_whole(train: Train) -> None:
    full = train("--mesh 1x1").summary["memory"]["gradients"]
    each = "--mesh 2x1 --steps 2 --train.accumulation 2"
    assert train(each).summary["memory"]["gradients"] == full // 2
    assert train(f"{each} --parallel.reduce step").summary["memory"]["gradients"] == full
