"""Orbax checkpoints of jaxdist: `checkpoints/<step>/`, read and written a layer at a time.

Our arrays hold all layers. The conversion takes single layers, under the names of LAYERS, each of which can be read by
itself: those of a run and those written here lie in chunks of one layer.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxdist.config import ConfigError, Experiment, check_shapes
from jaxdist.config.bounded import file_within, read_json
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, agreed, entries_of
from jaxdist.convert.entries import cut, layer_atoms, shapes_of
from jaxdist.convert.kinds.orbax_compat import WithoutMetadataStore
from jaxdist.convert.kinds.zarr_files import ZarrFiles
from jaxdist.convert.mappings.atoms import Shape
from jaxdist.convert.runs import begin, metrics_of, origin_of
from jaxdist.convert.stream import Conversion, Resharder, one_dtype
from jaxdist.families import models
from jaxdist.formats.foreign import check_files
from jaxdist.formats.orbax import arrays, check_chunks, numbers_of, read_experiment, reading, spec
from jaxdist.formats.tables import LAYERS, OWN
from jaxdist.runs.checkpoints import publish, sealed, unfinished
from jaxdist.training import checkpoint
from jaxdist.training.loss_scale import state_of
from jaxdist.training.optim import State, optimizer
from jaxdist.training.orbax_io import checkpointer, items

# TensorStore's setting: map files in the page cache, instead of copying them into fresh memory.
READING = ts.Context.Spec({"file_io_mode": {"mode": "memmap"}})


def described(path: Path) -> dict[str, Leaf]:
    """Every parameter."""
    found = checkpoint.locate(path, "small")
    return {name: leaf(found, store) for name, store in arrays(found).items()}


def read_content(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a checkpoint, or of a run's newest complete one as far as the small files show: the large ones
    of `Content.checkpoint` are still to be compared. Raises ConfigError."""
    found = checkpoint.locate(path, "small")
    experiment = agreed(str(path), read_experiment(found), wanted)

    def layers(what: str, group: str, there: Mapping[str, ts.TensorStore]) -> Leaves:
        wanted = {name: entry.shape for name, entry in entries_of(OWN, experiment, group).items()}
        check_shapes(what, {name: tuple(store.shape) for name, store in there.items()}, wanted)
        return {part: leaf for name, store in there.items() for part, leaf in _layers(found, name, store).items()}

    groups = {PARAMETERS: layers(str(path), PARAMETERS, arrays(found))}
    updates = scaling = None
    if training and (found / "optimizer").is_dir():
        optimizer_item = stores(found, "optimizer")
        with reading(found):
            kept = checkpoint.kept_in(optimizer_item)
            counts = [part["updates"] for part in optimizer_item if isinstance(part, dict) and "updates" in part]
            updates = int(numbers_of(found, named(found, "updates", dict(enumerate(counts)))[0]))
        asked = experiment.optimizer.kept
        groups |= {
            kind: layers(f"{path}, {kind}", kind, named(found, kind, arrays)) if kind in asked else {}
            for kind, arrays in kept.items()
        }
        if (found / "scaling").is_dir():
            scales = named(found, "scaling", stores(found, "scaling"))
            with reading(found):
                scaling = state_of(**{name: numbers_of(found, store) for name, store in scales.items()})
    if not found.name.isdecimal():
        raise ConfigError(
            f"{path}: a checkpoint is named by its step, and {found.name} is not a step; rename it to its step"
        )
    step = int(found.name)
    provenance = origin_of(found), metrics_of(found)
    return Content(experiment, LAYERS, groups, step, updates, *provenance, scaling, sealed(found)).checked(path)


class Opening(WithoutMetadataStore):
    """Opens arrays of what a checkpoint calls `kind`, and leaves to read them to who asks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def typestr(self) -> str:
        return self.kind

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        specs = [spec(Path(i.parent_dir), i.name, i.is_ocdbt_checkpoint, i.use_zarr3) for i in infos]
        stores = [
            await ts.open(array, open=True, context=ts.Context(READING, parent=info.ts_context))
            for array, info in zip(specs, infos, strict=True)
        ]
        for info, store in zip(infos, stores, strict=True):
            check_chunks(info.name, store)
        return stores


def named(path: Path, what: str, tree: Any) -> Any:
    """A part of a checkpoint's pytree that is to be arrays by name. Raises ConfigError where it is something else."""
    if isinstance(tree, dict) and tree and all(isinstance(store, ts.TensorStore) for store in tree.values()):
        return tree
    raise ConfigError(f"checkpoint {path} is damaged: its {what} are not arrays by name; use another, or a copy of it")


def stores(root: Path, item: str = ".") -> Any:
    """The pytree that Orbax wrote to a folder, or to an item of it, its arrays not read yet. Raises ConfigError."""
    path = root / item
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, Opening("jax.Array")), (ts.TensorStore, Opening("np.ndarray")), (float, Opening("scalar"))
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with checkpointer(handler) as reader, reading(path):
        file_within(root, item)
        check_files(path)
        read_json(path / "_METADATA")  # Orbax would take any size
        if (found := reader.metadata(path).item_metadata) is None:
            raise ValueError("its tree cannot be read, or has leaves that are not arrays")
        tree = found.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=ts.TensorStore), tree)
        return reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))


def leaf(path: Path, store: ts.TensorStore) -> Leaf:
    """An array of the checkpoint `path`."""
    return Leaf(tuple(store.shape), np.dtype(store.dtype.numpy_dtype), partial(numbers_of, path, store))


def _layers(path: Path, name: str, store: ts.TensorStore) -> dict[str, Leaf]:
    """The layers of an array by their names, or itself where it has none."""
    return {
        part: leaf(path, store[place] if place else store) for part, place in places(name, tuple(store.shape)).items()
    }


def places(name: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Indices of an array's parts along its first axes, layers and experts."""
    stack, _ = cut(name, shape)
    return {part: tuple(map(int, np.unravel_index(number, stack))) for part, (_, number), _ in layer_atoms(name, shape)}


@dataclass(frozen=True)
class Coming:
    """An array that a conversion will give; `places` are those of its tensors along the first axes."""

    group: str
    shape: Shape
    dtype: np.dtype
    places: Mapping[str, tuple[int, ...]]


class Streaming(ocp.type_handlers.NumpyHandler):
    """Writes arrays as a conversion gives their tensors, each in files of its own: one database of all, as Orbax has it
    else, is written by a thread at a time."""

    def __init__(self, conversion: Resharder) -> None:
        super().__init__()
        self.conversion, self.lock, self.failed = conversion, threading.Lock(), False
        self.begun: list[ocp.future.Future] = []
        self.arrays: list[tuple[str, ZarrFiles]] = []  # item/array

    @property
    def sums(self) -> dict[str, str]:
        """Checksums of the arrays' files, by their names in the checkpoint."""
        return {f"{name}/{file}": digest for name, array in self.arrays for file, digest in array.sums.items()}

    def handler(self) -> ocp.PyTreeCheckpointHandler:
        """An Orbax handler of pytrees of `Coming` and of numpy arrays."""
        arrays = ocp.type_handlers.create_type_handler_registry(
            (Coming, self),
            (np.ndarray, ocp.type_handlers.NumpyHandler()),
            (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None)),  # without it, Orbax warns
        )
        # Weights hardly compress, and it would take most of the time.
        return ocp.PyTreeCheckpointHandler(type_handler_registry=arrays, use_compression=False, use_ocdbt=False)

    def save(self, writer: ocp.Checkpointer, path: Path, args: Any) -> None:
        """Writes a checkpoint. Where one of its items fails, or a signal comes, the rest is left.

        When this ends nothing is being written any more.
        """
        with ThreadPoolExecutor(1) as pool:  # the thread that signals come to waits for it here, and not within Orbax
            try:
                pool.submit(writer.save, path, args=args).result()
            except BaseException:
                self.failed = True
                raise
            finally:
                for item in self.begun:
                    with suppress(Exception):  # it has been raised already
                        item.result()

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        """Writes them all."""
        writing = ocp.future.CommitFutureAwaitingContractedSignals(self._write(values, infos))
        self.begun.append(writing)
        await asyncio.to_thread(writing.result)
        return []

    async def _write(self, values: Sequence[Any], infos: Sequence[Any]) -> None:
        there: dict[tuple[str, str], tuple[ZarrFiles, tuple[int, ...]]] = {}
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            folder = file_within(Path(info.parent_dir), info.name)
            array = ZarrFiles(folder, value.shape, len(next(iter(value.places.values()))), value.dtype)
            item = folder.parent.name.partition(".")[0]  # which has another ending until it is complete
            self.arrays.append((f"{item}/{info.name}", array))
            there |= {(value.group, name): (array, place) for name, place in value.places.items()}

        def put(group: str, name: str, numbers: np.ndarray) -> None:
            if self.failed:
                raise RuntimeError("the conversion has ended")
            array, place = there[group, name]
            array.put(place, numbers)

        def convert() -> None:
            with self.lock:  # two items at once would be twice as much in memory
                if self.failed:
                    return
                try:
                    self.conversion.each(put, *{value.group: None for value in values})
                except BaseException:
                    self.failed = True
                    raise

        await asyncio.to_thread(convert)


def check(conversion: Conversion) -> None:
    """Raises ConfigError where layers of one array are of several dtypes, since an array has one."""
    for group, leaves in conversion.groups.items():
        for name, shape in shapes_of(conversion.content.experiment.model).items():
            layers = [part for part, _, _ in layer_atoms(name, shape) if part in leaves]
            if len(dtypes := {leaves[part].dtype.name for part in layers}) > 1:
                raise ConfigError(
                    f"{group} {name}: its layers are {', '.join(sorted(dtypes))}, and Orbax has one array of them; "
                    f"{one_dtype(group)}"
                )


def write(path: Path, conversion: Conversion) -> None:
    """Write a run folder that `jaxdist` continues from, with this one checkpoint. Raises ConfigError."""
    check(conversion)
    content = conversion.content
    folder = begin(path, content)
    coming = {
        group: {n: _coming(group, n, e.shape, leaves) for n, e in entries_of(OWN, content.experiment, group).items()}
        for group, leaves in conversion.groups.items()
    }
    values: dict[str, Any] = {
        "parameters": ocp.args.PyTreeSave(coming[PARAMETERS]),
        "experiment": ocp.args.JsonSave(content.experiment.model_dump(exclude_none=True)),
    }
    if content.updates is not None:
        values["optimizer"] = ocp.args.PyTreeSave(_optimizer(content, coming))
    if content.scaling:
        values["scaling"] = ocp.args.PyTreeSave(jax.tree.map(np.asarray, content.scaling))
    streaming = Streaming(conversion)
    with checkpointer(items(streaming.handler, ocp.args.PyTreeSave)) as writer:
        streaming.save(writer, unfinished(folder.checkpoints.resolve(), content.step), ocp.args.Composite(**values))
    publish(folder.checkpoints, content.step, streaming.sums)


def _coming(group: str, name: str, shape: Shape, leaves: Leaves) -> Coming:
    where = places(name, shape)
    return Coming(group, shape, leaves[next(iter(where))].dtype, where)


def _optimizer(content: Content, coming: Mapping[str, Mapping[str, Coming]]) -> Any:
    """The state of our optimizer, the moments to come."""
    e = content.experiment
    param_specs = models.param_specs(models.build(e.model))
    trained = {name: array for name, array in coming[PARAMETERS].items() if not param_specs[name].statistic}
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in trained.items()}

    def filled(part: Any) -> Any:
        if isinstance(part, State):
            count: Any = np.asarray(content.updates, np.int32)
            return State(count, {kind: coming[kind] for kind in part.kept})  # type: ignore[misc]
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=np.asarray(content.step, np.int32))
        return part

    state = jax.eval_shape(optimizer(e.optimizer, e.train.steps, param_specs).init, shapes)
    return tuple(filled(part) for part in state)
