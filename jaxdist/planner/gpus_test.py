"""Steps compiled for absent GPUs, in separate processes as the plugin must be configured before JAX starts; and the
closed form against compiled memory."""

import json
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxdist.accounting.decoder import DecoderFootprint
from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.config.hardware import shipped
from jaxdist.conftest import often, tiny
from jaxdist.planner import gpus
from jaxdist.planner.compiled import compile_plan
from jaxdist.planner.plans import Plan


@pytest.mark.parametrize("name", [name for name, device in shipped().items() if device.platform == "gpu"])
def test_a_chip_is_named(name: str) -> None:
    """hardware.toml's figures agree with XLA's own descriptions."""
    device = shipped()[name]
    assert device.chip
    description = gpus.target(device)
    major, minor = device.chip.capability.split(".")
    for text in (f"core_count: {device.chip.cores}", f"major: {major} minor: {minor}", f"NVIDIA {device.known_as}"):
        assert text in description
    with pytest.raises(ConfigError, match="has no table `chip`"):
        gpus.target(device.model_copy(update={"chip": None}))


@pytest.mark.parametrize(("capability", "threads"), [("8.0", 2048), ("8.6", 1536), ("8.9", 1536), ("9.0", 2048)])
def test_chips_for_graphics_have_fewer_threads(capability: str, threads: int) -> None:
    device = shipped()["h100"]
    assert device.chip
    chip = device.chip.model_copy(update={"capability": capability})
    assert f"threads_per_core_limit: {threads}\n" in gpus.target(device.model_copy(update={"chip": chip}))


@pytest.mark.long
def test_a_gpu_without_its_chip_is_not_taken_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "installed", lambda: True)
    with pytest.raises(ConfigError, match="--hardware h100: has no table `chip`"):
        compile_plan(tiny(), shipped()["h100"].model_copy(update={"chip": None}))


# GB that a step holds on each of these H100, by `python -m jaxdist.plan --compiled` with jax 0.10.2.
PEAKS: list[tuple[str, dict[str, str], float]] = [
    ("llama-1b", {"parallel.mesh": "1x1"}, 90.70),
    ("llama-1b", {"parallel.mesh": "1x1", "train.batch": "8", "memory.remat": "full"}, 31.26),
    ("llama-1b", {"parallel.mesh": "8x1", "parallel.strategy": "ddp"}, 27.72),
    ("llama-1b", {"parallel.mesh": "8x1", "parallel.strategy": "zero1"}, 19.07),
    ("llama-1b", {"parallel.mesh": "8x1", "memory.remat": "selective"}, 12.76),
    ("llama-1b", {"parallel.mesh": "8x1", "memory.remat": "full"}, 7.32),
    ("llama-1b", {"parallel.mesh": "2x4"}, 15.43),
    ("llama-1b", {"parallel.mesh": "2x4", "parallel.sequence": "true", "memory.remat": "selective"}, 12.37),
    ("llama-1b", {"parallel.mesh": "8x1", "parallel.overlap": "true"}, 11.83),
    ("llama-3.1-8b", {"parallel.mesh": "8x1"}, 48.21),
    ("llama-3.1-8b", {"parallel.mesh": "8x1", "memory.remat": "full"}, 28.23),
    ("llama-3.1-8b", {"parallel.mesh": "8x8", "parallel.sequence": "true"}, 6.43),
    ("llama-3.1-8b", {"parallel.mesh": "128x1", "train.batch": "256"}, 28.54),
    ("mistral-7b", {"parallel.mesh": "8x1"}, 64.78),
    ("mistral-7b", {"parallel.mesh": "4x2", "memory.remat": "full"}, 28.78),
    ("llama-1b", {"parallel.mesh": "pipeline=4,fsdp=2", "train.accumulation": "4"}, 10.14),
    ("llama-3.1-70b", {"parallel.mesh": "16x8"}, 96.57),
    ("qwen3-0.6b", {"parallel.mesh": "8x1"}, 10.43),
    ("llama-1b", {"parallel.mesh": "fsdp=2,context=4", "parallel.context": "ulysses"}, 13.03),
    ("mixtral-8x7b", {"parallel.mesh": "fsdp=8,expert=8", "train.batch": "64"}, 30.62),
    ("llama-1b", {"parallel.mesh": "fsdp=4,context=2"}, 18.91),
    ("llama-1b", {"parallel.mesh": "fsdp=2,context=4"}, 14.51),
    ("llama-1b", {"parallel.mesh": "fsdp=2,context=4", "data.sequence": "8192"}, 33.32),
    ("llama-1b", {"parallel.mesh": "fsdp=2,context=2", "data.sequence": "8192", "train.batch": "4"}, 29.99),
    ("llama-1b", {"parallel.mesh": "1x1", "train.batch": "8", "memory.loss_chunks": "8"}, 47.23),
    (
        "llama-1b",
        {"parallel.mesh": "1x1", "train.batch": "32", "memory.remat": "full", "memory.loss_chunks": "8"},
        41.12,
    ),
    ("llama-1b", {"parallel.mesh": "8x1", "memory.remat": "full", "memory.loss_chunks": "8"}, 6.35),
    ("llama-1b", {"parallel.mesh": "2x4", "memory.remat": "full", "memory.loss_chunks": "8"}, 6.88),
    ("llama-3.1-8b", {"parallel.mesh": "8x1", "memory.remat": "full", "memory.loss_chunks": "8"}, 30.17),
    ("qwen3-0.6b", {"parallel.mesh": "8x1", "memory.loss_chunks": "8"}, 8.70),
    ("gpt2", {"parallel.mesh": "8x1"}, 1.273),
    ("gpt2", {"parallel.mesh": "8x1", "model.vocab": "50272"}, 1.079),
]
TRUE = {"precision.policy": "bf16-true"}
FULL = {"memory.remat": "full"}
NARROW: list[tuple[str, dict[str, str], float]] = [
    ("llama-1b", {"parallel.mesh": "8x1"} | TRUE, 11.49),
    ("llama-1b", {"parallel.mesh": "4x2"} | TRUE | FULL, 6.25),
    ("llama-1b", {"parallel.mesh": "2x4"} | TRUE, 14.28),
    ("llama-1b", {"parallel.mesh": "2x4"} | TRUE | FULL, 7.48),
    ("llama-1b", {"parallel.mesh": "2x4", "parallel.sequence": "true"} | TRUE | FULL, 6.05),
    ("llama-1b", {"parallel.mesh": "2x4", "parallel.strategy": "ddp"} | TRUE | FULL, 8.29),
    ("llama-3.1-8b", {"parallel.mesh": "8x1"} | TRUE, 39.27),
    ("llama-3.1-8b", {"parallel.mesh": "2x4"} | TRUE | FULL, 23.60),
    ("llama-3.1-8b", {"parallel.mesh": "8x8", "parallel.sequence": "true"} | TRUE | FULL, 2.504),
    ("mistral-7b", {"parallel.mesh": "4x2"} | TRUE | FULL, 21.06),
    ("llama-3.1-70b", {"parallel.mesh": "16x8"} | TRUE, 104.25),
    ("qwen3-0.6b", {"parallel.mesh": "2x4"} | TRUE | FULL, 5.763),
]
BF16 = {"precision.policy": "bf16"}
FP32 = {"precision.policy": "fp32"}
IMAGES: list[tuple[str, dict[str, str], float]] = [
    ("resnet-18", {"parallel.mesh": "1x1"} | BF16, 2.505),
    ("resnet-18", {"parallel.mesh": "8x1"}, 0.896),
    ("resnet-18", {"parallel.mesh": "8x1", "parallel.strategy": "ddp", "parallel.batch_norm": "replica"}
     | {"train.batch": "2048"} | BF16, 4.123),
    ("resnet-18", {"parallel.mesh": "8x1", "train.batch": "2048", "train.accumulation": "2"} | BF16, 2.123),
    ("resnet-18", {"parallel.mesh": "8x1", "parallel.strategy": "zero1", "train.batch": "2048"}
     | {"train.accumulation": "2"} | BF16, 2.237),
    ("resnet-50", {"parallel.mesh": "1x1"}, 21.143),
    ("resnet-50", {"parallel.mesh": "1x1"} | BF16, 10.843),
    ("resnet-50", {"parallel.mesh": "8x1", "parallel.strategy": "ddp"} | BF16, 1.905),
    ("resnet-50", {"parallel.mesh": "8x1", "parallel.strategy": "zero1"} | BF16, 1.790),
    ("resnet-50", {"parallel.mesh": "8x1", "parallel.strategy": "zero2"} | BF16, 1.790),
    ("resnet-50", {"parallel.mesh": "8x1"} | BF16, 1.691),
    ("resnet-50", {"parallel.mesh": "data=2,fsdp=4", "train.batch": "2048", "optimizer.name": "adamw"} | BF16, 12.763),
]  # fmt: skip
# XLA holds more than the closed form; the last number is the form's share. Many small experts: their gradients, and the
# logits' beside the last block's. Two stages: gradients of their last tick, which it unrolls. float32, without fused
# attention: the logits' gradient beside the last block's scores, the mask and its fill, and padded logits once more.
# Narrow parameters: float32 zeros for the embedding's gradient from before the blocks' backward pass, and beside the
# ring the logits' gradient. Few images: differences from a batch norm's mean that its fusions keep.
FAR: list[tuple[str, dict[str, str], float, float]] = [
    ("qwen3-30b-a3b", {"parallel.mesh": "fsdp=4,expert=2", "model.layers": "4"}, 16.70, 0.885),
    ("llama-1b", {"parallel.mesh": "pipeline=2", "train.accumulation": "8"}, 27.15, 0.870),
    ("llama-1b", {"parallel.mesh": "8x1"} | FP32, 34.47, 0.836),
    ("gpt2", {"parallel.mesh": "8x1"} | FP32, 2.289, 0.745),
    ("llama-1b", {"parallel.mesh": "8x1"} | TRUE | FULL, 6.105, 0.881),
    ("llama-1b", {"parallel.mesh": "fsdp=2,context=4", "parallel.context": "ulysses"} | TRUE | FULL, 6.373, 0.844),
    ("llama-1b", {"parallel.mesh": "fsdp=2,context=4"} | TRUE | FULL, 8.734, 0.859),
    ("resnet-50", {"parallel.mesh": "8x1", "train.accumulation": "4"} | BF16, 0.599, 0.882),
    ("resnet-digits", {"parallel.mesh": "4x1", "train.batch": "4096"} | BF16, 0.01156, 0.783),
]
# XLA holds less: for one-tick phases of two stages over fsdp, and a mixture with narrow parameters.
MUCH: list[tuple[str, dict[str, str], float, float]] = [
    ("llama-1b", {"parallel.mesh": "pipeline=2,fsdp=4", "train.accumulation": "4"}, 8.05, 1.200),
    ("mixtral-8x7b", {"parallel.mesh": "fsdp=8,expert=8", "train.batch": "64"} | TRUE, 24.30, 1.126),
]


def named(row: tuple[Any, ...]) -> str:
    return f"{row[0]} {' '.join(row[1].values())}"


def ratio(config: str, fields: dict[str, str], peak: float) -> float:
    """Closed-form peak over the compiled program's."""
    return Plan(load(config, fields), shipped()["h100"]).memory["peak"] / 1e9 / peak


@pytest.mark.parametrize("row", PEAKS, ids=named)
def test_the_closed_form_on_gpus(row: tuple[str, dict[str, str], float]) -> None:
    assert ratio(*row) == pytest.approx(1, rel=0.08)


@pytest.mark.parametrize("row", NARROW, ids=named)
def test_the_closed_form_of_narrow_parameters(row: tuple[str, dict[str, str], float]) -> None:
    assert ratio(*row) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("row", IMAGES, ids=named)
def test_the_closed_form_of_images(row: tuple[str, dict[str, str], float]) -> None:
    """Neither includes cuDNN's workspaces: without a GPU none are chosen."""
    assert ratio(*row) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("row", [*FAR, *MUCH], ids=named)
def test_where_the_form_is_far_off(row: tuple[str, dict[str, str], float, float]) -> None:
    assert ratio(*row[:3]) == pytest.approx(row[3], abs=0.01)


def test_logits_held_twice_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the form of a loss that keeps its softmax."""
    monkeypatch.setattr(DecoderFootprint, "logits", property(lambda f: f.arrays({"V": (1, 1)})))
    assert max(abs(ratio(*row) - 1) for row in PEAKS) > 0.15


def compiled(*arguments: str) -> dict[str, Any]:
    line = [sys.executable, "-m", "jaxdist.plan", "--compiled", "--json", "--hardware", "h100", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


needed = pytest.mark.skipif(not gpus.installed(), reason="JAX's CUDA plugin is not installed: jaxdist[cuda12]")
ROWS = [row[:3] for row in (*PEAKS, *NARROW, *IMAGES, *FAR, *MUCH)]
AGAIN = (PEAKS[3], PEAKS[5], FAR[-1][:3])  # run by every suite


@pytest.mark.long
@needed
@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="the record is of jax 0.10")
@pytest.mark.parametrize("row", often(ROWS, AGAIN), ids=named)
def test_the_record_is_of_the_compiled_step(row: tuple[str, dict[str, str], float]) -> None:
    config, fields, peak = row
    line = [text for name, value in fields.items() for text in (f"--{name}", value)]
    assert compiled("--config", config, *line)["compiled"]["memory"]["peak"] / 1e9 == pytest.approx(peak, rel=1e-3)


LLAMA = ("--config", "llama-3.1-8b", "--model.layers", "4", "--train.accumulation", "1", "--parallel.overlap")


@pytest.mark.long
@needed
@pytest.mark.parametrize("overlap", ["false", "true"])
def test_fsdp_on_eight_gpus(overlap: str) -> None:
    """Gradients are reduce-scattered in float32, weights gathered in bfloat16, most of both overlapped with matrix
    products, both by XLA's default schedule and with pipelined collectives."""
    found = compiled(*LLAMA, overlap, "--mesh", "8x1")
    program = found["compiled"]
    assert program["platform"] == "gpu"
    assert {kind: program["memory"][kind] for kind in ("parameters", "optimizer_state")} == {
        kind: found["memory"][kind] for kind in ("parameters", "optimizer_state")
    }
    assert program["traffic"] == pytest.approx(found["least_bytes"], rel=1e-3)
    of_blocks = [o for o in program["overlaps"] if o["looped"]]
    assert {(o["op"], o["dtype"]) for o in of_blocks} == {("all-gather", "bf16"), ("reduce-scatter", "f32")}
    hidden = [o for o in of_blocks if o["products"]]
    assert {o["op"] for o in hidden} == {"all-gather", "reduce-scatter"} and len(hidden) > len(of_blocks) / 2


@pytest.mark.long
@needed
def test_gradients_of_another_dtype_are_found() -> None:
    program = compiled(*LLAMA, "false", "--mesh", "8x1", "--precision.reduce", "bfloat16")["compiled"]
    assert ("reduce-scatter", "bf16") in {(o["op"], o["dtype"]) for o in program["overlaps"] if o["looped"]}


@pytest.mark.long
@needed
@pytest.mark.parametrize(("reduce", "dtype"), [("float32", "f32"), ("bfloat16", "bf16")])
def test_two_machines(reduce: str, dtype: str) -> None:
    """Gradients are reduce-scattered within a machine and summed between machines in the requested dtype; no collective
    of the blocks is awaited at once."""
    program = compiled(*LLAMA, "false", "--mesh", "data=2,fsdp=8", "--precision.reduce", reduce)["compiled"]
    of_blocks = [o for o in program["overlaps"] if o["looped"]]
    assert {(o["op"], o["dtype"]) for o in of_blocks} == {("all-gather", "bf16"), ("reduce-scatter", dtype)}
    assert all(o["beside"] for o in of_blocks)
    assert ("all-reduce", dtype) in {(o["op"], o["dtype"]) for o in program["overlaps"]}
