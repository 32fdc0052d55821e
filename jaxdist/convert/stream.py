"""From the tensors of one naming to those of another, a few at a time, on several cores.

Two namings rarely cut a model into the same tensors: query, key and value may be one, and our layers are stacked. A
`Unit` is the least that can be converted by itself: tensors of either side that hold the same atoms. Units are made in
order and ahead of whoever writes them, as long as what waits is within a budget of memory.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from jaxdist.config import ConfigError
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves
from jaxdist.convert.tables import Atom, Entry, entries

T = TypeVar("T")
AHEAD = 128_000_000  # bytes that may wait to be written
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


@dataclass
class Unit:
    """The smallest sets of tensors of two namings that hold the same atoms."""

    sources: list[Entry] = field(default_factory=list)
    targets: list[Entry] = field(default_factory=list)


def units(sources: Mapping[str, Entry], targets: Mapping[str, Entry]) -> list[Unit]:
    """All units, in the order of the sources' tensors: what is best read together comes together."""
    of: dict[Atom, Unit] = {}
    for side, group in (("sources", sources), ("targets", targets)):
        for entry in group.values():
            found = list({id(of[atom]): of[atom] for atom in entry.atoms if atom in of}.values()) or [Unit()]
            whole = found[0]
            for other in found[1:]:
                whole.sources += other.sources
                whole.targets += other.targets
            getattr(whole, side).append(entry)
            of |= {atom: whole for e in (*whole.sources, *whole.targets) for atom in e.atoms}
    return list({id(unit): unit for unit in of.values()}.values())


@dataclass(frozen=True)
class Conversion:
    """A checkpoint, seen in the tensors of another naming; weights in `dtype`, or as they are."""

    content: Content
    naming: str
    dtype: str | None = None
    report: Callable[[int], None] = lambda count: None  # is told the bytes of each tensor that is taken

    @cached_property
    def units(self) -> list[Unit]:
        return units(self.content.entries, self.entries)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The tensors of each group."""
        return entries(self.naming, self.content.experiment.model)

    @cached_property
    def groups(self) -> dict[str, Leaves]:
        """What there will be: shapes and dtypes, and reading of one at a time, which is slow where several are one."""
        return {group: self._leaves(group) for group in self.content.groups}

    def _leaves(self, group: str) -> Leaves:
        found: dict[str, Leaf] = {}
        for unit in self.units:
            dtype = self._dtype(group, unit)
            for target in unit.targets:
                found[target.name] = Leaf(target.shape, dtype, partial(self.read, group, unit, target.name))
        return {name: found[name] for name in self.entries}

    def read(self, group: str, unit: Unit, name: str) -> np.ndarray:
        """One tensor of the target, for which all of its unit is read."""
        return self.convert(group, unit)[name]

    def _dtype(self, group: str, unit: Unit) -> np.dtype:
        leaves = self.content.groups[group]
        dtypes = {leaves[source.name].dtype for source in unit.sources}
        if self.dtype and group == PARAMETERS:
            return np.dtype(DTYPES[self.dtype])
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ConfigError(
                f"{unit.sources[0].name} and others that are one array in the target are {names}; give --dtype"
            )
        return dtypes.pop()

    def convert(self, group: str, unit: Unit) -> dict[str, np.ndarray]:
        """The target's tensors of a unit, contiguous. Raises ConfigError where a finite value becomes infinite."""
        leaves, dtype = self.content.groups[group], self._dtype(group, unit)
        made = {target.name: np.empty(target.shape, dtype) for target in unit.targets}
        places = {atom: (target, i) for target in unit.targets for i, atom in enumerate(target.atoms)}
        for source in unit.sources:
            tensor = cast(source.name, leaves[source.name].read(), dtype)
            for atom, array in zip(source.atoms, source.split(tensor), strict=True):
                target, i = places[atom]
                target.put(made[target.name], i, array)
        return made

    def stream(self, *groups: str) -> Iterator[tuple[str, str, np.ndarray]]:
        """(group, name, tensor) of all tensors of these groups, by units.

        The next may be as large as all that is allowed: who takes a tensor lets go of it before (`del`).
        """
        jobs = [Job(self._cost(group, unit), group, unit) for unit, group in product(self.units, groups)]
        for job, tensors in ahead(jobs, lambda job: self.convert(job.group, job.unit)):
            while tensors:
                name = next(iter(tensors))
                self.report(tensors[name].nbytes)
                yield job.group, name, tensors.pop(name)

    def _cost(self, group: str, unit: Unit) -> int:
        """Bytes that a unit's conversion takes: what is made, and as much of what is read."""
        made = sum(self.groups[group][target.name].bytes for target in unit.targets)
        return 2 * made + sum(self.content.groups[group][source.name].besides for source in unit.sources)

    def order(self, *groups: str) -> list[tuple[str, str]]:
        """(group, name) of what `stream` will give, in its order."""
        return [(group, target.name) for unit, group in product(self.units, groups) for target in unit.targets]

    @property
    def bytes(self) -> int:
        """Of all groups, as they will be."""
        return sum(leaf.bytes for leaves in self.groups.values() for leaf in leaves.values())


class Job(NamedTuple):
    """A unit of a group to be converted, and the bytes that it takes on the way."""

    bytes: int
    group: str
    unit: Unit


def ahead(jobs: Iterable[Job], do: Callable[[Job], T]) -> Iterator[tuple[Job, T]]:
    """Each job and what `do` makes of it, in order, done by several threads ahead of whoever takes them.

    A job is begun when it and those that wait are within AHEAD together, or when none waits.
    """
    waiting: deque[tuple[Job, Future[T]]] = deque()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in jobs:
            while waiting and sum(other.bytes for other, _ in waiting) + job.bytes > AHEAD:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
            waiting.append((job, pool.submit(do, job)))
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()


def cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`, rounded to nearest. Raises ConfigError where finite values become infinite."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    if not np.array_equal(np.isfinite(result), np.isfinite(array)):
        raise ConfigError(f"--dtype {dtype}: parameter {name} has values beyond its range; choose float32 or bfloat16")
    return result
