"""Checkpoints of a run, by Orbax: `checkpoints/<step>/` with the items `parameters`, `optimizer` and `experiment`.

Arrays are saved under their global shapes, so a checkpoint can be restored on any mesh and under any strategy. Saves
are asynchronous and appear whole or not at all: Orbax writes a temporary folder and renames it.
"""

import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdist.config import ConfigError, Experiment, RunFolder, checkpoint_in
from jaxdist.step import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every save; we report ours


class Saved(NamedTuple):
    """A checkpoint on the host. `optimizer` is the optax state as nested lists and dicts, None when there is none."""

    step: int
    experiment: Experiment
    parameters: dict[str, np.ndarray]
    optimizer: Any


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        """`keep`: how many of the newest stay; 0 for all."""
        self.folder, self.keep = folder.resolve(), keep

    @cached_property
    def manager(self) -> ocp.CheckpointManager:
        """Orbax's manager; making it creates the folder, so it is made when it is first needed."""
        options = ocp.CheckpointManagerOptions(max_to_keep=self.keep or None, create=True)
        handlers = {
            "parameters": ocp.StandardCheckpointHandler(),
            "optimizer": ocp.StandardCheckpointHandler(),
            "experiment": ocp.JsonCheckpointHandler(),
        }
        return ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

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
        self._check(step, abstract.parameters)
        if "optimizer" not in self.manager.item_metadata(step):
            raise ConfigError(f"checkpoint {self.folder / str(step)} has weights only; start from it by --init instead")
        items = self.manager.restore(
            step,
            args=ocp.args.Composite(
                parameters=ocp.args.StandardRestore(abstract.parameters),
                optimizer=ocp.args.StandardRestore(abstract.optimizer),
            ),
        )
        return TrainState(items.parameters, items.optimizer)

    def restore_parameters(self, step: int, abstract: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The weights alone. Raises ConfigError."""
        self._check(step, abstract)
        return self.manager.restore(
            step, args=ocp.args.Composite(parameters=ocp.args.StandardRestore(abstract))
        ).parameters

    def _check(self, step: int, abstract: Mapping[str, Any]) -> None:
        shapes = {name: tuple(a.shape) for name, a in self.manager.item_metadata(step)["parameters"].items()}
        check_shapes(f"checkpoint {self.folder / str(step)}", shapes, {n: tuple(a.shape) for n, a in abstract.items()})

    def close(self) -> None:
        """Wait for what is being written."""
        self.manager.wait_until_finished()
        self.manager.close()


def check_shapes(source: str, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ConfigError naming the first parameter that is missing, unexpected or of another shape."""
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"{source} holds another model: parameter {name} is {found.get(name, 'absent')} there and "
                f"{wanted.get(name, 'absent')} in the config; use the config it was trained with"
            )


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a run folder with a checkpoint, or a checkpoint, of jaxdist."""
    return (checkpoint_in(path) / "parameters" / "_METADATA").exists()


def locate(path: Path) -> tuple[Path, int]:
    """(folder of the checkpoints, step) of a run folder's newest checkpoint or of a checkpoint. Raises ConfigError."""
    found = checkpoint_in(path).resolve()
    if not is_checkpoint(path) or not found.name.isdigit():
        raise ConfigError(f"{path} is no jaxdist checkpoint; give a run folder or its checkpoints/<step>")
    return found.parent, int(found.name)


def read_experiment(path: Path) -> Experiment:
    """The experiment that a checkpoint or run folder belongs to. Raises ConfigError."""
    folder, step = locate(path)
    text = (folder / str(step) / "experiment" / "metadata").read_text(encoding="utf-8")
    return Experiment.parse(json.loads(text), source=str(path))


def read(path: Path) -> Saved:
    """A whole checkpoint as numpy arrays on the host, without a mesh. Raises ConfigError."""
    folder, step = locate(path)

    def arrays(item: str) -> Any:
        manager = ocp.CheckpointManager(folder, item_names=(item,), item_handlers={item: ocp.PyTreeCheckpointHandler()})
        metadata = manager.item_metadata(step)[item]
        to_host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        tree = manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.PyTreeRestore(restore_args=to_host)}))
        manager.close()
        return tree[item]

    has_optimizer = (folder / str(step) / "optimizer").is_dir()
    return Saved(step, read_experiment(path), arrays("parameters"), arrays("optimizer") if has_optimizer else None)


def write(path: Path, experiment: Experiment, parameters: Mapping[str, np.ndarray]) -> None:
    """A run folder at `path` whose checkpoint 0 holds these weights. Raises ConfigError when it is occupied."""
    folder = RunFolder(path, experiment)
    folder.create()
    checkpoints = Checkpoints(folder.checkpoints)
    checkpoints.save(0, experiment, dict(parameters))
    checkpoints.close()
