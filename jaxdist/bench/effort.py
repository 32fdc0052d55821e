"""Effort of the sections of the benchmark: how much each measures, and where."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Effort:
    """Numbers of repetitions. `large` pairs of the large shape on one device, `large_mesh` on eight, `gpu` of decoders
    that take a GPU of their own."""

    pairs: int
    large: int
    large_mesh: int
    gpu: int
    starts: int
    compiles: int
    savings: int
    every_row: bool


QUICK = Effort(pairs=2, large=0, large_mesh=0, gpu=1, starts=1, compiles=1, savings=0, every_row=False)
DEFAULT = Effort(pairs=3, large=2, large_mesh=0, gpu=2, starts=3, compiles=3, savings=1, every_row=True)
FULL = Effort(pairs=3, large=3, large_mesh=2, gpu=3, starts=5, compiles=7, savings=2, every_row=True)


@dataclass
class Bench:
    """One measurement: on which device, how much of it, a folder for its runs, and `say`, which shows what it does."""

    device: str
    effort: Effort
    folder: Path
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    """Notes on the figures, such as rows that were left out."""

    @property
    def on(self) -> list[str]:
        """Device arguments of both sides."""
        return ["--device", self.device]

    @property
    def torch(self) -> bool:
        """Whether torch is installed; it is not imported here."""
        return find_spec("torch") is not None
