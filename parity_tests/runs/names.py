"""Records under common names, those of torch_ref's modules and parameters: from jaxdist's and from Hugging Face's."""

import re
from collections.abc import Mapping
from posixpath import commonpath

import numpy as np

from jaxdist.config import state_kinds
from jaxdist.config.optimizer import REDUCED_DIMS
from jaxdist.config.record import LOGITS
from jaxdist.formats.naming import as_named_by_transformers, plain
from jaxdist.formats.tables import IN_MEMORY, table_of_files, tables_of

Arrays = dict[str, np.ndarray]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # weights that are not trained

# JAX parameter -> torch parameter: the last part of the name, and whether the matrix is stored transposed.
LEAVES = {
    "kernel": ("weight", True),
    "embedding": ("weight", False),
    "scale": ("weight", False),
    "bias": ("bias", False),
} | {name: (name, False) for name in STATISTICS}
IMAGES = ("stem", "stages.")  # modules whose outputs are [B, Y, X, C] in JAX, [B, C, Y, X] in torch
CONVOLUTION = (3, 2, 0, 1)  # the axes of a kernel [Y, X, in, out] in torch's order

BLOCK = "layers"
CONTAINERS = (BLOCK, "layers.attention", "layers.mlp")  # modules that hold others, beside those with parameters


def as_torch(parameters: Mapping[str, np.ndarray]) -> Arrays:
    """JAX's stacked, (in, out) parameters under torch's names, one per layer, (out, in)."""
    named: Arrays = {}
    for name, array in parameters.items():
        module, _, leaf = name.rpartition(".")
        new, transposed = LEAVES[leaf]
        if module.startswith("layers."):
            parts = {f"layers.{i}.{module.removeprefix('layers.')}.{new}": w for i, w in enumerate(array)}
        else:
            parts = {f"{module}.{new}": array}
        named |= {key: turned(w) if transposed else w for key, w in parts.items()}
    return named


def by_parameter() -> tuple[str, ...]:
    """The kinds of arrays that are named by parameters."""
    return ("start", "gradient", "clipped", *state_kinds(), "weights")


def turned(kernel: np.ndarray) -> np.ndarray:
    """A matrix, those of all experts, or a convolution's kernel as torch has it."""
    return kernel.transpose(CONVOLUTION) if kernel.ndim == len(CONVOLUTION) else kernel.swapaxes(-1, -2)


def kept(shape: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """The shape of what an optimizer keeps as `kind` of a parameter, in torch's order of dimensions."""
    return tuple(1 if dim == REDUCED_DIMS.get(kind) else size for dim, size in enumerate(shape, start=-len(shape)))


def from_jax(record: Mapping[str, np.ndarray]) -> Arrays:
    """A record of jaxdist with its parameters named, turned and taken apart as torch's."""
    named, of_parameters = dict[str, np.ndarray](), by_parameter()
    for key, array in record.items():
        kind, _, name = key.partition("/")
        if kind.startswith("activation") and name.startswith(IMAGES):
            array = np.moveaxis(array, -1, 1)
        renamed = as_torch({name: array}) if kind in of_parameters else {name: array}
        named |= {f"{kind}/{new}": a for new, a in renamed.items()}
    return named


def unwrapped(record: Mapping[str, np.ndarray]) -> Arrays:
    """A record without what DDP, FSDP1 and torch.compile put into names."""
    parts = ((key.partition("/"), array) for key, array in record.items())
    return {f"{kind}/{plain(name)}": array for (kind, _, name), array in parts}


def is_jax(record: Mapping[str, np.ndarray]) -> bool:
    """Whether a record's parameters have jaxdist's names."""
    return any(key.endswith((".kernel", ".embedding")) for key in record)


def is_hf(record: Mapping[str, np.ndarray]) -> bool:
    """Whether a record's parameters have Hugging Face's names."""
    return any(key.partition("/")[2].startswith(("model.", "transformer.")) for key in record)


def from_hf(record: Mapping[str, np.ndarray], family: str, layers: int) -> Arrays:
    """A record in Hugging Face's names; activations without a counterpart of ours are left out.

    Raises ValueError for such parameters.
    """
    kinds: dict[str, Arrays] = {}
    for key, array in record.items():
        kind, _, name = key.partition("/")
        kinds.setdefault(kind, {})[name] = array
    named, of_parameters = dict[str, np.ndarray](), by_parameter()
    for kind, arrays in kinds.items():
        if kind in of_parameters:
            renamed = _parameters(arrays, family, layers)
        else:
            renamed = _activations(arrays, family) if kind.startswith("activation") else arrays
        named |= {f"{kind}/{name}": a for name, a in renamed.items()}
    return named


def _parameters(arrays: Arrays, family: str, layers: int) -> Arrays:
    from jaxdist.convert.mappings.atoms import split_rows  # imports jax, which most readers of records do not need

    arrays = one_by_one(arrays, family, layers)
    table, ours = as_named_by_transformers(family, arrays), dict[str, np.ndarray]()
    left, missing = set(arrays), list[str]()
    for row in table.rows:
        experts = (
            sum(row.theirs.format(layer=0, expert=e) in arrays for e in range(len(arrays))) if row.by_expert else 1
        )
        theirs = row.names(layers, experts)
        absent = [name for name in theirs if name not in arrays]
        if 0 < len(absent) < len(theirs):
            missing += absent
        elif experts and not absent:
            parts = zip(*(split_rows(row, arrays[name]) for name in theirs), strict=True)
            stacks = ((n, np.stack(p) if row.stacked else p[0]) for n, p in zip(row.ours, parts, strict=True))
            ours |= {n: a.reshape(layers, experts, *a.shape[1:]) if row.by_expert else a for n, a in stacks}
            left -= {*theirs}
    if missing:
        raise ValueError(f"{', '.join(missing[:3])} {'are' if missing[1:] else 'is'} missing")
    if unknown := sorted(name for name in left if name != table.head and not table.ignored.search(name)):
        raise ValueError(f"{', '.join(unknown[:3])} has no counterpart in it")
    return as_torch(ours)


def one_by_one(arrays: Mapping[str, np.ndarray], family: str, layers: int) -> Arrays:
    """Parameters of a mixture under the names that transformers 5 has in memory, where the experts of a layer are
    stacked and gate and up are one, under the names of its files; all others as they are."""
    tables = tables_of(family)
    found, in_files = dict(arrays), {ours: row for row in table_of_files(family).rows for ours in row.ours}
    rows = tables[IN_MEMORY].rows if IN_MEMORY in tables else []
    for row, layer in ((row, layer) for row in rows if row.stacked for layer in range(layers)):
        if (name := row.theirs.format(layer=layer)) not in found:
            continue
        array, count = found.pop(name), len(row.ours)
        for ours, part in zip(row.ours, np.split(array, count, axis=-2) if count > 1 else [array], strict=True):
            theirs = in_files[ours].theirs
            parts = enumerate(part) if in_files[ours].by_expert else [(0, part)]
            found |= {theirs.format(layer=layer, expert=expert): matrix for expert, matrix in parts}
    return found


def _activations(arrays: Arrays, family: str) -> Arrays:
    """Outputs by module; an output of theirs for several modules of ours is split along its last axis."""
    several: dict[str, list[str]] = {"": [LOGITS]}
    modules = {ours: row.theirs for row in table_of_files(family).rows for ours in row.ours}
    named_so = {_module(ours, "layers.", "layers.#."): _module(t, "{layer}", "#") for ours, t in modules.items()}
    for ours, theirs in containers(family).items():
        named_so[ours.replace(BLOCK, f"{BLOCK}.#")] = theirs.replace("{layer}", "#")
    for ours, theirs in named_so.items():
        several.setdefault(theirs, []).append(ours)
    named: Arrays = {}
    for name, array in arrays.items():
        layer = next(iter(re.findall(r"\.(\d+)(?:\.|$)", name)), "")
        found = several.get(re.sub(r"\.\d+(?=\.|$)", ".#", name, count=1), [])
        for new, part in zip(found, np.split(array, max(1, len(found)), axis=-1), strict=False):
            named[new.replace("#", layer)] = part
    return named


def containers(family: str) -> dict[str, str]:
    """Our modules that hold others -> transformers' with `{layer}`: the common part of the names within."""
    tables, found = tables_of(family), dict[str, str]()
    for ours in CONTAINERS:
        rows = tables.get(IN_MEMORY, table_of_files(family)).rows
        within = [row.theirs.replace(".", "/") for row in rows if row.ours[0].startswith(f"{ours}.")]
        if (theirs := commonpath(within).replace("/", ".")) not in found.values():
            found[ours] = theirs
    return found


def _module(parameter: str, layer: str, number: str) -> str:
    """The module of a parameter, its layer's number written as `number`."""
    return parameter.rpartition(".")[0].replace(layer, number, 1)


def numbered(path: str, call: int) -> str:
    """The name of what a module puts out when it is called again."""
    return path if call == 1 else f"{path}#{call}"


def base(path: str) -> str:
    """A path without the number of its call."""
    return path.partition("#")[0]
