"""The tables of the README, written between two comments of it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxdist.bench import facts, start
from jaxdist.bench.figures import Figure, Sections, number
from jaxdist.config import ConfigError
from jaxdist.runs import folder as files

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
    files.replace(file, f"{before}{BEGIN}\n\n{block(sections)}\n{END}{after}")


def block(sections: Sections) -> str:
    """The machine, then one or two tables per section, with their notes."""
    parts = ["\n".join(origins(sections)) + "\n"]
    for name, (heading, make) in TABLES.items():
        if name in sections:
            if found := sections[name].figures:
                parts += make(heading, found)
            parts += [f"{heading}: {note}.\n" for note in sections[name].notes]
    return "\n".join([*parts, f"Goals that are missed: {'; '.join(missed(sections)) or 'none'}.\n"])


def missed(sections: Sections) -> Iterator[str]:
    """Figures that are not as their goal asks."""
    for name in (name for name in TABLES if name in sections):
        for figure in sections[name].figures:
            if figure.met is False:
                yield f"{figure.name}, {number(figure.median)} ({figure.goal})"


def origins(sections: Sections) -> Iterator[str]:
    """A line for each machine that was measured, with all commits."""
    for machine in {str(s.stamp.machine): s.stamp.machine for s in sections.values()}.values():
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        commits = sorted({s.stamp.commit for s in sections.values()} - {""})
        days = sorted({s.stamp.date[:10] for s in sections.values()})
        gpus = ", ".join(filter(None, machine.gpus))
        yield (
            f"{machine.cores} cores of {machine.cpu}{f', {gpus}' if gpus else ''}, "
            f"{machine.memory / 2**30:.0f} GiB; {versions};\n{' and '.join(days)}, "
            f"commit {', '.join(commits) or 'unknown'}."
        )


def goal(figure: Figure) -> str:
    """The goal, and whether it was met."""
    return "" if figure.goal is None else str(figure.goal) + ("" if figure.met else " **missed**")


def table(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """In Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def ratio_table(heading: str, figures: Sequence[Figure]) -> Iterator[str]:
    """A row for each; median, and lowest and highest of its pairs."""
    rows = ((f.name, str(f), goal(f), ", ".join(f"{n} {number(v)}" for n, v in f.beside.items())) for f in figures)
    yield table((heading, "median (lowest to highest)", "goal", "measured"), rows)


def fact_table(heading: str, figures: Sequence[Figure]) -> Iterator[str]:
    """Both ratios of a row side by side."""
    rows = ((name, exact(sent), exact(held)) for name, (sent, held) in facts.rows(figures).items())
    yield table((heading, f"sent / least ({facts.TRAFFIC})", f"held / closed form ({facts.MEMORY})"), rows)


def exact(figure: Figure) -> str:
    """A ratio that has no spread."""
    return f"{figure.median:.3f}" + (" **missed**" if figure.met is False else "")


def start_table(heading: str, figures: Sequence[Figure]) -> Iterator[str]:
    """Seconds of each stage, of a start that compiles and one that loads; and their ratio."""
    rows = ((stage, number(cold.median), number(warm.median)) for stage, (cold, warm) in start.stages(figures).items())
    yield table((heading, "cold cache", "warm cache"), rows)
    yield from ratio_table("a second start", [figure for figure in figures if figure.goal])


TABLES: dict[str, tuple[str, Callable[[str, Sequence[Figure]], Iterator[str]]]] = {
    "pace": ("pace of JAX / torch", ratio_table),
    "gpu": ("one GPU", ratio_table),
    "facts": ("default config on 8 devices", fact_table),
    "compile": ("seconds to compile", ratio_table),
    "start": ("seconds to the first step, medians", start_table),
    "inputs": ("input", ratio_table),
    "saving": ("saving every 50 steps, of 8.5 million parameters", ratio_table),
}
