"""From the tensors of one naming to those of another, a few at a time, on several cores.

Two namings rarely cut a model into the same tensors: query, key and value may be one, and our layers are stacked. A
`ConversionUnit` is the least that can be converted alone: tensors of either side that hold the same atoms. Several are
on their way at once: beside the largest of them, as many as a budget of memory allows.
"""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from typing import Literal, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from jaxdist.config import ConfigError
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, entries_of
from jaxdist.convert.finite import bad_values
from jaxdist.convert.mappings.atoms import Atom, Entry, fill
from jaxdist.formats.finite import BadValues, is_second_moment, optimizer_tensor_name, refused
from jaxdist.formats.tables import LAYERS, OWN, table_of

T = TypeVar("T")
BLOCK = 1_000_000  # numbers that are rounded at a time
UNCAST_KINDS = "iubc"  # numpy's kinds of dtypes that are not cast: integers, booleans and complex numbers
AHEAD = 400_000_000  # bytes that may be on their way beside the largest unit
NonFinite = Literal["refuse", "keep", "zero"]
WITHOUT_STATE = (
    "Give a source without them; or --to hf, which takes the weights alone; or --nonfinite keep. --nonfinite zero is "
    "of weights and first moments, which would be divided by the root of a second moment of 0"
)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


@dataclass
class ConversionUnit:
    """The smallest sets of tensors of two namings that hold the same atoms."""

    sources: list[Entry] = field(default_factory=list)
    targets: list[Entry] = field(default_factory=list)


def units(sources: Mapping[str, Entry], targets: Mapping[str, Entry]) -> list[ConversionUnit]:
    """All units, in the order of the sources' tensors: what is best read together comes together."""
    by_atom: dict[Atom, ConversionUnit] = {}
    for side, group in (("sources", sources), ("targets", targets)):
        for entry in group.values():
            known = [by_atom[atom] for atom in entry.atoms if atom in by_atom]
            unit, *others = {id(part): part for part in known}.values() or [ConversionUnit()]
            for other in others:
                unit.sources += other.sources
                unit.targets += other.targets
            getattr(unit, side).append(entry)
            by_atom |= {atom: unit for e in (*unit.sources, *unit.targets) for atom in e.atoms}
    return list({id(unit): unit for unit in by_atom.values()}.values())


@dataclass(frozen=True, kw_only=True)
class Resharder(ABC):
    """Tensors by group, seen as others that hold the same atoms; parameters in `dtype`, or as they are.

    `widen`: parameters that become one and have several dtypes take one that holds all of their values, and are not
    refused. `nonfinite` says what becomes of values that cannot be, as NaN and infinity: they are kept, are 0, or are
    refused, when all tensors have been looked at. Second moments are not made 0: the first would be divided by it.
    """

    dtype: str | None = None
    widen: bool = False
    nonfinite: NonFinite = "keep"
    report: Callable[[int], None] = lambda count: None  # called with the bytes of each tensor that is read
    found: dict[str, BadValues] = field(default_factory=dict, compare=False)  # by name, of the tensors read so far

    @property
    @abstractmethod
    def source_groups(self) -> Mapping[str, Leaves]:
        """The tensors of the source."""

    @abstractmethod
    def sources(self, group: str) -> Mapping[str, Entry]:
        """The tensors of a group as they are given."""

    @abstractmethod
    def targets(self, group: str) -> Mapping[str, Entry]:
        """The tensors of a group as they will be."""

    @cached_property
    def units(self) -> dict[str, list[ConversionUnit]]:
        """Units of each group."""
        return {group: units(self.sources(group), self.targets(group)) for group in self.source_groups}

    @cached_property
    def groups(self) -> dict[str, Leaves]:
        """The tensors of the target: shapes and dtypes, and reading of one at a time, which is slow if several are
        one."""
        return {group: self._leaves(group) for group in self.source_groups}

    def _leaves(self, group: str) -> Leaves:
        found: dict[str, Leaf] = {}
        for unit in self.units[group]:
            dtype = self._dtype(group, unit)
            for target in unit.targets:
                found[target.name] = Leaf(target.shape, dtype, partial(self.read, group, unit, target.name))
        return {name: found[name] for name in self.targets(group)}

    def read(self, group: str, unit: ConversionUnit, name: str) -> np.ndarray:
        """One tensor of the target, for which all of its unit is read."""
        return self.convert(group, unit)[name]

    def _dtype(self, group: str, unit: ConversionUnit) -> np.dtype:
        leaves = self.source_groups[group]
        dtypes = {leaves[source.name].dtype for source in unit.sources}
        if self.dtype and group == PARAMETERS and not any(dtype.kind in UNCAST_KINDS for dtype in dtypes):
            return np.dtype(DTYPES[self.dtype])
        if len(dtypes) > 1 and self.widen and group == PARAMETERS:
            return np.result_type(*dtypes)
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise ConfigError(
                f"{group} {unit.sources[0].name} and others that are one array in the target are {names}; "
                f"{one_dtype(group)}"
            )
        return dtypes.pop()

    def convert(self, group: str, unit: ConversionUnit) -> dict[str, np.ndarray]:
        """The target's tensors of a unit, contiguous. Raises ConfigError where a finite value becomes infinite."""
        leaves, dtype = self.source_groups[group], self._dtype(group, unit)
        source, target = unit.sources[0], unit.targets[0]

        def read(source: Entry) -> np.ndarray:
            return cast(source.name, self._looked_at(group, source.name, leaves[source.name].read()), dtype)

        if target.same(source):  # then they are all of the unit
            return {target.name: np.asarray(read(source), order="C")}
        arrays = {target.name: np.empty(target.shape, dtype) for target in unit.targets}
        fill(arrays, unit.targets, unit.sources, read)
        return arrays

    def _looked_at(self, group: str, name: str, array: np.ndarray) -> np.ndarray:
        """A tensor that was read, as `nonfinite` says."""
        label = name if group == PARAMETERS else optimizer_tensor_name(name, group)
        found = None if self.nonfinite == "keep" else bad_values(array, label)
        if found is None:
            return array
        self.found[self.called(name) if group == PARAMETERS else label] = found
        return np.where(np.isfinite(array), array, array.dtype.type(0))

    def called(self, name: str) -> str:
        """The source's name of a parameter."""
        return name

    def refuse(self, source: object, fix: str) -> None:
        """Raises ConfigError naming the tensors that were read and have values that are to be refused."""
        moments = {name: bad for name, bad in self.found.items() if is_second_moment(name)}
        if wrong := self.found if self.nonfinite == "refuse" else moments:
            raise refused(source, wrong, WITHOUT_STATE if moments else fix)

    def stream(self, *groups: str) -> Iterator[tuple[str, str, np.ndarray]]:
        """(group, name, tensor) of all tensors of these groups, by units, which are made ahead.

        The next may be as large as all that is allowed: who takes a tensor lets go of it before (`del`).
        """
        for job, tensors in ahead(self._jobs(groups), lambda job: self.convert(job.group, job.unit)):
            while tensors:
                name = next(iter(tensors))
                yield job.group, name, tensors.pop(name)

    def each(self, put: Callable[[str, str, np.ndarray], None], *groups: str) -> None:
        """`put(group, name, tensor)` for all tensors of these groups, in any order, several threads at once."""

        def work(job: Job) -> int:
            tensors = self.convert(job.group, job.unit)
            size = sum(tensor.nbytes for tensor in tensors.values())
            while tensors:
                put(job.group, *tensors.popitem())
            return size

        for size in together(self._jobs(groups), work):
            self.report(size)

    def _jobs(self, groups: Iterable[str]) -> list["Job"]:
        return [Job(self._cost(group, unit), group, unit) for group in groups for unit in self.units[group]]

    def _cost(self, group: str, unit: ConversionUnit) -> int:
        """Bytes that a unit's conversion takes: the result, and a tensor both as read and in the target dtype; one of
        these is the result if both sides have the same tensor."""
        dtype = self._dtype(group, unit)

        def taken(leaf: Leaf) -> int:
            cast = 0 if leaf.dtype == dtype else leaf.bytes // leaf.dtype.itemsize * dtype.itemsize
            return max(leaf.bytes + leaf.besides, leaf.bytes + cast)

        written = sum(self.groups[group][target.name].bytes for target in unit.targets)
        read = max(taken(self.source_groups[group][source.name]) for source in unit.sources)
        return read if unit.targets[0].same(unit.sources[0]) else written + read

    @property
    def bytes(self) -> int:
        """Bytes of the tensors of all groups, as in the target."""
        return sum(leaf.bytes for leaves in self.groups.values() for leaf in leaves.values())


@dataclass(frozen=True)
class Conversion(Resharder):
    """A checkpoint, seen in the tensors of another naming."""

    content: Content
    naming: str

    @property
    def source_groups(self) -> Mapping[str, Leaves]:
        return self.content.groups

    def sources(self, group: str) -> dict[str, Entry]:
        return self.content.entries(group)

    def targets(self, group: str) -> dict[str, Entry]:
        return entries_of(self.naming, self.content.experiment, group)

    def called(self, name: str) -> str:
        return self.content.origin.names.get(name, name)

    def _dtype(self, group: str, unit: ConversionUnit) -> np.dtype:
        """Counts of batches are of 64 bits in torch, of 32 in JAX."""
        dtype = super()._dtype(group, unit)
        counts = np.dtype(np.int32 if self.naming in (OWN, LAYERS) else np.int64)
        return counts if dtype.kind == "i" else dtype

    def tied_copies(self, kind: str) -> dict[str, str]:
        """Embedding -> what the head is called in a target of a kind, where a tied one was stored in such a source."""
        model, names = self.content.experiment.model, self.content.origin.names_in(kind)
        head = table_of(self.naming, model).head
        return {next(iter(self.targets(PARAMETERS))): names[head]} if model.tied and head in names else {}


class Job(NamedTuple):
    """A unit of a group to be converted, and the bytes that it takes on the way."""

    bytes: int
    group: str
    unit: ConversionUnit


def ahead(jobs: Sequence[Job], do: Callable[[Job], T]) -> Iterator[tuple[Job, T]]:
    """Each job and what `do` makes of it, in order, done by several threads ahead of whoever takes them."""
    waiting, room = deque[tuple[Job, Future[T]]](), room_for(jobs)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in jobs:
            while _size(job) + sum(_size(other) for other, _ in waiting) > room:
                yield waiting[0][0], waiting[0][1].result()
                waiting.popleft()
            waiting.append((job, pool.submit(do, job)))
        while waiting:
            yield waiting[0][0], waiting[0][1].result()
            waiting.popleft()


def together(jobs: Sequence[Job], do: Callable[[Job], T]) -> Iterator[T]:
    """Results of `do` for each job, as they finish, by several threads: the largest job that fits into memory first, so
    that no core works alone at the end. If one raises, jobs that have not started are dropped."""
    waiting = {size: deque(alike) for size, alike in groupby(sorted(jobs, reverse=True, key=_size), _size)}
    running, room = dict[Future[T], Job](), room_for(jobs)
    pool = ThreadPoolExecutor(2 * (os.cpu_count() or 1))  # of which half wait for the disk
    try:
        while waiting or running:
            left = room - sum(map(_size, running.values()))
            if (size := next((size for size in waiting if size <= left), None)) is not None:
                job = waiting[size].popleft()
                running[pool.submit(do, job)] = job
                waiting = {size: alike for size, alike in waiting.items() if alike}
            else:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _size(job: Job) -> int:
    return job.bytes


def room_for(jobs: Iterable[Job]) -> int:
    """Bytes that may be on their way at once: one may always be there, however large."""
    return max(map(_size, jobs), default=0) + AHEAD


def one_dtype(group: str) -> str:
    """The fix for a group whose tensors have several dtypes and must have one."""
    return "give --dtype" if group == PARAMETERS else "--dtype is of weights alone: --to hf leaves the optimizer out"


def rounded_to_odd(numbers: np.ndarray) -> np.ndarray:
    """float64 as float32: what is between two of these becomes the odd one, which keeps its side when it is
    rounded further (Boldo and Melquiond, 2008)."""
    near = numbers.astype(np.float32)
    there, bits = near.astype(np.float64), near.view(np.uint32)
    bits -= np.abs(there) > np.abs(numbers)  # towards zero
    bits |= (there != numbers) & ~np.isnan(numbers)
    return near


def cast(name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`array` in `dtype`, rounded to nearest. Raises ConfigError where finite values become infinite."""
    if array.dtype == dtype:
        return array
    result = np.empty(array.shape, dtype)
    numbers, rounded = array.reshape(-1), result.reshape(-1)
    for start in range(0, array.size, BLOCK):
        before, after = numbers[start : start + BLOCK], rounded[start : start + BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            # To bfloat16 numpy goes by float32, and would round twice.
            twice = (array.dtype, dtype) == (np.float64, ml_dtypes.bfloat16)
            np.copyto(after, rounded_to_odd(before) if twice else before, casting="unsafe")
        if not np.array_equal(np.isfinite(after), np.isfinite(before)):
            raise _beyond(name, array, dtype)
    return result


def _beyond(name: str, array: np.ndarray, dtype: np.dtype) -> ConfigError:
    """The error of finite values that are infinite in `dtype`: how many, the first of them, and the dtypes that hold
    them all."""
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = np.isfinite(array) & ~np.isfinite(array.astype(dtype))
        wide = [d for d in DTYPES if np.array_equal(np.isfinite(array.astype(DTYPES[d])), np.isfinite(array))]
    index = np.unravel_index(int(wrong.argmax()), array.shape)
    first = f"{float(array[index]):g} at [{', '.join(map(str, index))}]"
    return ConfigError(
        f"--dtype {dtype}: parameter {name} has values beyond its range, {int(wrong.sum()):,} of {array.size:,}, the "
        f"first {first}; choose {' or '.join(wide)}"
    )
