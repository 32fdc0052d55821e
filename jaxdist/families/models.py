"""Abstract models of configs, the table of their parameters, and how arrays are put into them."""

import reprlib
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.config import ConfigError, Model
from jaxdist.config.plugins import function, named
from jaxdist.config.registry import FAMILIES
from jaxdist.parallel.collectives import Weight
from jaxdist.parallel.sharding import ParamSpec

M = TypeVar("M", bound=nnx.Module)


def build(model: Model) -> nnx.Module:
    """The abstract model of a config: a tree of declarations."""
    module: nnx.Module = function(FAMILIES, model.family, "model", "training in JAX", nnx.Module)(model)
    if not FAMILIES.built_in(model.family):
        _check_declared(model.family, module)
    return module


def _check_declared(family: str, module: nnx.Module) -> None:
    """Raises ConfigError for a model of a plugin's family without its config, or with parameters without axes."""
    if config_of(module) is None:
        raise ConfigError(f"{named(FAMILIES, family)}: its model has no config; keep the model section as self.config")
    for path, v in nnx.to_flat_state(nnx.state(module)):
        axes = getattr(v, "axes", None)
        if axes is None or len(axes) != len(v.shape):
            raise ConfigError(
                f"{named(FAMILIES, family)}: its parameter {'.'.join(map(str, path))} {[*v.shape]} has the axes "
                f"{axes}; declare it with one for each dimension, by jaxdist.families.layers.parameter or statistic"
            )


def check_output(family: str, output: Any, shape: tuple[int, ...]) -> None:
    """Raises ConfigError where the model of a plugin's family returns other things than floating numbers of a shape."""
    if family not in FAMILIES or FAMILIES.built_in(family):
        return
    if getattr(output, "shape", None) == shape and jnp.issubdtype(output.dtype, jnp.floating):
        return
    found = f"{output.dtype}{[*output.shape]}" if isinstance(output, jax.Array) else reprlib.repr(output)
    raise ConfigError(f"{named(FAMILIES, family)}: model returns {found}; return floating numbers {[*shape]}")


def masks_padding(model: nnx.Module) -> bool:
    """Whether the model's call takes `valid_BT` [B, T], the mask of tokens whose target has a loss: its attribute
    `masks_padding`, by default False."""
    return getattr(model, "masks_padding", False)


def config_of(model: nnx.Module) -> Model | None:
    """The model section that a model was built from: its attribute `config`; None for a model of no family."""
    return getattr(model, "config", None)


def param_specs(model: nnx.Module) -> dict[str, ParamSpec]:
    """Every parameter that `model` declares, by dotted name, in the order of the names."""
    flat = {".".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}
    return {
        name: ParamSpec(name, v.shape, v.axes, v.mean, v.std, statistic=isinstance(v, nnx.BatchStat))
        for name, v in sorted(flat.items())
    }


def bind(model: M, weights: dict[str, jax.Array], accumulators: dict[str, jax.Array] | None = None) -> M:
    """Bind a Weight to each parameter of `model`, and arrays to statistics. Without accumulators it cannot be
    differentiated."""
    graph, state = nnx.split(model)

    def bound(name: str, v: nnx.Variable[Any]) -> nnx.Variable[Any]:
        trained = isinstance(v, nnx.Param)
        return v.replace(
            Weight(weights[name], accumulators[name] if accumulators else None) if trained else weights[name]
        )

    flat = [(path, bound(".".join(map(str, path)), v)) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))
