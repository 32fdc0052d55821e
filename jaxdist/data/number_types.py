"""Recognizes, in a .bin file, ids of number types that are not read, and headers of unknown formats.

Ids of another type are numbers too, many of them within a large vocabulary, so that reading them raises no error.
Each test below measures how unlikely its finding would be if the file held the ids that it seems to hold.
"""

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# NumPy's names of types that ids are found in, and that are not read.
FLOATS = {
    "<f2": "float16", "<f4": "float32", "<f8": "float64",
    ">f2": "big-endian float16", ">f4": "big-endian float32", ">f8": "big-endian float64",
}  # fmt: skip
INTEGERS = {">i8": "big-endian int64", ">u4": "big-endian uint32", ">u2": "big-endian uint16"}
NAMES = FLOATS | INTEGERS | {"|u1": "uint8"}
MOST = 2**20  # ids of a vocabulary: numbers of 32 bits or more that are all below it are ids, even of a larger model
BITS = 20  # of evidence: by chance one file of a million is taken for another
FEWEST = 8  # numbers: fewer may be alike by the ids that they are, as 64 and 0 are the bytes of the float 2.0
SPREAD = 1.0  # bits of entropy by which the high bytes of uint16 ids vary more than the low ones, if they are swapped
DISTINCT = 64  # different ids: enough for the entropy of their bytes to show the byte order
ALIKE = 0.1  # the most, of 1, by which the distributions of even and odd bytes differ in ids of one byte
ANY_BYTE = 7.5  # bits of entropy of a byte, above which even and odd bytes are alike in random numbers of any size
ENOUGH_BYTES = 2048, 256  # needed for that, where all may be ids as uint16, and where they may not
HEAD = 1024  # bytes that are searched for a header
COUNTED = 64  # bytes of a header in which the number of ids is looked for
HEADERS = (*range(8, 65, 4), 128, 256, 512, 1024)  # bytes
ENOUGH = 8192  # bytes behind HEAD that are needed to see what is unusual in it
# A name in ASCII, then zeros or a small number: a file's magic and version.
MAGIC = re.compile(rb"[A-Za-z0-9_]{4}([A-Za-z0-9_\0]{4}|[\0-\x40]\0\0\0)")


class Header(NamedTuple):
    """The sign of a header at the start of a file, and its length in bytes; 0 if unknown."""

    why: str
    length: int


def numbers(content: bytes, dtype: str) -> NDArray:
    """The whole numbers of this type at the start of `content`."""
    size = np.dtype(dtype).itemsize
    return np.frombuffer(content[: len(content) // size * size], dtype)


def certain_type(content: bytes, vocab: int, readable: bool) -> str | None:
    """The type that is not read in which all numbers of `content` are ids, as other numbers are by chance only: most
    bits of an id are zero in it. Ids are in range(vocab), or in range(MOST) where the type has more than 16 bits.
    `readable`: whether they are ids of `vocab` as what is read, too."""
    body = _behind_head(content)
    for dtype in (*FLOATS, *INTEGERS):
        if readable and dtype == ">u2":
            continue
        most = vocab if np.dtype(dtype).itemsize == 2 else max(vocab, MOST)
        with np.errstate(invalid="ignore"):
            ids = numbers(body, dtype).astype(np.float64)
            fits = ((ids >= 0) & (ids < most) & (ids == np.floor(ids))).all()
        if fits and len(ids) >= FEWEST and _bits(ids[ids > 0], np.dtype(dtype), vocab) >= BITS:
            return dtype
    return None


def _bits(ids: NDArray[np.float64], dtype: np.dtype, vocab: int) -> float:
    """Number of bits of these numbers of type `dtype` that are zero because they are ids of `vocab`, not by chance."""
    if dtype.kind != "f" and dtype.itemsize > 2:
        return len(ids)  # at least one each: before every other number of half the size is a zero
    different = np.unique(ids)
    if dtype.kind != "f":
        return len(different) * (8 * dtype.itemsize - np.log2(vocab))
    fraction = np.finfo(dtype).nmant - np.floor(np.log2(different))  # bits behind the point
    return float(np.maximum(fraction, 0).sum())


def likely_type(content: bytes, vocab: int, readable: bool) -> str | None:
    """The type of 8 or 16 bits that is not read and that the bytes of `content` are like: of little-endian uint16 ids
    the low bytes vary, and the high ones are mostly small. `readable`: whether these would all be in range(vocab)."""
    halves = numbers(_behind_head(content), "<u2")
    even, odd = _columns(halves)
    different = len(np.unique(halves))
    if different >= DISTINCT and _entropy(odd) - _entropy(even) > SPREAD:
        return ">u2"
    if 8 * different >= BITS and not even[1:].any():
        return ">u2"
    return "|u1" if like_bytes(content, vocab, readable) and _entropy(even + odd) <= ANY_BYTE else None


def like_bytes(content: bytes, vocab: int, readable: bool) -> bool:
    """Whether all bytes are ids of `vocab`, and even and odd ones are alike, as in ids of one byte and in random
    numbers of any size. `readable` as in `likely_type`."""
    even, odd = _columns(numbers(_behind_head(content), "<u2"))
    both = even + odd
    seen = both > 0
    # Pearson's chi-squared of two columns of one distribution, whose mean is the number of values.
    apart = (np.square(even - odd)[seen] / both[seen]).sum()
    telling = both.sum() - both.max(initial=0)  # without the commonest byte, as zero is in ids of several bytes
    alike = apart < ALIKE * telling + seen.sum() + 4 * np.sqrt(2 * seen.sum())
    return bool(alike and telling >= ENOUGH_BYTES[not readable] and both.nonzero()[0].max() < vocab)


def _columns(halves: NDArray) -> tuple[NDArray, NDArray]:
    """Counts of each value among the low bytes of little-endian uint16 numbers, and among the high ones."""
    even, odd = (np.bincount(column, minlength=256) for column in (halves & 255, halves >> 8))
    return even, odd


def header_length(content: bytes, size: int, dtype: str) -> int:
    """The length in bytes of a header that holds the number of ids of this type behind it, to the end of a file of
    `size` bytes; 0 where none does."""
    width = np.dtype(dtype).itemsize
    for length in HEADERS:
        # Among wider ids a 4-byte count may be an id itself; an 8-byte count hardly can.
        words = numbers(content[: min(length, COUNTED)], "<u4" if width == 2 else "<u8")
        if (size - length) % width == 0 and (size - length) // width in words:
            return length
    return 0


def header_of(content: bytes, size: int, dtype: str) -> Header | None:
    """The header with which a file of `size` bytes and ids of this type begins, where all numbers in it may be ids;
    `content` is a sample of the file."""
    width = np.dtype(dtype).itemsize
    if len(content) < HEAD + ENOUGH:
        return None
    if length := header_length(content, size, dtype):
        count = (size - length) // width
        return Header(f"the number {count} is in it, and that many ids follow its {length} bytes", length)
    if width == 2 and MAGIC.match(content):
        return Header(f"it begins with {content[:8].rstrip(bytes(range(48)))!r}", 0)
    if (zeros := bytes(16 * width)) in content[:HEAD] and zeros not in content[2 * HEAD :]:
        return Header(f"only its first {HEAD} bytes have {len(zeros)} zeros one after another", 0)
    return None


def only_at_the_start(content: bytes, dtype: str, vocab: int) -> int | None:
    """The greatest number of the first HEAD bytes, where that is not an id of `vocab` and all numbers behind are."""
    if len(content) < HEAD + ENOUGH:
        return None
    first, rest = numbers(content[:HEAD], dtype), numbers(content[HEAD:], dtype)
    beyond = first[(first < 0) | (first >= vocab)]
    return int(beyond.max()) if beyond.size and rest.min() >= 0 and rest.max() < vocab else None


def _behind_head(content: bytes) -> bytes:
    """`content` without a possible header, where enough is left to find a type."""
    return content[HEAD:] if len(content) >= HEAD + ENOUGH else content


def _entropy(counts: NDArray) -> float:
    """In bits."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())
