"""Files of torch.save's, before their content is known: their names, and what jaxdist puts into its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
EXPERIMENT = "experiment"  # jaxdist's, in its own files
SECTIONS = {"model", "optimizer", "train", "parallel", "precision"}  # of ours; a script's own experiment has other ones


def is_own(tree: Any) -> bool:
    """Whether jaxdist wrote it: it has an experiment of ours."""
    experiment = tree.get(EXPERIMENT) if isinstance(tree, dict) else None
    return isinstance(experiment, dict) and experiment.keys() >= SECTIONS


@contextmanager
def reading(path: Path, part: str) -> Iterator[None]:
    """What a part of another form than torch's makes Python raise becomes a ConfigError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path}: its {part} is not as torch saves it: {error!r}; leave it out") from None
