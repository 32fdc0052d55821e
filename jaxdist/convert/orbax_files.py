"""Orbax checkpoints of jaxdist: `checkpoints/<step>/`, read an array at a time and written as the arrays come."""

import asyncio
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

from jaxdist import checkpoint, models
from jaxdist.config import Experiment
from jaxdist.config.checkpoints import publish, unfinished
from jaxdist.convert.content import MOMENTS, PARAMETERS, Content, Leaf, Leaves, agreed
from jaxdist.convert.runs import begin, metrics_of, origin_of
from jaxdist.convert.stream import Conversion
from jaxdist.convert.tables import OWN, Shape
from jaxdist.optim import adamw

ADAM = dict(zip(MOMENTS, ("mu", "nu"), strict=True))  # torch's name -> optax's
RELEASE = 1.0  # seconds that TensorStore may hold on to an array that it has written


def described(path: Path) -> dict[str, Leaf]:
    """Every parameter."""
    found = checkpoint.locate(path)
    return _leaves(found, "parameters", _tree(found, "parameters"))


def opened(path: Path, wanted: Experiment | None = None) -> Content:
    """The content of a checkpoint or of a run's newest whole one. Raises ConfigError."""
    found = checkpoint.locate(path)
    experiment = agreed(str(path), checkpoint.read_experiment(found), wanted)
    groups: dict[str, Leaves] = {PARAMETERS: _leaves(found, "parameters", _tree(found, "parameters"))}
    updates = None
    if (found / "optimizer").is_dir():
        tree = _tree(found, "optimizer")
        place = next(i for i, part in enumerate(tree) if isinstance(part, dict) and "mu" in part)
        groups |= {kind: _leaves(found, "optimizer", tree, place, ADAM[kind]) for kind in MOMENTS}
        updates = int(_read(found, "optimizer", tree, (place, "count")))
    return Content(
        experiment, OWN, groups, int(found.name), updates, origin_of(found), metrics_of(found)
    ).checked(path)  # fmt: skip


def _tree(path: Path, item: str) -> Any:
    with checkpoint.opened(path, ocp.PyTreeCheckpointHandler) as reader:
        return reader.metadata(path).item_metadata[item].tree


def _leaves(path: Path, item: str, tree: Any, *place: Any) -> dict[str, Leaf]:
    """The arrays of the dictionary at `place` in an item's tree."""
    return {
        name: Leaf(tuple(array.shape), np.dtype(array.dtype), partial(_read, path, item, tree, (*place, name)))
        for name, array in reduce(getitem, place, tree).items()
    }


def _read(path: Path, item: str, tree: Any, place: tuple[Any, ...]) -> np.ndarray:
    """One array of an item, whose tree is that of its metadata. Raises ConfigError."""
    with checkpoint.opened(path, ocp.PyTreeCheckpointHandler) as reader:
        only = jax.tree_util.tree_map_with_path(lambda at, _: 0 if _keys(at) == place else ocp.PLACEHOLDER, tree)
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.PyTreeRestore(item=only, restore_args=to_host)
        found: np.ndarray = reduce(getitem, place, reader.restore(path, args=ocp.args.Composite(**{item: args}))[item])
        return found


def _keys(path: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)


@dataclass(frozen=True)
class Coming:
    """An array that a conversion will give."""

    group: str
    name: str
    shape: Shape
    dtype: np.dtype


class Streaming(ocp.type_handlers.NumpyHandler):
    """Writes arrays in the order in which a conversion gives them, each before the next is taken."""

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self.conversion = conversion

    async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
        places = {(value.group, value.name): place for value, *place in zip(values, infos, args, strict=True)}
        for group, name, array in self.conversion.stream(*{value.group: None for value in values}):
            info, arg = places[group, name]
            released = threading.Event()
            weakref.finalize(array, released.set)
            futures = await super().serialize([array], [info], [arg])
            del array
            while futures:
                await asyncio.to_thread(futures.pop().result)
            await asyncio.to_thread(released.wait, RELEASE)
        return []


def write(path: Path, conversion: Conversion) -> None:
    """Write a run folder that `jaxdist` goes on from, with this one checkpoint. Raises ConfigError."""
    content = conversion.content
    folder = begin(path, content)
    arrays = ocp.type_handlers.create_type_handler_registry(
        (Coming, Streaming(conversion)), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    # Weights hardly compress, and it would take most of the time.
    handler = partial(ocp.PyTreeCheckpointHandler, type_handler_registry=arrays, use_compression=False)
    coming = {
        group: {name: Coming(group, name, leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
        for group, leaves in conversion.groups.items()
    }
    values: dict[str, Any] = {
        "parameters": ocp.args.PyTreeSave(coming[PARAMETERS]),
        "experiment": ocp.args.JsonSave(content.experiment.model_dump(exclude_none=True)),
    }
    if content.updates is not None:
        values["optimizer"] = ocp.args.PyTreeSave(_optimizer(content, coming))
    with ocp.Checkpointer(checkpoint.items(handler)) as writer:
        writer.save(unfinished(folder.checkpoints.resolve(), content.step), args=ocp.args.Composite(**values))
    publish(folder.checkpoints, content.step)


def _optimizer(content: Content, coming: Mapping[str, Mapping[str, Coming]]) -> Any:
    """The state of our optimizer, the moments to come."""
    e = content.experiment
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in coming[PARAMETERS].items()}

    def filled(part: Any) -> Any:
        if isinstance(part, optax.ScaleByAdamState):
            moments = {ADAM[kind]: coming[kind] for kind in MOMENTS}
            return part._replace(count=np.asarray(content.updates, np.int32), **moments)
        if isinstance(part, optax.ScaleByScheduleState):
            return part._replace(count=np.asarray(content.step, np.int32))
        return part

    layouts = models.layouts(models.build(e.model))
    state = jax.eval_shape(adamw(e.optimizer, e.train.steps, layouts).init, shapes)
    return tuple(filled(part) for part in state)
