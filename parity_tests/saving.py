"""What checkpoints cost a JAX run: `python -m parity_tests.saving --mesh 2x4`.

The default config at ten times its parameters is trained in pairs, saving every 50 steps and never. *Blocked* is the
time that the loop spends in `keep`, over that of all steps from the 51st; *slower* is what a pair shows
besides: writing and checksums take cores from the devices where these are virtual ones. Arguments go to both runs, but
for steps, saves and output, which are its own.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from jaxdist.config import exit_codes, parse, read_metrics

PROGRAM = "parity_tests.saving"
PAIRS, EVERY, STEPS = 2, 50, 150
TENFOLD = ["--model.dim", "416", "--model.head_dim", "52", "--model.hidden", "1248"]  # 8.5 million in place of 0.85
BOUND = 0.02


class Cost(NamedTuple):
    """Seconds from the 51st step on: of all, and of them within `keep`."""

    seconds: float
    blocked: float


def command(arguments: Sequence[str], every: int, output: Path) -> list[str]:
    """The command line of a run that saves `every` so many steps."""
    ours = ["--steps", str(STEPS), "--train.validation_batches", "0", "--checkpoint.every", str(every)]
    return [*TENFOLD, *arguments, *ours, "--output", str(output)]


def train(line: Sequence[str], start: int) -> Cost:
    """One run, in a process of its own; what it costs after the step `start`."""
    from jaxdist import train as jax_train

    keep, spent = jax_train.keep, dict[int, float]()

    def timed(program: Any, step: int, *rest: Any) -> None:
        began = time.perf_counter()
        keep(program, step, *rest)
        spent[step] = time.perf_counter() - began

    jax_train.keep = timed  # type: ignore[assignment]
    arguments = parse(line, PROGRAM, __doc__)
    jax_train.main(line)
    assert arguments.output
    steps = [record["step_seconds"] for record in read_metrics(arguments.output)[start:]]
    blocked = sum(seconds for step, seconds in spent.items() if start <= step < arguments.experiment.train.steps)
    return Cost(sum(steps) + blocked, blocked)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the pairs and print the shares. Ends with 1 where a run is blocked for longer than the bound.

    Raises ConfigError, before the first run where the arguments alone tell."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parse(arguments, PROGRAM, __doc__)
    blocked, slower = [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in track(range(1, PAIRS + 1), description="pairs"):
            with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as one:
                lines = [command(arguments, every, Path(folder) / f"{pair}-{every}") for every in (EVERY, 0)]
                saving, never = (one.submit(train, line, EVERY).result() for line in lines)
            blocked.append(saving.blocked / saving.seconds)
            slower.append(saving.seconds / never.seconds - 1)
            print(f"pair {pair}: blocked {blocked[-1]:.2%} of {saving.seconds:.1f} s, {slower[-1]:+.1%} in all")
    share = statistics.median(blocked)
    print(
        f"median: blocked {share:.2%} (at most {BOUND:.0%}: {share <= BOUND}), {statistics.median(slower):+.1%} in all"
    )
    if share > BOUND:
        sys.exit(1)


if __name__ == "__main__":
    exit_codes(main)
