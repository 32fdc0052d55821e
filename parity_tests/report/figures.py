"""The report's figures as inline SVG: each with ids of its own, a name for screen readers, and the page's own font."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from jaxdist.runs.drawing import STYLE, WIDTH, inline

SIDES = (  # colour, line, hatch: distinguishable without colour too
    ("#1f5fa8", "-", ""),
    ("#c2571a", (0, (3, 2)), "////"),
)
BEYOND = "#b42318"
UNKNOWN = "#d0d7de"
BLUES = ("#eef4fb", "#0b3d78")
MARKED = 60  # a curve of more steps is drawn without a marker for each
FLAT = 0.01  # no axis of a curve spans less than this share of its values
TICKS = 8  # powers of ten on the scale, so that their names keep apart
WRITTEN = 8  # a heat map of more columns is drawn without its numbers
SHADES = 48  # from 50 on the scale would be drawn as an image
EPSILON = 1e-17  # below the rounding of float64


@dataclass(frozen=True)
class Curve:
    """One side's curve: `values` over `steps`; values that are not finite are left out of the line."""

    side: str
    steps: Sequence[int]
    values: np.ndarray


def short(value: float) -> str:
    """A number in as few characters as show it: 0, 92, 0.05, 7.0e-16, 1e-12."""
    if not np.isfinite(value):
        return "NaN" if np.isnan(value) else "∞" if value > 0 else "−∞"
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.0e}" if value == float(f"{value:.0e}") else f"{value:.1e}"


def brief(side: str) -> str:
    """The end of a long name, which a legend has room for; matplotlib leaves out what begins with an underscore."""
    return (side if len(side) <= 20 else f"…{side[-19:]}").lstrip("_")


def curves(
    name: str, label: str, unit: str, sides: Sequence[Curve], between: Curve, bound: np.ndarray | None
) -> Markup:
    """Both sides' curves above; below, their relative difference per step and the band that it may lie in."""
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 4.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for curve, (colour, line, _) in zip(sides, SIDES, strict=True):
            _line(
                above, curve.steps, curve.values, label=brief(curve.side), color=colour, linestyle=line, linewidth=1.8
            )
        above.set_ylabel(unit)
        above.ticklabel_format(style="plain", useOffset=False)
        low, high = above.get_ylim()
        flat = max(0.0, FLAT * abs(high) - (high - low)) / 2
        above.set_ylim(low - flat, high + flat)
        _difference(below, between, bound)
        below.set_xlabel("step")
        below.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        steps = [step for curve in sides for step in curve.steps]
        if steps:
            below.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
        for axes in (above, below):
            axes.grid(axis="y")
            axes.tick_params(length=0)
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0, handlelength=2)
        return inline(figure, name, label)


def _line(axes: Axes, steps: Sequence[int], values: np.ndarray, **style: Any) -> None:
    marker: dict[str, Any] = {"marker": "o", "markersize": 3.5} if len(steps) <= MARKED else {}
    axes.plot(steps, np.where(np.isfinite(values), values, np.nan), **(marker | style))


def _difference(axes: Axes, between: Curve, bound: np.ndarray | None) -> None:
    """Draw differences on a log scale, zero on the lower edge."""
    steps, values = between.steps, between.values
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"1e{round(np.log10(y)):d}"))
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("relative difference")
    shown = np.concatenate([values, [] if bound is None else bound])
    positive = shown[np.isfinite(shown) & (shown > 0)]
    low, high = (positive.min() / 10, positive.max() * 4) if len(positive) else (EPSILON, 1.0)
    axes.set_ylim(low, high)
    drawn = np.maximum(values, low)
    if bound is not None and len(bound):
        band = np.pad(bound, 1, mode="edge")
        wide = [steps[0] - 0.5, *steps, steps[-1] + 0.5]
        axes.fill_between(wide, low, band, color="#dfeee3", linewidth=0, label="allowed")
        axes.plot(wide, band, color="#2f7d4a", linewidth=1)
        outside = ~(values <= bound) & np.isfinite(values)
        if outside.any():
            at = np.array(steps)[outside]
            axes.plot(at, drawn[outside], "x", color=BEYOND, markersize=9, markeredgewidth=1.8, label="not allowed")
    _line(axes, steps, drawn, label="difference", color="#24292f", linewidth=1.2, clip_on=False)


def heat(
    name: str, label: str, rows: Sequence[str], columns: Sequence[int | str], errors: np.ndarray, bounds: np.ndarray
) -> Markup:
    """Relative errors, rows × columns: log shades of blue, red beyond the column's bound, grey for NaN.

    Columns that are numbers are steps.
    """
    blues = LinearSegmentedColormap.from_list("blues", BLUES, SHADES)
    colours = blues.with_extremes(bad=UNKNOWN, over=BEYOND, under="#ffffff")
    low, high = float(np.log10(EPSILON)), float(np.log10(bounds.max()))
    scale = Normalize(low, high)
    beyond, written = errors > bounds, len(columns) <= WRITTEN
    shades = np.ma.masked_invalid(np.log10(np.maximum(errors, EPSILON / 10)))
    shades[beyond & np.isfinite(errors)] = high + 1
    height = 0.27 if len(rows) <= 16 else 0.14
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, height * len(rows) + 1.3), layout="constrained")
        axes = figure.subplots()
        mesh = axes.pcolormesh(shades, cmap=colours, norm=scale, edgecolors="#ffffff", linewidth=1)
        axes.invert_yaxis()
        every = 1 + len(rows) // 40
        axes.set_yticks(np.arange(0, len(rows), every) + 0.5, rows[::every])
        every = 1 + len(columns) // 12
        axes.set_xticks(np.arange(0, len(columns), every) + 0.5, [str(column) for column in columns[::every]])
        if all(isinstance(column, int) for column in columns):
            axes.set_xlabel("step")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for (i, j), error in np.ndenumerate(errors):
            if written or beyond[i, j]:
                text = "∞" if error == np.inf else "×" if not written else f"{error:.0e}" if error else "0"
                dark = error < np.inf and scale(shades[i, j]) > 0.55
                colour = "#ffffff" if dark else "#24292f"
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center_baseline", size=8.5, color=colour)
        ticks = np.arange(np.ceil(low), high + 0.5, 1 + (high - low) // TICKS)
        bar = figure.colorbar(mesh, ax=axes, location="bottom", extend="max", aspect=30, shrink=0.9, ticks=ticks)
        bar.solids.set_edgecolor("face")  # type: ignore[union-attr]  # no seams between the shades
        bar.ax.set_xticklabels([f"1e{tick:.0f}" for tick in ticks])
        bar.ax.tick_params(length=0, labelsize=8.5)
        bar.outline.set_visible(False)  # type: ignore[operator]
        limit = "its step's bound" if len(set(bounds)) > 1 else f"the bound of {short(bounds[0])}"
        bar.set_label(f"relative error; red: beyond {limit}")
        return inline(figure, name, label)


def bars(name: str, label: str, sides: Sequence[str], rows: Mapping[str, Sequence[float | None]], unit: str) -> Markup:
    """Each row's value on both sides, one bar below the other, with its number at its end."""
    most = max((value for values in rows.values() for value in values if value is not None), default=0) or 1
    with mpl.rc_context(STYLE):
        figure = Figure((WIDTH, 0.55 * len(rows) + 0.7), layout="constrained")
        axes = figure.subplots()
        for side, (colour, _, hatch) in enumerate(SIDES):
            values = [row[side] for row in rows.values()]
            places = np.arange(len(rows)) + 0.4 * side - 0.2
            widths = [value or 0 for value in values]
            axes.barh(places, widths, height=0.36, color=colour, hatch=hatch, label=brief(sides[side]))
            for place, value in zip(places, values, strict=True):
                text = "not reported" if value is None else f"{digits(value)} {unit}"
                axes.text((value or 0) + most / 80, place, text, va="center_baseline", size=8.5, color="#24292f")
        axes.set_xlim(0, most * 1.3)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.xaxis.set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
        return inline(figure, name, label)


def digits(value: float) -> str:
    """Three digits that matter, or all before the point."""
    return f"{value:,.{max(0, 2 - int(np.floor(np.log10(value)))) if value > 0 else 0}f}"
