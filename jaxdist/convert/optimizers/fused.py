"""torchtitan's moments of queries, keys and values in one, as its default `fuse_qkv` trains them.

It saves the weights of `qkv_linear.wqkv` as wq, wk and wv, and the optimizer's state fused. Its rows are, for each
group of heads that shares one key, the queries, the key and the value
(https://github.com/pytorch/torchtitan/blob/main/torchtitan/models/common/attention.py, `FusedQKVLinear`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdist.config import ConfigError, Model
from jaxdist.formats.leaves import Leaf

FUSED = ".qkv_linear.wqkv."
PARTS = {".qkv_linear.wq.": (0, -2), ".qkv_linear.wk.": (-2, -1), ".qkv_linear.wv.": (-1, None)}  # of a group's heads


def unfused(path: str, found: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The entries of a checkpoint by their names, with those of `wqkv` as entries of wq, wk and wv: moments cut, and
    what is no moment for each. Raises ConfigError where a moment is not of this model's heads."""
    entries: dict[str, Any] = {}
    for name, value in found.items():
        for part, heads in PARTS.items() if FUSED in name else ():
            large = isinstance(value, Leaf) and math.prod(value.shape) > 1
            entries[name.replace(FUSED, part)] = _cut(f"{path}: {name}", value, heads, model) if large else value
        if FUSED not in name:
            entries[name] = value
    return entries


def ways(found: Mapping[str, Any]) -> dict[str, Any]:
    """The same for paths of entries in the saved tree."""
    paths: dict[str, Any] = {}
    for name, way in found.items():
        parts = PARTS if FUSED in name else ("",)
        paths |= {name.replace(FUSED, part): [_renamed(step, part) for step in way] for part in parts}
    return paths


def _renamed(step: Any, part: str) -> Any:
    return step.replace(FUSED, part) if isinstance(step, str) and part else step


def _cut(what: str, fused: Leaf, heads: tuple[int, int | None], model: Model) -> Leaf:
    """The rows of these heads of each group."""
    groups = model.kv_heads
    each = model.heads // groups + 2 if groups else 0
    rows, rest = fused.shape[0], fused.shape[1:]
    if not each or rows % (groups * each):
        raise ConfigError(
            f"{what} has {rows} rows, which do not match model.heads and model.kv_heads; give --model those of the "
            "run, or take the weights alone, --to hf"
        )
    first, last = heads

    def read() -> np.ndarray:
        return fused.read().reshape(groups, each, -1, *rest)[:, first:last].reshape(-1, *rest)

    count = rows // each * len(range(each)[first:last])
    return Leaf((count, *rest), fused.dtype, read, besides=fused.bytes + fused.besides)
