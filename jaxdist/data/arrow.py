"""Columns of Parquet and Arrow files, whichever of the two a file is by its content."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import ConfigError
from jaxdist.data.signatures import signature
from jaxdist.data.unpacking import needed

ROWS = 1024  # read together


class Table(NamedTuple):
    """The names of its columns, how many rows it has (0: not known), and what reads a column, some rows at a time."""

    names: list[str]
    rows: int
    read: Callable[[str], Iterator[list[Any]]]


def open_table(file: Path) -> Table:
    """Open a Parquet or Arrow file. Raises ConfigError for other files, and if two columns share a name."""
    with file.open("rb") as stream:
        head = stream.read(512)
    if head.startswith(b"PAR1"):
        table = _parquet(file)
    elif head.startswith(b"ARROW1"):
        table = _arrow(file, as_file=True)
    elif found := signature(head):
        raise ConfigError(f"data.path = {str(file)!r}: neither Parquet nor Arrow: it is {found.title}; {found.fix}")
    elif file.suffix.lower() == ".parquet" or not head:
        what, fix = ("whatever its name says", "rename it to its format") if head else ("it is empty", "remove it")
        raise ConfigError(f"data.path = {str(file)!r}: neither Parquet nor Arrow, {what}; {fix}, or copy it again")
    else:
        table = _arrow(file, as_file=False)
    if twice := sorted({name for name in table.names if table.names.count(name) > 1}):
        raise ConfigError(
            f"data.path = {str(file)!r}: columns of the same name ({', '.join(twice)}); give each its own name"
        )
    return table


def _parquet(file: Path) -> Table:
    needed("pyarrow", "Parquet")
    from pyarrow import parquet

    stream = parquet.ParquetFile(file)

    def read(name: str) -> Iterator[list[Any]]:
        for batch in stream.iter_batches(ROWS, columns=[name], use_threads=False):
            yield batch.column(0).to_pylist()

    return Table(stream.schema_arrow.names, stream.metadata.num_rows, read)


def _arrow(file: Path, as_file: bool) -> Table:
    """A file (`as_file`), or a stream as `datasets.save_to_disk` writes it."""
    pyarrow = needed("pyarrow", "Arrow")
    from pyarrow import ipc

    source = pyarrow.memory_map(str(file))
    stream = ipc.open_file(source) if as_file else ipc.open_stream(source)

    def read(name: str) -> Iterator[list[Any]]:
        for batch in map(stream.get_batch, range(stream.num_record_batches)) if as_file else stream:
            column = batch.column(name)
            column.validate(full=True)  # offsets of a damaged file lead outside of it: reading them ends the process
            for start in range(0, len(column), ROWS):
                yield column.slice(start, ROWS).to_pylist()

    return Table(stream.schema.names, 0, read)
