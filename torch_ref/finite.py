"""Weights and optimizer state are looked at for NaN and infinity when they are read."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from jaxdist.config.finite import NotFinite, of_resume, of_start, refused
from torch_ref.weights import local, place

Piece = tuple[tuple[int, int], ...]  # of a whole tensor: start and stop along each dimension


def check_start(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Raises ConfigError where starting weights, read from `path`, are not finite. Called by all ranks."""
    if found := on_all_ranks(weights):
        raise refused(path, found, of_start(path))


def check_read(path: Path, own: Mapping[str, NotFinite]) -> None:
    """Raises ConfigError, the same on all ranks, where whole tensors that any of them read from `path` are not finite:
    the stages of a pipeline read different ones. Called by all ranks."""
    every: list[dict[str, NotFinite]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, dict(own))
    if found := {name: bad for of_rank in every for name, bad in of_rank.items()}:
        raise refused(path, found, of_start(path))


def check_resumed(path: Path, weights: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    """Raises ConfigError where weights of the checkpoint `path`, or what its optimizer keeps, are not finite, also
    under train.nonfinite = skip, as that passes over steps alone. Called by all ranks."""
    if found := on_all_ranks({**weights, **kept}):
        raise refused(f"checkpoint {path}", found, of_resume(path, weights=not found.keys().isdisjoint(weights)))


def not_finite(tensor: Tensor) -> NotFinite | None:
    """How many values there are that are not finite, and which comes first; None where there are none."""
    if bool(torch.isfinite(tensor).all()):
        return None
    indices = (~torch.isfinite(tensor)).nonzero()
    first = tuple(indices[0].tolist())
    return NotFinite(len(indices), tensor.numel(), float(tensor[first]), first)


def on_all_ranks(tensors: Mapping[str, Tensor]) -> dict[str, NotFinite]:
    """Those that are not finite, by name: whole tensors, of which each rank has a piece."""
    own: dict[str, tuple[Piece, NotFinite]] = {}
    for name, tensor in tensors.items():
        if found := not_finite(local(tensor)):
            piece = tuple((s.start, s.stop) for s in place(tensor))
            first = tuple(start + i for (start, _), i in zip(piece, found.index, strict=True))
            own[name] = piece, replace(found, size=tensor.numel(), index=first)
    every: list[dict[str, tuple[Piece, NotFinite]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, own)
    pieces: dict[str, dict[Piece, NotFinite]] = {}
    for name, (piece, found) in (item for of_rank in every for item in of_rank.items()):
        pieces.setdefault(name, {})[piece] = found  # replicas have the same piece
    order = (name for name in dict.fromkeys((*tensors, *pieces)) if name in pieces)  # other stages have other names
    return {name: _whole(list(pieces[name].values())) for name in order}


def _whole(pieces: list[NotFinite]) -> NotFinite:
    return replace(min(pieces, key=lambda found: found.index), count=sum(found.count for found in pieces))
