"""Folders of torch.distributed.checkpoint, read and written by one process without a process group.

`torch_ref` writes them, in torch's own layout: `model.<name>`, `optimizer.state.<name>.<kind>`, `step`.
"""

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from jaxdist.config import ConfigError, Experiment, whole
from jaxdist.config.checkpoints import publish, unfinished
from jaxdist.config.dcp import EXPERIMENT, read_index
from jaxdist.config.foreign import read_json
from jaxdist.convert import torch_files
from jaxdist.convert.content import MOMENTS, PARAMETERS, Content, Leaf, Leaves, Origin, agreed, one_count
from jaxdist.convert.naming import carried, plain, recognized
from jaxdist.convert.runs import begin, metrics_of, origin_of
from jaxdist.convert.stream import Conversion
from jaxdist.convert.tables import NAMINGS

MODEL, STATE = "model.", "optimizer.state."


class Tensors:
    """The tensors of a checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that is damaged."""
        self.folder = folder
        self.index: Metadata = read_index(folder)
        self.reader = dcp.FileSystemReader(folder)
        self.reader.set_up_storage_reader(self.index, is_coordinator=True)
        self.leaves = {
            name: Leaf(tuple(entry.size), torch_files.dtype_of(entry.properties.dtype), partial(self.read, name))
            for name, entry in self.index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor, put together from what the ranks wrote. Raises ConfigError."""
        tensor = torch_files.empty(self.leaves[name])
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner({name: tensor}, self.index, is_coordinator=True)
            self.reader.read_data(self.reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
        except Exception as error:  # of a damaged file, many kinds
            raise ConfigError(f"{self.folder}: tensor {name}: {error!r}; use another checkpoint, or a copy") from None
        return torch_files.to_numpy(tensor)


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under the names that the model gave them."""
    return _parameters(Tensors(whole(path)).leaves)


def _parameters(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Those below `model.`; all where some lie elsewhere, for then it is the model's own prefix."""
    kept = {name: leaf for name, leaf in leaves.items() if not name.startswith("optimizer.") and name != "step"}
    inside = all(name.startswith(MODEL) for name in kept)
    return {name.removeprefix(MODEL): leaf for name, leaf in kept.items()} if inside else kept


def opened(path: Path, wanted: Experiment | None = None) -> Content:
    """The content of a checkpoint or of a run's newest whole one. Raises ConfigError."""
    found = whole(path)
    leaves = Tensors(found).leaves
    model = _parameters(leaves)
    said = _experiment(found)
    experiment = agreed(str(path), said, wanted)
    naming, names = recognized(str(path), model, experiment.model)
    table = NAMINGS[naming][experiment.model.family]
    groups: dict[str, Leaves] = {PARAMETERS: {full: model[name] for full, name in names.items()}}
    updates = None
    counts = [leaf for name, leaf in leaves.items() if name.startswith(STATE) and name.endswith(".step")]
    if counts:
        updates = one_count(str(path), (int(leaf.read()) for leaf in counts))
        groups |= {kind: _moments(leaves, kind, lambda name: table.full_name(plain(name))) for kind in MOMENTS}
    step = int(leaves["step"].read()) if "step" in leaves else updates or 0
    origin = origin_of(found) if said else Origin("dcp", naming, carried(names, naming, experiment.model))
    return Content(experiment, naming, groups, step, updates, origin, metrics_of(found)).checked(path)


def _moments(leaves: Mapping[str, Leaf], kind: str, rename: Any) -> Leaves:
    return {
        rename(name.removeprefix(STATE).removesuffix(f".{kind}")): leaf
        for name, leaf in leaves.items()
        if name.startswith(STATE) and name.endswith(f".{kind}")
    }


def _experiment(path: Path) -> Experiment | None:
    """That of the run; another program writes none. Raises ConfigError."""
    file = path / EXPERIMENT
    if not file.exists():
        return None
    try:
        return Experiment.parse(read_json(file), source=str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}; use another checkpoint, or a copy of it") from None


class Streaming(DefaultSavePlanner):
    """Takes the tensors as they come from a conversion; what a checkpoint is planned with has no numbers."""

    def __init__(self, given: dict[str, Tensor], coming: Iterator[tuple[str, np.ndarray]]) -> None:
        super().__init__()
        self.given, self.coming = given, coming

    def resolve_data(self, write_item: Any) -> Any:
        name = write_item.index.fqn
        while name not in self.given:
            key, array = next(self.coming)
            self.given[key] = torch_files.to_torch(array)
            del array
        return self.given.pop(name)


def write(path: Path, conversion: Conversion) -> None:
    """Write a run folder that `torch_ref` goes on from, with this one checkpoint. Raises ConfigError."""
    content = conversion.content
    folder = begin(path, content)
    names = content.origin.names if content.origin.kind == "dcp" else {}

    def key(group: str, name: str) -> str:
        name = names.get(name, name)
        return f"{MODEL}{name}" if group == PARAMETERS else f"{STATE}{name}.{group}"

    # In the order in which they come: what comes before its turn would be kept.
    turns = [(PARAMETERS,), tuple(kind for kind in MOMENTS if kind in conversion.groups)]
    with FakeTensorMode():
        state: dict[str, Any] = {
            key(group, name): torch_files.empty(conversion.groups[group][name])
            for groups in turns
            for group, name in conversion.order(*groups)
        }
    given = {"step": torch.tensor(content.step)}
    if content.updates is not None:
        given |= {key("step", name): torch.tensor(float(content.updates)) for name in conversion.entries}

    def named(item: tuple[str, str, np.ndarray]) -> tuple[str, np.ndarray]:
        return key(item[0], item[1]), item[2]

    coming = map(named, chain.from_iterable(conversion.stream(*groups) for groups in turns))
    beside = unfinished(folder.checkpoints, content.step)
    beside.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        writer = dcp.FileSystemWriter(beside, single_file_per_rank=False)  # it holds a file's tensors to its end
        try:
            dcp.save(state | given, storage_writer=writer, planner=Streaming(dict(given), coming), no_dist=True)
        except CheckpointException as error:  # around what was raised below
            raise next(iter(error.failures.values()))[0] from None
    (beside / EXPERIMENT).write_text(content.experiment.model_dump_json(), encoding="utf-8")
    publish(folder.checkpoints, content.step)
