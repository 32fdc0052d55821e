"""Reported metrics that no run on a test machine shows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jaxdist.config import Experiment
from torch_ref.families.accounting import flops_per_token
from torch_ref.families.models import build
from torch_ref.train import notes
from torch_ref.training.metrics import utilization

EXPERIMENT = Experiment()


def mfu(kind: str, monkeypatch: pytest.MonkeyPatch, device: str = "cuda", policy: str = "bf16") -> float | None:
    """MFU on two devices of one kind that process a million tokens a second."""
    experiment = Experiment.parse({"precision": {"policy": policy}}, "test")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: kind)
    mesh: Any = SimpleNamespace(device_type=device, size=lambda: 2)
    return utilization(experiment, build(experiment.model), mesh, 1e6)


def test_utilization_is_of_all_devices_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = flops_per_token(EXPERIMENT, build(EXPERIMENT.model))
    assert flops is not None
    arithmetic = 1e6 * flops
    assert mfu("NVIDIA H100 80GB HBM3", monkeypatch) == pytest.approx(arithmetic / (2 * 989e12))
    assert mfu("NVIDIA A100-SXM4-80GB", monkeypatch) == pytest.approx(arithmetic / (2 * 312e12))
    assert mfu("NVIDIA H100 80GB HBM3", monkeypatch, policy="fp32") == pytest.approx(arithmetic / (2 * 67e12))


def test_utilization_is_none_where_the_peak_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mfu("NVIDIA GeForce 8800", monkeypatch) is None
    assert mfu("NVIDIA H100", monkeypatch, device="cpu") is None


def test_the_start_shows_memory_per_device() -> None:
    row = notes(torch.nn.Linear(1, 1), {"parameters": 2 * 10**6, "optimizer_state": 4 * 10**6})["memory per device"]
    assert row == "parameters 2.00 MB, gradients 2.00 MB, optimizer 4.00 MB"
