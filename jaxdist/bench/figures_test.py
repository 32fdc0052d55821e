"""Medians, spreads, goals, and comparisons of two results."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxdist.bench.figures import EXACT, Difference, Figure, Goal, Section, compare, ratios, read, to_json
from jaxdist.bench.stamp import Machine, Stamp
from jaxdist.config import ConfigError

HERE, ELSEWHERE = (Stamp(Machine(2, cpu, 2**30, (), "cpu", {}), "2026-01-02", 0.1, "") for cpu in "ab")


def test_a_figure_has_a_median_and_a_spread() -> None:
    figure = Figure("pace", (1.3, 1.1, 2.0))
    assert (figure.median, figure.low, figure.high) == (1.3, 1.1, 2.0) and str(figure) == "1.3 (1.1 to 2)"
    assert str(Figure("start", (2.0,), "s")) == "2 s"


@pytest.mark.parametrize(
    ("goal", "values", "met"),
    [
        (Goal("at least", 1.5), (1.4, 1.5, 9.0), True),
        (Goal("at least", 1.5), (1.4, 1.49, 9.0), False),
        (Goal("at most", 1.02), (1.02,), True),
        (Goal("at most", 1.02), (1.0202,), False),
        (None, (1.0,), None),
    ],
)
def test_the_median_is_held_to_a_goal(goal: Goal | None, values: tuple[float, ...], met: bool | None) -> None:
    assert Figure("x", values, goal=goal).met is met


def test_pairs_are_divided_one_by_one() -> None:
    assert ratios([2, 9], [1, 3]) == (2, 3)
    with pytest.raises(ValueError):
        ratios([1], [1, 2])


def test_only_figures_beyond_their_spread_differ() -> None:
    apart = Difference("pace", Figure("x", (1.0, 1.2)), Figure("x", (1.3, 1.5)))
    among = Difference("pace", Figure("x", (1.0, 1.4)), Figure("x", (1.3, 1.5)))
    assert apart.differs and not among.differs and apart.ratio == pytest.approx(1.4 / 1.1)
    for section, differs in ("start", False), (EXACT, True):  # one run has no spread
        assert Difference(section, Figure("x", (1.0,)), Figure("x", (1.001,))).differs is differs


def test_seconds_of_another_machine_are_not_compared() -> None:
    figures = Figure("cold", (3.0,), "s"), Figure("cold over warm", (3.0,)), Figure("now alone", (3.0,))

    def compared(stamp: Stamp) -> list[str]:
        now = {"start": Section(figures, HERE), "pace": Section((), HERE, ("left out",))}
        return [d.now.name for d in compare({"start": Section(figures[:2], stamp)}, now)]

    assert compared(HERE) == ["cold", "cold over warm"] and compared(ELSEWHERE) == ["cold over warm"]


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    figure = Figure("x", (1.0, 2.0), "s", Goal("at most", 3.0), {"a, ms": 4.0})
    sections = {"pace": Section((figure, Figure("y", (5.0,))), HERE, ("a note",))}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(to_json(sections)))
    assert read(file, "--compare") == sections


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("stamp",), {}, r"pace.stamp.machine = {}: Field required"),
        (
            ("stamp", "machine", "memory"),
            "much",
            r"pace.stamp.machine.memory = 'much': Input should be a valid integer",
        ),
        (("figures",), [], r"pace = .*: there are none, and no notes"),
        (("figures", 0, "values"), [], r"pace.figures.0.values = \[\]: .* at least 1 item"),
        (("figures", 0, "goal", "side"), "near", r"pace.figures.0.goal.side = 'near': .*'at least' or 'at most'"),
    ],
)
def test_an_invalid_field_is_named(path: tuple[str | int, ...], value: Any, message: str, tmp_path: Path) -> None:
    section = to_json({"pace": Section((Figure("x", (1.0,), goal=Goal("at most", 3.0)),), HERE)})
    table: Any = section["pace"]
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    (file := tmp_path / "bench.json").write_text(json.dumps(section))
    with pytest.raises(
        ConfigError, match=rf"^--compare {file}: {message}.*; give the bench.json of an earlier --output$"
    ):
        read(file, "--compare")


@pytest.mark.parametrize("text", ["", "[]", '{"pace": 3}', '{"pace": {"figures": [{}]}}', "{" * 9999, "\xff"])
def test_other_files_than_results_are_refused(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "bench.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"^--compare .*bench.json: .* = .*give the bench.json"):
        read(file, "--compare")
    with pytest.raises(ConfigError, match=r"No such file.*give the bench.json"):
        read(tmp_path / "other.json", "--compare")
