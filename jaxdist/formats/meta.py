"""Folders as Meta published Llama 1 to 3: params.json, and a consolidated.*.pth of each model-parallel rank."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.bounded import file_within, read_json
from jaxdist.config.decoder import MOST_LAYERS
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.leaves import Leaf, Reader
from jaxdist.formats.naming import recognized
from jaxdist.formats.tables import Shape, stored
from jaxdist.formats.torch_weights import weights_in
from jaxdist.runs.display import say

PARAMS, FILES = "params.json", "consolidated.*.pth"
LLAMA31 = {"rope_scaling": "llama3", "positions": 131072}  # what `use_scaled_rope` stands for, beside our defaults
# By how much it stretches, where params.json does not say: Llama 3.2 of these widths by 32, Llama 3.1 and 3.3 by 8.
STRETCHED = {2048: 32.0, 3072: 32.0}


def is_meta(path: Path) -> bool:
    """Whether `path` is such a folder."""
    return (path / PARAMS).is_file() and any(path.glob(FILES))


def read(path: Path, reader: Reader) -> tuple[Experiment, dict[str, Leaf]]:
    """The model, and its tensors joined over all ranks, under Meta's names. Raises ConfigError."""
    try:
        files = [file_within(path, file.name) for file in sorted(path.glob(FILES))]
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; give a folder with its files in it") from None
    ranks = [weights_in(file, reader) for file in files]
    experiment = experiment_for(_model(path, ranks), source=str(path / PARAMS))
    unsharded = stored("meta", experiment.model, reader.shapes(experiment.model))
    shapes = {name: tensor.shape for name, tensor in unsharded.items()}
    _, names = recognized(str(path), ranks[0], experiment.model)
    return experiment, {
        full: _unsharded(path, name, ranks, shapes[full]) if full in shapes else ranks[0][name]
        for full, name in names.items()
    }


def _model(path: Path, ranks: list[dict[str, Leaf]]) -> dict[str, Any]:
    """The model section, from params.json and what only the tensors' shapes show. Raises ConfigError."""
    try:
        params = read_json(path / PARAMS)
        dim, heads, layers = (int(params[key]) for key in ("dim", "n_heads", "n_layers"))
        if layers > MOST_LAYERS:
            raise ValueError(f"n_layers = {layers}, more than {MOST_LAYERS:,}")
        hidden = sum(rank["layers.0.feed_forward.w1.weight"].shape[0] for rank in ranks)
        embeddings = [rank["tok_embeddings.weight"].shape for rank in ranks]
        values = {
            "family": "llama", "dim": dim, "heads": heads, "layers": layers, "hidden": hidden, "head_dim": dim // heads,
            "kv_heads": int(params.get("n_kv_heads") or heads), "norm_eps": params["norm_eps"],
            "rope_theta": params.get("rope_theta", 10000.0), "positions": 8192 if "rope_theta" in params else 4096,
            "vocab": embeddings[0][0] * (len(ranks) if embeddings[0][1] == dim else 1),
            "tied": "output.weight" not in ranks[0],
        }  # fmt: skip
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path / PARAMS}: {error!r}; give the folder that Meta published") from None
    if not params.get("use_scaled_rope"):
        return values
    if not (factor := params.get("rope_scaling_factor")):
        factor = STRETCHED.get(dim, 8.0)
        say(
            f"{path}: its rotation is taken to be stretched by {factor:g}; rope_scaling_factor in {PARAMS} says another"
        )
    return values | LLAMA31 | {"rope_factor": factor}


def _unsharded(path: Path, name: str, ranks: Sequence[Mapping[str, Leaf]], shape: Shape) -> Leaf:
    """The tensor whose pieces the ranks hold, along the one axis in which they are smaller; all alike are copies.

    Raises ConfigError where they are no such pieces."""
    pieces = [rank[name] for rank in ranks if name in rank]
    first = pieces[0]
    axis = next((i for i, (a, b) in enumerate(zip(first.shape, shape, strict=False)) if a != b), len(first.shape))

    def other_dims(piece: Leaf) -> tuple[Any, ...]:
        return len(piece.shape), piece.shape[:axis], piece.shape[axis + 1 :], piece.dtype

    if len(pieces) < len(ranks) or len({*map(other_dims, pieces)}) > 1:
        there = ", ".join(f"{piece.dtype}{list(piece.shape)}" for piece in pieces)
        raise ConfigError(f"{path}: of {name} its {len(ranks)} {FILES} have {there}; give the complete folder")
    if axis == len(first.shape):
        return first
    sizes = [piece.shape[axis] for piece in pieces]

    def read() -> np.ndarray:
        full = np.empty(found, first.dtype)
        for piece, part in zip(pieces, np.split(full, np.cumsum(sizes)[:-1], axis), strict=True):
            part[...] = piece.read()
        return full

    found = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])
    return Leaf(found, first.dtype, read, besides=max(piece.bytes + piece.besides for piece in pieces))
