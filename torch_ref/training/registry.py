"""The optimizers of torch's side, one row each. Imports no torch: plugins register their own by it."""

from dataclasses import dataclass
from typing import Any

from jaxdist.config.optimizer import ENDS, INNER, MATRICES, VECTORS, AppliesTo
from jaxdist.config.registry import BUILT_IN, Reference, Registry, registrant

Groups = tuple[tuple[AppliesTo, dict[str, Any]], ...]
BY_DECAY: Groups = (MATRICES, {}), (VECTORS, {"weight_decay": 0.0})
BY_MUON: Groups = (
    (INNER, {"use_muon": True}),
    (ENDS, {"use_muon": False}),
    (VECTORS, {"use_muon": False, "weight_decay": 0.0}),
)


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer as torch_ref makes it: the twin of `jaxdist.UpdateRule`."""

    name: str
    """Value of `optimizer.name`."""
    optimizer: Reference
    """The class, a torch.optim.Optimizer."""
    settings: Reference
    """The function that makes its keyword arguments of the optimizer section; `lr` and `weight_decay` come beside."""
    counts: bool = False
    """Whether it counts its updates in `step` by itself."""
    pieces: bool = False
    """Whether it asks for `pieces` (`torch_ref.training.matrices.Pieces`), as it needs full matrices."""
    groups: Groups = BY_DECAY
    """Parameters of each group, and its own settings."""


OPTIMIZERS: Registry[UpdateRule] = Registry("optimizer of torch's side", UpdateRule)


def register_optimizer(row: UpdateRule) -> None:
    """Make an optimizer known to torch_ref. Raises ConfigError for a name that is taken."""
    OPTIMIZERS.register(row, registrant())


for _row in (
    UpdateRule("adamw", "torch.optim:AdamW", "torch_ref.training.optim:adam", counts=True),
    UpdateRule("adam", "torch.optim:Adam", "torch_ref.training.optim:adam", counts=True),
    UpdateRule("sgd", "torch.optim:SGD", "torch_ref.training.optim:sgd"),
    UpdateRule("lion", "torch_ref.training.optim:Lion", "torch_ref.training.optim:lion"),
    UpdateRule(
        "adafactor",
        "torch_ref.training.matrices:Adafactor",
        "torch_ref.training.optim:adafactor",
        counts=True,
        pieces=True,
    ),
    UpdateRule(
        "muon",
        "torch_ref.training.matrices:Muon",
        "torch_ref.training.optim:muon",
        counts=True,
        pieces=True,
        groups=BY_MUON,
    ),
):
    OPTIMIZERS.register(_row, BUILT_IN)
