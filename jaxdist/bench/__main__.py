"""Measure what this project promises of its speed, as ratios of runs made one after the other on this machine.

Nothing that is measured is compared with another machine's: JAX with torch, one start with another, a program with the
closed form of what it must send and hold. Other load on the machine falsifies the figures.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.status import Status
from rich.table import Column, Table

from jaxdist.bench import decoders, facts, figures, inputs, pace, readme, saving, start
from jaxdist.bench.effort import DEFAULT, FULL, QUICK, Bench
from jaxdist.bench.figures import Figure, Section, Sections
from jaxdist.bench.stamp import Others, stamp
from jaxdist.command_line.arguments import Parser, user_path
from jaxdist.config import ConfigError, exit_codes
from jaxdist.config.errors import writes_to
from jaxdist.runs import folder as files
from jaxdist.runs.display import aside, console, say
from jaxdist.runs.folder import make

RESULTS, PAGE = "bench.json", "bench.html"
# Each with its title; in the order in which they are measured and shown.
SECTIONS: dict[str, tuple[str, Callable[[Bench], Iterator[Figure]]]] = {
    "facts": ("Bytes sent and memory held, over their closed forms", facts.measure),
    "pace": ("Pace of JAX over that of torch", pace.measure),
    "gpu": ("Decoders on one GPU, against torch and the peak rate of its matrix products", decoders.measure),
    "compile": ("Seconds to compile, over those of a smaller program", start.compiles),
    "start": ("From the command to the first step", start.starts),
    "inputs": ("Batches, over the steps that consume them", inputs.measure),
    "saving": ("Saving every 50 steps, at ten times as many parameters", saving.measure),
}
BUSY = 0.03  # of the machine's time, for others: what is timed is the worse for it


def main(argv: Sequence[str] | None = None) -> None:
    """Arguments -> sections, measured or read -> tables, or with --json one object; files that were asked for."""
    a = arguments(sys.argv[1:] if argv is None else argv)
    kept = known(a.output) if a.output else {}
    earlier = result(a.compare, "--compare") if a.compare else {}
    with aside(a.json):
        found = result(a.results, "--results") if a.results else measured(a, kept)
        found = {name: found[name] for name in SECTIONS if name in found}
        for name, section in found.items():
            show(SECTIONS[name][0], section)
        differences = figures.compare(earlier, found)
        if a.compare:
            show_differences(differences, earlier, found)
        if a.readme:
            if not any(section.figures for section in found.values()):
                raise ConfigError(f"--readme {a.readme}: nothing was measured, its tables stay; leave --readme out")
            with writes_to(f"--readme {a.readme}"):
                readme.write(a.readme, found)
            say(f"written into {a.readme}")
        if a.output:
            write(a.output, found, differences)
    if a.json:
        compared = [vars(d) | {"then": str(d.then), "now": str(d.now), "name": d.now.name, "ratio": d.ratio,
                               "differs": d.differs} for d in differences]  # fmt: skip
        print(json.dumps({"sections": figures.to_json(found), "compared": compared}))


def result(file: Path, option: str) -> Sections:
    """The sections of a result that `option` asked for. Raises ConfigError as `read`, and where none is ours."""
    found = figures.read(file, option)
    if found.keys().isdisjoint(SECTIONS):
        raise ConfigError(
            f"{option} {file}: has none of the sections {', '.join(SECTIONS)}; give the bench.json of an earlier "
            "--output"
        )
    return found


def known(folder: Path) -> Sections:
    """Results of an earlier run in `folder`, which is created. Raises ConfigError if results can't be written there."""
    make(folder, f"--output {folder}")
    found = figures.read(folder / RESULTS, "--output") if (folder / RESULTS).exists() else {}
    return {name: section for name, section in found.items() if name in SECTIONS}  # not those of an older benchmark


def measured(a: Any, kept: Sections) -> Sections:
    """The sections that were asked for, beside those that are `kept`; written one by one, for a run takes a while.

    Raises ConfigError for kept ones of another machine: a page has one.
    """
    here = stamp(a.device)
    for name, section in kept.items():
        if section.stamp.machine != here.machine:
            raise ConfigError(
                f"--output {a.output} has the section {name} of another machine or other versions; give another folder"
            )
    found = dict(kept)
    effort = QUICK if a.quick else FULL if a.full else DEFAULT
    for name in a.only or SECTIONS:
        title, measure = SECTIONS[name]
        with tempfile.TemporaryDirectory(prefix="jaxdist-bench-") as folder, telling(title) as tell:
            bench = Bench(a.device, effort, Path(folder), tell)
            taken, before, others = [], stamp(a.device), Others()
            for figure in measure(bench):
                taken.append(figure)
                say(f"  {figure.name}: {figure}")
        own = replace(before, others=others.share)
        if taken and name != figures.EXACT and (own.others or 0) > BUSY:
            bench.notes.append(f"other processes took {own.others:.0%} of this machine meanwhile")
        if taken or bench.notes:
            found[name] = Section(tuple(taken), own, tuple(bench.notes))
        if a.output:
            write(a.output, found, [])
    return found


class telling:
    """Shows what is being done: a line that is written over on a terminal, else one line after the other."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.status = Status(title, console=console)

    def __enter__(self) -> Callable[[str], None]:
        say(self.title)
        if console.is_terminal:
            self.status.start()
            return self.status.update
        return lambda text: say(f"  {text} ...")

    def __exit__(self, *_: object) -> None:
        self.status.stop()


def show(title: str, section: Section) -> None:
    """A section as a table."""
    table = Table(Column("", overflow="fold"), "median (spread)", "goal", "", title=title, title_justify="left")
    for figure in section.figures:
        beside = ", ".join(f"{name} {figures.number(value)}" for name, value in figure.beside.items())
        goal = "" if figure.goal is None else f"{figure.goal}{'' if figure.met else ', missed'}"
        table.add_row(figure.name, str(figure), goal, beside)
    console.print(table)
    for note in section.notes:
        say(note)


def show_differences(differences: Sequence[figures.Difference], then: Sections, now: Sections) -> None:
    """Changes of figures since an earlier result, and which of them exceed the spread."""
    if any(not figures.same_machine(then[name], now[name]) for name in then.keys() & now.keys()):
        say("measured on another machine or with other versions: seconds are not compared")
    table = Table(Column("", overflow="fold"), "then", "now", "now / then", "", title="compared", title_justify="left")
    for d in differences:
        verdict = "differs by more than the spread" if d.differs else "" if d.judged else "one run, no spread"
        table.add_row(d.now.name, str(d.then), str(d.now), figures.number(d.ratio), verdict)
    console.print(table)
    few = sum(d.differs for d in differences)
    say(f"{few} of {len(differences)} figures differ by more than their spread")


def write(folder: Path, found: Sections, differences: Sequence[figures.Difference]) -> None:
    """bench.json, and the page where there is something to draw with."""
    with writes_to(f"--output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        files.replace(folder / RESULTS, json.dumps(figures.to_json(found), indent=2) + "\n")
        if all(map(find_spec, ("matplotlib", "jinja2"))):
            from jaxdist.bench import page

            titles = {name: title for name, (title, _) in SECTIONS.items()}
            files.replace(folder / PAGE, page.render(found, titles, differences))


def arguments(argv: Sequence[str]) -> Any:
    """The command line. Raises ConfigError."""
    parser = Parser(
        prog="python -m jaxdist.bench",
        usage="%(prog)s [--quick|--full] [--only NAME ...] [--device auto|cpu|gpu] [--output DIR] [--compare FILE]\n"
        "       %(prog)s --results FILE [--readme FILE] [--compare FILE] [--json]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        metavar="NAME",
        help=f"sections to measure: {', '.join(SECTIONS)} (default: all)",
    )
    much = parser.add_mutually_exclusive_group()
    much.add_argument(
        "--quick", action="store_true", help="a few minutes: few pairs of the small shape, no checkpoints"
    )
    much.add_argument(
        "--full", action="store_true", help="more pairs, and the large shape on 8 devices too: takes most of an hour"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="device of both sides (default auto)"
    )
    parser.add_argument(
        "--output",
        type=user_path,
        metavar="DIR",
        help=f"also write {RESULTS} and {PAGE}; keep other sections that are in them",
    )
    parser.add_argument("--results", type=user_path, metavar="FILE", help="report this bench.json, without measuring")
    parser.add_argument("--compare", type=user_path, metavar="FILE", help="an earlier bench.json to compare with")
    parser.add_argument(
        "--readme", type=user_path, metavar="FILE", help="write the tables into this file, between its two comments"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; print everything else to stderr")
    a = parser.parse_args(argv)
    if a.results and (a.only or a.quick or a.full):
        raise ConfigError("--results measures nothing: --only, --quick and --full choose what to measure; give either")
    if a.device == "gpu" and "gpu" in (a.only or ()) and decoders.here() is None:
        raise ConfigError(f"--device gpu: {decoders.UNKNOWN}; use --device cpu, or leave the section gpu out by --only")
    if a.readme:
        readme.check(a.readme)
    return a


if __name__ == "__main__":
    exit_codes(main)
