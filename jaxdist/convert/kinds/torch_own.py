"""Our additions to a torch file, beyond the content of training scripts' files: experiment, log, companions of the
weights, and their origin."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from jaxdist.config import ConfigError
from jaxdist.convert.content import Content, Leaf, Leaves, Origin, OriginFields
from jaxdist.convert.kinds.torch_leaves import leaf
from jaxdist.formats.own_files import FILES, bytes_of
from jaxdist.formats.torch_files import EXPERIMENT, reading
from jaxdist.runs.folder import MOST_BYTES as MOST_LOGGED
from jaxdist.runs.folder import parse_metrics

METRICS, ORIGIN, BUFFERS = "metrics.jsonl", "origin", "buffers"


def put_own(content: Content, room: Callable[[Leaves], Mapping[str, Tensor]]) -> dict[str, Any]:
    """Our entries by key; large ones are tensors, to which `room` gives space in the file outside the pickle.
    Companions of a script's file are left out."""
    found: dict[str, Any] = {EXPERIMENT: content.experiment.model_dump(mode="json", exclude_none=True)}
    found |= room({METRICS: _of_bytes(content.metrics)}) if content.metrics else {}
    files = {} if content.origin.from_script else content.origin.files
    return found | ({FILES: room({name: _of_bytes(file) for name, file in files.items()})} if files else {})


def _of_bytes(file: bytes) -> Leaf:
    return Leaf((len(file),), np.dtype(np.uint8), partial(np.frombuffer, file, np.uint8))


def log_of(path: Path, tree: Mapping[str, Any]) -> bytes:
    """The run's log. Raises ConfigError if it is not a valid log."""
    found = tree.get(METRICS, "")
    try:
        # Once it was a string.
        log = found.encode() if isinstance(found, str) else bytes_of(path, METRICS, found, MOST_LOGGED, leaf)
        for _ in parse_metrics(log):
            pass
        return log
    except ValueError as error:
        raise ConfigError(f"{path}: its {METRICS} is damaged: {error!r}; leave it out") from None


def origin_of(path: Path, tree: Mapping[str, Any]) -> Origin:
    """Origin of the weights, if not a torch file, without torch's own parts. Raises ConfigError."""
    with reading(path, ORIGIN):
        facts, kept = OriginFields.model_validate(tree[ORIGIN]["said"]), tree[ORIGIN][BUFFERS]
        found = {name: leaf(path, name, tensor) for name, tensor in kept.items()}
    return Origin(**dict(facts), buffers=found)
