"""The closed form of a ResNet's memory against compiled programs: some compiled here, others from recorded figures."""

import pytest

from jaxdist.command_line.arguments import load
from jaxdist.config import Experiment
from jaxdist.conftest import slow
from jaxdist.families.resnet import accounting
from jaxdist.families.resnet.accounting import ImageFootprint
from jaxdist.planner.compiled import compile_plan
from jaxdist.planner.plans import footprint

SMALL = {"model.image": "64"}
DDP = {"parallel.mesh": "8x1", "parallel.strategy": "ddp"}
ZERO1 = {"parallel.mesh": "8x1", "parallel.strategy": "zero1"}
ZERO2 = {"parallel.mesh": "8x1", "parallel.strategy": "zero2"}
FSDP = {"parallel.mesh": "8x1"}
HYBRID = {"parallel.mesh": "data=2,fsdp=4"}
TWICE = {"train.accumulation": "2"}
BF16 = {"precision.policy": "bf16"}
REPLICA = {"parallel.batch_norm": "replica"}
ADAMW = {"optimizer.name": "adamw"}


def experiment(config: str, *fields: dict[str, str], batch: int = 64) -> Experiment:
    return load(config, {"train.batch": str(batch)} | {name: value for part in fields for name, value in part.items()})


def planned(e: Experiment) -> float:
    return footprint(e, e.parallel.axes()).total


def name_of(case: tuple[dict[str, str], ...]) -> str:
    return " ".join(value for part in case for value in part.values()) or "one device"


# One device and several; recorded figures below cover strategies and precisions.
CASES: list[tuple[dict[str, str], ...]] = [(), (FSDP, REPLICA)]
MORE: list[tuple[dict[str, str], ...]] = [
    (FSDP, TWICE, {"model.depths": "2,2,2", "model.widths": "32,64,128", "model.image": "32"}),
    *(({"parallel.mesh": "4x1", "parallel.strategy": name},) for name in ("ddp", "zero1", "zero2", "fsdp")),
    ({"parallel.mesh": "4x1", "train.accumulation": "4"},),
    ({"parallel.mesh": "data=2,fsdp=2"}, BF16),
    (FSDP, {"model.block": "bottleneck", "model.depths": "3,3"}),
]


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *slow(MORE)], ids=name_of)
def test_the_peak_of_a_compiled_step(case: tuple[dict[str, str], ...]) -> None:
    """Parameters and optimizer state match the program's to the byte."""
    e = experiment("resnet-digits", *case)
    held, form = compile_plan(e).memory, footprint(e, e.parallel.axes())
    assert (form.parameters, form.optimizer_state) == (held["parameters"], held["optimizer_state"])
    assert planned(e) == pytest.approx(held["peak"], rel=0.1)


# MB that a step holds on each CPU device by `compile_plan` with jax 0.10.2, by global batch.
PEAKS: list[tuple[str, int, tuple[dict[str, str], ...], float]] = [
    ("resnet-18", 8, (), 507.97),
    ("resnet-18", 64, (DDP,), 366.24),
    ("resnet-18", 64, (ZERO1,), 331.75),
    ("resnet-18", 64, (ZERO2, REPLICA), 331.75),
    ("resnet-18", 64, (FSDP,), 338.24),
    ("resnet-18", 64, (FSDP, TWICE), 275.35),
    ("resnet-18", 64, (FSDP, {"parallel.reshard_after_forward": "false"}), 337.56),
    ("resnet-18", 64, (ZERO1, ADAMW, {"train.accumulation": "4"}), 212.86),
    ("resnet-18", 128, (HYBRID, BF16), 607.57),
    ("resnet-18", 16, (DDP, SMALL), 187.21),
    ("resnet-18", 16, (ZERO1, SMALL), 97.43),
    ("resnet-18", 16, (FSDP, SMALL), 116.14),
    ("resnet-18", 32, (FSDP, TWICE, SMALL), 153.52),
    ("resnet-18", 32, (DDP, TWICE, SMALL), 187.31),
    ("resnet-18", 32, (DDP, TWICE, BF16, SMALL), 297.95),
    ("resnet-18", 32, (HYBRID, ADAMW, SMALL), 142.58),
    ("resnet-50", 8, (), 1682.09),
    ("resnet-50", 32, (DDP,), 636.19),
    ("resnet-50", 32, (ZERO1,), 519.72),
    ("resnet-50", 32, (ZERO2, REPLICA), 519.88),
    ("resnet-50", 32, (FSDP,), 524.54),
    ("resnet-50", 32, (FSDP, TWICE), 466.49),
    ("resnet-50", 32, (FSDP, {"parallel.reshard_after_forward": "false"}), 496.06),
    ("resnet-50", 32, (ZERO1, ADAMW, {"train.accumulation": "4"}), 370.47),
    ("resnet-50", 64, (HYBRID, BF16), 885.38),
    ("resnet-50", 16, (DDP, SMALL), 409.44),
    ("resnet-50", 32, (FSDP, TWICE, SMALL), 287.29),
    ("resnet-50", 32, (DDP, TWICE, SMALL), 409.54),
    ("resnet-50", 32, (DDP, TWICE, BF16, SMALL), 516.06),
    ("resnet-50", 32, (HYBRID, ADAMW, SMALL), 301.04),
]


@pytest.mark.parametrize("row", PEAKS, ids=lambda row: f"{row[0]} {name_of(row[2])}")
def test_peaks_that_were_compiled(row: tuple[str, int, tuple[dict[str, str], ...], float]) -> None:
    config, batch, case, peak = row
    assert planned(experiment(config, *case, batch=batch)) / 1e6 == pytest.approx(peak, rel=0.1)


def test_where_the_form_is_too_low() -> None:
    """Weights that dwarf the activations of two small images are gathered forward and backward at once."""
    assert 0.75 < planned(experiment("resnet-50", FSDP, SMALL, batch=16)) / 246.87e6 < 0.85


@pytest.mark.parametrize("row", [
    ("resnet-18", 128, (DDP, TWICE, BF16, REPLICA), 482.27),
    ("resnet-50", 64, (DDP, TWICE, BF16, REPLICA), 811.85),
    ("resnet-50", 16, (ZERO1, SMALL), 165.98),
], ids=lambda row: f"{row[0]} {name_of(row[2])}")  # fmt: skip
def test_where_the_form_is_too_high(row: tuple[str, int, tuple[dict[str, str], ...], float]) -> None:
    """Microbatches in 16 bits with per-replica batch norms under ddp, and two small images under zero1."""
    config, batch, case, peak = row
    assert 1.1 < planned(experiment(config, *case, batch=batch)) / 1e6 / peak < 1.2


@pytest.mark.parametrize("left", ["C", "A"])
def test_a_form_without_outputs_is_too_low(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form without the outputs of convolutions, or of relu."""
    monkeypatch.setattr(accounting, "SAVED", {**accounting.SAVED, left: (0, 0)})
    assert planned(experiment("resnet-50", DDP, batch=32)) < 0.9 * 636.19e6


def test_a_form_without_what_one_cpu_saves_is_too_low(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form without the differences that batch norms save on one CPU device, but not on several."""
    monkeypatch.setattr(accounting, "SAVED_ON_CPU", accounting.SAVED)
    assert planned(experiment("resnet-50", batch=8)) < 0.9 * 1682.09e6


def test_blocks_are_in_order() -> None:
    """ResNet-50: the stem at half of the image's height, then stages; first blocks have shortcuts."""
    e = experiment("resnet-50", DDP)
    form = footprint(e, e.parallel.axes())
    assert isinstance(form, ImageFootprint) and len(form.blocks) == 1 + 3 + 4 + 6 + 3
    stem, first, second, *_, last = form.blocks
    assert stem["C"] == 64 * 112**2 and stem["A"] == 64 * 56**2
    assert first["C"] - first["A"] == 256 * 56**2 and second["C"] == second["A"] == (64 + 64 + 256) * 56**2
    assert last["O"] == 2048 * 7**2
    own = sum(own for own, _ in form.gradients_by_block)
    assert own == form.parameters == form.gradients


def test_images_that_are_normalized_alone_wait_for_nothing() -> None:
    own, alike = (experiment("resnet-18", DDP, extra) for extra in (REPLICA, {}))
    assert footprint(own, own.parallel.axes()).sums == 1 < footprint(alike, alike.parallel.axes()).sums == 80
