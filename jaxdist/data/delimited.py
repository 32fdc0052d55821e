"""CSV and its like: columns by the names in the first row, whatever the delimiter."""

import csv
import io
from collections.abc import Iterable, Iterator

DELIMITERS = (",", "\t", ";", "|")  # the usual one first
ROWS = 3  # below the names: fewer show no table


def columns(head: list[str], field: str) -> tuple[list[str], str, bool]:
    """The names of the columns in the first row, which is the lines `head`; the delimiter; and whether spaces follow
    it that belong to no value. Both are chosen so that a column is called `field`; else they are the usual ones."""

    def split(mark: str, spaced: bool) -> list[str]:
        return next(csv.reader(head, delimiter=mark, skipinitialspace=spaced), [])

    for mark in DELIMITERS:
        exact, trimmed = (split(mark, spaced) for spaced in (False, True))
        if field in trimmed and exact != trimmed:
            return trimmed, mark, True
        if field in exact:
            return exact, mark, False
    return split(DELIMITERS[0], False), DELIMITERS[0], False


def begins_with_table(head: str, cut: bool, field: str) -> bool:
    """Whether text begins with a row of at least two different names, one of them `field`, followed by rows of as
    many values. `cut`: there is more text."""
    lines = io.StringIO(head, newline="").readlines()
    if field not in (names := lines[0].strip() if lines else "") or not any(mark in names for mark in DELIMITERS):
        return False
    try:
        found, mark, spaced = columns(lines[:1], field)
        rows = [row for row in csv.reader(lines[1:], delimiter=mark, skipinitialspace=spaced, strict=not cut) if row]
    except csv.Error:
        return False
    rows = rows[: len(rows) - cut]  # of which the last is incomplete
    named = len(set(found)) == len(found) > 1 and field in found and all(found)
    return named and len(rows) >= ROWS and all(len(row) == len(found) for row in rows)


def checked(lines: Iterable[str]) -> Iterator[str]:
    """The same lines. Raises UnicodeDecodeError at a line with bytes that are not UTF-8, escaped as surrogates."""
    for line in lines:
        try:
            line.encode()
        except UnicodeEncodeError:
            line.encode(errors="surrogateescape").decode()
        yield line
