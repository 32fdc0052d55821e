"""The planner against published runs: `python -m parity_tests.validation.published`.

Predictions for their shapes, meshes and devices, beside their measurements. No constant of the planner was fitted to
these runs: its shares of the data sheets' rates are an H200's. The published runs are other programs with kernels of
their own. Two facts are unknown and stated beside: the rate of torchtitan's GPUs, taken as the middle of its possible
range, and the share of communication that these programs overlap, taken as none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Column, Table

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError, exit_codes
from jaxdist.config.hardware import hardware
from jaxdist.planner.plans import Plan
from jaxdist.runs.display import console, say

DEVICES = Path(__file__).parent / "measured"
LLAMA2 = {"model.kv_heads": 32, "model.hidden": 11008, "model.vocab": 32000, "model.rope_scaling": "none",
          "data.sequence": 4096, "model.positions": 4096}  # fmt: skip
TITAN = "https://github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
RATES = (835e12, 989e12)  # bounds stated by torchtitan for its GPUs: those of an H100 NVL and SXM
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext, src/maxtext/configs/gpu/a3/llama_2_7b/README.md"
TOKENS, TFLOPS = "tokens/s", "TFLOP/s"


class Run(NamedTuple):
    """A published run: its measurement per device in tokens/s or TFLOP/s, and GiB of memory if stated."""

    name: str
    source: str
    device: str
    fields: dict[str, Any]
    pace: float
    unit: str
    memory: float | None = None


def runs() -> Iterator[Run]:
    """torchtitan's Llama 3.1 8B under FSDP2 and torch.compile, local batch 2; MaxText's Llama 2 7B, four sequences per
    device, sharded within machines and replicated between them."""
    for devices, tokens, memory in ((8, 6667, 77.0), (128, 6514, 62.0)):
        fields = {"parallel.mesh": f"{devices}x1", "train.batch": 2 * devices}
        yield Run(f"Llama 3.1 8B, {devices} GPUs", TITAN, "h100-500w.toml", fields, tokens, TOKENS, memory)
    for machines, flops in ((1, 492), (2, 422), (4, 407), (8, 409), (16, 375)):
        fields = LLAMA2 | {"parallel.mesh": f"data={machines},fsdp=8", "train.batch": 32 * machines}
        yield Run(f"Llama 2 7B, {8 * machines} GPUs", MAXTEXT, "h100-a3.toml", fields, flops, TFLOPS)


def planned(run: Run, overlap: bool = False, rate: float | None = None) -> tuple[Plan, float]:
    """The plan, and its pace per device in the run's unit; FLOPs count the full square of attention. `rate`:
    bfloat16's, if it differs from the hardware file's."""
    device = hardware(str(DEVICES / run.device))
    if rate:
        device = device.model_copy(update={"flops": {**device.flops, "bfloat16": rate}})
    fields = {"train.accumulation": 1, "parallel.overlap": overlap} | run.fields
    plan = Plan(load("llama-3.1-8b", fields), device)
    m, tokens = plan.experiment.model, plan.tokens_per_second / plan.devices
    square = 6.0 * m.layers * m.heads * m.head_dim * plan.experiment.data.sequence  # type: ignore[attr-defined]
    return plan, tokens if run.unit == TOKENS else tokens * (plan.flops_per_token + square) / 1e12


def ratio(run: Run, overlap: bool = False, rate: float | None = None) -> float:
    """Planned pace over the measured one."""
    return planned(run, overlap, rate)[1] / run.pace


def main() -> None:
    if not DEVICES.is_dir():
        raise ConfigError(f"{DEVICES}: measured figures are not installed; run this from a clone of the repository")
    names = ("measured", "planned", "ratio", "overlapped", "GiB", "planned")
    table = Table("run", *(Column(name, no_wrap=True) for name in names))
    for run in runs():
        plan, pace = planned(run)
        table.add_row(
            run.name, f"{run.pace:,.0f} {run.unit}", f"{pace:,.0f}", f"{pace / run.pace:.2f}",
            f"{ratio(run, overlap=True):.2f}",
            f"{run.memory:.1f}" if run.memory else "", f"{plan.memory['peak'] / 2**30:.1f}" if run.memory else "",
        )  # fmt: skip
    console.print(table)
    for run in runs():
        if run.source == TITAN:
            least, most = (f"{ratio(run, rate=rate):.2f}" for rate in RATES)
            say(f"{run.name}: {least} to {most} for rates from {RATES[0] / 1e12:.0f} to {RATES[1] / 1e12:.0f} TFLOP/s")
    for source in (TITAN, MAXTEXT):
        say(source)


if __name__ == "__main__":
    exit_codes(main)
