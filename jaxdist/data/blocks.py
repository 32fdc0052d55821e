"""Blocks of files, spread evenly: enough of their content to know them by, at the same cost for any size."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

BLOCK = 4096  # bytes
BLOCKS = 256


def read_blocks(files: Sequence[Path], sizes: Sequence[int], blocks: int = BLOCKS) -> Iterator[bytes]:
    """Sample `blocks` blocks of the files, concatenated, including the first and the last block; all content of shorter
    files. Raises OSError."""
    before = np.cumsum([0, *sizes])
    total = int(before[-1])
    if total <= blocks * BLOCK:
        yield from (file.read_bytes() for file, size in zip(files, sizes, strict=True) if size)
        return
    # Multiples of a block: numbers of up to 8 bytes begin where a block of a single file does.
    places = np.linspace(0, (total - 1) // BLOCK, blocks).astype(np.int64) * BLOCK
    numbers = np.searchsorted(before, places, side="right") - 1
    for number in np.unique(numbers).tolist():
        with files[number].open("rb", buffering=0) as stream:
            for place in places[numbers == number].tolist():
                stream.seek(place - int(before[number]))
                yield stream.read(BLOCK)


def fingerprint_of(files: Sequence[Path], names: Sequence[str], *facts: object, blocks: int = BLOCKS) -> str:
    """32 hex digits over names, sizes and sampled content of the files, and over `facts`.

    Not where they lie, nor when they were written. In more than a megabyte a change of a few bytes can be missed;
    another order, or another text, is not. Raises OSError.
    """
    sizes = [file.stat().st_size for file in files]
    named = list(zip(names, sizes, strict=True))
    found = hashlib.blake2b(json.dumps([named, *facts]).encode(), digest_size=16)
    for block in read_blocks(files, sizes, blocks):
        found.update(block)
    return found.hexdigest()


class Earlier(NamedTuple):
    """The fingerprints that versions before content was sampled recorded for the same files, and the fields of Data
    (name, value) that read them as then, where their defaults now read them otherwise."""

    fingerprints: frozenset[str] = frozenset()
    fields: tuple[tuple[str, str], ...] = ()


def fingerprint_by_names(files: Sequence[tuple[str, Path]], identity: str, version: str | None) -> str:
    """The fingerprint of those versions: of names, sizes, the tokenizer's or the ids' `identity`, Python's version."""
    facts = [[(name, file.stat().st_size) for name, file in files], identity, version]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
