"""Kinds of the entries of a torch.distributed.checkpoint, by their names."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.config.bounded import size_of
from jaxdist.formats.boxes import tiled
from jaxdist.formats.dcp_index import INDEX
from jaxdist.formats.folders import is_trainer_folder
from jaxdist.formats.naming import MODEL, plain
from jaxdist.formats.refusals import loading
from jaxdist.formats.tables import Shape
from jaxdist.formats.torch_files import GROUPS, OPTIMIZER, SCHEDULER, STEP
from jaxdist.formats.torch_zips import Place, open_zip

COPY = "use another checkpoint, or a copy"  # where a file of one is damaged

APP, STATE = "app.", "state."
FIRST = ("", ".0", "_0")  # Lightning's optimizers and schedulers are the first of several
# torchtitan has its weights below nothing, beside these parts of a run.
TRAIN_STATE = "train_state."
BESIDE = (TRAIN_STATE, "dataloader.", *(f"{key}." for key in SCHEDULER))
# Prefixes of the names of a part. Others name parts otherwise, have everything below `app.`, or weights without a
# prefix.
PREFIXES = {"model": f"{MODEL[0]}.", "optimizer": f"{OPTIMIZER[0]}.", "step": STEP[0]}


def part_prefixes(entries: Mapping[str, Shape | None]) -> tuple[dict[str, str], list[str]]:
    """The prefix of the names of each part, as in PREFIXES, and the names of the weights.

    `entries`: name -> shape of a tensor, None for another entry.
    """
    tensors = [name for name, shape in entries.items() if shape is not None]
    # As torch's tutorial calls the parts: {"app": {"model", "optim"}}.
    below = tuple(f"{APP}{key}." for key in MODEL)
    within = any(name.startswith(below) for name in tensors) or all(name.startswith(APP) for name in tensors)
    outer = APP if within else ""
    places = (f"{place}{key}" for place in dict.fromkeys((outer, "")) for key in (*STEP, f"{TRAIN_STATE}step"))
    step = next((name for name in places if name in entries and _is_one_number(entries[name])), "")
    optimizers = tuple(f"{outer}{key}{first}." for key in OPTIMIZER for first in FIRST)
    holds = (o for o in optimizers if any(name.startswith((f"{o}{STATE}", f"{o}{GROUPS}")) for name in entries))
    optimizer = next(holds, f"{outer}{PREFIXES['optimizer']}")
    beside = (*optimizers, *(f"{outer}{part}" for part in BESIDE))
    weights = [name for name in tensors if name != step and not name.startswith(beside)]
    prefixes = {"model": _before(weights, outer), "optimizer": optimizer, "step": step}
    return prefixes, [name for name in weights if name.startswith(prefixes["model"])]


def _is_one_number(shape: Shape | None) -> bool:
    """Whether an entry may be a count: a plain value, or a tensor of one number."""
    return shape is None or math.prod(shape) == 1


def _before(weights: Sequence[str], outer: str) -> str:
    """Prefix of the parameters, as `model.`; "" if it is part of the model or of a wrapper: then other parameters,
    which are not averages, lie beside it."""
    for begun in (f"{outer}{key}." for key in MODEL):
        inside = {plain(name.removeprefix(begun)) for name in weights if name.startswith(begun)}
        others = [n for n in weights if not n.startswith(begun) and n.endswith((".weight", ".bias"))]
        beside = [n.removeprefix(outer) for n in others]
        if inside and all(plain(name).partition(".")[2] in inside for name in beside):
            return begun
    return outer


def check_parts(folder: Path, name: str, entry: Any, places: Sequence[Any]) -> None:
    """Raises ConfigError where the parts of a tensor, by its `entry` of an index, overlap or are not all of it, or one
    has no place in a file (None in `places`): torch would leave memory there as it was."""
    try:
        if not tiled(tuple(entry.size), entry.chunks):
            raise ValueError("its parts overlap or are not all of it")
        if None in places:
            raise ValueError(f"{INDEX} has no file of its part at {[*entry.chunks[places.index(None)].offsets]}")
    except ValueError as error:
        raise ConfigError(f"{folder}: tensor {name}: {error}; {COPY}") from None


def check_part(folder: Path, name: str, found: Any) -> None:
    """Raises ConfigError where the file of a tensor's part, as the index of a checkpoint has found it, is missing, or
    has nothing there that torch.save wrote."""
    path = folder / found.relative_path
    try:
        with loading(path, COPY):
            if not size_of(path):
                raise ValueError("it is empty")
            open_zip(path, Place(found.offset, found.length))
    except ConfigError as error:
        raise ConfigError(f"{folder}: tensor {name}: {error}") from None


def no_weights(path: Path, folder: Path) -> ConfigError:
    """The error of a checkpoint `path`, in `folder`, that has the state of an optimizer alone."""
    fix = f"give its folder {folder.parent}" if is_trainer_folder(folder.parent) else "give one with weights"
    return ConfigError(f"{path} has no weights, as the checkpoint of an optimizer alone; {fix}")
