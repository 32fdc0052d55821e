"""Traffic of a compiled step over the least by a closed form, and its memory over the sum of its causes.

Traffic is counted in the compiled program, by mesh axis (`jaxdist/accounting/traffic.py`). Memory is the peak that the
compiler reports, over the sum of its causes (`jaxdist/accounting/memory.py`); nothing is run.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxdist.bench.effort import Bench
from jaxdist.bench.figures import Figure, Goal
from jaxdist.bench.runs import apart

TRAFFIC, MEMORY = Goal("at most", 1.02), Goal("at most", 1.10)
MIXTURE = {"model": {"family": "mixtral", "layers": 4, "dim": 128, "heads": 8, "kv_heads": 4, "head_dim": 16,
                     "hidden": 384, "vocab": 256, "experts": 8, "top_k": 2}}  # fmt: skip
# The default config on 8 devices; each section states its own changes.
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"parallel": {"mesh": "8x1", "strategy": "ddp"}},
    "zero1": {"parallel": {"mesh": "8x1", "strategy": "zero1"}},
    "zero2": {"parallel": {"mesh": "8x1", "strategy": "zero2"}},
    "fsdp": {"parallel": {"mesh": "8x1"}},
    "fsdp, two microbatches": {"parallel": {"mesh": "8x1"}, "train": {"accumulation": 2}},
    "fsdp, kept after forward": {"parallel": {"mesh": "8x1", "reshard_after_forward": False}},
    "fsdp in replicas": {"parallel": {"mesh": "data=2,fsdp=4"}},
    "fsdp, remat full": {"parallel": {"mesh": "8x1"}, "memory": {"remat": "full"}},
    "2x4": {"parallel": {"mesh": "2x4"}},
    "2x4, sequence": {"parallel": {"mesh": "2x4", "sequence": True}},
    "context, ring": {"parallel": {"mesh": "fsdp=2,context=4"}},
    "context, ulysses": {"parallel": {"mesh": "fsdp=2,context=4", "context": "ulysses"}},
    "pipeline": {"parallel": {"mesh": "pipeline=4,fsdp=2"}, "train": {"accumulation": 8}},
    "experts": MIXTURE | {"parallel": {"mesh": "expert=4,fsdp=2"}},
}
FIRST = ("ddp", "fsdp", "2x4")  # which show the most in the least time


class Ratios(NamedTuple):
    """Over the closed form: bytes sent, over all axes or over the one that is furthest from it, and the peak."""

    traffic: float
    memory: float
    peak: float
    """Bytes."""


def measure(bench: Bench) -> Iterator[Figure]:
    """Both ratios of every row."""
    with apart(JAX_NUM_CPU_DEVICES="8", JAX_PLATFORMS="cpu") as call:
        for name in ROWS if bench.effort.every_row else FIRST:
            bench.say(f"compiling {name}")
            yield from figures(name, call(row_ratios, name))


def figures(name: str, found: Ratios) -> Iterator[Figure]:
    """Figures of one row."""
    yield Figure(f"traffic, {name}", (found.traffic,), goal=TRAFFIC)
    yield Figure(f"memory, {name}", (found.memory,), goal=MEMORY, beside={"peak, MB": found.peak / 1e6})


def rows(figures: Sequence[Figure]) -> dict[str, tuple[Figure, Figure]]:
    """Ratios of traffic and of memory by row, where both are known."""
    found = {figure.name: figure for figure in figures}
    names = (name.removeprefix("traffic, ") for name in found if name.startswith("traffic, "))
    return {n: (found[f"traffic, {n}"], found[f"memory, {n}"]) for n in names if f"memory, {n}" in found}


def row_ratios(name: str) -> Ratios:
    """Compile a row on 8 virtual devices, and compare. Raises KeyError for no row."""
    from jaxdist.accounting.forms import least_bytes
    from jaxdist.command_line.arguments import load
    from jaxdist.config.experiment import Experiment
    from jaxdist.planner.compiled import compile_plan
    from jaxdist.planner.plans import footprint, param_specs

    values = load("default", {}).model_dump(exclude_none=True)
    for section, fields in ROWS[name].items():
        values[section] = fields if section == "model" else values[section] | fields
    e = Experiment.parse(values, source=f"row {name}")
    mesh, declared = e.parallel.axes(), param_specs(e.model)
    compiled = compile_plan(e)
    least = {axis: size for axis, size in (least_bytes(e, declared, mesh) or {}).items() if size}
    sent = [compiled.traffic.get(axis, 0.0) / size for axis, size in least.items()]
    return Ratios(
        max(sum(compiled.traffic.values()) / sum(least.values()), *sent),
        compiled.memory["peak"] / footprint(e, mesh).total,
        compiled.memory["peak"],
    )
