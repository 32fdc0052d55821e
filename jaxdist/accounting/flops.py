"""FLOPs of the model's own arithmetic: multiply-adds × 2 of a step, nothing of it twice."""

import math
from collections.abc import Mapping
from typing import Any

from jaxdist.config import Experiment
from jaxdist.parallel.sharding import ParamSpec


def decoder_flops(
    experiment: Experiment, param_specs: Mapping[str, ParamSpec], applied: Mapping[str, float] = {}
) -> float:
    """FLOPs of a step per token: 6 per parameter that multiplies, and 12·L·H·C per key for attention.

    Lookups do not multiply; a tied embedding does, as the head. Attention's two products are over the keys that a query
    sees: T/2 under the causal mask (arXiv:2204.02311, appendix B, counts all T), less with a window. `applied`: logical
    axis -> share of the parameters along it that a token is multiplied by, 1 along the others.
    """
    m: Any = experiment.model
    looked_up = {"positions.embedding"} | (set() if m.tied else {"embed.embedding"})
    multiplying = sum(
        math.prod(spec.shape) * math.prod(applied.get(axis, 1.0) for axis in spec.axes)
        for name, spec in param_specs.items()
        if name not in looked_up
    )
    return 6.0 * multiplying + 12.0 * m.layers * m.heads * m.head_dim * m.keys(experiment.data.sequence)
