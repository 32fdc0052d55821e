"""Folders of torch.distributed.checkpoint, read and written by one process without a process group.

`torch_ref` writes them, in torch's own layout: `model.<name>`, `optimizer.state.<name>.<kind>`, `step`, and
`scaling.<name>` where the loss is scaled.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.bounded import read_json
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, Origin, agreed, one_count
from jaxdist.convert.entries import trainable
from jaxdist.convert.kinds import torch_files, torch_leaves
from jaxdist.convert.kinds.torch_compat import FakeTensor, FakeTensorMode, StorageInfo, tree_map_only
from jaxdist.convert.kinds.torch_leaves import PIECE, blocks
from jaxdist.convert.kinds.torch_parts import like, unread
from jaxdist.convert.kinds.torch_zip import TorchFile
from jaxdist.convert.optimizers import fused, rates, rules
from jaxdist.convert.runs import begin, metrics_of, origin_of
from jaxdist.convert.stream import Conversion
from jaxdist.formats import folders
from jaxdist.formats.dcp import APP, FIRST, PREFIXES, STATE, check_parts, no_weights, part_prefixes
from jaxdist.formats.dcp_index import EXPERIMENT, nesting, read_index
from jaxdist.formats.naming import carried, recognized, renaming
from jaxdist.formats.torch_files import GROUPS, SCHEDULER, part
from jaxdist.formats.torch_zips import Part, Place
from jaxdist.runs.checkpoints import complete_checkpoint, publish, sealed, unfinished
from jaxdist.runs.display import say
from jaxdist.training.loss_scale import LossScale, state_of

SCALING = "scaling."


class Tensors:
    """The tensors of a checkpoint, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError for a folder that is damaged."""
        self.folder = folder
        self.index: Metadata = read_index(folder)
        found = self.index.state_dict_metadata
        entries = {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
        self.leaves = {name: self._leaf(name, entry) for name, entry in entries.items()}
        shapes = {name: tuple(entries[name].size) if name in entries else None for name in found}
        self.prefixes, self.weights = part_prefixes(shapes)

    @property
    def parameters(self) -> dict[str, Leaf]:
        """Tensors of the model, under the model's own names."""
        return {name.removeprefix(self.prefixes["model"]): self.leaves[name] for name in self.weights}

    def _leaf(self, name: str, entry: TensorStorageMetadata) -> Leaf:
        dtype = torch_leaves.dtype_of(entry.properties.dtype)
        besides = min(PIECE, math.prod(entry.size) * dtype.itemsize)  # a turned part, or one of several
        return Leaf(tuple(entry.size), dtype, partial(self.read, name, entry), besides=besides)

    def read(self, name: str, entry: TensorStorageMetadata) -> np.ndarray:
        """One tensor, put together from what the ranks wrote. Raises ConfigError."""
        shape, dtype, parts = tuple(entry.size), torch_leaves.dtype_of(entry.properties.dtype), self._parts(name, entry)
        with self._reading(name):
            if [tuple(chunk.sizes) for chunk, _ in parts] == [shape]:
                return torch_leaves.leaf(*self._part(name, *parts[0], dtype)).read()
            tensor = np.empty(shape, dtype)
            for chunk, found in parts:
                place = (slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
                into, (path, _, part) = tensor[tuple(place)], self._part(name, chunk, found, dtype)
                for block in blocks(into.shape, into.nbytes):  # a full part would take room beside the tensor
                    into[block] = torch_leaves.leaf(path, name, part[block]).read()
            return tensor

    def _parts(self, name: str, entry: TensorStorageMetadata) -> list[tuple[ChunkStorageMetadata, StorageInfo]]:
        """Parts of a tensor, and their places in files. Raises ConfigError."""
        places = [self.index.storage_data.get(MetadataIndex(name, chunk.offsets)) for chunk in entry.chunks]
        check_parts(self.folder, name, entry, places)
        return list(zip(entry.chunks, places, strict=True))

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Raises ConfigError for any error of the reading of a tensor."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(f"{self.folder}: tensor {name}: {error}") from None
        except Exception as error:  # of a damaged file, many kinds
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise ConfigError(f"{self.folder}: tensor {name}: {reason}; use another checkpoint, or a copy") from None

    def _part(
        self, name: str, chunk: ChunkStorageMetadata, found: StorageInfo, dtype: np.dtype
    ) -> tuple[Path, str, Tensor]:
        """One rank's part of a tensor, as `torch_leaves.leaf` takes it: a file of `torch.save` inside a file."""
        if extended(found):
            raise ConfigError(f"it is written by {found.transform_descriptors}; write it without extensions")
        path, part = self._loaded(found)
        leaf = torch_leaves.leaf(path, name, part)
        if (leaf.shape, leaf.dtype) != (tuple(chunk.sizes), dtype):
            raise ValueError(
                f"{found.relative_path} has {leaf.dtype}{list(leaf.shape)} of it, not {dtype}{list(chunk.sizes)}"
            )
        return path, name, part

    def _loaded(self, found: Any, mapped: bool = False) -> tuple[Path, Any]:
        """Object that `torch.save` wrote to a part of a file. Raises ConfigError, OSError."""
        path = self.folder / found.relative_path
        return path, torch_files.load(path, Place(found.offset, found.length), mapped)

    @cached_property
    def values(self) -> dict[str, Any]:
        """Plain values and trees of them, by their full names: step, groups, scheduler. Larger values stay behind, as a
        note says."""
        found: dict[str, Any] = {}
        behind: list[str] = []
        for name in (n for n in self.index.state_dict_metadata if n not in self.leaves):
            try:
                found[name] = self._loaded(self.index.storage_data[MetadataIndex(name)], mapped=True)[1]
            except (ConfigError, OSError, ValueError, KeyError):
                behind.append(name)
        self._say_behind(behind)
        return found

    @cached_property
    def others(self) -> list[str]:
        """The tensors that are neither weight nor moment: counters, averages. A tensor larger than all
        files repeats a few numbers: it stays behind, as a note says."""
        states, counts = self.prefixes["optimizer"] + STATE, ".step"
        known = {*self.weights, *(n for n in self.leaves if n.startswith(states) and not n.endswith(counts))}
        others = [name for name in self.leaves if name not in known]
        size = sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())
        self._say_behind([name for name in others if self.leaves[name].bytes > size])
        return [name for name in others if self.leaves[name].bytes <= size]

    def extras(self, begin: str = "") -> dict[str, Any]:
        """Values and tensors by their full names; only tensors whose names begin with `begin`."""
        return self.values | {name: self._mapped(name) for name in self.others if name.startswith(begin)}

    def _mapped(self, name: str) -> Tensor:
        """A tensor in one piece, mapped into memory; in several, put together. Raises ConfigError."""
        entry: Any = self.index.state_dict_metadata[name]
        if [chunk.sizes for chunk in entry.chunks] != [entry.size]:
            return torch_leaves.to_torch(self._leaf(name, entry).read())
        ((chunk, found),) = self._parts(name, entry)
        with self._reading(name):
            self._part(name, chunk, found, torch_leaves.dtype_of(entry.properties.dtype))
            return torch_files.contiguous(*self._loaded(found, mapped=True))

    def _say_behind(self, names: Sequence[str]) -> None:
        if names:
            say(f"{self.folder}: {len(names)} entries stay behind, {names[0]} first: they cannot be read safely")


def extended(found: Any) -> bool:
    """Whether a part is more than what `torch.save` wrote: compressed, say."""
    return bool(getattr(found, "transform_descriptors", None))


def embedded_files(folder: Path) -> Iterator[tuple[str, Callable[[], AbstractContextManager[BufferedReader]]]]:
    """Places of the files of `torch.save` within those of a checkpoint, and a function that opens each."""
    for found in read_index(folder).storage_data.values():
        if not extended(found):
            path, place = folder / found.relative_path, Place(found.offset, found.length)
            yield f"{path}, from byte {place.start}", partial(_opened, path, place)


@contextmanager
def _opened(path: Path, place: Place) -> Iterator[BufferedReader]:
    with path.open("rb", buffering=0) as file:
        yield BufferedReader(Part(file, place))


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under the names that the model gave them."""
    return Tensors(complete_checkpoint(path, "small")).parameters


def _check_alone(path: Path, tensors: Tensors, known: Callable[[str], bool]) -> None:
    """Raises ConfigError for an optimizer besides the one that is read: groups, or the state of a `known` parameter."""
    for name in tensors.index.state_dict_metadata:
        of_groups, grouped, _ = f".{name}.".partition(f".{GROUPS}.")
        of_state, _, entry = f".{name}.".partition(f".{STATE}")
        owner = of_groups if grouped else of_state if known(entry[:-1].rpartition(".")[0]) else None
        if owner is not None and f"{owner}."[1:] != tensors.prefixes["optimizer"]:
            raise unread(str(path), owner[1:] or name)


def read_content(
    path: Path, wanted: Experiment | None = None, training: bool = True, peak: rates.Peak | None = None
) -> Content:
    """The content of a checkpoint, or of a run's newest complete one as far as the small files show: the large ones
    of `Content.checkpoint` are still to be compared. Raises ConfigError."""
    found = complete_checkpoint(path, "small")
    tensors = Tensors(found)
    leaves, model = tensors.leaves, tensors.parameters
    if not model:
        raise no_weights(path, found)
    if own := _experiment(found):
        rates.check_unasked(path, peak)
    experiment = agreed(str(path), own, wanted)
    naming, names = recognized(str(path), model, experiment.model)
    full_name = renaming(names, naming, experiment.model)
    groups: dict[str, Leaves] = {PARAMETERS: {full: model[name] for full, name in names.items()}}
    carries = carried(names, naming, experiment.model)
    prefix, others = tensors.prefixes["optimizer"], training and not own
    if others:
        _check_alone(path, tensors, lambda name: full_name(name) in names)
    extras = tensors.extras(prefix) if others else {}
    leaves, extras = (fused.unfused(str(path), part, experiment.model) for part in (leaves, extras))
    trained = list(groups_of(extras, f"{prefix}{GROUPS}.").values())
    updates, rule = None, None
    if states := states_of({**leaves, **extras}, prefix) if training else {}:
        if not own:
            rule = rules.rule_of(str(path), (kind for _, kind in states), trained)
        kept = rule.kinds(trained) if rule else experiment.optimizer.kept
        groups |= {
            kind: {full_name(n): leaf for (n, k), leaf in states.items() if k == kind and isinstance(leaf, Leaf)}
            for kind in kept
        }
        called: dict[tuple[str, str], str] = {}
        for name, kind in states:
            if (twin := called.setdefault((full_name(name), kind), name)) != name:
                raise ConfigError(f"{path}: its optimizer has {kind} of {twin} and of {name}; leave one of them out")
        carries |= {f"{n}.{kind}": there for (n, kind), there in called.items() if names.get(n, there) != there}
        counts = counts_of(str(path), states, needed=rule is None or rule.counts)
        updates = one_count(str(path), (torch_files.count_of(path, count) for count in counts)) if counts else None
    step_at = tensors.prefixes["step"]
    saved_step = leaves[step_at] if step_at in leaves else tensors.values.get(step_at) if training and step_at else None
    step = torch_files.first_count(_number(str(path), "step", saved_step), updates)
    updates = step if states and updates is None else updates
    if own:
        provenance = origin_of(found), metrics_of(found)
        content = Content(experiment, naming, groups, step, updates, *provenance, _scaling(leaves), sealed(found))
        return content.checked(path)
    if rule:
        with torch_files.reading(path, "optimizer"):
            named = tree_map_only(Tensor, partial(torch_files.number, path), trained)
            for group in named:
                group["params"] = [full_name(name) for name in group["params"]]
            shapes = {name: entry.shape for name, entry in trainable(naming, experiment.model).items()}
            settings = rules.settings(str(path), rule, named, shapes)
            recorded = rates.Recorded(path, named, step, scheduler_of(extras))
            settings |= rates.going_on(recorded, experiment, rates.schedule_origin(wanted), peak)
        experiment = torch_files.trained_by(experiment, settings, f"{path}: optimizer")
    ways = fused.ways(nesting(tensors.index.planner_data))

    def held() -> dict[str, Any]:
        return fused.unfused(str(path), tensors.extras(), experiment.model) if others else {}

    origin = Origin(
        "dcp", naming, carries, tensors.prefixes, ways, held=held, step=step, left=folders.trainer_state_files(found)
    )
    return Content(experiment, naming, groups, step, updates, origin, checkpoint=sealed(found)).checked(path)


def states_of(found: Mapping[str, Any], optimizer: str) -> dict[tuple[str, str], Any]:
    """Optimizer state by parameter and kind: a tensor that is not read yet, or a plain value."""
    begun = f"{optimizer}{STATE}"
    return {n.removeprefix(begun).rpartition(".")[::2]: value for n, value in found.items() if n.startswith(begun)}


def counts_of(path: str, states: Mapping[tuple[str, str], Any], needed: bool) -> list[Any]:
    """Number of updates of each parameter. Raises ConfigError where a `needed` count is missing."""
    counts = {name: value for (name, kind), value in states.items() if kind == "step"}
    if needed and (uncounted := [name for name, _ in states if name not in counts]):
        raise ConfigError(f"{path}: its optimizer has moments of {uncounted[0]}, and no count of its steps; add it")
    return [_number(path, f"step of {name}", value) for name, value in counts.items()]


def _number(path: str, name: str, value: Any) -> Any:
    """The number in a tensor; other values unchanged. Raises ConfigError if the tensor has more than one number."""
    if isinstance(value, Leaf | Tensor) and math.prod(value.shape) != 1:
        raise ConfigError(f"{path}: {name} is a tensor {list(value.shape)}; give one whole number")
    return value.read().item() if isinstance(value, Leaf) else value


def _scaling(leaves: Leaves) -> LossScale | None:
    names = {name: f"{SCALING}{name}" for name in LossScale._fields}
    there = leaves.keys() >= {*names.values()}
    return state_of(**{n: leaves[key].read() for n, key in names.items()}) if there else None


def groups_of(extras: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """The optimizer's groups by what they are called: their number, or the name of the one parameter."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in extras.items():
        if key.startswith(prefix):
            group, _, setting = key.removeprefix(prefix).rpartition(".")
            found.setdefault(group, {"params": [group]})[setting] = value
    return found


def scheduler_of(extras: Mapping[str, Any]) -> dict[Any, Any]:
    """The state of a scheduler, in one entry or in one for each of its parts; empty without one."""
    begins = (f"{outer}{key}{first}." for outer in (APP, "") for key in SCHEDULER for first in FIRST)
    flat = ({n.removeprefix(begin): value for n, value in extras.items() if n.startswith(begin)} for begin in begins)
    return part(extras, SCHEDULER) or next(filter(None, flat), {})


def _extras(content: Content, optimizer: str) -> dict[str, Any]:
    """State beside weights and moments, to be written again, with the groups as after more steps. `optimizer`: prefix
    of the optimizer's names."""
    origin = content.origin
    extras = dict(origin.extras or {}) if origin.kind == "dcp" else {}
    if not extras or content.step == origin.step:
        return extras
    rate, prefix = torch_files.rate_of(content), f"{optimizer}{GROUPS}."
    for name, group in groups_of(extras, prefix).items():
        now = rules.going_on(group, content.experiment.optimizer, rate, content.updates or 0)
        extras |= {key: value for setting, value in now.items() if (key := f"{prefix}{name}.{setting}") in extras}
    if others := [key for key in extras if not key.startswith(optimizer) and key != origin.metadata["step"]]:
        say(f"{others[0]} and what else is neither weight nor optimizer stays as it was before the steps since")
    return extras


def _experiment(path: Path) -> Experiment | None:
    """The loss scale of the run; other programs write none. Raises ConfigError."""
    file = path / EXPERIMENT
    if not file.exists():
        return None
    try:
        return Experiment.parse(read_json(file), source=str(file))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {error}; use another checkpoint, or a copy of it") from None


def own_way(key: str) -> list[str]:
    """The way to an entry in the tree that `torch_ref` saves."""
    part, dot, rest = key.partition(".")
    if rest.startswith(STATE):
        name, _, kind = rest.removeprefix(STATE).rpartition(".")
        return [part, STATE[:-1], name, kind]
    return [part, rest] if dot else [part]


class Layout(dcp.FileSystemWriter):
    """Writes files with room for tensors that are to come, by their names."""

    def __init__(self, folder: Path, ways: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self.folder, self.ways, self.files = folder, nesting(ways), dict[str, tuple[TorchFile, Tensor]]()
        self.sums = dict[str, str]()  # checksums by file

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write as `torch.distributed.checkpoint` does with one file per tensor."""
        results = []
        for i, item in enumerate(plan.items):
            path = self.folder / f"__0_{i}.distcp"
            data = planner.resolve_data(item)
            if isinstance(data, Tensor):
                self.files[item.index.fqn] = TorchFile(path, data), data
                if not isinstance(data, FakeTensor):  # a count, which is there already
                    self.files[item.index.fqn][0].seal()
            else:
                path.write_bytes(data.getbuffer())
            size = path.stat().st_size
            results.append(WriteResult(item.index, size, StorageInfo(path.name, 0, size)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, where entries that lay within others do so again: `dcp.save` was given them side by side."""
        ways = {name: tuple(self.ways.get(name, way)) for name, way in metadata.planner_data.items()}
        super().finish(replace(metadata, planner_data=ways), results)

    def put(self, name: str, numbers: np.ndarray) -> None:
        """Write one of the tensors, the only one of its file."""
        file, tensor = self.files[name]
        file.write(tensor, numbers)
        file.seal()
        self.sums[file.path.name] = file.digest(tensor, numbers)


def check(conversion: Conversion) -> None:
    """Anything can be written."""


def write(path: Path, conversion: Conversion) -> None:
    """Write a run folder with this one checkpoint, which `torch_ref` continues from; one that came from another program
    has the names that it had there. Raises ConfigError."""
    content = conversion.content
    folder = begin(path, content)
    names = content.origin.names_in("dcp")
    of_dcp = content.origin.kind == "dcp"
    prefixes = {**PREFIXES, **(content.origin.metadata if of_dcp else {})}
    own = conversion.naming == "torch_ref" and prefixes["model"] == PREFIXES["model"]
    if not own:
        say("its tensors are called as in the program that they came from: torch_ref takes it by --init alone")

    tied = conversion.tied_copies("dcp")

    def keys(group: str, name: str) -> list[str]:
        there = names.get(name, name)
        if group != PARAMETERS:
            there = names.get(f"{name}.{group}", there)
            return [f"{prefixes['optimizer']}{STATE}{there}.{group}"]
        return [prefixes["model"] + called for called in (there, tied.get(name)) if called]

    with FakeTensorMode():
        state: dict[str, Any] = {
            key: torch_leaves.empty(leaf)
            for group, leaves in conversion.groups.items()
            for name, leaf in leaves.items()
            for key in keys(group, name)
        }
        buffers_there = {prefixes["model"] + name: leaf for name, leaf in content.origin.buffers_in("dcp").items()}
        state |= {key: torch_leaves.empty(leaf) for key, leaf in buffers_there.items()}
    step = prefixes["step"] or ("step" if content.step != (content.updates or 0) else "")
    counts: dict[str, Any] = {step: torch.tensor(content.step)} if step else {}
    if content.updates is not None and (not of_dcp or rules.by_name()[content.experiment.optimizer.name].counts):
        done = float(content.updates)
        counts |= {
            key: torch.tensor(done)
            for name in trainable(conversion.naming, content.experiment.model)
            for key in keys("step", name)
        }
    if content.scaling and own:
        counts |= {f"{SCALING}{name}": torch.tensor(x.item()) for name, x in content.scaling._asdict().items()}
    extras = _extras(content, prefixes["optimizer"])
    # A count is a number where it was one, and a tensor else; without steps since then it is as it was.
    same = content.step == content.origin.step
    counts |= {key: extras[key] if same else like(extras[key], int(counts[key])) for key in counts.keys() & extras}
    partial_path = unfinished(folder.checkpoints, content.step)
    partial_path.mkdir(parents=True)
    layout = Layout(partial_path, content.origin.index if of_dcp else {key: own_way(key) for key in state | counts})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        try:
            dcp.save(state | extras | counts, storage_writer=layout, no_dist=True)
        except CheckpointException as error:  # around what was raised below
            raise next(iter(error.failures.values()))[0] from None

    def put(group: str, name: str, array: np.ndarray) -> None:
        for key in keys(group, name):
            layout.put(key, array)

    conversion.each(put, *conversion.groups)
    for key, leaf in buffers_there.items():
        layout.put(key, leaf.contiguous())
    (partial_path / EXPERIMENT).write_text(content.experiment.model_dump_json(), encoding="utf-8")
    publish(folder.checkpoints, content.step, layout.sums)
