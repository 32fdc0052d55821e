"""Overlap of computation with collectives on a GPU, read from the order of kernels in XLA's schedule."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

OPS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all"
COMPUTATION = re.compile(r"^(?:ENTRY )?%?(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (.*?) ([\w-]+)\(%?([^\s,)]*)")
ARRAY = re.compile(r"\b([a-z]\w*)\[[\d,]*\]")  # its dtype
KERNELS = ("fusion", "custom-call", "while", "conditional", "copy")
# Matrix products: those of cuBLAS and cuDNN, whose attention is one too, and fusions of XLA around one.
PRODUCTS = re.compile(r"gemm|cublas|cudnn\$")


@dataclass(frozen=True)
class Overlap:
    """One collective of a compiled program; `arrays` are sent as one. `beside`: the kernels between its start and its
    end, and those of them that multiply matrices."""

    op: str
    dtype: str
    arrays: int
    looped: bool
    beside: int
    products: int


def overlaps(hlo: str) -> list[Overlap]:
    """Each collective of a scheduled program, as `compiled.as_text()` prints it, in its order."""
    bodies = set(re.findall(r"body=%?([^\s,)]+)", hlo))
    return [found for name, lines in computations(hlo) for found in overlaps_in(lines, name in bodies)]


def computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = "", list[str]()
    for line in hlo.splitlines():
        if begun := COMPUTATION.match(line):
            name, lines = begun[1], []
        elif line == "}":
            yield name, lines
        else:
            lines.append(line)


def overlaps_in(lines: list[str], looped: bool) -> Iterator[Overlap]:
    """The collectives of one computation."""
    under_way: dict[str, tuple[str, list[str], list[str]]] = {}  # by name: kind, dtypes, and the kernels since
    for line in lines:
        if not (found := INSTRUCTION.match(line)):
            continue
        name, shape, kind, operand = found.groups()
        if asked := re.fullmatch(f"({OPS})-start", kind):
            under_way[name] = asked[1], ARRAY.findall(shape), []
        elif re.fullmatch(f"({OPS})-done", kind) and operand in under_way:
            op, dtypes, kernels = under_way.pop(operand)
            # Inputs and outputs; a sum lists its arrays once.
            arrays = len(dtypes) if op == "all-reduce" else len(dtypes) // 2
            yield Overlap(op, dtypes[0], arrays, looped, len(kernels), sum(map(multiplies, kernels)))
        elif re.fullmatch(OPS, kind):
            dtypes = ARRAY.findall(shape)
            yield Overlap(kind, dtypes[0], len(dtypes), looped, 0, 0)
        elif kind in KERNELS:
            for *_, kernels in under_way.values():
                kernels.append(line.partition(", metadata=")[0] if kind == "custom-call" else name)


def multiplies(kernel: str) -> bool:
    return bool(PRODUCTS.search(kernel))
