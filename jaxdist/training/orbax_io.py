"""The items of a checkpoint, as Orbax writes and reads them. Nothing else of training imports Orbax, which takes a
quarter of a second: what needs it imports this module when it comes to that."""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdist.config import Experiment, check_shapes
from jaxdist.formats.orbax import CHUNK, check_chunk, reading
from jaxdist.training.step import TrainState


def quiet() -> None:
    """Silence Orbax's log of every save, and asyncio's of many reads that fail for one reason: we report our own."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def checkpointer(handler: ocp.CheckpointHandler) -> ocp.Checkpointer:
    """A context that writes and reads checkpoints by `handler`."""
    quiet()
    return ocp.Checkpointer(handler)


class WithoutLateErrors:
    """The sys.unraisablehook `hook` without errors of arrays that are still being written or read when another one has
    failed: Orbax has closed their event loop, and each would print a traceback."""

    LATE = ("Event loop is closed", "Encountered error while reading array index")

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self.hook = hook

    def __call__(self, met: Any) -> None:
        if not (met.exc_type in (RuntimeError, Exception) and str(met.exc_value).startswith(self.LATE)):
            self.hook(met)


@contextmanager
def one_error() -> Iterator[None]:
    """Within, a save or a read that fails prints one error alone. An error leaves the hook in place: arrays that it
    abandoned are freed with it, once it has been reported."""
    before = sys.unraisablehook
    if not isinstance(before, WithoutLateErrors):
        sys.unraisablehook = WithoutLateErrors(before)
    yield
    sys.unraisablehook = before


@contextmanager
def writer() -> Iterator[ocp.AsyncCheckpointer]:
    """An asynchronous checkpointer, which writes while training continues."""
    quiet()
    # Weights and moments hardly compress: 3.02 GB to 2.75.
    handler = partial(ocp.PyTreeCheckpointHandler, use_compression=False)
    with one_error(), ocp.AsyncCheckpointer(items(handler, ocp.args.PyTreeSave)) as checkpointer:
        yield checkpointer


def values(experiment: Experiment, state: TrainState) -> ocp.args.Composite:
    """Arguments for a `writer` that save a step."""
    trees = {item: ocp.args.PyTreeSave(tree, by_layer(tree)) for item, tree in arrays(state)}
    return ocp.args.Composite(**trees, experiment=ocp.args.JsonSave(experiment.model_dump(exclude_none=True)))


def arrays(state: TrainState) -> Iterator[tuple[str, Any]]:
    """The items of a checkpoint that hold arrays: all that a state has."""
    return ((item, tree) for item, tree in state._asdict().items() if tree is not None)


def by_layer(tree: Any) -> Any:
    """Chunks of the arrays: those of all layers in chunks of one each, as a conversion takes them; others in small
    ones, since a chunk is in memory three times while it is read."""

    def layout(path: Sequence[Any], _: Any) -> ocp.SaveArgs:
        name = str(getattr(path[-1], "key", ""))
        return ocp.SaveArgs(shard_axes=(0,)) if name.startswith("layers.") else ocp.SaveArgs(chunk_byte_size=CHUNK)

    return jax.tree_util.tree_map_with_path(layout, tree)


def items(
    handler: Callable[[], ocp.CheckpointHandler], args: type[ocp.args.CheckpointArgs]
) -> ocp.CompositeCheckpointHandler:
    """The items of a checkpoint. `handler` makes those of arrays, which are saved or restored with `args`; Orbax finds
    the handler of others by their own arguments."""
    registry = ocp.DefaultCheckpointHandlerRegistry()
    for item in TrainState._fields:
        registry.add(item, args, handler())
    return ocp.CompositeCheckpointHandler(handler_registry=registry)


@contextmanager
def open_reader(
    path: Path, handler: Callable[[], ocp.CheckpointHandler], args: type[ocp.args.CheckpointArgs]
) -> Iterator[ocp.Checkpointer]:
    """A reader of the checkpoint `path`, as `items` says. Raises ConfigError for a damaged one."""
    with one_error(), checkpointer(items(handler, args)) as reader, reading(path):
        yield reader


def restore(path: Path, **abstract: Any) -> Any:
    """Items of the checkpoint `path`, laid out as ShapeDtypeStructs with shardings. Raises ConfigError."""
    wanted = {item: ocp.args.StandardRestore(tree) for item, tree in abstract.items()}
    with open_reader(path, ocp.StandardCheckpointHandler, ocp.args.StandardRestore) as reader:
        metadata = reader.metadata(path).item_metadata
        check_arrays({item: metadata[item] for item in abstract})
        trees = dict(metadata["parameters"]), abstract["parameters"]
        found, here = ({name: tuple(array.shape) for name, array in tree.items()} for tree in trees)
        check_shapes(f"checkpoint {path}", found, here)
        return reader.restore(path, args=ocp.args.Composite(**wanted))


def check_arrays(metadata: Any) -> None:
    """Raises ValueError as `check_chunk`: TensorStore allocates chunks of the declared size, and ends the process where
    memory does not suffice."""
    for place, array in jax.tree_util.tree_leaves_with_path(metadata):
        if (storage := getattr(array, "storage", None)) and storage.chunk_shape:
            name = jax.tree_util.keystr(place, simple=True, separator=".")
            check_chunk(name, storage.chunk_shape, tuple(array.shape), np.dtype(array.dtype).itemsize)


def on_host(path: Path, item: str) -> Any:
    """An item of the checkpoint `path` as numpy arrays. Raises ConfigError."""
    with open_reader(path, ocp.PyTreeCheckpointHandler, ocp.args.PyTreeRestore) as reader:
        tree = reader.metadata(path).item_metadata[item].tree
        check_arrays(tree)
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.Composite(**{item: ocp.args.PyTreeRestore(restore_args=to_host)})
        return reader.restore(path, args=args)[item]
