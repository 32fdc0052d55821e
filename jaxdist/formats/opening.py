"""A source opened once for all that the start of a run reads: its model, its weights, the files next to it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.config import ConfigError
from jaxdist.formats.companions import CONFIG
from jaxdist.formats.described import Source, experiment_source, source_of
from jaxdist.formats.leaves import Reader
from jaxdist.formats.origin import CompanionFiles, companion_files

if TYPE_CHECKING:  # else imported when a source is opened
    from jaxdist.formats.sources import Found


@cache
def opened(path: Path, reader: Reader) -> "Found":
    """The source at `path`, opened at the first call and kept until `release`. Raises ConfigError."""
    from jaxdist.formats import sources

    return sources.found(path, reader)


def release() -> None:
    """Close the sources that are open: files from before torch 1.6 are in memory until then."""
    opened.cache_clear()


@contextmanager
def opening_once() -> Iterator[None]:
    """Around a command: no source that it opened stays open after it."""
    try:
        yield
    finally:
        release()


def described_by(reader: Reader, path: Path) -> Source | None:
    """The model of weights of any kind; None where they do not state it. Raises ConfigError as `source_of`."""
    if described := source_of(path):
        return described
    from jaxdist.formats import models

    with suppress(ConfigError):  # the reader of the weights reports it
        source = opened(path, reader)
        if source.experiment:
            return experiment_source(path, source.experiment)._replace(notes=source.notes)
        if source.rows and (experiment := models.experiment_beside(path)):
            fitted = models.fitted(str(path), experiment.model, source.leaves)
            return experiment_source(path, experiment)._replace(model=fitted, notes=source.notes)
    return None


def companions_by(reader: Reader, path: Path | None) -> CompanionFiles | None:
    """The files next to weights of any kind that a run keeps for its export. Raises ConfigError as
    `companion_files`."""
    if (kept := companion_files(path)) is not None or path is None:
        return kept
    with suppress(ConfigError):
        source = opened(path, reader)
        files = source.files()
        first = next(iter(source.leaves.values()), None)
        return CompanionFiles(files, str(first.dtype)) if first and CONFIG in files else None
    return None
