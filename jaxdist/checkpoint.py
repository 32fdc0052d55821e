"""Checkpoints of a run, by Orbax: `checkpoints/<step>/` with the items `parameters`, `optimizer` and `experiment`.

Arrays are saved under their global shapes, so a checkpoint can be restored on any mesh and under any strategy. Saves
are asynchronous and appear whole or not at all: Orbax writes a temporary folder and renames it.
"""

import json
import logging
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdist.config import ConfigError, Experiment, RunFolder, check_shapes, checkpoint_in
from jaxdist.step import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save; we report ours
logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of many reads that fail for one reason, one is reported


class Saved(NamedTuple):
    """A checkpoint on the host. `optimizer` is the optax state as nested lists and dicts, None when there is none."""

    step: int
    experiment: Experiment
    parameters: dict[str, np.ndarray]
    optimizer: Any


class Checkpoints:
    """The checkpoints of one run folder, of which a run in progress is the only writer."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        """`keep`: how many of the newest stay; 0 for all."""
        self.folder, self.keep = folder.resolve(), keep

    @cached_property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager. Making it creates the folder and drops what an interrupted save left: on the first need."""
        return manager(self.folder, max_to_keep=self.keep or None, cleanup_tmp_directories=True)

    def save(self, step: int, experiment: Experiment, parameters: Any, optimizer: Any = None) -> None:
        """Start writing `step`; returns once the arrays are copied, so that training can go on."""
        items: dict[str, Any] = {
            "parameters": ocp.args.StandardSave(parameters),
            "experiment": ocp.args.JsonSave(experiment.model_dump(exclude_none=True)),
        }
        if optimizer is not None:
            items["optimizer"] = ocp.args.StandardSave(optimizer)
        self.manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of `step`, laid out as `abstract` (ShapeDtypeStructs with shardings). Raises ConfigError."""
        path = self.folder / str(step)
        if not (path / "optimizer").is_dir():
            raise ConfigError(f"checkpoint {path} has weights only; start from it by --init instead")
        items = restore(path, parameters=abstract.parameters, optimizer=abstract.optimizer)
        return TrainState(items.parameters, items.optimizer)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is being written."""
        if "manager" in self.__dict__:
            self.manager.wait_until_finished()
            self.manager.close()


def manager(
    folder: Path, arrays: type[ocp.CheckpointHandler] = ocp.StandardCheckpointHandler, **options: Any
) -> ocp.CheckpointManager:
    """Orbax's manager of a folder of checkpoints; `arrays` handles what is not JSON."""
    handlers = {"parameters": arrays(), "optimizer": arrays(), "experiment": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options), item_handlers=handlers)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever Orbax raises for a damaged checkpoint becomes a ConfigError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = textwrap.shorten(str(error), 200)
        raise ConfigError(f"checkpoint {path} is damaged: {reason}; use another, or a copy of it") from None


@contextmanager
def opened(path: Path, **how: Any) -> Iterator[ocp.CheckpointManager]:
    """The manager that reads the checkpoint `path`. Raises ConfigError for a damaged one."""
    with manager(path.parent, read_only=True, **how) as reader, reading(path):
        yield reader


def described(path: Path) -> dict[str, Any]:
    """What the checkpoint `path` says of its parameters before they are read: shape and dtype. Raises ConfigError."""
    with opened(path) as reader:
        return dict(reader.item_metadata(int(path.name))["parameters"])


def restore(path: Path, **abstract: Any) -> Any:
    """Items of the checkpoint `path`, laid out as ShapeDtypeStructs with shardings. Raises ConfigError."""
    wanted = {item: ocp.args.StandardRestore(tree) for item, tree in abstract.items()}
    with opened(path) as reader:
        found, here = dict(reader.item_metadata(int(path.name))["parameters"]), abstract["parameters"]
        check_shapes(f"checkpoint {path}", *({n: tuple(a.shape) for n, a in tree.items()} for tree in (found, here)))
        return reader.restore(int(path.name), args=ocp.args.Composite(**wanted))


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a run folder with a checkpoint, or a checkpoint, of jaxdist."""
    return (checkpoint_in(path) / "parameters" / "_METADATA").exists()


def locate(path: Path) -> Path:
    """The checkpoint that `path` names: itself, or the newest of a run folder. Raises ConfigError."""
    found = checkpoint_in(path).resolve()
    if not is_checkpoint(path) or not found.name.isdigit():
        raise ConfigError(f"{path} is no jaxdist checkpoint; give a run folder or its checkpoints/<step>")
    return found


def read_experiment(path: Path) -> Experiment:
    """The experiment that a checkpoint or run folder belongs to. Raises ConfigError."""
    found = locate(path)
    with reading(found):
        values = json.loads((found / "experiment" / "metadata").read_text(encoding="utf-8"))
    return Experiment.parse(values, source=str(path))


def read(path: Path) -> Saved:
    """A whole checkpoint as numpy arrays on the host, without a mesh. Raises ConfigError."""
    found = locate(path)

    def arrays(item: str) -> Any:
        with opened(found, arrays=ocp.PyTreeCheckpointHandler) as reader:
            tree = reader.item_metadata(int(found.name))[item].tree
            to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            args = ocp.args.Composite(**{item: ocp.args.PyTreeRestore(restore_args=to_host)})
            return reader.restore(int(found.name), args=args)[item]

    has_optimizer = (found / "optimizer").is_dir()
    return Saved(
        int(found.name), read_experiment(path), arrays("parameters"), arrays("optimizer") if has_optimizer else None
    )


def write(path: Path, experiment: Experiment, parameters: Mapping[str, np.ndarray]) -> None:
    """A run folder at `path` whose checkpoint 0 holds these weights. Raises ConfigError when it is occupied."""
    folder = RunFolder(path, experiment)
    folder.create(experiment)
    with Checkpoints(folder.checkpoints) as checkpoints:
        checkpoints.save(0, experiment, dict(parameters))
