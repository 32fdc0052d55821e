"""The modules of configs."""

import re
import reprlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from jaxdist.config import ConfigError, Model
from jaxdist.config.plugins import function, named, piece, running, twin
from jaxdist.config.registry import FAMILIES as JAX_FAMILIES
from torch_ref.families.registry import FAMILIES, Family
from torch_ref.runtime.launch import is_collective_error


def build(model: Model) -> nn.Module:
    """The module of a config, on torch's current default device; `torch_ref.parallel.weights` gives it its values."""
    module_of(model)
    module: nn.Module = function(FAMILIES, model.family, "model", "training in torch", nn.Module)(model)
    if not FAMILIES.built_in(model.family) and config_of(module) is None:
        raise ConfigError(
            f"{named(FAMILIES, model.family)}: its model has no config; keep the model section as self.config"
        )
    return module


def check_output(family: str, output: Any, shape: tuple[int, ...]) -> None:
    """Raises ConfigError where the model of a plugin's family returns other things than floating numbers of a shape,
    with a gradient where one is needed."""
    if family not in FAMILIES or FAMILIES.built_in(family):
        return
    tensor, differentiable = isinstance(output, Tensor), getattr(output, "requires_grad", False)
    if tensor and output.shape == shape and output.is_floating_point() and differentiable >= torch.is_grad_enabled():
        return
    found = f"{output.dtype}{[*output.shape]}" if tensor else reprlib.repr(output)
    detached = "" if differentiable else " without a gradient"
    raise ConfigError(
        f"{named(FAMILIES, family)}: model returns {found}{detached}; return floating numbers {[*shape]} that depend "
        "on the parameters"
    )


def declared(model: Model) -> nn.Module:
    """The module of a config on the meta device: names, shapes and dtypes without values."""
    with torch.device("meta"):
        return build(model)


def module_of(model: Model) -> Callable[[Model], nn.Module]:
    """The class of a config's module. Raises ConfigError where a plugin's family has none on torch's side."""
    twin(JAX_FAMILIES, FAMILIES, model.family, "register_family")
    found: Callable[[Model], nn.Module] = piece(FAMILIES, model.family, "model", "training in torch")
    return found


def masks_padding(model: nn.Module) -> bool:
    """Whether the model's call takes `valid_BT` [B, T], the mask of tokens whose target has a loss: its attribute
    `masks_padding`, by default False."""
    return getattr(model, "masks_padding", False)


def config_of(model: nn.Module) -> Model | None:
    """The model section that a model was built from: its attribute `config`; None for a model of no family."""
    config: Model | None = getattr(model, "config", None)
    return config


def row_of(model: nn.Module) -> Family:
    """The row of a module's family."""
    config: Model = model.config  # type: ignore[assignment]
    return FAMILIES[config.family]


def computing(model: nn.Module) -> AbstractContextManager[None]:
    """Context manager for a forward pass of a module, or of a part of it. Raises ConfigError for errors of the code of
    a plugin's family."""
    family = getattr(config_of(model), "family", "")
    return running(FAMILIES, family, "model", _is_machine_error) if family in FAMILIES else nullcontext()


def _is_machine_error(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or is_collective_error(error)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, in order. Raises ConfigError where a plugin's row names none of its modules."""
    row = row_of(model)
    pattern = re.compile(re.escape(row.blocks).replace(r"\*", r"\d+"))
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not found:
        raise ConfigError(
            f"{named(FAMILIES, row.name)}: no module has a name as blocks = {row.blocks!r}; register it with the names "
            "of its blocks, as 'layers.*'"
        )
    return found
