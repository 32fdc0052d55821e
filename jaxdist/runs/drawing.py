"""Style of figures, and their embedding in a page: inline SVG with its own ids and a name for screen readers."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

# Wide enough for two columns on a desk, narrow enough for its text to be read on a phone.
WIDTH = 4.8  # inches
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": "#8c959f",
    "axes.labelcolor": "#424a53",
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": "#e4e8ec",
    "grid.linewidth": 0.8,
    "hatch.color": "#ffffff",
    "hatch.linewidth": 1.2,
    "legend.frameon": False,
    "xtick.color": "#424a53",
    "ytick.color": "#424a53",
}


def pages(folder: Path) -> Environment:
    """The templates of a folder, which may include those beside this file: what is put in is escaped, and what is
    missing is an error."""
    loader = FileSystemLoader([folder, Path(__file__).parent])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def inline(figure: Figure, name: str, label: str) -> Markup:
    """The figure as SVG, its ids begun with `name`."""
    file = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing, transparent=True)
    svg = file.getvalue()
    svg = re.sub(r'(?<= id=")|(?<=href="#)|(?<=url\(#)', f"{name}-", svg[svg.index("<svg") :])
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))
