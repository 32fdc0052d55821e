"""What a file of torch's has of ours besides what training scripts keep in theirs: the experiment, what the run logged,
what came along with the weights, and where these came from."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jaxdist.config import ConfigError
from jaxdist.config.folder import MOST_BYTES as MOST_LOGGED
from jaxdist.config.folder import parse_metrics
from jaxdist.convert.content import Content, Leaf, Leaves, Origin, Said
from jaxdist.convert.torch_leaves import leaf
from jaxdist.formats.companions import MOST_BYTES, is_companion
from jaxdist.formats.torch_files import EXPERIMENT, is_own, part, reading

METRICS, FILES, ORIGIN, BUFFERS = "metrics.jsonl", "files", "origin", "buffers"


def put_own(content: Content, room: Callable[[Leaves], Mapping[str, Tensor]]) -> dict[str, Any]:
    """What we keep, by our keys: what has many bytes are tensors that get `room` in the file, as a pickle has little.
    What came along with a script's file stays out of it."""
    found: dict[str, Any] = {EXPERIMENT: content.experiment.model_dump(mode="json", exclude_none=True)}
    found |= room({METRICS: _of_bytes(content.metrics)}) if content.metrics else {}
    files = {} if content.origin.of_a_script else content.origin.files
    return found | ({FILES: room({name: _of_bytes(file) for name, file in files.items()})} if files else {})


def _of_bytes(file: bytes) -> Leaf:
    return Leaf((len(file),), np.dtype(np.uint8), partial(np.frombuffer, file, np.uint8))


def _bytes_of(path: Path, name: str, value: Any, most: int) -> bytes:
    """Raises ValueError for what is no tensor of bytes, or has more than `most`, and ConfigError."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.numel() > most:
        raise ValueError(f"it is no tensor of at most {most:,} bytes")
    return leaf(path, name, value).read().tobytes()


def files_of(path: Path, tree: Any) -> dict[str, bytes]:
    """What came along with the weights. Raises ConfigError."""
    found = dict[str, bytes]()
    for name, file in part(tree, (FILES,)).items() if is_own(tree) else ():
        try:
            if not is_companion(name):
                raise ValueError("it does not go along with weights")
            found[name] = _bytes_of(path, name, file, MOST_BYTES)
        except ValueError as error:
            raise ConfigError(f"{path}: its {FILES} have {name!r}: {error}; leave it out") from None
    return found


def log_of(path: Path, tree: Mapping[str, Any]) -> bytes:
    """What the run logged. Raises ConfigError where it is no such log."""
    found = tree.get(METRICS, "")
    try:
        # Once it was a string.
        log = found.encode() if isinstance(found, str) else _bytes_of(path, METRICS, found, MOST_LOGGED)
        for _ in parse_metrics(log):
            pass
        return log
    except ValueError as error:
        raise ConfigError(f"{path}: its {METRICS} is damaged: {error!r}; leave it out") from None


def origin_of(path: Path, tree: Mapping[str, Any]) -> Origin:
    """Where the weights came from, if not from a torch file, without what torch alone had. Raises ConfigError."""
    with reading(path, ORIGIN):
        said, kept = Said.model_validate(tree[ORIGIN]["said"]), tree[ORIGIN][BUFFERS]
        found = {name: leaf(path, name, tensor) for name, tensor in kept.items()}
    return Origin(**dict(said), buffers=found)
