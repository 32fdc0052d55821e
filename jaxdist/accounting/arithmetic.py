"""Narrowest dtype of a step's precision-sensitive operations: softmax, norms, rotation and the loss.

An error in them is smaller than that of bfloat16 elsewhere: no loss curve of a bf16 run shows it, though some models
train worse. The traced program shows it at once, where it is written with these functions: a hand-written norm, which
divides by a square root, can't be distinguished from Adam, which does the same.
"""

from typing import Any

import jax.numpy as jnp

from jaxdist.accounting.traffic import equations

DELICATE = ("exp", "exp2", "log", "log1p", "rsqrt", "cos", "sin")


def narrowest(closed: Any) -> dict[str, str]:
    """function -> the narrowest dtype that a traced program (`jit(f).trace(...).jaxpr`) computes it in."""
    found: dict[str, Any] = {}
    for equation, *_ in equations(closed):
        if (name := equation.primitive.name) in DELICATE:
            dtype = equation.outvars[0].aval.dtype
            found[name] = max(found.get(name, dtype), dtype, key=lambda dtype: float(jnp.finfo(dtype).eps))
    return {name: str(dtype) for name, dtype in sorted(found.items())}
