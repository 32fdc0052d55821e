"""Folders of Meta's as contents: weights alone."""

from pathlib import Path

from jaxdist.config import Experiment
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Origin, agreed
from jaxdist.convert.kinds.reader import READER
from jaxdist.formats import meta
from jaxdist.formats.companions import companions


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor, of all ranks together. Raises ConfigError."""
    return meta.read(path, READER)[1]


def read_content(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a folder. Raises ConfigError."""
    found, leaves = meta.read(path, READER)
    origin = Origin("meta", "meta", files=companions(path))
    return Content(agreed(str(path), found, wanted), "meta", {PARAMETERS: leaves}, origin=origin).checked(path)
