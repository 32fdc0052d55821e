"""Check that weights and optimizer state read from files are valid."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from jaxdist.formats.finite import (
    BadValues,
    check_counts,
    is_square,
    nonfinite_weights_error,
    optimizer_tensor_name,
    refused,
    resume_fix,
    start_fix,
)
from torch_ref.parallel.weights import local, place

Piece = tuple[tuple[int, int], ...]  # of a full tensor: start and stop along each dimension


def check_start(path: Path, weights: Mapping[str, Tensor], here: str, there: str | None) -> None:
    """Raises ConfigError if starting weights read from `path` are invalid; `here` and `there` as in
    `nonfinite_weights_error`. Called by all ranks."""
    if found := on_all_ranks(weights):
        raise nonfinite_weights_error(path, found, here, there)


def check_read(path: Path, own: Mapping[str, BadValues]) -> None:
    """Raises ConfigError, the same on all ranks, where full tensors that any of them read from `path` cannot be: the
    stages of a pipeline read different ones. Called by all ranks."""
    every: list[dict[str, BadValues]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, dict(own))
    if found := {name: bad for of_rank in every for name, bad in of_rank.items()}:
        raise refused(path, found, start_fix(path))


def check_resumed(
    path: Path,
    weights: Mapping[str, Tensor],
    optimizer: Mapping[str, Mapping[str, Tensor]],
    scaling: Mapping[str, Tensor],
) -> None:
    """Raises ConfigError where weights of the checkpoint `path`, what its `optimizer` keeps of each, or its loss scale
    cannot be, also under train.nonfinite = skip, as that passes over steps alone. Called by all ranks."""
    kept = {
        optimizer_tensor_name(name, kind): tensor for name, state in optimizer.items() for kind, tensor in state.items()
    }
    if found := on_all_ranks({**weights, **kept}):
        raise refused(f"checkpoint {path}", found, resume_fix(path, weights=not found.keys().isdisjoint(weights)))
    every: list[set[float]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, {float(state["step"]) for state in optimizer.values()})
    scale, good = (float(scaling[key]) if scaling else None for key in ("scale", "good"))
    for updates in sorted(set().union(*every)):
        check_counts(path, int(path.name), updates, scale, good)


def bad_values(name: str, tensor: Tensor) -> BadValues | None:
    """Number of invalid values, NaN, infinity, and in means of squares those below zero, and the first of them; None
    without any."""
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        indices = (~finite).nonzero()
    elif is_square(name) and bool((tensor < 0).any()):
        indices = (tensor < 0).nonzero()
    else:
        return None
    first = tuple(indices[0].tolist())
    return BadValues(len(indices), tensor.numel(), float(tensor[first]), first)


def on_all_ranks(tensors: Mapping[str, Tensor]) -> dict[str, BadValues]:
    """Tensors with invalid values, by name: full tensors, of which each rank has a piece."""
    own: dict[str, tuple[Piece, BadValues]] = {}
    for name, tensor in tensors.items():
        if found := bad_values(name, local(tensor)):
            piece = tuple((s.start, s.stop) for s in place(tensor))
            first = tuple(start + i for (start, _), i in zip(piece, found.index, strict=True))
            own[name] = piece, replace(found, size=tensor.numel(), index=first)
    every: list[dict[str, tuple[Piece, BadValues]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    pieces: dict[str, dict[Piece, BadValues]] = {}
    for name, (piece, found) in (item for of_rank in every for item in of_rank.items()):
        pieces.setdefault(name, {})[piece] = found  # replicas have the same piece
    order = (name for name in dict.fromkeys((*tensors, *pieces)) if name in pieces)  # other stages have other names
    return {name: _merged(list(pieces[name].values())) for name in order}


def _merged(pieces: list[BadValues]) -> BadValues:
    pieces = [found for found in pieces if not math.isfinite(found.value)] or pieces
    return replace(min(pieces, key=lambda found: found.index), count=sum(found.count for found in pieces))
