"""A result drawn, as one HTML file without scripts or references: each ratio with its spread and its goal."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure as Drawing

from jaxdist.bench.figures import RATIO, Difference, Figure, Section, Sections, number
from jaxdist.bench.start import KINDS, STAGES, stages
from jaxdist.runs.drawing import STYLE, WIDTH, inline, pages

MET, MISSED, PLAIN = "#1f5fa8", "#c2571a", "#5f8fc9"
STACK = ("#0b3d78", "#d0d7de", "#8c959f", "#b48a2f", "#7a9e3f", "#5f8fc9", "#1f5fa8", "#c2571a")


def render(sections: Sections, titles: Mapping[str, str], differences: Sequence[Difference]) -> str:
    """The page of `sections`, by whose names the `titles` are."""
    drawn = {name: drawings(name, section, titles[name]) for name, section in sections.items()}
    template = pages(Path(__file__).parent).get_template("bench.html.j2")
    return template.render(sections=sections, titles=titles, drawn=drawn, differences=differences, number=number)


def drawings(name: str, section: Section, title: str) -> list[Markup]:
    """Charts: a row for each figure with a goal, and the stages of a start."""
    aimed = [figure for figure in section.figures if figure.goal]
    found = [spread(name, aimed, title)] if aimed else []
    if name == "start" and stages(section.figures):
        found.append(stacked(section.figures))
    return found


def spread(name: str, figures: Sequence[Figure], title: str) -> Markup:
    """Median and every value of each figure, and its goal as a line across its row."""
    unit = figures[0].unit
    with mpl.rc_context(STYLE):
        drawing = Drawing((WIDTH * 1.6, 0.8 + 0.3 * len(figures)), layout="constrained")
        axes = drawing.subplots()
        for row, figure in enumerate(figures):
            colour = MISSED if figure.met is False else MET
            axes.plot([figure.low, figure.high], [row, row], color=colour, linewidth=2)
            axes.plot(figure.values, [row] * len(figure.values), "|", color=colour, markersize=7)
            axes.plot([figure.median], [row], "o" if figure.met else "D", color=colour, markersize=5)
            if figure.goal:
                axes.plot([figure.goal.value] * 2, [row - 0.4, row + 0.4], color="#1b1f24", linewidth=1)
        axes.set_yticks(range(len(figures)), [figure.name for figure in figures])
        axes.invert_yaxis()
        shown = [x for f in figures for x in (*f.values, f.goal.value if f.goal else f.median)]
        if min(shown) > 0 and max(shown) > 8 * min(shown):
            axes.set_xscale("log")
        else:
            axes.set_xlim(left=0 if min(shown) >= 0 and max(shown) > 1.5 * min(shown) else None)
        axes.set_xlabel(("ratio" if unit == RATIO else unit) + "; the black line is the goal, a diamond misses it")
        axes.grid(axis="x")
        axes.tick_params(length=0)
        return inline(drawing, name, title)


def stacked(figures: Sequence[Figure]) -> Markup:
    """Bars of the two kinds of start, by what their seconds went into."""
    found, colours = stages(figures), dict(zip(STAGES, STACK, strict=True))
    with mpl.rc_context(STYLE):
        drawing = Drawing((WIDTH * 1.6, 1.9), layout="constrained")
        axes = drawing.subplots()
        left = np.zeros(len(KINDS))
        for stage, both in found.items():
            seconds = np.array([figure.median for figure in both])
            axes.barh(KINDS, seconds, left=left, color=colours[stage], height=0.6, label=stage)
            left += seconds
        axes.invert_yaxis()
        axes.set_xlabel("seconds from the command to the end of the first step, medians")
        axes.tick_params(length=0)
        drawing.legend(loc="outside upper left", ncols=4, handlelength=1)
        return inline(drawing, "stages", "Seconds to the first step, by phase")
