"""llm.c's checkpoints: model_*.bin, and beside it the optimizer's state. Tensors have no names there, but one order."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxdist.config import ConfigError, Model
from jaxdist.formats import buffers, llmc
from jaxdist.formats.leaves import Leaf, Leaves, Reader
from jaxdist.formats.tables import Shape, stored

VERSIONS: Mapping[int, Any] = {3: np.float32, 5: ml_dtypes.bfloat16}
FIELDS = {"positions": 2, "vocab": 3, "layers": 4, "heads": 5, "dim": 6}  # field -> its place in the header
ROWS, MULTIPLE = 7, 128  # the header's place of the padded vocabulary size; the exporter pads to this multiple
PROCESSES, MASTERS, STEP = 2, 4, 10  # places in the header of a state
PARAMETERS = "parameters"
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


def sections(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of an experiment that the header of a model file has. Raises ConfigError."""
    header = header_of(path)
    if (version := int(header[1])) not in VERSIONS:
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
    return {"model": model, "data": {"sequence": model["positions"]}}


class State(NamedTuple):
    """The state file next to a model file after `step` steps: its `groups` are moments and, if any, float32 master
    weights as PARAMETERS. They are empty where several `processes` shared them."""

    file: Path
    step: int
    processes: int
    groups: Mapping[str, Leaves]


def state_of(path: Path, model: Model, reader: Reader) -> State | None:
    """The state beside a model file; None without one. Raises ConfigError."""
    file = path.with_name(f"{path.stem.replace('model', 'state', 1)}_00000.bin")
    if not file.is_file() or file == path:
        return None
    header = header_of(file)
    if header[0] != llmc.STATE:
        raise ConfigError(f"{file} is not a state of llm.c's; use an intact copy, or leave it out")
    step, processes = int(header[STEP]), int(header[PROCESSES])
    if processes != 1:
        return State(file, step, processes, {})
    kinds = ["exp_avg", "exp_avg_sq", *([PARAMETERS] if header[MASTERS] else [])]
    places = _laid_out(file, _shapes_of(model, reader), np.dtype(np.float32), len(kinds))
    return State(file, step, processes, dict(zip(kinds, places, strict=True)))


def weights(path: Path, model: Model, reader: Reader) -> Leaves:
    """Every tensor of a model file, by nanoGPT's names: the master weights where the state beside it has some. Raises
    ConfigError."""
    own = _laid_out(path, _shapes_of(model, reader), np.dtype(VERSIONS[int(header_of(path)[1])]))[0]
    state = state_of(path, model, reader)
    return state.groups.get(PARAMETERS, own) if state else own


def _shapes_of(model: Model, reader: Reader) -> dict[str, Shape]:
    """Shapes of the tensors, by nanoGPT's names."""
    return {name: tensor.shape for name, tensor in stored(NAMING, model, reader.shapes(model)).items()}


def _multiple(path: Path, vocab: int, rows: int) -> int:
    """The `vocab_multiple` that pads the tokens to the rows. Raises ConfigError if no multiple does."""
    if not 0 < vocab <= rows:
        raise ConfigError(
            f"{path}: its header has {vocab} tokens in {rows} rows, padding among them; use an intact copy"
        )
    return next(multiple for multiple in (1, MULTIPLE, rows) if math.ceil(vocab / multiple) * multiple == rows)


def header_of(path: Path) -> np.ndarray:
    try:
        return buffers.read(path, 0, (llmc.HEADER,), np.dtype("<i4"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; use an intact copy") from None


def _laid_out(path: Path, shapes: Mapping[str, Shape], dtype: np.dtype, kinds: int = 0) -> list[Leaves]:
    """All tensors of these shapes, by nanoGPT's names: of a model file once, of a state as many `kinds` of them one
    after the other. Raises ConfigError where the file is too short, or a model's too long."""
    layers = range(sum(name.endswith("ln_1.weight") for name in shapes))
    names = [template.format(layer=i) for template in ORDER for i in (layers if "{layer}" in template else range(1))]
    start, found = 4 * llmc.HEADER, list[Leaves]()
    for _ in range(kinds or 1):
        leaves: dict[str, Leaf] = {}
        for name in names:
            read = partial(buffers.read, path, start, shapes[name], dtype)
            leaves[name] = Leaf(shapes[name], dtype, read, (path, start))
            start += leaves[name].bytes
        found.append(leaves)
    size = path.stat().st_size
    if size < start or (not kinds and size > start):
        raise ConfigError(f"{path} has {size:,} bytes, where its header says {start:,}; use an intact copy")
    return found
