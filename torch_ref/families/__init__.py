"""Models by family: plain modules. What is split over ranks they meet as `context`, `dispatch` and `images`, which
`parallelize` gives them, and as DTensors."""

from torch import nn

from jaxdist import config
from torch_ref.families.gpt2 import GPT2
from torch_ref.families.llama import Llama
from torch_ref.families.mixtral import Mixtral
from torch_ref.families.resnet import ResNet

FAMILIES = {"llama": Llama, "gpt2": GPT2, "mixtral": Mixtral, "qwen3_moe": Mixtral, "resnet": ResNet}


def build(model: config.Model) -> nn.Module:
    """The module of a config, on torch's current default device; `torch_ref.parallel.weights` gives it its values."""
    return FAMILIES[model.family](model)  # type: ignore[attr-defined]
