"""What is measured: figures with their spread and their goal, and how two results compare."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxdist.config import ConfigError

RATIO = "×"


@dataclass(frozen=True)
class Goal:
    """What a figure's median is to be."""

    side: Literal["at least", "at most"]
    value: float

    def __str__(self) -> str:
        return f"{'≥' if self.side == 'at least' else '≤'} {self.value:g}"


@dataclass(frozen=True)
class Figure:
    """One quantity. `values`: of each pair of runs, one where it is exact; `beside`: medians that it was made of."""

    name: str
    values: tuple[float, ...]
    unit: str = RATIO
    goal: Goal | None = None
    beside: Mapping[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median is as the goal asks; None without one."""
        if self.goal is None:
            return None
        reached, value = round(self.median, 4), self.goal.value
        return reached >= value if self.goal.side == "at least" else reached <= value

    def __str__(self) -> str:
        unit = "" if self.unit == RATIO else f" {self.unit}"
        if len(self.values) == 1:
            return f"{number(self.median)}{unit}"
        return f"{number(self.median)}{unit} ({number(self.low)} to {number(self.high)})"


def number(value: float) -> str:
    """As a table shows it, in three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """Of each pair."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


@dataclass(frozen=True)
class Section:
    """The figures of one kind, when and on what they were measured, and what is to be known of them."""

    figures: tuple[Figure, ...]
    stamp: Mapping[str, Any]
    notes: tuple[str, ...] = ()


Sections = dict[str, Section]  # by name


def to_json(sections: Sections) -> dict[str, Any]:
    """As bench.json has it: with median, lowest and highest value beside the values."""
    return {
        name: {
            "stamp": dict(section.stamp),
            "notes": list(section.notes),
            "figures": [
                asdict(figure) | {"median": figure.median, "low": figure.low, "high": figure.high, "met": figure.met}
                for figure in section.figures
            ],
        }
        for name, section in sections.items()
    }


def read(file: Path, option: str) -> Sections:
    """The sections of a bench.json, which `option` asked for. Raises ConfigError."""
    try:
        return {name: _section(values) for name, values in json.loads(file.read_text(encoding="utf-8")).items()}
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; give the bench.json of an earlier --output") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{option} {file}: is no result of jaxdist.bench: {error!r}; give its bench.json") from None


def _section(values: Any) -> Section:
    figures = tuple(
        Figure(
            str(f["name"]),
            tuple(map(float, f["values"])),
            str(f["unit"]),
            Goal(f["goal"]["side"], float(f["goal"]["value"])) if f["goal"] else None,
            {str(name): float(value) for name, value in f["beside"].items()},
        )
        for f in values["figures"]
    )
    if not all(figure.values for figure in figures):
        raise ValueError("a figure has no values")
    return Section(figures, dict(values["stamp"]), tuple(map(str, values["notes"])))


@dataclass(frozen=True)
class Difference:
    """A figure of two results. `ratio`: median now over median then; `differs`: no value of one lies among the
    other's, the only thing that is said of so few runs."""

    section: str
    then: Figure
    now: Figure

    @property
    def ratio(self) -> float:
        return self.now.median / self.then.median if self.then.median else float(self.now.median == 0)

    @property
    def differs(self) -> bool:
        return self.now.low > self.then.high or self.now.high < self.then.low


def compare(then: Sections, now: Sections) -> list[Difference]:
    """The figures that both have. Seconds of another machine are left out: ratios are what may be compared there."""
    found = []
    for name in (name for name in now if name in then):
        alike = same_machine(then[name], now[name])
        earlier = {figure.name: figure for figure in then[name].figures}
        for figure in now[name].figures:
            before = earlier.get(figure.name)
            if before and before.unit == figure.unit and (alike or figure.unit == RATIO):
                found.append(Difference(name, before, figure))
    return found


def same_machine(a: Section, b: Section) -> bool:
    """Whether two sections were measured on machines that say the same of themselves."""
    return a.stamp.get("machine") == b.stamp.get("machine")
