"""Decoders on one GPU: which are measured, and the figures of their runs. None runs on a GPU or is timed here."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxdist.bench import decoders, pace
from jaxdist.bench.decoders import ROWS, Workload, compare, fitting, measure, product
from jaxdist.bench.effort import DEFAULT, QUICK, Bench
from jaxdist.config import TrainingError
from jaxdist.config.hardware import hardware, known

H100 = hardware("h100")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench("gpu", DEFAULT, tmp_path, lambda _: None)


class Ran:
    """Results of a run: steps of two seconds in JAX, one in torch, in 30 and 40 GB."""

    def __init__(self, side: str) -> None:
        self.step = {"jaxdist": 2.0, "torch_ref": 1.0}[side]
        memory = {"jaxdist": {"peak": 1, "allocator_peak": 30e9}, "torch_ref": {"peak": 40e9}}[side]
        self.summary = {"flops_per_token": 1e9, "memory": memory}


def ran(monkeypatch: pytest.MonkeyPatch, *, fails: str = "") -> list[Sequence[str]]:
    """Replaces runs by made-up results and records their command lines."""
    lines: list[Sequence[str]] = []

    def train(side: str, line: Sequence[str], output: Path) -> Ran:
        lines.append([side, *line])
        if side == fails:
            raise TrainingError("python -m x ended with 1: Traceback\nno memory left")
        return Ran(side)

    monkeypatch.setattr(pace, "train", train)
    return lines


@pytest.mark.parametrize(
    ("device", "way"),
    [
        ("a100", ("bf16-true", "full")),
        ("h100", ("bf16-true", "full")),
        ("h200", ("bf16-true", "selective")),
        ("b200", ("bf16", "selective")),
    ],
)
def test_the_first_way_that_has_room(device: str, way: tuple[str, str]) -> None:
    small, large = ROWS
    for row, expected in (small, ("bf16", "selective")), (large, way):
        fields = fitting(row, 8192, hardware(device))
        assert fields and (fields["precision.policy"], fields["memory.remat"]) == expected
    assert fitting(Workload("llama-3.1-70b", tokens=4096), 4096, hardware(device)) is None


def test_figures_of_a_row(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    """Both sides get the same command line; torch takes half the time and a third more memory."""
    lines = ran(monkeypatch)
    share, rate, memory = compare(bench, Workload("llama-1b", tokens=16384), 8192, H100, ceiling=1e14)
    assert [line[0] for line in lines] == ["jaxdist", "torch_ref", "torch_ref", "jaxdist"]
    assert [*lines[0][1:], *pace.SIDES[pace.COMPILED][1]] == lines[1][1:]
    assert rate.name == "llama-1b, T 8192, bf16, remat selective: pace over torch.compile"
    assert rate.values == (0.5, 0.5) and not rate.met and rate.beside["JAX, tokens/s"] == 8192
    assert memory.values == (0.75, 0.75) and memory.met and memory.beside["torch.compile, GB"] == 40
    assert share.values == (8192e9 / 1e14,) * 2 and share.goal is None
    half = 8192 * 6 * 16 * 2048 * 8192 / 1e12  # tokens/s, and the half that causal attention saves
    assert share.beside["with the whole square"] == pytest.approx(share.beside["TFLOP/s"] + half)


@pytest.mark.parametrize(("fails", "side", "left"), [("torch_ref", pace.COMPILED, 1), ("jaxdist", pace.JAX, 0)])
def test_a_side_that_fails_is_noted(
    fails: str, side: str, left: int, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    """Noted once; the other side continues."""
    lines = ran(monkeypatch, fails=fails)
    assert len(list(compare(bench, ROWS[0], 4096, H100, 1e14))) == left
    assert len(lines) == 3 and bench.notes == [f"llama-1b, T 4096: {side}: no memory left"]


def test_decoders_that_do_not_fit_are_noted(bench: Bench) -> None:
    assert not list(compare(bench, Workload("llama-3.1-70b", tokens=4096), 4096, H100, 1e14))
    assert bench.notes == ["llama-3.1-70b, T 4096 would leave torch no room on H100"]


@pytest.mark.parametrize(("device", "gpu"), [("auto", ""), ("auto", "NVIDIA GeForce 8800"), ("cpu", "NVIDIA H100")])
def test_without_a_gpu_nothing_is_measured(
    device: str, gpu: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(decoders, "gpus", lambda: (gpu,))
    bench = Bench(device, QUICK, tmp_path, lambda _: None)
    assert not list(measure(bench))
    assert bench.notes == ["left out by --device cpu" if device == "cpu" else decoders.UNKNOWN]


def test_devices_by_their_names() -> None:
    assert known("NVIDIA H100 80GB HBM3") == H100 and known("NVIDIA H200") == hardware("h200")
    assert known("") is known("NVIDIA GH200 480GB") is None


@pytest.mark.slow
def test_the_section_on_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole section for a small model, a small product and eager torch, on CPUs."""
    monkeypatch.setattr(decoders, "gpus", lambda: ("NVIDIA H100",))
    monkeypatch.setattr(decoders, "SIZE", 64)
    monkeypatch.setattr(decoders, "ROWS", (Workload("default", tokens=256, lengths=(128,)),))
    monkeypatch.setitem(pace.SIDES, pace.COMPILED, pace.SIDES[pace.EAGER])
    lines: list[str] = []
    train: Callable[..., Any] = pace.train
    monkeypatch.setattr(pace, "train", lambda side, line, output: train(side, [*line, "--device", "cpu"], output))
    apart: Callable[..., Any] = decoders.apart
    monkeypatch.setattr(decoders, "apart", lambda **_: apart(JAX_PLATFORMS="cpu"))
    product_, share, rate, memory = measure(Bench("auto", QUICK, tmp_path, lines.append))
    assert product_.unit == "TFLOP/s" and min(f.median for f in (product_, share, rate, memory)) > 0
    assert len(lines) == 3 and product(8, times=2) > 0
