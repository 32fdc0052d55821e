"""Checkpoints of a run, by Orbax: `checkpoints/<step>/` with the items `parameters`, `optimizer`, `experiment` and,
where the loss is scaled, `scaling`.

Arrays are saved under their global shapes, so a checkpoint can be restored on any mesh and under any strategy. Saves
are asynchronous: the step continues when the arrays are copied, and a thread writes, seals and names the checkpoint
(`jaxdist/runs/checkpoints.py`).
"""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdist.config import Checkpoint, ConfigError, Experiment
from jaxdist.formats.orbax import is_checkpoint, read_experiment
from jaxdist.runs.checkpoints import Looked, Saves, canonical, complete_checkpoint, publish, sweep, thin, unfinished
from jaxdist.runtime.processes import agreement, first, from_first, together
from jaxdist.training.step import TrainState

if TYPE_CHECKING:  # else imported at the first save
    import orbax.checkpoint as ocp


class Saved(NamedTuple):
    """A checkpoint on the host. `optimizer` is the optax state as nested lists and dicts, None when there is none."""

    step: int
    experiment: Experiment
    parameters: dict[str, np.ndarray]
    optimizer: Any


class Checkpoints:
    """The checkpoints of one run folder, of which a run in progress is the only writer. Each of several
    processes writes its arrays, and the first all else."""

    def __init__(self, folder: Path, config: Checkpoint) -> None:
        """`config`: how many stay, and what a failure to write means."""
        self.folder, self.config = folder.resolve(), config
        self.saves = Saves(self.folder, config, first())
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.writing: Future[None] | None = None  # the save in progress
        self.opened = ExitStack()  # the writer, from the first save on

    @cached_property
    def checkpointer(self) -> "ocp.AsyncCheckpointer":
        """Orbax's, from the first save on."""
        from jaxdist.training import orbax_io

        return self.opened.enter_context(orbax_io.writer())

    def save(self, step: int, experiment: Experiment, state: TrainState) -> None:
        """Start writing `step`; returns once the arrays are copied, so that training can continue.

        Waits for the save before it. Raises TrainingError where either cannot be written, unless that is to be borne.
        """
        from jaxdist.training import orbax_io

        self.wait()
        values = orbax_io.values(experiment, state)
        with self.saves.writing(step):
            from_first(partial(self.folder.mkdir, parents=True, exist_ok=True))
            begin = partial(self.checkpointer.save, args=values, force=True)
            try:
                together(partial(begin, unfinished(self.folder, step)))
            except Exception:
                with suppress(Exception):  # it gives up waiting for those that have not begun
                    self.checkpointer.wait_until_finished()
                raise
            self.writing = self.thread.submit(self._finish, step, agreement())

    def _finish(self, step: int, name: str) -> None:
        """In the thread: when all files are written, the first process gives the checkpoint its name, and the others
        hear by the agreement `name` whether it could. A process whose steps end meanwhile in an error gets here too.
        """
        with self.saves.writing(step):
            if not first():
                with suppress(Exception):  # the first, which waits for all, says it
                    self.checkpointer.wait_until_finished()
            from_first(partial(self._publish, step), name)

    def _publish(self, step: int) -> None:
        self.checkpointer.wait_until_finished()
        publish(self.folder, step)
        thin(self.folder, self.config)

    def failed(self) -> bool:
        """Whether the save in progress has failed, in a way that ends the run: `wait` raises the reason."""
        return bool(self.writing and self.writing.done() and self.writing.exception())

    def wait(self) -> None:
        """Wait until the save in progress is published. Raises TrainingError as `save` does."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of `step`, laid out as `abstract` (ShapeDtypeStructs with shardings). Raises ConfigError."""
        from jaxdist.training import orbax_io

        path = self.folder / str(step)
        if not (path / "optimizer").is_dir():
            raise ConfigError(f"checkpoint {path} has weights only; start from it by --init instead")
        found = orbax_io.restore(path, **dict(orbax_io.arrays(abstract)))
        return TrainState(**{item: found[item] for item, _ in orbax_io.arrays(abstract)})

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: Any) -> None:
        """Wait for the save in progress."""
        with ExitStack() as stack:
            if "checkpointer" in self.__dict__ and first():
                stack.callback(sweep, self.folder)
            stack.callback(self.opened.__exit__, *error)
            stack.enter_context(self.thread)
            self.wait()


def kept_in(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Per-parameter arrays of a checkpoint's item `optimizer`, by kind and name."""
    parts = [part["kept"] for part in optimizer if isinstance(part, dict) and part.get("kept")]
    return {kind: arrays for kept in parts for kind, arrays in kept.items()}


def locate(path: Path, verify: Looked = "checksums") -> Path:
    """The checkpoint that `path` names: itself, or the newest complete one of a run folder. Raises ConfigError.

    All of its files are read to verify it, once: what takes a checkpoint's own path trusts it.
    """
    if not is_checkpoint(path):
        raise ConfigError(f"{path} is not a jaxdist checkpoint; give a run folder or its checkpoints/<step>")
    return canonical(complete_checkpoint(path, verify))


def read(path: Path) -> Saved:
    """A complete checkpoint as numpy arrays on the host, without a mesh. Raises ConfigError."""
    from jaxdist.training import orbax_io

    found = locate(path)
    optimizer = orbax_io.on_host(found, "optimizer") if (found / "optimizer").is_dir() else None
    return Saved(int(found.name), read_experiment(found), orbax_io.on_host(found, "parameters"), optimizer)
