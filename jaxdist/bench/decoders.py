"""Decoders of 1.2 and 7.2 billion parameters on one NVIDIA GPU, in bfloat16: JAX beside torch, and beside the ceiling.

Both sides train the same config on the same tokens, attention by fused kernels of either, torch under `torch.compile`.
The ceiling is what the GPU makes of one large product of bfloat16. FLOPs are those of `flops_per_token`: 6 for each
parameter that multiplies, and causal attention by half of its square; with the full square, as some count
(arXiv:2204.02311), there are more of them. Recomputation is not counted.
Peaks are those of either allocator, torch's within a step, JAX's since the process began.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxdist.bench.effort import Bench
from jaxdist.bench.figures import Figure, Goal, ratios
from jaxdist.bench.pace import COMPILED, JAX, in_turns
from jaxdist.bench.runs import WARM_UP, Run, apart
from jaxdist.bench.stamp import gpus
from jaxdist.command_line.arguments import load
from jaxdist.config import TrainingError
from jaxdist.config.hardware import Hardware, known

Runs = Mapping[str, Sequence[Run]]  # by side, those of one pair at one place

STEPS = 6
PACE, MEMORY, SHARE = Goal("at least", 1.05), Goal("at most", 1.0), Goal("at least", 0.6)
SIZE = 8192  # of the ceiling's matrices
UNKNOWN = "nvidia-smi names no GPU of jaxdist/config/hardware.toml"
# The first that there is room for is taken: with float32 weights where that is, then with the least computed again.
WAYS: tuple[dict[str, Any], ...] = tuple(
    {"precision.policy": policy, "memory.remat": remat}
    for policy in ("bf16", "bf16-true") for remat in ("selective", "full")
)  # fmt: skip
ROOM = 0.8  # of a device's memory, for JAX's peak by the planner: torch takes about a fifth more for the same step


@dataclass(frozen=True)
class Workload:
    """A shipped config, and how many tokens a step has; sequences are as long as `lengths` says, one after another."""

    config: str
    tokens: int
    lengths: Sequence[int] = (4096, 8192)
    share: Goal | None = None


ROWS = (Workload("llama-1b", tokens=16384), Workload("mistral-7b", tokens=8192, share=SHARE))


def measure(bench: Bench) -> Iterator[Figure]:
    """Three figures for each row and length; none without a GPU of known memory."""
    device = None if bench.device == "cpu" else here()
    if device is None:
        bench.notes.append("left out by --device cpu" if bench.device == "cpu" else UNKNOWN)
        return
    bench = replace(bench, device="gpu")  # of both sides: neither is to fall back to CPUs
    with apart(JAX_PLATFORMS="cuda") as call:
        bench.say(f"a product of {SIZE}² matrices")
        ceiling = call(product, SIZE)
    yield Figure("a product of bfloat16", (ceiling / 1e12,), "TFLOP/s")
    for row in ROWS:
        for length in row.lengths:
            yield from compare(bench, row, length, device, ceiling)


def here() -> Hardware | None:
    """This machine's first GPU, if its memory is known."""
    return known(gpus()[0])


def product(size: int, times: int = 50) -> float:
    """FLOP/s of bfloat16 products of two matrices of random numbers, `times` of them begun at once."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
    multiply = jax.jit(jnp.matmul)
    multiply(a, b).block_until_ready()
    began = time.perf_counter()
    jax.block_until_ready([multiply(a, b) for _ in range(times)])
    return 2 * size**3 * times / (time.perf_counter() - began)


def fitting(row: Workload, length: int, device: Hardware) -> dict[str, Any] | None:
    """The fields of the first way in which the planner sees room for a row in a device; None where it does in none."""
    from jaxdist.planner.plans import Plan

    fields = {
        "parallel.mesh": "1x1", "data.sequence": length, "model.window": 0, "optimizer.warmup": 0,
        "train.batch": row.tokens // length, "train.accumulation": 1, "train.steps": WARM_UP + STEPS,
    }  # fmt: skip
    ways = (fields | way for way in WAYS)
    plans = ((way, Plan(load(row.config, way), device)) for way in ways)
    return next((way for way, plan in plans if plan.memory["peak"] < ROOM * device.memory), None)


def compare(bench: Bench, row: Workload, length: int, device: Hardware, ceiling: float) -> Iterator[Figure]:
    """JAX's share of the ceiling, and its pace and peak over torch's; of a side that fails what it says is noted."""
    name = f"{row.config}, T {length}"
    if (fields := fitting(row, length, device)) is None:
        bench.notes.append(f"{name} would leave torch no room on {device.known_as}")
        return
    line = ["--config", row.config, *(text for field, value in fields.items() for text in (f"--{field}", str(value)))]
    runs = defaultdict[str, list[Run]](list)
    sides = [JAX, COMPILED] if bench.torch else [JAX]
    for side, run in in_turns(bench, name, sides, bench.effort.gpu, line):
        try:
            runs[side].append(run())
        except TrainingError as error:
            bench.notes.append(f"{name}: {side}: {str(error).splitlines()[-1]}")
            sides.remove(side)
    name += f", {fields['precision.policy']}, remat {fields['memory.remat']}"
    if JAX in sides:
        yield share(name, row, length, runs[JAX], ceiling)
    if {JAX, COMPILED} <= {*sides}:
        yield beside_torch(
            f"{name}: pace over torch.compile", PACE, runs, lambda run: row.tokens / run.step, "tokens/s"
        )
        yield beside_torch(f"{name}: peak memory over torch's", MEMORY, runs, lambda run: peak(run) / 1e9, "GB")


def share(name: str, row: Workload, length: int, runs: Sequence[Run], ceiling: float) -> Figure:
    """FLOP/s over the ceiling, beside them by either way to count attention."""
    model: Any = load(row.config, {"model.window": 0}).model
    done = row.tokens * runs[0].summary["flops_per_token"]
    square = row.tokens * 12 * model.layers * model.heads * model.head_dim * (length - model.keys(length))
    step = statistics.median(run.step for run in runs)
    beside = {"TFLOP/s": done / step / 1e12, "with the whole square": (done + square) / step / 1e12}
    shares = tuple(done / run.step / ceiling for run in runs)
    return Figure(f"{name}: share of the ceiling", shares, goal=row.share, beside=beside)


def beside_torch(name: str, goal: Goal, runs: Runs, quantity: Callable[[Run], float], unit: str) -> Figure:
    """JAX's quantity over torch's, for each pair."""
    found = {side: [*map(quantity, runs[side])] for side in (JAX, COMPILED)}
    beside = {f"{side}, {unit}": statistics.median(values) for side, values in found.items()}
    return Figure(name, ratios(found[JAX], found[COMPILED]), goal=goal, beside=beside)


def peak(run: Run) -> float:
    """Bytes: the most that the allocator gave out, of a JAX run from its start on."""
    memory = run.summary["memory"]
    return memory.get("allocator_peak", memory["peak"])
