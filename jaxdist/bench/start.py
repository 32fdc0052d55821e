"""Time to the first step: what it goes into, what the cache of compiled programs saves, and how compiling grows.

All of the default config, read from `start_seconds` and `compile_seconds` of summary.json.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.bench.effort import Bench
from jaxdist.bench.figures import Figure, Goal, ratios
from jaxdist.bench.runs import Run, train

FLAT = Goal("at most", 1.3)
SHALLOW, DEEP = 4, 64  # layers
STAGES = ("imports", "config", "devices", "data", "initialize", "trace", "compile", "first step")
KINDS = ("cold", "warm")


def starts(bench: Bench) -> Iterator[Figure]:
    """A start that compiles and one that loads, in pairs; seconds of each stage of both."""
    mesh = "1x1" if bench.device == "gpu" else "2x4"
    seconds: dict[str, list[dict[str, float]]] = defaultdict(list)
    for pair in range(bench.effort.starts):
        own = bench.folder / f"start-{pair}"  # with a cache of its own, empty at first
        for kind in KINDS:
            bench.say(f"{kind} start on {mesh}, pair {pair + 1} of {bench.effort.starts}")
            found = once(bench, ["--mesh", mesh], own / kind)
            seconds[kind].append(found.summary["start_seconds"])
    cold, warm = ([sum(run.values()) for run in seconds[kind]] for kind in KINDS)
    yield Figure("cold start over warm start", ratios(cold, warm), goal=Goal("at least", 3.0))
    for stage in STAGES:
        for kind, runs in seconds.items():
            yield Figure(f"{kind}: {stage}", tuple(run[stage] for run in runs), "s")


def stages(figures: Sequence[Figure]) -> dict[str, tuple[Figure, ...]]:
    """Seconds of each stage in both kinds of start, where both are known."""
    found = {figure.name: figure for figure in figures}
    both = {stage: [f"{kind}: {stage}" for kind in KINDS] for stage in STAGES}
    return {stage: tuple(found[n] for n in names) for stage, names in both.items() if found.keys() >= {*names}}


def compiles(bench: Bench) -> Iterator[Figure]:
    """Seconds to trace and compile: of many layers over a few, of several devices over one."""
    lines = {f"{SHALLOW} layers": ["--mesh", "1x1"], f"{DEEP} layers": ["--mesh", "1x1", "--model.layers", str(DEEP)]}
    if bench.device != "gpu":
        lines |= {f"{n} devices": ["--mesh", f"{n}x1"] for n in (2, 4, 8)}
    seconds: dict[str, list[float]] = defaultdict(list)
    for turn in range(bench.effort.compiles):
        for name, line in lines.items() if turn % 2 == 0 else reversed(lines.items()):
            bench.say(f"compiling {name}, turn {turn + 1} of {bench.effort.compiles}")
            own = bench.folder / f"compile-{turn}" / name.replace(" ", "") / "run"
            seconds[name].append(once(bench, line, own).summary["compile_seconds"])
    few, *others = seconds
    for name in others:
        against = few if "layers" in name else "1 device"
        beside = {f"{n}, s": statistics.median(seconds[n]) for n in (few, name)}
        yield Figure(f"{name} over {against}", ratios(seconds[name], seconds[few]), goal=FLAT, beside=beside)


def once(bench: Bench, line: list[str], output: Path) -> Run:
    """A run of one step; what it compiles is kept beside `output`."""
    return train("jaxdist", ["--steps", "1", *bench.on, *line], output)
