"""The tables of the README, written between two comments of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.bench.figures import Figure, Section, Sections, number
from jaxdist.bench.start import STAGES
from jaxdist.config import ConfigError
from jaxdist.config.folder import replace

BEGIN, END = "<!-- written by python -m jaxdist.bench -->", "<!-- to here -->"


def check(file: Path) -> None:
    """Raises ConfigError where there is no place for the tables."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--readme {file}: {error}; give a file that can be read") from None
    if not 0 <= text.find(BEGIN) < text.find(END) or text.count(BEGIN) + text.count(END) != 2:
        raise ConfigError(
            f"--readme {file}: the tables go between the lines {BEGIN!r} and {END!r}; write them there once"
        )


def write(file: Path, sections: Sections) -> None:
    """Put the tables of `sections` in place of what is there. Raises OSError."""
    before, _, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    replace(file, f"{before}{BEGIN}\n\n{block(sections)}\n{END}{after}")


def block(sections: Sections) -> str:
    """All tables, each below what it was measured on."""
    parts = [part for name, make in TABLES.items() if name in sections for part in make(sections[name])]
    measured = "\n".join(origins(sections))
    return "\n".join([measured, "", *parts])


def origins(sections: Sections) -> Iterator[str]:
    """On what it was measured; of several machines each, of several commits all."""
    for machine in {str(s.stamp["machine"]): s.stamp["machine"] for s in sections.values()}.values():
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        commits = sorted({str(s.stamp["commit"]) for s in sections.values()} - {""})
        days = sorted({str(s.stamp["date"])[:10] for s in sections.values()})
        gpus = ", ".join(filter(None, machine["gpus"]))
        yield (
            f"{machine['cores']} cores of {machine['cpu']}{f', {gpus}' if gpus else ''}, "
            f"{machine['memory'] / 2**30:.0f} GiB; {versions};\n{' and '.join(days)}, "
            f"commit {', '.join(commits) or 'unknown'}."
        )


def goal(figure: Figure) -> str:
    """What was to be reached, and whether it was."""
    return "" if figure.goal is None else str(figure.goal) + ("" if figure.met else " **missed**")


def table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def of_ratios(section: Section) -> Iterator[str]:
    """A row for each figure; median, and lowest and highest of its pairs."""
    rows = (
        (f.name, str(f), goal(f), ", ".join(f"{n} {number(v)}" for n, v in f.beside.items())) for f in section.figures
    )
    yield table(("", "median (lowest to highest)", "goal", "of"), rows)


def of_facts(section: Section) -> Iterator[str]:
    """Both ratios of a row side by side."""
    found = {figure.name: figure for figure in section.figures}
    rows = (
        (name.removeprefix("traffic, "), *cells(f), *cells(found[name.replace("traffic", "memory", 1)]))
        for name, f in found.items()
        if name.startswith("traffic, ")
    )
    goals = [next(f.goal for f in section.figures if f.name.startswith(kind)) for kind in ("traffic", "memory")]
    yield table(("8 devices", *(f"{k} / least ({g})" for k, g in zip(("sent", "held"), goals, strict=True))), rows)


def cells(figure: Figure) -> tuple[str]:
    """An exact ratio."""
    return (f"{figure.median:.3f}" + (" **missed**" if figure.met is False else ""),)


def of_starts(section: Section) -> Iterator[str]:
    """Seconds of each stage, of a start that compiles and one that loads; and their ratio."""
    found = {figure.name: figure for figure in section.figures}
    kinds = ("cold", "warm")
    rows = [(stage, *(number(found[f"{kind}: {stage}"].median) for kind in kinds)) for stage in STAGES]
    yield table(("seconds, medians", "nothing kept", "compiled before"), iter(rows))
    yield from of_ratios(Section(tuple(f for f in section.figures if f.goal), section.stamp))


TABLES = {
    "pace": of_ratios,
    "facts": of_facts,
    "compile": of_ratios,
    "start": of_starts,
    "inputs": of_ratios,
    "saving": of_ratios,
}  # fmt: skip
