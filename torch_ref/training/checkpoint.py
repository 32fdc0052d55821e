"""Distributed checkpoints (torch.distributed.checkpoint): parameters and optimizer state by parameter name.

Layout of the saved state, torch's own: `model.<name>`, `optimizer.state.<name>.{step, exp_avg, ...}`,
`step`, and `scaling.{scale, good}` where the loss is scaled; beside it the experiment as `experiment.json`, and the
manifest (`jaxdist/runs/checkpoints.py`). Every rank writes its pieces; a restore reads what its own layout needs, so
mesh and strategy may differ.
"""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from jaxdist.config import Experiment, Model, same_model
from jaxdist.config.bounded import read_json
from jaxdist.formats.dcp_index import EXPERIMENT, read_index
from jaxdist.formats.opening import opened
from jaxdist.formats.sources import located
from jaxdist.runs.checkpoints import Saves, complete_checkpoint, publish, thin, unfinished
from torch_ref.families.models import declared
from torch_ref.formats import hf
from torch_ref.formats.distributed import Reader, load, read_full, reading
from torch_ref.formats.finite import check_read, check_resumed, check_start
from torch_ref.formats.reader import READER
from torch_ref.parallel.weights import VOCABULARY, extended, fill, local, model_tensors, place
from torch_ref.runtime.launch import from_first
from torch_ref.training.program import Program, TrainState

SHORT_WRITE = "unexpected pos"  # torch's zip writer says so when the disk took fewer bytes than it was given


def tensors_of(state: TrainState) -> dict[str, Any]:
    """The tensors to save, sharing memory with model and optimizer."""
    model, optimizer = state
    tensors = {"model": dict(model_tensors(model)), "optimizer": {"state": optimizer.state_dict()}}
    return tensors | ({"scaling": scaling} if (scaling := optimizer.scaling) else {})


def save(saves: Saves, step: int, program: Program, state: TrainState) -> None:
    """Write `checkpoints/<step>` by all ranks, named so when complete; then remove those beyond `checkpoint.keep`."""
    folder = saves.checkpoints
    partial_path = unfinished(folder, step)

    def begin() -> None:
        shutil.rmtree(partial_path, ignore_errors=True)
        partial_path.mkdir(parents=True)

    def finish() -> None:
        (partial_path / EXPERIMENT).write_text(program.experiment.model_dump_json(), encoding="utf-8")
        publish(folder, step)
        thin(folder, program.experiment.checkpoint)

    with saves.writing(step):
        from_first(begin)
        try:
            dcp.save(tensors_of(state) | {"step": torch.tensor(step)}, checkpoint_id=partial_path)
        except CheckpointException as error:  # no Exception: it has those of the ranks, with their tracebacks
            reason = str(next(iter(error.failures.values()))[0])
            raise OSError(os.strerror(errno.ENOSPC) if SHORT_WRITE in reason else reason) from None
        from_first(finish)


def restore(path: Path, program: Program, state: TrainState) -> None:
    """Read the checkpoint at `path` into model and optimizer. Raises ConfigError for another model's."""
    same_model(program.experiment.model, read_experiment(path).model, str(path))
    tensors = tensors_of(state)
    load(path, tensors)
    scaling = tensors.get("scaling", {})
    check_resumed(path, tensors["model"], tensors["optimizer"]["state"], scaling)
    if scaling:
        state.optimizer.scaling = scaling


def initialize(path: Path, model: nn.Module, experiment: Experiment) -> None:
    """Starting weights from a source of any kind. Raises ConfigError."""
    config, dtype = experiment.model, experiment.precision.parameters
    found = from_first(lambda: located(path, experiment.checkpoint.verify))
    if is_own(found):
        theirs = read_experiment(found)
        same_model(config, theirs.model, str(found))
        load_weights(found, model, config, theirs.model)
        check_start(found, dict(model_tensors(model)), dtype, theirs.precision.parameters)
    else:
        weights = hf.Weights(found, config, opened(found, READER))
        weights.check()
        fill(model, lambda name, shape: extended(weights.read(name), shape))
        check_read(found, weights.bad)
        check_start(found, dict(model_tensors(model)), dtype, None)


def is_own(path: Path) -> bool:
    """Whether the checkpoint `path` has torch_ref's names of tensors: one that `jaxdist.convert` wrote again has those
    of the program that it came from. Raises ConfigError."""
    if not (path / EXPERIMENT).exists():
        return False
    names = read_index(path).state_dict_metadata
    return all(f"model.{name}" in names for name, _ in model_tensors(declared(read_experiment(path).model)))


def load_weights(path: Path, model: nn.Module, config: Model, theirs: Model) -> None:
    """The weights of a checkpoint of torch_ref, whose model is `theirs`. Where its vocabulary is smaller or padded
    otherwise, every rank reads all rows, and keeps those of tokens. Raises ConfigError."""
    named, other = dict(model_tensors(model)), dict[str, Tensor]()
    for name in VOCABULARY if config.vocabulary != theirs.vocabulary else ():
        if name in named:
            own = local(named[name])
            other[name] = own.new_empty(theirs.vocab_rows, named[name].shape[1])
    load(path, {"model": named | other})
    for name, tensor in other.items():
        local(named[name]).copy_(extended(tensor[: theirs.vocab], named[name].shape)[place(named[name])])


def read_experiment(path: Path) -> Experiment:
    """The experiment that the checkpoint `path` belongs to. Raises ConfigError."""
    with reading(path):
        values = read_json(path / EXPERIMENT)
    return Experiment.parse(values, source=str(path / EXPERIMENT))


def read(path: Path) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """A complete checkpoint on one process, without a process group; a run folder stands for its newest one.

    Returns its step, and `model` and each kind of state, parameter name -> full tensor. Raises ConfigError.
    """
    path = complete_checkpoint(path)
    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in Reader(path).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)  # all are
    }
    read_full(path, flat)

    def named_so(prefix: str, suffix: str = "") -> dict[str, Tensor]:
        inner = {
            k.removeprefix(prefix).removesuffix(suffix): v
            for k, v in flat.items()
            if k.startswith(prefix) and k.endswith(suffix)
        }
        return dict(sorted(inner.items()))

    prefix = "optimizer.state."
    kinds = read_experiment(path).optimizer.kept
    state = {"model": named_so("model.")} | {kind: named_so(prefix, f".{kind}") for kind in kinds}
    return int(flat["step"]), state
