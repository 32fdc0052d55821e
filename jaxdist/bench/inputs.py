"""Batches of the default config's data, over the steps that consume them."""

import time
from collections.abc import Iterator

from jaxdist.bench.effort import Bench
from jaxdist.bench.figures import Figure, Goal
from jaxdist.bench.runs import WARM_UP, train
from jaxdist.command_line.arguments import load
from jaxdist.data import dataset_of

BLOCKS, BATCHES, STEPS = 5, 100, 20


def measure(bench: Bench) -> Iterator[Figure]:
    """Number of batches made in the time of a step, in blocks of 100 one after the other."""
    bench.say(f"{STEPS} steps of the default config on one device")
    line = ["--steps", str(WARM_UP + STEPS), "--mesh", "1x1", *bench.on]
    step = train("jaxdist", line, bench.folder / "inputs").step
    experiment = load("default", {})
    dataset, t = dataset_of(experiment), experiment.train
    seconds = []
    for block in range(BLOCKS):
        bench.say(f"{BATCHES} batches, block {block + 1} of {BLOCKS}")
        began = time.perf_counter()
        for number in range(BATCHES):
            dataset.batch(1 + block * BATCHES + number, t.batch, t.seed)
        seconds.append((time.perf_counter() - began) / BATCHES)
    beside = {"a step, ms": 1000 * step, "a batch, ms": 1000 * sorted(seconds)[BLOCKS // 2]}
    yield Figure(
        "batches made during a step", tuple(step / s for s in seconds), goal=Goal("at least", 20), beside=beside
    )
