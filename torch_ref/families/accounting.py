"""FLOPs and memory that a family adds to a step on torch's side. Twin: jaxdist/accounting/forms.py.

A form that a row lacks is unknown, which is not an error: what a step holds and sends is measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from jaxdist.config import Experiment, Model
from jaxdist.config.plugins import optional, running
from torch_ref.families.registry import FAMILIES
from torch_ref.parallel.weights import named

Arrays = Mapping[str, tuple[float, float]]  # size -> number of arrays of it in the compute dtype, and in float32


@dataclass(frozen=True)
class Accounting:
    """Closed forms of a family; None: unknown."""

    flops: Callable[[Experiment, nn.Module], float] | None = None
    """FLOPs of a step per token, or image: products and attention, nothing of it twice."""
    kept: Arrays | None = None
    """Arrays that a decoder's block keeps from forward to backward without rematerialization, by the sizes of
    `jaxdist/accounting/decoder.py`."""
    why: str = ""
    """Why `kept` is unknown."""


def accounting_of(model: Model) -> Accounting:
    """The closed forms of a model's family. Raises ConfigError for a row that refers to none."""
    found = optional(FAMILIES, model.family, "accounting", Accounting) if model.family in FAMILIES else None
    return found or Accounting(why=f"as that of family {model.family} is unknown")


def flops_per_token(experiment: Experiment, model: nn.Module) -> float | None:
    """Multiply-adds × 2 of a step, per token or image; None where unknown."""
    if (form := accounting_of(experiment.model).flops) is None:
        return None
    with running(FAMILIES, experiment.model.family, "accounting"):
        return form(experiment, model)


def flops_of_decoder(experiment: Experiment, model: nn.Module, applied: Mapping[str, float] = {}) -> float:
    """FLOPs of a step per token: 6 a parameter that multiplies, and 12·L·H·C a key for attention.

    Lookups do not multiply; a tied embedding does, as the head. Attention's two products are over the keys that a query
    sees: T/2 under the causal mask (arXiv:2204.02311, appendix B, counts all T), less with a window. `applied`: module
    -> share of the parameters below it that a token is multiplied by, 1 of the others.
    """
    c: Any = experiment.model
    looked_up = {"positions.weight"} | (set() if c.tied else {"embed.weight"})
    multiplying = sum(
        p.numel() * next((share for module, share in applied.items() if f".{module}." in name), 1.0)
        for name, p in named(model)
        if name not in looked_up
    )
    flops: float = 6.0 * multiplying + 12.0 * c.layers * c.heads * c.head_dim * c.keys(experiment.data.sequence)
    return flops
