"""Cost of checkpoints in a JAX run, with ten times the parameters of the default config.

It is trained in pairs, saving every 50 steps and never. *Blocked* is the time that the loop spends in `keep`, over that
of all steps from the 51st; *slower* is what a pair shows besides: writing and checksums take cores from the devices
where these are virtual ones.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.bench.effort import Bench
from jaxdist.bench.figures import Figure, Goal
from jaxdist.bench.runs import apart
from jaxdist.command_line.arguments import parse
from jaxdist.runs.folder import read_metrics

EVERY, STEPS = 50, 150
TENFOLD = ["--model.dim", "416", "--model.head_dim", "52", "--model.hidden", "1248"]  # 8.5 million in place of 0.85
BLOCKED = Goal("at most", 2.0)  # %


class Cost(NamedTuple):
    """Seconds from the 51st step on: of all, and of them within `keep`."""

    seconds: float
    blocked: float


def command(arguments: Sequence[str], every: int, output: Path) -> list[str]:
    """Command line of a run that saves every `every` steps."""
    ours = ["--steps", str(STEPS), "--train.validation_batches", "0", "--checkpoint.every", str(every)]
    return [*TENFOLD, *arguments, *ours, "--output", str(output)]


def train(line: Sequence[str], start: int) -> Cost:
    """One run, in a process of its own; what it costs after the step `start`."""
    from jaxdist import train as jax_train

    keep, spent = jax_train.Run.keep, dict[int, float]()

    def timed(run: jax_train.Run, step: int, state: Any) -> None:
        began = time.perf_counter()
        keep(run, step, state)
        spent[step] = time.perf_counter() - began

    jax_train.Run.keep = timed  # type: ignore[assignment]
    arguments = parse(line, "jaxdist.bench.saving", __doc__)
    jax_train.main(line)
    assert arguments.output
    steps = [record["step_seconds"] for record in read_metrics(arguments.output)[start:]]
    blocked = sum(seconds for step, seconds in spent.items() if start <= step < arguments.experiment.train.steps)
    return Cost(sum(steps) + blocked, blocked)


def measure(bench: Bench) -> Iterator[Figure]:
    """Blocked share of the time, and slowdown by saving, in percent, for each pair."""
    pairs = bench.effort.savings
    mesh = "1x1" if bench.device == "gpu" else "2x4"
    blocked, slower = [], []
    for pair in range(pairs):
        costs = {}
        for every in (EVERY, 0) if pair % 2 == 0 else (0, EVERY):
            bench.say(
                f"{STEPS} steps, {f'saving every {every}' if every else 'never saving'}, pair {pair + 1} of {pairs}"
            )
            line = command(["--mesh", mesh, *bench.on], every, bench.folder / f"saving-{pair}-{every}")
            with apart(XDG_CACHE_HOME=str(bench.folder / "cache")) as call:
                costs[every] = call(train, line, EVERY)
        blocked.append(100 * costs[EVERY].blocked / costs[EVERY].seconds)
        slower.append(100 * (costs[EVERY].seconds / costs[0].seconds - 1))
    if pairs:
        yield Figure("blocked by saving", tuple(blocked), "%", BLOCKED)
        yield Figure("slower than never saving", tuple(slower), "%")
