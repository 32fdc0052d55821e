"""Folders of torch.distributed.checkpoint, read and written by one process without a process group.

`torch_ref` writes them, in torch's own layout: `model.<name>`, `optimizer.state.<name>.<kind>`, `step`.
"""

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from jaxdist.config import ConfigError, Experiment, whole
from jaxdist.config.checkpoints import publish, unfinished
from jaxdist.config.dcp import EXPERIMENT, read_index
from jaxdist.config.display import say
from jaxdist.config.foreign import read_json
from jaxdist.convert import buffers, torch_files
from jaxdist.convert.content import MOMENTS, PARAMETERS, Content, Leaf, Leaves, Origin, agreed, one_count
from jaxdist.convert.naming import carried, plain, recognized
from jaxdist.convert.runs import begin, metrics_of, origin_of
from jaxdist.convert.stream import Conversion
from jaxdist.convert.tables import NAMINGS, Shape
from jaxdist.convert.torch_zip import TorchFile

MODEL, STATE, APP = "model.", "optimizer.state.", "app."


class Tensors:
    """The tensors of a checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that is damaged."""
        self.folder = folder
        self.index: Metadata = read_index(folder)
        found = self.index.state_dict_metadata.items()
        entries = {name: entry for name, entry in found if isinstance(entry, TensorStorageMetadata)}
        # As torch's tutorial calls the parts: {"app": {"model", "optim"}}.
        outer = APP if all(name.startswith(APP) for name in entries) else ""
        self.leaves = {
            re.sub(r"^optim\.", "optimizer.", name.removeprefix(outer)): Leaf(
                tuple(entry.size), torch_files.dtype_of(entry.properties.dtype), partial(self.read, name, entry)
            )
            for name, entry in entries.items()
        }

    def read(self, name: str, entry: TensorStorageMetadata) -> np.ndarray:
        """One tensor, put together from what the ranks wrote. Raises ConfigError."""
        shape, dtype, chunks = tuple(entry.size), torch_files.dtype_of(entry.properties.dtype), entry.chunks
        try:
            if [tuple(chunk.sizes) for chunk in chunks] == [shape]:
                return self._part(name, chunks[0], dtype)
            if not tiled(shape, chunks):
                raise ValueError("its parts overlap or are not all of it")
            tensor = buffers.empty(shape, dtype)
            for chunk in chunks:
                place = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
                tensor[tuple(place)] = self._part(name, chunk, dtype)
            return tensor
        except Exception as error:  # of a damaged file, many kinds
            raise ConfigError(f"{self.folder}: tensor {name}: {error!r}; use another checkpoint, or a copy") from None

    def _part(self, name: str, chunk: ChunkStorageMetadata, dtype: np.dtype) -> np.ndarray:
        """What one rank wrote of a tensor: a file of `torch.save` within a file."""
        found = self.index.storage_data[MetadataIndex(name, chunk.offsets)]
        if getattr(found, "transform_descriptors", None):
            raise ValueError(f"it is written by {found.transform_descriptors}; write it without extensions")
        path = self.folder / found.relative_path
        with path.open("rb") as file:
            part = torch_files.load(path, cast(IO[bytes], _create_file_view(file, found.offset, found.length)))
        leaf = torch_files.leaf(path, name, part, found.offset)
        if (leaf.shape, leaf.dtype) != (tuple(chunk.sizes), dtype):
            raise ValueError(
                f"{found.relative_path} has {leaf.dtype}{list(leaf.shape)} of it, not {dtype}{list(chunk.sizes)}"
            )
        return leaf.read()


def tiled(shape: Shape, chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether the chunks are all of a tensor, and each number is in one of them."""
    boxes = [tuple(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk in chunks]
    within = all(0 <= start <= start + n <= size for box in boxes for (start, n), size in zip(box, shape, strict=True))
    apart = all(
        any(a + n <= b or b + m <= a for (a, n), (b, m) in zip(*pair, strict=True)) for pair in combinations(boxes, 2)
    )
    return within and apart and sum(chunk.sizes.numel() for chunk in chunks) == math.prod(shape)


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under the names that the model gave them."""
    return _parameters(Tensors(whole(path)).leaves)


def _parameters(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Those below `model.`; all where it is the model's own prefix: then other weights lie beside it."""
    given = {name: leaf for name, leaf in leaves.items() if name != "step" and not name.startswith("optimizer.")}
    inside = {name.removeprefix(MODEL): leaf for name, leaf in given.items() if name.startswith(MODEL)}
    own = any(name.endswith((".weight", ".bias")) for name in given if not name.startswith(MODEL))
    return inside if inside and not own else given


def opened(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
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
    if training and counts:
        updates = one_count(str(path), (int(leaf.read()) for leaf in counts))
        groups |= {kind: _moments(leaves, kind, lambda name: table.full_name(plain(name))) for kind in MOMENTS}
    step = int(leaves["step"].read()) if "step" in leaves else updates or 0
    if updates is not None and not said:
        say(f"{path}: the optimizer's settings of another program stay behind; --model gives them")
    origin = origin_of(found) if said else Origin("dcp", naming, carried(names, naming, experiment.model))
    return Content(experiment, naming, groups, step, updates, origin, metrics_of(found) if said else b"").checked(path)


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


class Layout(dcp.FileSystemWriter):
    """Writes files with room for tensors that are to come, by their names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder, self.files = folder, dict[str, tuple[TorchFile, Tensor]]()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As `torch.distributed.checkpoint` does it with a file for each tensor."""
        results = []
        for i, item in enumerate(plan.items):
            path = self.folder / f"__0_{i}.distcp"
            tensor = cast(Tensor, planner.resolve_data(item))
            file = TorchFile(path, tensor)
            file.seal()  # a count is there already
            self.files[item.index.fqn] = file, tensor
            size = path.stat().st_size
            results.append(WriteResult(item.index, size, _StorageInfo(path.name, 0, size)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def put(self, name: str, numbers: np.ndarray) -> None:
        """Write one of the tensors, the only one of its file."""
        file, tensor = self.files[name]
        file.write(tensor, numbers)
        file.seal()


def check(conversion: Conversion) -> None:
    """Anything can be written."""


def write(path: Path, conversion: Conversion) -> None:
    """Write a run folder that `torch_ref` goes on from, with this one checkpoint. Raises ConfigError."""
    content = conversion.content
    folder = begin(path, content)
    names = content.origin.names_in("dcp")

    def key(group: str, name: str) -> str:
        name = names.get(name, name)
        return f"{MODEL}{name}" if group == PARAMETERS else f"{STATE}{name}.{group}"

    with FakeTensorMode():
        state: dict[str, Any] = {
            key(group, name): torch_files.empty(leaf)
            for group, leaves in conversion.groups.items()
            for name, leaf in leaves.items()
        }
    counts = {"step": torch.tensor(content.step)}
    if content.updates is not None:
        counts |= {key("step", name): torch.tensor(float(content.updates)) for name in conversion.entries}
    beside = unfinished(folder.checkpoints, content.step)
    beside.mkdir(parents=True)
    layout = Layout(beside)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        try:
            dcp.save(state | counts, storage_writer=layout, no_dist=True)
        except CheckpointException as error:  # around what was raised below
            raise next(iter(error.failures.values()))[0] from None
    conversion.each(lambda group, name, array: layout.put(key(group, name), array), *conversion.groups)
    (beside / EXPERIMENT).write_text(content.experiment.model_dump_json(), encoding="utf-8")
    publish(folder.checkpoints, content.step)
