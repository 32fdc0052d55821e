"""Check that a plugin's optimizer is elementwise unless its row says otherwise: ranks call it with pieces of
parameters.

Twin: jaxdist/training/elementwise.py.
"""

import torch
from torch import Tensor

from jaxdist.config import ConfigError
from jaxdist.config import Optimizer as Config
from jaxdist.config.optimizer import ParamRole
from jaxdist.config.plugins import named, running
from torch_ref.training.matrices import kept
from torch_ref.training.optim import rule_of
from torch_ref.training.registry import OPTIMIZERS

NAME, SHAPE = "layers.0.mlp.up_proj.weight", (6, 4)  # of a matrix that two ranks divide along each dimension
SCALES = (1e-3, 1.0, 1e3)  # of gradients, one of each update
TOLERANCE = 1e-4  # of the largest update, in float32


def check_elementwise(o: Config, device: str = "cpu") -> None:
    """Raises ConfigError for a plugin's optimizer that asks for no `pieces` and updates half of a parameter, taken
    alone, otherwise than within the full one, on a kind of device."""
    if OPTIMIZERS.built_in(o.name) or rule_of(o).pieces:
        return
    with running(OPTIMIZERS, o.name, "optimizer"):
        if is_elementwise(o, device):
            return
    raise ConfigError(
        f"{named(OPTIMIZERS, o.name)}: it is not elementwise, as it updates half of a matrix, taken alone, otherwise "
        "than within the full one, and so would depend on the mesh; register it with pieces = True and let it take "
        "means and full matrices from its argument pieces (torch_ref.training.matrices.Pieces)"
    )


def is_elementwise(o: Config, device: str = "cpu") -> bool:
    """Whether an optimizer updates both halves of parameters as it updates full parameters, along every dimension."""
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (torch.randn(SHAPE, generator=generator).to(device) for _ in range(1 + len(SCALES)))
    gradients = [scale * g for scale, g in zip(SCALES, gradients, strict=True)]
    full = updates(o, weights, gradients)
    largest = full.abs().amax(tuple(range(1, full.ndim)), keepdim=True)
    for dim in range(len(SHAPE)):
        halves = zip(*(tensor.chunk(2, dim) for tensor in (weights, *gradients)), strict=True)
        parts = torch.cat([updates(o, half, rest) for half, *rest in halves], 1 + dim)
        if not bool(((parts - full).abs() <= TOLERANCE * largest).all()):
            return False
    return True


def updates(o: Config, weights: Tensor, gradients: list[Tensor]) -> Tensor:
    """The updates of one parameter by these gradients, each from the same weights [updates, *shape]."""
    rule, parameter = rule_of(o), torch.nn.Parameter(weights.clone())
    role = ParamRole.in_torch(NAME, parameter.ndim)
    own = next((own for applies_to, own in rule.groups if applies_to(role)), {})
    group = {"params": [parameter], "weight_decay": 0.0} | own
    optimizer = rule.optimizer([group], **{"lr": 1.0, **rule.settings(o)})
    kinds = [kind for kind, applies_to in o.states.items() if applies_to(role)]
    state = {"step": torch.tensor(0.0)} | {kind: kept(parameter.detach(), kind) for kind in kinds}
    optimizer.state[parameter] = state
    found = []
    for g in gradients:
        parameter.grad = g.clone()
        optimizer.step()
        if not rule.counts:
            state["step"] += 1
        found.append(parameter.detach() - weights)
        parameter.data.copy_(weights)
    return torch.stack(found)
