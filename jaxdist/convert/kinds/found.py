"""Checkpoints whose weights `jaxdist.formats.sources` finds, as contents: the kinds that plugins add."""

from pathlib import Path

from jaxdist.config import Experiment
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Origin, agreed
from jaxdist.convert.kinds.reader import READER
from jaxdist.formats.kinds import CheckpointKind
from jaxdist.formats.naming import carried, recognized
from jaxdist.formats.sources import Found, found_as


class Weights:
    """Reads the weights of a kind."""

    def __init__(self, kind: CheckpointKind) -> None:
        self.kind = kind

    def _found(self, path: Path) -> Found:
        return found_as(self.kind.name, path, READER)

    def described(self, path: Path) -> dict[str, Leaf]:
        """Every tensor, under the names of the source. Raises ConfigError."""
        return dict(self._found(path).leaves)

    def read_content(self, path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
        """The content: weights, with the files that belong to them. Raises ConfigError."""
        return content_of(self._found(path), wanted, self.kind.name)


def content_of(found: Found, wanted: Experiment | None, kind: str = "") -> Content:
    """The weights of an open source of a kind, with the files that belong to them. Raises ConfigError."""
    path = found.path
    experiment = agreed(str(path), found.experiment, wanted)
    if not found.experiment:  # which may have fewer tokens
        experiment = experiment.model_copy(update={"model": found.model(experiment.model)})
    naming, names = recognized(str(path), found.leaves, experiment.model)
    groups = {PARAMETERS: {full: found.leaves[name] for full, name in names.items()}}
    origin = Origin(kind, naming, carried(names, naming, experiment.model), files=found.files())
    return Content(experiment, naming, groups, origin=origin).checked(path)
