"""Steps of both sides on the same config, in pairs: how many times as fast as torch's JAX's are.

Decoders of two sizes, float32, 2,048 tokens a step. Sides of a row run one after the other, in turned order
each time, so that a machine which slows down meanwhile slows both.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from jaxdist.bench.effort import Bench
from jaxdist.bench.figures import Figure, Goal, ratios
from jaxdist.bench.runs import WARM_UP, Run, train

JAX, EAGER, COMPILED = "JAX", "torch", "torch.compile"
SIDES = {
    JAX: ("jaxdist", []),
    EAGER: ("torch_ref", []),
    COMPILED: ("torch_ref", ["--train.compile", "true"]),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model, and how many of its steps are measured in a run."""

    name: str
    fields: dict[str, int]
    steps: int

    @property
    def arguments(self) -> list[str]:
        fixed = {"data.sequence": 256, "train.batch": 8, "model.vocab": 8192, "train.steps": WARM_UP + self.steps}
        return [text for name, value in (fixed | self.fields).items() for text in (f"--{name}", str(value))]


def decoder(dim: int, layers: int) -> dict[str, int]:
    """Heads of 64 numbers, and an MLP of 8/3 of the width."""
    return {
        "model.dim": dim, "model.layers": layers, "model.heads": dim // 64, "model.kv_heads": dim // 64,
        "model.head_dim": 64, "model.hidden": dim * 8 // 3 // 16 * 16,
    }  # fmt: skip


# Up to five of a run's first steps still find no memory that was used before (bench/LEVERS.md).
SMALL, LARGE = Shape("256 × 4", decoder(256, 4), steps=8), Shape("512 × 8", decoder(512, 8), steps=6)


@dataclass(frozen=True)
class Comparison:
    """A mesh on which sides are compared; `others` with the goal of JAX's pace over theirs."""

    name: str
    arguments: tuple[str, ...]
    others: dict[str, float] = field(default_factory=dict)


ONE = Comparison("one device", ("--mesh", "1x1", "--strategy", "ddp"), {EAGER: 1.0, COMPILED: 1.0})
EIGHT = (
    Comparison("8 devices, ddp", ("--mesh", "8x1", "--strategy", "ddp"), {EAGER: 1.5}),
    Comparison("8 devices, fsdp", ("--mesh", "8x1"), {EAGER: 1.5}),
    Comparison("8 devices, 2x4", ("--mesh", "2x4"), {EAGER: 1.5}),
)


def measure(bench: Bench) -> Iterator[Figure]:
    """JAX's pace over torch's, for each shape and mesh. Without torch there is nothing to compare with."""
    if not bench.torch:
        bench.notes.append("torch is not installed (pip install 'jaxdist[torch]'): its side is left out")
        return
    meshes: tuple[Comparison, ...] = (ONE, *EIGHT)
    if bench.device == "gpu":
        bench.notes.append("rows of 8 devices are left out: on GPUs one is compared with one")
        meshes = (ONE,)
    effort = bench.effort
    for shape, one, eight in ((SMALL, effort.pairs, effort.pairs), (LARGE, effort.large, effort.large_mesh)):
        for row in meshes:
            yield from compare(bench, shape, row, one if row is ONE else eight)


def compare(bench: Bench, shape: Shape, row: Comparison, pairs: int) -> Iterator[Figure]:
    """One figure per reference side of a row; empty without pairs."""
    steps: dict[str, list[float]] = defaultdict(list)
    name, line = f"{shape.name}, {row.name}", [*shape.arguments, *row.arguments]
    for side, run in in_turns(bench, name, [JAX, *row.others], pairs, line):
        steps[side].append(run().step)
    for other, goal in row.others.items() if pairs else ():
        beside = {f"{side}, ms a step": 1000 * statistics.median(steps[side]) for side in (JAX, other)}
        ours = ratios(steps[other], steps[JAX])
        yield Figure(f"{name}, against {other}", ours, goal=Goal("at least", goal), beside=beside)


def in_turns(
    bench: Bench, name: str, sides: Sequence[str], pairs: int, line: Sequence[str]
) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Each side of each pair, in turned order each time, and what makes its run. One that is taken out of `sides` has
    no more turns."""
    for pair in range(pairs):
        for side in sides[:: 1 if pair % 2 == 0 else -1]:
            bench.say(f"{name}: {side}, pair {pair + 1} of {pairs}")
            package, own = SIDES[side]
            output = bench.folder / f"{name}-{side}-{pair}".replace(" ", "")
            yield side, partial(train, package, [*line, *bench.on, *own], output)
