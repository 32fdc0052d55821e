"""The state of `torch.optim.AdamW` by parameter: it numbers them, and only their order tells which is which."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jaxdist.config import ConfigError, Optimizer
from jaxdist.convert.content import MOMENTS
from jaxdist.convert.tables import Shape

Order = dict[Any, str]  # number or name in the optimizer -> name of the parameter


def order_of(source: str, state: Mapping[str, Any], shapes: Mapping[str, Shape], rename: Callable[[str], str]) -> Order:
    """Which entry of a state dict belongs to which of `shapes`, the model's in their order. Raises ConfigError.

    `rename` turns a name of the optimizer's into one of `shapes`. Numbers are taken for the order of the parameters
    as a training script gives them: all, or those of two or more axes and the others in two groups.
    """
    entries, groups = state.get("state"), state.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list):
        raise ConfigError(f"{source}: its optimizer has no state and param_groups; give that of torch.optim.AdamW")
    named = [{key: rename(key) for key in entries}] if all(isinstance(key, str) for key in entries) else []
    for order in (*named, *_orders(groups, shapes, rename)):
        if set(order) == set(entries) and all(_fits(entries[i], shapes.get(name)) for i, name in order.items()):
            return order
    raise ConfigError(
        f"{source}: its optimizer has {len(entries)} entries in {len(groups)} groups, in no order that gives each "
        "parameter moments of its shape; make an AdamW from model.named_parameters(), so that param_names are saved"
    )


def decayed_vectors(state: Mapping[str, Any], order: Order, shapes: Mapping[str, Shape]) -> list[str]:
    """Biases and scales that the optimizer decays, as neither jaxdist nor torch_ref would."""
    decayed = [key for group in state["param_groups"] if group.get("weight_decay") for key in group["params"]]
    names = [order[key] for key in decayed if key in order]
    return [name for name in names if len(shapes.get(name, ())) == 1]


def _orders(groups: list[Any], shapes: Mapping[str, Shape], rename: Callable[[str], str]) -> Iterable[Order]:
    """Number -> name, the likeliest first."""
    numbers = [i for group in groups for i in group["params"]]
    if all("param_names" in group for group in groups):
        yield dict(zip(numbers, [rename(name) for group in groups for name in group["param_names"]], strict=False))
    yield dict(zip(numbers, shapes, strict=False))
    decayed, others = by_decay(shapes)
    for first, second in ((decayed, others), (others, decayed)):
        if [len(group["params"]) for group in groups] == [len(first), len(second)]:
            yield dict(zip(numbers, (*first, *second), strict=True))


def by_decay(shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """Those of two or more axes, which decay, and all others."""
    return [name for name, shape in shapes.items() if len(shape) >= 2], [n for n, s in shapes.items() if len(s) < 2]


def _fits(entry: Any, shape: Shape | None) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(kind), Tensor) and tuple(entry[kind].shape) == shape for kind in MOMENTS
    )


def settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer section of an experiment, as far as the groups say it."""
    groups = [group for group in state["param_groups"] if isinstance(group, dict)]
    first = max(groups, key=lambda group: group.get("weight_decay", 0))
    found = {"learning_rate": first.get("initial_lr", first.get("lr")), "eps": first.get("eps")}
    found |= dict(zip(("beta1", "beta2"), first.get("betas", ()), strict=False))
    found["weight_decay"] = first.get("weight_decay")
    return {name: float(value) for name, value in found.items() if value is not None}


def state_dict(
    moments: Mapping[str, Mapping[str, Tensor]], shapes: Mapping[str, Shape], o: Optimizer, rate: float, updates: int
) -> dict[str, Any]:
    """What `AdamW.state_dict` would give: matrices decay and come first, then all others.

    `moments`: kind -> name -> tensor; `rate`: the learning rate now.
    """
    decayed, others = by_decay(shapes)
    groups = {o.weight_decay: decayed, 0.0: others} if o.weight_decay else {0.0: [*decayed, *others]}
    order = [name for names in groups.values() for name in names]
    state = {
        i: {"step": torch.tensor(float(updates))} | {kind: moments[kind][name] for kind in MOMENTS}
        for i, name in enumerate(order)
    }
    return {"state": state, "param_groups": _param_groups(groups, o, rate)}


def _param_groups(groups: Mapping[float, Sequence[str]], o: Optimizer, rate: float) -> list[dict[str, Any]]:
    """As this version of torch writes them."""
    given = [
        {"params": [(name, torch.nn.Parameter(torch.empty(0))) for name in names], "weight_decay": decay}
        for decay, names in groups.items()
        if names
    ]
    optimizer = torch.optim.AdamW(given, lr=rate, betas=(o.beta1, o.beta2), eps=o.eps)
    return [group | {"initial_lr": o.learning_rate} for group in optimizer.state_dict()["param_groups"]]
