"""Check that a plugin's update rule is elementwise where its row says so: devices call it with pieces of parameters.

Twin: torch_ref/training/elementwise.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import ConfigError, Optimizer
from jaxdist.config.optimizer import OPTIMIZERS
from jaxdist.config.plugins import named
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.training.optim import rule

SHAPE, AXES = (2, 6, 4), ("layers", "embed", "embed")  # of matrices that two devices divide along each dimension
SCALES = (1e-3, 1.0, 1e3)  # of gradients, one of each update
TOLERANCE = 1e-4  # of the largest update, in float32


def check_elementwise(o: Optimizer) -> None:
    """Raises ConfigError for a plugin's rule of an elementwise row that updates half of a parameter, taken
    alone, otherwise than within the full one."""
    if OPTIMIZERS.built_in(o.name) or not o.elementwise or is_elementwise(o):
        return
    raise ConfigError(
        f"{named(OPTIMIZERS, o.name)}: its rule is not elementwise, as it updates half of a matrix, taken alone, "
        "otherwise than within the full one, and so would depend on the mesh; register it with elementwise = False and "
        "let it take means and full matrices from its parameter (ShardedParam.mean and by_matrix)"
    )


def is_elementwise(o: Optimizer) -> bool:
    """Whether the rule of an optimizer updates both halves of parameters as it updates full parameters, along every
    dimension."""
    rng = np.random.default_rng(0)
    weights, *gradients = (rng.standard_normal(SHAPE).astype(np.float32) for _ in range(1 + len(SCALES)))
    gradients = [scale * g for scale, g in zip(SCALES, gradients, strict=True)]
    with jax.ensure_compile_time_eval():
        full = updates(o, weights, gradients)
        for dim in range(len(SHAPE)):
            halves = zip(*(np.split(array, 2, dim) for array in (weights, *gradients)), strict=True)
            parts = np.concatenate([updates(o, half, rest) for half, *rest in halves], 1 + dim)
            largest = np.abs(full).max(tuple(range(1, full.ndim)), keepdims=True)
            if not np.all(np.abs(parts - full) <= TOLERANCE * largest):
                return False
    return True


def updates(o: Optimizer, weights: np.ndarray, gradients: list[np.ndarray]) -> np.ndarray:
    """The updates of one parameter by these gradients, one after the other [updates, *shape]."""
    spec = ParamSpec("layers.mlp.up_proj.kernel", weights.shape, AXES, 0.0, 1.0)
    parameters, found = {spec.name: jnp.asarray(weights)}, list[np.ndarray]()
    transform = rule(o, {spec.name: spec})
    state = transform.init(parameters)
    for g in gradients:
        update, state = transform.update({spec.name: jnp.asarray(g)}, state, parameters, rate=o.learning_rate)
        found.append(np.asarray(update[spec.name]))
    return np.stack(found)
