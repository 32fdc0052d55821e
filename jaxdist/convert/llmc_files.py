"""llm.c's checkpoints: model_*.bin, and beside it the optimizer's state. Tensors have no names there, but one order."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxdist.config import ConfigError, Experiment, llmc
from jaxdist.config.display import say
from jaxdist.convert import buffers
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, Origin, agreed
from jaxdist.convert.entries import entries
from jaxdist.convert.nanogpt import filled

VERSIONS: Mapping[int, Any] = {3: np.float32, 5: ml_dtypes.bfloat16}
FIELDS = {"positions": 2, "vocab": 3, "layers": 4, "heads": 5, "dim": 6}  # field -> its place in the header
ROWS, MULTIPLE = 7, 128  # the place of the vocabulary's padded size, and of what its exporter makes it a multiple
PROCESSES, MASTERS, STEP = 2, 4, 10  # places in the header of a state
NAMING = "nanogpt"  # has the same tensors: products lie as torch's Linear
PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
OF_LAYERS = [f"transformer.h.{{layer}}.{part}.{kind}" for part in PARTS for kind in ("weight", "bias")]
ORDER = (
    "transformer.wte.weight",
    "transformer.wpe.weight",
    *OF_LAYERS,
    "transformer.ln_f.weight",
    "transformer.ln_f.bias",
)


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under nanoGPT's names. Raises ConfigError."""
    return dict(_opened(path, None)[1])


def opened(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a model file, with the state beside it; its float32 master weights in place of bfloat16 ones.

    Raises ConfigError."""
    experiment, weights = _opened(path, wanted)
    groups: dict[str, Leaves] = {PARAMETERS: weights}
    left, step, updates = list[str](), 0, None
    state = path.with_name(f"{path.stem.replace('model', 'state', 1)}_00000.bin")
    if training and state.is_file() and state != path:
        header = _header(state)
        step, processes = int(header[STEP]), int(header[PROCESSES])
        if header[0] != llmc.STATE:
            raise ConfigError(f"{state} is no state of llm.c's; use a whole copy, or leave it out")
        if processes != 1:
            left.append(f"the moments of {state.name}, which {processes} processes shared")
        else:
            kinds = ["exp_avg", "exp_avg_sq", *([PARAMETERS] if header[MASTERS] else [])]
            places = _laid_out(state, experiment, np.dtype(np.float32), len(kinds), exact=False)
            groups |= dict(zip(kinds, places, strict=True))
            updates = step
            say(f"{path}: llm.c keeps no learning rate: the config's schedule is taken, --model gives another")
    return Content(experiment, NAMING, groups, step, updates, Origin("llmc", NAMING, left=left)).checked(path)


def _opened(path: Path, wanted: Experiment | None) -> tuple[Experiment, Leaves]:
    header = _header(path)
    version = int(header[1])
    if version not in VERSIONS:
        raise ConfigError(
            f"{path}: version {version} of llm.c's model files; give one of {', '.join(map(str, VERSIONS))}"
        )
    model: dict[str, Any] = {field: int(header[place]) for field, place in FIELDS.items()}
    model |= {
        "vocab_multiple": _multiple(path, model["vocab"], int(header[ROWS])),
        "family": "gpt2",
        "hidden": 4 * model["dim"],
        "tied": True,
        "gelu": "tanh",
        "bias": True,
        "norm_eps": 1e-5,
    }
    sections = {"model": model, "data": {"sequence": model["positions"]}}
    found = Experiment.parse(sections, f"{path}: header")
    experiment = agreed(str(path), found, filled(sections, wanted, str(path)) if wanted else None)
    return experiment, _laid_out(path, experiment, np.dtype(VERSIONS[version]), 1)[0]


def _multiple(path: Path, vocab: int, rows: int) -> int:
    """The `vocab_multiple` with which so many tokens have so many rows. Raises ConfigError where they have more."""
    if not 0 < vocab <= rows:
        raise ConfigError(f"{path}: its header has {vocab} tokens in {rows} rows, padding among them; use a whole copy")
    return next(multiple for multiple in (1, MULTIPLE, rows) if math.ceil(vocab / multiple) * multiple == rows)


def _header(path: Path) -> np.ndarray:
    try:
        return buffers.read(path, 0, (llmc.HEADER,), np.dtype("<i4"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; use a whole copy") from None


def _laid_out(path: Path, experiment: Experiment, dtype: np.dtype, times: int, exact: bool = True) -> list[Leaves]:
    """All tensors, so many times one after the other. Raises ConfigError where the file is too short, or too long."""
    shapes = {name: entry.shape for name, entry in entries(NAMING, experiment.model).items()}
    layers = range(experiment.model.layers)
    names = [template.format(layer=i) for template in ORDER for i in (layers if "{layer}" in template else range(1))]
    start, found = 4 * llmc.HEADER, list[Leaves]()
    for _ in range(times):
        leaves: dict[str, Leaf] = {}
        for name in names:
            read = partial(buffers.read, path, start, shapes[name], dtype)
            leaves[name] = Leaf(shapes[name], dtype, read, (path, start))
            start += leaves[name].bytes
        found.append(leaves)
    size = path.stat().st_size
    if size < start or (exact and size > start):
        raise ConfigError(f"{path} has {size:,} bytes, where its header says {start:,}; use a whole copy")
    return found
