"""Distributed checkpoints (torch.distributed.checkpoint): parameters and AdamW's moments by parameter name.

Layout of the saved state, torch's own: `model.<name>`, `optimizer.state.<name>.{step, exp_avg, exp_avg_sq}`,
`step`. Every rank writes its pieces; a restore reads what its own layout needs, so mesh and strategy may
differ.
"""

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from jaxdist.config import ConfigError, checkpoint_in
from torch_ref import hf
from torch_ref.optim import AdamW
from torch_ref.weights import fill, named


def state_of(model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """What is saved, sharing memory with model and optimizer."""
    return {"model": dict(named(model)), "optimizer": {"state": optimizer.state_dict()}}


def save(folder: Path, step: int, model: nn.Module, optimizer: AdamW, keep: int = 0) -> None:
    """Write `folder/<step>`, by all ranks; so named only once whole. Keeps the newest `keep`, 0: all."""
    final, unfinished = folder / str(step), folder / f"{step}.tmp"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    state = state_of(model, optimizer) | {"step": torch.tensor(step)}
    dcp.save(state, checkpoint_id=unfinished)
    if first:
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        steps = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit())
        for old in steps[: -keep or len(steps)] if keep else []:
            shutil.rmtree(folder / str(old))
    dist.barrier()


def restore(path: Path, model: nn.Module, optimizer: AdamW) -> None:
    """Read the checkpoint at `path` into model and optimizer. Raises ConfigError for another model's."""
    check_shapes(path, saved_shapes(path), model)
    dcp.load(state_of(model, optimizer), checkpoint_id=path)


def initialize(path: Path, model: nn.Module, config: Any) -> None:
    """Starting weights from a run or checkpoint of torch_ref or a Hugging Face folder. Raises ConfigError."""
    found = checkpoint_in(path)
    if (found / ".metadata").exists():
        check_shapes(found, saved_shapes(found), model)
        dcp.load({"model": dict(named(model))}, checkpoint_id=found)
    elif (path / "config.json").exists():
        weights = hf.Weights(path, config)
        check_shapes(path, weights.shapes(), model)
        fill(model, lambda name, _: weights.read(name))
    else:
        raise ConfigError(
            f"--init {path}: neither a run folder or checkpoint of torch_ref nor a Hugging Face folder; "
            "`python -m jaxdist.convert` writes either"
        )


def metadata(path: Path) -> Metadata:
    """The index of a checkpoint. Raises ConfigError."""
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path}: {error}; give a run folder with checkpoints, or a checkpoint") from None


def saved_shapes(path: Path) -> dict[str, torch.Size]:
    """Parameter name -> shape in a checkpoint."""
    entries = metadata(path).state_dict_metadata.items()
    return {
        key.removeprefix("model."): entry.size
        for key, entry in entries
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def check_shapes(source: Path, found: Mapping[str, torch.Size], model: nn.Module) -> None:
    """Raises ConfigError naming the first parameter that is missing, unexpected or of another shape."""
    wanted = {name: p.shape for name, p in named(model)}
    for name in sorted(found.keys() | wanted.keys()):
        there, here = (tuple(shapes[name]) if name in shapes else "absent" for shapes in (found, wanted))
        if there != here:
            raise ConfigError(
                f"{source} holds another model: parameter {name} is {there} there and {here} in the config; "
                "use the config it was trained with"
            )


def read(path: Path) -> tuple[int, dict[str, dict[str, Tensor]]]:
    """A whole checkpoint on one process, without a process group; a run folder stands for its newest one.

    Returns its step, and `model`, `exp_avg` and `exp_avg_sq`, each parameter name -> whole tensor. Raises
    ConfigError.
    """
    path = checkpoint_in(path)
    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata(path).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # that is what is asked for
        dcp.load(flat, checkpoint_id=path, no_dist=True)

    def named_so(prefix: str, suffix: str = "") -> dict[str, Tensor]:
        inner = {
            k.removeprefix(prefix).removesuffix(suffix): v
            for k, v in flat.items()
            if k.startswith(prefix) and k.endswith(suffix)
        }
        return dict(sorted(inner.items()))

    prefix = "optimizer.state."
    state = {"model": named_so("model.")} | {kind: named_so(prefix, f".{kind}") for kind in ("exp_avg", "exp_avg_sq")}
    return int(flat["step"]), state
