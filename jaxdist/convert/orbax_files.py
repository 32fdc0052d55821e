"""Orbax checkpoints of jaxdist: `checkpoints/<step>/`, read and written a layer at a time.

Our arrays hold all layers. What is converted are their layers, under the names of LAYERS, each of which can be read by
itself: those of a run and those written here lie in chunks of one layer.
"""

import asyncio
import math
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
from orbax.checkpoint.type_handlers import get_json_tspec_read, get_json_tspec_write

from jaxdist import checkpoint, models
from jaxdist.checkpoint import CHUNK
from jaxdist.config import ConfigError, Experiment, check_shapes
from jaxdist.config.checkpoints import publish, unfinished
from jaxdist.config.foreign import read_json
from jaxdist.convert import buffers
from jaxdist.convert.atoms import Shape
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, agreed
from jaxdist.convert.runs import begin, metrics_of, origin_of
from jaxdist.convert.stream import Conversion, Recut, one_dtype
from jaxdist.convert.tables import LAYERS, cut, parts, shapes_of
from jaxdist.loss_scale import state_of
from jaxdist.optim import State, optimizer

# Of TensorStore: files are seen where the page cache has them, not copied into fresh memory; and no write waits for the
# disk, as all files are waited for before they get their names.
READING, WRITING = ts.Context.Spec({"file_io_mode": {"mode": "memmap"}}), ts.Context.Spec({"file_io_sync": False})


def described(path: Path) -> dict[str, Leaf]:
    """Every parameter."""
    found = checkpoint.locate(path)
    return {name: leaf(found, store) for name, store in stores(found / "parameters").items()}


def opened(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a checkpoint or of a run's newest whole one. Raises ConfigError."""
    found = checkpoint.locate(path)
    experiment = agreed(str(path), checkpoint.read_experiment(found), wanted)
    shapes, layouts = shapes_of(experiment.model), models.layouts(models.build(experiment.model))
    trained = {name: shape for name, shape in shapes.items() if not layouts[name].statistic}

    def layers(what: str, arrays: Mapping[str, ts.TensorStore], wanted: Mapping[str, Shape] = trained) -> Leaves:
        check_shapes(what, {name: tuple(store.shape) for name, store in arrays.items()}, wanted)
        return {part: leaf for name, store in arrays.items() for part, leaf in _layers(found, name, store).items()}

    groups = {PARAMETERS: layers(str(path), stores(found / "parameters"), shapes)}
    updates = scaling = None
    if training and (found / "optimizer").is_dir():
        optimizer_item = stores(found / "optimizer")
        kept = checkpoint.kept_in(optimizer_item)
        groups |= {kind: layers(f"{path}, {kind}", arrays) for kind, arrays in kept.items()}
        counts = (part["updates"] for part in optimizer_item if isinstance(part, dict) and "updates" in part)
        updates = int(_read(found, next(counts)))
        if (found / "scaling").is_dir():
            scaling = state_of(**{name: _read(found, store) for name, store in stores(found / "scaling").items()})
    if not found.name.isdecimal():
        raise ConfigError(f"{path}: its step is told by its name, and {found.name} is none; rename it to its step")
    step = int(found.name)
    content = Content(experiment, LAYERS, groups, step, updates, origin_of(found), metrics_of(found), scaling)
    return content.checked(path)


class Opening(ocp.type_handlers.NumpyHandler):
    """Opens arrays of what a checkpoint calls `kind`, and leaves to read them to who asks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def typestr(self) -> str:
        return self.kind

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        return [
            await ts.open(
                get_json_tspec_read(info, info.is_ocdbt_checkpoint),
                open=True,
                context=ts.Context(READING, parent=info.ts_context),
            )
            for info in infos
        ]


def stores(path: Path) -> Any:
    """The pytree that Orbax wrote to a folder, its arrays not read yet. Raises ConfigError."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, Opening("jax.Array")), (ts.TensorStore, Opening("np.ndarray")), (float, Opening("scalar"))
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    with ocp.Checkpointer(handler) as reader, checkpoint.reading(path):
        read_json(path / "_METADATA")  # Orbax would wait for a pipe, and take any size
        tree = reader.metadata(path).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=ts.TensorStore), tree)
        return reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))


def _read(path: Path, store: ts.TensorStore) -> np.ndarray:
    """What is stored. Raises ConfigError."""
    array = buffers.empty(tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
    with checkpoint.reading(path):
        ts.array(array, copy=False, write=True).write(store).result()
    return array


def leaf(path: Path, store: ts.TensorStore) -> Leaf:
    """An array of the checkpoint `path`."""
    return Leaf(tuple(store.shape), np.dtype(store.dtype.numpy_dtype), partial(_read, path, store))


def _layers(path: Path, name: str, store: ts.TensorStore) -> dict[str, Leaf]:
    """The layers of an array by their names, or itself where it has none."""
    return {
        part: leaf(path, store[place] if place else store) for part, place in places(name, tuple(store.shape)).items()
    }


def places(name: str, shape: Shape) -> dict[str, tuple[int, ...]]:
    """Where along its first axes, of layers and experts, an array has each of its parts."""
    stack, _ = cut(name, shape)
    return {part: tuple(map(int, np.unravel_index(number, stack))) for part, (_, number), _ in parts(name, shape)}


def chunk_of(shape: Shape, dtype: np.dtype) -> Shape:
    """Equal numbers of whole rows, of CHUNK bytes at most unless one row has more."""
    if not shape:
        return shape
    rows, row = shape[0], math.prod(shape[1:]) * dtype.itemsize
    chunks = -(-rows // max(1, CHUNK // row))
    return (-(-rows // chunks), *shape[1:])


@dataclass(frozen=True)
class Coming:
    """An array that a conversion will give; `places` are those of its tensors along the first axes."""

    group: str
    shape: Shape
    dtype: np.dtype
    places: Mapping[str, tuple[int, ...]]


class Streaming(ocp.type_handlers.NumpyHandler):
    """Writes arrays as a conversion gives their tensors."""

    def __init__(self, conversion: Recut) -> None:
        super().__init__()
        self.conversion, self.lock, self.failed = conversion, threading.Lock(), False
        self.begun: list[ocp.future.Future] = []

    def handler(self) -> ocp.PyTreeCheckpointHandler:
        """What handles pytrees of `Coming` and of numpy arrays."""
        arrays = ocp.type_handlers.create_type_handler_registry(
            (Coming, self), (np.ndarray, ocp.type_handlers.NumpyHandler())
        )
        # Weights hardly compress, and it would take most of the time.
        return ocp.PyTreeCheckpointHandler(type_handler_registry=arrays, use_compression=False)

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
        self.begun.append(ocp.future.CommitFutureAwaitingContractedSignals(self._write(values, infos)))
        await asyncio.to_thread(self.begun[-1].result)
        return []

    async def _write(self, values: Sequence[Any], infos: Sequence[Any]) -> None:
        there: dict[tuple[str, str], Any] = {}
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            outer = len(next(iter(value.places.values())))
            chunk = (*(1,) * outer, *chunk_of(value.shape[outer:], value.dtype))
            spec = get_json_tspec_write(
                info, info.is_ocdbt_checkpoint, value.shape, chunk, value.dtype, process_index=jax.process_index()
            )
            context = ts.Context(WRITING, parent=info.ts_context)
            store = await ts.open(spec, create=True, open=True, context=context)
            there |= {(value.group, name): store[place] for name, place in value.places.items()}

        def put(group: str, name: str, array: np.ndarray) -> None:
            if self.failed:
                raise RuntimeError("the conversion has ended")
            there[group, name].write(array, can_reference_source_data_indefinitely=True).result()

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
            if len(dtypes := {leaves[part].dtype.name for part, _, _ in parts(name, shape) if part in leaves}) > 1:
                raise ConfigError(
                    f"{group} {name}: its layers are {', '.join(sorted(dtypes))}, and Orbax has one array of them; "
                    f"{one_dtype(group)}"
                )


def write(path: Path, conversion: Conversion) -> None:
    """Write a run folder that `jaxdist` goes on from, with this one checkpoint. Raises ConfigError."""
    check(conversion)
    content = conversion.content
    folder = begin(path, content)
    shapes = shapes_of(content.experiment.model)
    coming = {
        group: {n: _coming(group, n, s, leaves) for n, s in shapes.items() if parts(n, s)[0][0] in leaves}
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
    with ocp.Checkpointer(checkpoint.items(streaming.handler)) as writer:
        streaming.save(writer, unfinished(folder.checkpoints.resolve(), content.step), ocp.args.Composite(**values))
    publish(folder.checkpoints, content.step)


def _coming(group: str, name: str, shape: Shape, leaves: Leaves) -> Coming:
    where = places(name, shape)
    return Coming(group, shape, leaves[next(iter(where))].dtype, where)


def _optimizer(content: Content, coming: Mapping[str, Mapping[str, Coming]]) -> Any:
    """The state of our optimizer, the moments to come."""
    e = content.experiment
    layouts = models.layouts(models.build(e.model))
    trained = {name: array for name, array in coming[PARAMETERS].items() if not layouts[name].statistic}
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in trained.items()}

    def filled(part: Any) -> Any:
        if isinstance(part, State):
            count: Any = np.asarray(content.updates, np.int32)
            return State(count, {kind: coming[kind] for kind in part.kept})  # type: ignore[misc]
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=np.asarray(content.step, np.int32))
        return part

    state = jax.eval_shape(optimizer(e.optimizer, e.train.steps, layouts).init, shapes)
    return tuple(filled(part) for part in state)
