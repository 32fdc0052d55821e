"""What checkpoints cost a JAX run: `python -m parity_tests.saving --mesh 2x4`.

The default config at ten times its parameters is trained in pairs, saving every 50 steps and never. *Blocked* is the
time that the loop spends in `keep`, over that of all steps from the 51st; *slower* is what a pair shows
besides: writing and checksums take cores from the devices where these are virtual ones. Arguments go to both runs.
"""

import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import track

from jaxdist.config import read_metrics

PAIRS, EVERY, STEPS = 2, 50, 150
TENFOLD = ["--model.dim", "416", "--model.head_dim", "52", "--model.hidden", "1248"]  # 8.5 million in place of 0.85
BOUND = 0.02


class Cost(NamedTuple):
    """Seconds from the 51st step on: of all, and of them within `keep`."""

    seconds: float
    blocked: float


def train(every: int, output: Path, arguments: list[str]) -> Cost:
    """One run, in a process of its own."""
    from jaxdist import train as jax_train

    keep, spent = jax_train.keep, []

    def timed(program: Any, step: int, *rest: Any) -> None:
        began = time.perf_counter()
        keep(program, step, *rest)
        if EVERY <= step < STEPS:
            spent.append(time.perf_counter() - began)

    jax_train.keep = timed  # type: ignore[assignment]
    line = [*TENFOLD, "--steps", str(STEPS), "--train.validation_batches", "0", "--checkpoint.every", str(every)]
    jax_train.main([*line, "--output", str(output), *arguments])
    steps = [record["step_seconds"] for record in read_metrics(output)[EVERY:]]
    return Cost(sum(steps) + sum(spent), sum(spent))


def main(arguments: list[str]) -> None:
    """Run the pairs and print the shares. Ends with 1 where a run is blocked for longer than the bound."""
    blocked, slower = [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in track(range(1, PAIRS + 1), description="pairs"):
            with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as one:
                saving = one.submit(train, EVERY, Path(folder) / f"saving-{pair}", arguments).result()
                never = one.submit(train, 0, Path(folder) / f"never-{pair}", arguments).result()
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
    main(sys.argv[1:])
