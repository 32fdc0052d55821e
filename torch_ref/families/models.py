"""The modules of configs."""

from torch import nn

from jaxdist.config import Model
from jaxdist.config.registry import resolve
from torch_ref.families.registry import FAMILIES


def build(model: Model) -> nn.Module:
    """The module of a config, on torch's current default device; `torch_ref.parallel.weights` gives it its values."""
    return resolve(FAMILIES[model.family].model)(model)
