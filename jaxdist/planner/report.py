"""A plan drawn, as one HTML file without scripts or references: memory by mesh, and pace by number of devices."""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from jaxdist.config.parallel import written
from jaxdist.planner.plans import KINDS, Plan
from jaxdist.runs.drawing import STYLE, WIDTH, inline, pages

MOST = 12  # bars of a figure
COLOURS = ("#0b3d78", "#1f5fa8", "#c2571a", "#7a9e3f", "#5f8fc9", "#b48a2f", "#8c959f")
LINES = (("o", "-"), ("s", "--"), ("^", "-."), ("D", ":"), ("v", "-"))


def write(folder: Path, plans: Sequence[Plan], title: str, notes: Sequence[str]) -> Path:
    """Write plan.html: the memory of `plans`, the first of which is drawn over numbers of devices too."""
    page = (
        pages(Path(__file__).parent)
        .get_template("plan.html.j2")
        .render(title=title, notes=notes, memory=memory(plans[:MOST]), scaling=scaling(plans[0]), plans=plans[:MOST])
    )
    folder.mkdir(parents=True, exist_ok=True)
    (file := folder / "plan.html").write_text(page, encoding="utf-8")
    return file


def name_of(plan: Plan) -> str:
    e = plan.experiment
    return f"{written(plan.mesh)} {e.parallel.strategy}, {e.memory.remat}, {e.train.accumulation}"


def memory(plans: Sequence[Plan]) -> Markup:
    """A bar for each plan, by category, and the line that it must stay below."""
    kinds = ("parameters", "optimizer_state", *KINDS)
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH * 1.5, 1.3 + 0.32 * len(plans)), layout="constrained")
        axes = figure.subplots()
        left = np.zeros(len(plans))
        for kind, colour in zip(kinds, COLOURS, strict=True):
            sizes = np.array([plan.memory[kind] / 1e9 for plan in plans])
            axes.barh(range(len(plans)), sizes, left=left, color=colour, height=0.7, label=kind.replace("_", " "))
            left += sizes
        axes.axvline(plans[0].room / 1e9, color="#b42318", linewidth=1.4)
        axes.set_yticks(range(len(plans)), [name_of(plan) for plan in plans])
        axes.invert_yaxis()
        axes.set_xlabel("GB of a device; the red line is its limit")
        axes.tick_params(length=0)
        figure.legend(loc="outside upper left", ncols=4, handlelength=1)
        return inline(figure, "memory", "Memory of a device by mesh")


def scaling(plan: Plan) -> Markup:
    """Pace of a device over the number of devices, as many rows of the batch to each, as a share of the best."""
    group = min(plan.hardware.group, 8)
    ways = {
        "ddp": lambda n: ("ddp", {"data": n}),
        "zero1": lambda n: ("zero1", {"fsdp": n}),
        "fsdp": lambda n: ("fsdp", {"fsdp": n}),
        f"fsdp = {group}, replicated": lambda n: ("fsdp", {"data": max(1, n // group), "fsdp": min(n, group)}),
        f"fsdp, tensor = {group}": lambda n: ("fsdp", {"fsdp": max(1, n // group), "tensor": min(n, group)}),
    }
    counts = [2**k for k in range(0, 13)]
    paces = {name: [pace(plan, *way(n)) for n in counts] for name, way in ways.items()}
    best = max(filter(math.isfinite, (p for row in paces.values() for p in row)), default=math.nan)
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH * 1.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for (name, row), (marker, line), colour in zip(paces.items(), LINES, COLOURS, strict=False):
            axes.plot(
                counts, np.array(row) / best, marker=marker, linestyle=line, color=colour, markersize=4, label=name
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [f"{n:,}" for n in counts])
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("devices")
        axes.set_ylabel("pace of a device, the best being 1")
        axes.grid(axis="y")
        axes.tick_params(length=0)
        figure.legend(loc="outside upper left", ncols=3, handlelength=2.4)
        return inline(figure, "scaling", "Scaling efficiency by strategy")


def pace(plan: Plan, strategy: str, axes: dict[str, int]) -> float:
    """Tokens a second of a device, whether or not it has the memory; NaN where the mesh cannot be."""
    e = plan.experiment
    rows = max(1, e.train.batch // plan.devices) * e.train.accumulation
    mesh = written(axes)
    other = plan.if_valid(
        parallel__mesh=mesh, parallel__strategy=strategy if mesh != "1x1" else "fsdp",
        parallel__reshard_after_forward=True, parallel__reduce="auto", train__batch=rows * math.prod(axes.values()),
    )  # fmt: skip
    return other.tokens_per_second / other.devices if other else math.nan
