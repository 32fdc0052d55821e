"""Offloading by FSDP2 and checkpoints trains the same to the bit; unsupported offloading is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jaxdist.config import ConfigError, Experiment, Memory
from torch_ref.conftest import Train, distance
from torch_ref.families.models import build
from torch_ref.train_test import continued
from torch_ref.training.parallelize import check_offload, rematerialize

STATE = "--memory.offload optimizer,parameters"
ALL = f"{STATE},activations --memory.remat full"


@pytest.mark.long
def test_trains_the_same_to_the_bit(train: Train) -> None:
    kept, offloaded = train("--mesh 2x1"), train(f"--mesh 2x1 {ALL}")
    assert distance(offloaded, kept) == (0, 0)
    memory, held = kept.summary["memory"], offloaded.summary["memory"]
    assert memory["host"] == 0 and held["host"] == held["parameters"] + held["optimizer_state"]
    assert held["parameters"] == memory["parameters"] and held["peak"] <= memory["peak"] - held["host"]


LEFT = "from torch_ref.training import parallelize\nparallelize.offload_policy = lambda *_: parallelize.OffloadPolicy()"
COPIES = """
from torch_ref.training import optim
local = optim.local
optim.local = lambda tensor: local(tensor).clone() if tensor.requires_grad else local(tensor)
"""


@pytest.mark.slow
def test_planted_mistakes_in_offloading_are_found(train: Train) -> None:
    """Planted: the policy is missing; the optimizer updates copies of the weights instead of the pinned ones."""
    assert train(f"--mesh 2x1 {ALL}", before=LEFT).summary["memory"]["host"] == 0
    assert distance(train(f"--mesh 2x1 {ALL}", before=COPIES), train("--mesh 2x1"))[0] > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["--mesh 2x2", "--mesh data=2,fsdp=2", "--mesh 2x1 --strategy zero2"])
def test_other_meshes(train: Train, mesh: str) -> None:
    mesh = f"{mesh} --train.accumulation 2"
    assert distance(train(f"{mesh} {STATE}"), train(mesh)) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(STATE, ""), ("", STATE)])
def test_a_run_goes_on_with_and_without(train: Train, tmp_path: Path, first: str, then: str) -> None:
    off = "--mesh 2x1 --memory.offload"
    first, then = (f"--mesh 2x1 {how}" if how else f"{off}=" for how in (first, then))
    assert distance(continued(train, tmp_path, first, then), train("--mesh 2x1")) == (0, 0)


@pytest.mark.parametrize(
    ("offload", "remat", "strategy", "valid"),
    [
        ("optimizer", "none", "fsdp", "memory.offload = optimizer,parameters"),
        ("parameters,activations", "full", "fsdp", "memory.offload = optimizer,parameters,activations"),
        ("optimizer,parameters", "none", "ddp", "parallel.strategy = zero2 or fsdp"),
        ("parameters", "none", "zero1", "parallel.strategy = zero2 or fsdp"),
        ("activations", "selective", "ddp", "memory.remat = full"),
    ],
)
def test_unsupported_offloading_is_refused(offload: str, remat: str, strategy: str, valid: str) -> None:
    values = {"memory": {"offload": offload, "remat": remat}, "parallel": {"strategy": strategy}}
    with pytest.raises(ConfigError, match=f"memory.offload = {offload}.*use {valid}$"):
        check_offload(Experiment.parse(values, source="test"))


@pytest.mark.parametrize("offload", [(), ("activations",)])
def test_inputs_of_blocks_wait_on_the_host(offload: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment()
    c, shape = experiment.model, (2, 8, experiment.model.dim)
    model, moved = build(c), list[torch.Size]()
    right = Tensor.cpu

    def cpu(self: Tensor) -> Tensor:
        moved.append(self.shape)
        return right(self)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    rematerialize(model, Memory(remat="full", offload=offload))
    model(torch.zeros(shape[:2], dtype=torch.int64)).sum().backward()
    assert moved == [shape] * (c.layers if offload else 0)
