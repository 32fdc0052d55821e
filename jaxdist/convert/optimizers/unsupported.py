"""Update rules that jaxdist lacks, recognized by what their optimizers save, so that none is taken for another rule.

Names of torch.optim's state entries and group settings; others' group settings are those of Apex, timm, DeepSpeed
and torch_optimizer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

Group = Mapping[str, Any]
WEIGHTS_ALONE = "take the weights alone, --to hf"  # the fix: a Hugging Face folder has no optimizer, and none is read


class Unsupported(NamedTuple):
    """An update rule: its name, state entries that it alone keeps, and whether a group's settings are its own."""

    name: str
    kept: frozenset[str]
    matches: Callable[[Group], Any]


def _any_of(*settings: str) -> Callable[[Group], Any]:
    return lambda group: any(name in group for name in settings)


# The first that fits counts: Adadelta and ASGD share a name with RMSprop, of the state and of the groups.
UNSUPPORTED = (
    Unsupported("Adadelta", frozenset({"acc_delta"}), _any_of("rho")),
    Unsupported("ASGD", frozenset({"ax", "eta"}), _any_of("lambd")),
    Unsupported("RMSprop", frozenset({"square_avg", "grad_avg"}), _any_of("alpha", "centered")),
    Unsupported("Adagrad", frozenset({"sum"}), _any_of("lr_decay", "initial_accumulator_value")),
    Unsupported("Rprop", frozenset({"prev", "step_size"}), _any_of("etas", "step_sizes")),
    Unsupported("AMSGrad", frozenset({"max_exp_avg_sq"}), lambda group: group.get("amsgrad")),
    Unsupported("Adamax", frozenset({"exp_inf"}), _any_of()),
    Unsupported("NAdam", frozenset({"mu_product"}), _any_of("momentum_decay")),
    # Adam has amsgrad beside it.
    Unsupported("RAdam", frozenset(), lambda group: "decoupled_weight_decay" in group and "amsgrad" not in group),
    Unsupported(
        "NovoGrad",
        frozenset(),
        lambda group: "grad_averaging" in group and not group.keys().isdisjoint(("amsgrad", "norm_type")),
    ),
    Unsupported("LARS", frozenset(), _any_of("trust_coeff", "trust_coefficient")),
    Unsupported("AdamP or SGDP", frozenset(), _any_of("wd_ratio")),
    Unsupported("Yogi", frozenset(), _any_of("initial_accumulator")),
    Unsupported("LAMB", frozenset(), _any_of("grad_averaging", "trust_clip", "max_coeff")),
    Unsupported("LBFGS", frozenset({"old_dirs", "old_stps"}), _any_of("line_search_fn", "tolerance_grad")),
)


def unsupported(kept: Collection[str], groups: Sequence[Group]) -> str:
    """The name of the rule, where jaxdist lacks it, of an optimizer that keeps these entries in such groups; else
    empty."""
    found = (rule.name for rule in UNSUPPORTED if not rule.kept.isdisjoint(kept) or any(map(rule.matches, groups)))
    return next(found, "")
