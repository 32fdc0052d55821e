"""Measured figures with their spread and goal, and the comparison of two results."""

import reprlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from jaxdist.bench.stamp import Stamp
from jaxdist.config import ConfigError

RATIO = "×"
EXACT = "facts"  # the section in which nothing is timed


@dataclass(frozen=True)
class Goal:
    """Goal of a figure's median."""

    side: Literal["at least", "at most"]
    value: FiniteFloat

    def __str__(self) -> str:
        return f"{'≥' if self.side == 'at least' else '≤'} {self.value:g}"


@dataclass(frozen=True)
class Figure:
    """One quantity. `values`: of each pair of runs, one where it is exact; `beside`: medians that it was made of."""

    name: str
    values: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)]
    unit: str = RATIO
    goal: Goal | None = None
    beside: Mapping[str, FiniteFloat] = field(default_factory=dict)

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
    """The value in three digits, as tables show it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    """The ratio of each pair."""
    return tuple(a / b for a, b in zip(above, below, strict=True))


@dataclass(frozen=True)
class Section:
    """The figures of one kind, when and on what they were measured, and what is to be known of them."""

    figures: tuple[Figure, ...]
    stamp: Stamp
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if not self.figures and not self.notes:
            raise ValueError("figures: there are none, and no notes that say why")
        return self


Sections = dict[str, Section]  # by name


def to_json(sections: Sections) -> dict[str, Any]:
    """The JSON of bench.json: the values with their median, minimum and maximum."""
    return {
        name: {
            "stamp": asdict(section.stamp),
            "notes": list(section.notes),
            "figures": [
                asdict(figure) | {"median": figure.median, "low": figure.low, "high": figure.high, "met": figure.met}
                for figure in section.figures
            ],
        }
        for name, section in sections.items()
    }


def read(file: Path, option: str) -> Sections:
    """The sections of a bench.json, which `option` asked for. Raises ConfigError naming the file and the field."""
    fix = "give the bench.json of an earlier --output"
    try:
        return TypeAdapter(Sections).validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; {fix}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        name, value = ".".join(map(str, problem["loc"])) or "all of it", reprlib.repr(problem["input"])
        raise ConfigError(f"{option} {file}: {name} = {value}: {problem['msg']}; {fix}") from None


@dataclass(frozen=True)
class Difference:
    """A figure of two results. `ratio`: median now over median then; `judged`: whether both have a spread, or are
    EXACT; `differs`: no value of one lies among the other's, the only claim that few runs support."""

    section: str
    then: Figure
    now: Figure

    @property
    def ratio(self) -> float:
        return self.now.median / self.then.median if self.then.median else float(self.now.median == 0)

    @property
    def differs(self) -> bool:
        return self.judged and (self.now.low > self.then.high or self.now.high < self.then.low)

    @property
    def judged(self) -> bool:
        return self.section == EXACT or min(len(self.then.values), len(self.now.values)) > 1


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
    return a.stamp.machine == b.stamp.machine
