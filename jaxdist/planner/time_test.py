"""The closed form of a step's time: its parts, and measurements on an H200."""

from dataclasses import replace
from typing import Any

import pytest

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.config.hardware import hardware
from jaxdist.families.llama.config import Llama
from jaxdist.planner.plans import Plan
from jaxdist.planner.time import reach

pytestmark = pytest.mark.long


def plan(config: str | None, device: str = "h100", **fields: Any) -> Plan:
    return Plan(load(config, {name.replace("__", "."): value for name, value in fields.items()}), hardware(device))


# tokens/s measured on one H200 (jax 0.11.2), on random tokens, and the largest relative difference.
MEASURED: list[tuple[str, dict[str, Any], float, float]] = [
    ("llama-1b", {"train__batch": 4}, 59_733, 0.05),
    ("llama-1b", {"train__batch": 4, "memory__remat": "full"}, 52_479, 0.05),
    ("llama-1b", {"train__batch": 4, "memory__remat": "none"}, 56_422, 0.15),
    ("llama-1b", {"train__batch": 4, "data__sequence": 8192}, 52_482, 0.05),
    (
        "mistral-7b",
        {"train__batch": 2, "data__sequence": 4096, "memory__remat": "full", "model__window": 0},
        9_351,
        0.05,
    ),
]


@pytest.mark.parametrize(("config", "fields", "took", "within"), MEASURED)
def test_measurements_of_a_gpu(config: str, fields: dict[str, Any], took: float, within: float) -> None:
    assert plan(config, "h200", **fields).tokens_per_second == pytest.approx(took, rel=within)


def test_arithmetic_equals_that_of_a_run() -> None:
    """Products and attention of all devices equal `flops_per_token`'s without recomputation, except for the fifth
    product of attention's backward pass."""
    one = plan("llama-1b", memory__remat="none", train__batch=8)
    done, tokens = one.footprint.work, 8 * 4096
    assert done.products + done.attention * 6 / 7 == pytest.approx(one.flops_per_token * tokens, rel=1e-3)
    many = plan("llama-1b", memory__remat="none", train__batch=8, parallel__mesh="4x2")
    assert many.footprint.work.products == pytest.approx(done.products / 8, rel=1e-3)
    assert plan("llama-1b", memory__remat="full", train__batch=8).footprint.work.products > 1.2 * done.products


@pytest.mark.parametrize("window", [0, 1, 3, 8, 20])
def test_keys_are_counted_as_the_mask_has_them(window: int) -> None:
    """The T/2 convention omits half a key where all are visible."""
    times, model = 8, load(None, {"model.window": window}).model
    assert isinstance(model, Llama)
    seen = sum(0 <= t - s < (window or times) for t in range(times) for s in range(times)) / times
    assert model.keys(times) == pytest.approx(seen - min(window or times, times) / (2 * times))


def test_a_window_is_less_arithmetic_in_a_run_and_in_a_plan() -> None:
    """A device never exceeds its rate in products and attention together."""
    fields: dict[str, Any] = {"memory__remat": "none", "data__sequence": 32768, "model__positions": 32768}
    full, windowed = (plan("mistral-7b", train__batch=8, model__window=w, **fields) for w in (0, 4096))
    tokens = 8 * 32768
    for one in full, windowed:
        done = one.footprint.work
        assert done.products + done.attention * 6 / 7 == pytest.approx(one.flops_per_token * tokens, rel=1e-3)
        assert one.mfu < 0.8
    layers = 12 * 32 * 32 * 128
    assert full.flops_per_token - windowed.flops_per_token == pytest.approx(layers * (16384 - (4096 - 256)))


def test_only_chosen_experts_multiply() -> None:
    """TPUs have grouped products; others use blocks of rows, the last ones half empty."""
    e = plan("mixtral-8x7b", memory__remat="none", parallel__mesh="expert=8", train__batch=8)
    own = replace(e.footprint, platform="tpu").work
    assert own.products + own.attention * 6 / 7 == pytest.approx(e.flops_per_token * 8 * 4096 / 8, rel=1e-2)
    assert 1.1 * own.products < e.footprint.work.products < 1.25 * own.products


def test_arithmetic_of_images() -> None:
    """Equals a run's figure except for the gradient of the images; the same on more devices."""
    one = plan("resnet-50", train__batch=64)
    stem = 7 * 7 * 3 * 64 * 112**2
    assert one.footprint.work.products == pytest.approx((one.flops_per_token - 2 * stem) * 64)
    # counted as in arXiv:1512.03385, with the stride in 3×3
    assert one.flops_per_token == pytest.approx(6 * 4.09e9, rel=1e-2)
    many = plan("resnet-50", train__batch=64, train__accumulation=2, parallel__mesh="4x1")
    assert many.footprint.work.products == pytest.approx(one.footprint.work.products / 4)
    time = plan("resnet-50", precision__policy="bf16").time
    assert time.attention == 0 < time.products < time.moved  # batch norms are memory-bound


def test_batch_norms_wait_for_their_sums() -> None:
    """Each has two sums forward and two backward, which are awaited."""
    alike, own = (
        plan("resnet-18", parallel__mesh="8x1", parallel__strategy="ddp", parallel__batch_norm=kind).time
        for kind in ("global", "replica")
    )
    latency, _ = hardware("h100").latency
    assert alike.latency == pytest.approx((4 * 20 + 2) * latency) and own.latency == pytest.approx((1 + 2) * latency)


@pytest.mark.parametrize(("mesh", "rounds"), [("1x8", 2), ("8x1", 0)])
def test_chunks_of_the_loss_wait_for_their_sums(mesh: str, rounds: int) -> None:
    """Each chunk waits for its largest logits and for its sums, in both microbatches."""
    one, eight = (
        plan("llama-1b", parallel__mesh=mesh, memory__loss_chunks=chunks, train__batch=16, train__accumulation=2).time
        for chunks in (1, 8)
    )
    latency, _ = hardware("h100").latency
    assert eight.latency - one.latency == pytest.approx(rounds * 7 * 2 * latency, abs=latency / 100)


def test_a_pipeline_waits() -> None:
    """Nearly half of the ticks are idle with as many microbatches as stages, and each pass runs twice."""
    alone = plan("llama-1b", train__batch=32, parallel__mesh="4x1")
    few, many = (plan("llama-1b", train__batch=32, parallel__mesh="pipeline=4", train__accumulation=n) for n in (4, 32))
    assert few.time.products > 1.5 * many.time.products > 1.5 * alone.time.products


@pytest.mark.parametrize(
    ("mesh", "axis", "bandwidth"),
    [
        ("fsdp=2,tensor=4", "tensor", 450e9),
        ("fsdp=2,tensor=4", "fsdp", 450e9),  # 8 devices: one machine
        ("data=2,fsdp=2,tensor=4", "data", 50e9),  # each device has its own link
        ("fsdp=16", "fsdp", 8 * 50e9),  # the ring crosses machines by 8 links
        ("fsdp=8,tensor=4", "fsdp", 2 * 50e9),
        ("tensor=16", "tensor", 8 * 50e9),
    ],
)
def test_the_speed_of_an_axis(mesh: str, axis: str, bandwidth: float) -> None:
    axes = load(None, {"parallel.mesh": mesh}).parallel.axes()
    assert reach(axes, axis, hardware("h100"))[0] == bandwidth


def test_overlap_hides_parameters_alone() -> None:
    slow, fast = (plan("llama-1b", parallel__mesh="8x2", parallel__overlap=flag) for flag in ("false", "true"))
    assert fast.time.hidden == fast.time.parameters > 0 and slow.time.hidden == 0
    assert fast.time.activations == slow.time.activations > 0


def test_the_host_is_paid_for() -> None:
    e = plan("llama-1b", parallel__mesh="8x1", memory__offload="optimizer")
    assert e.time.host == pytest.approx(2 * e.footprint.optimizer_state / 64e9)
    assert e.memory["host"] == e.footprint.optimizer_state


def test_a_dtype_that_a_device_lacks() -> None:
    with pytest.raises(ConfigError, match=r"precision.compute = float64: tpu-v5p has no rate for it; use bfloat16 or"):
        assert plan("llama-1b", "tpu-v5p", precision__policy="fp64").time


def test_factored_moments_are_read_and_written_as_they_are() -> None:
    """Adafactor's are rows and columns: an update moves little more than gradients and weights."""
    adam, factored = (
        plan("llama-1b", optimizer__name=name, parallel__mesh="1x1").footprint for name in ("adamw", "adafactor")
    )
    weights = factored.elements(True) * factored.param_itemsize
    assert 3 * weights < factored.update < 3.01 * weights and adam.update > 6.99 * weights


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=2,pipeline=4", "fsdp=2,context=4"])
def test_sequence_parallelism_without_tensor_changes_nothing(mesh: str) -> None:
    plain, split = (
        plan("llama-1b", parallel__mesh=mesh, parallel__sequence=sequence, train__batch=32, train__accumulation=4)
        for sequence in (False, True)
    )
    assert (split.time, split.traffic, split.memory) == (plain.time, plain.traffic, plain.memory)
