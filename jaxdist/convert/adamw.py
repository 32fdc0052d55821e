"""The state of `torch.optim.AdamW` by parameter: it numbers them, and only their order tells which is which."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jaxdist.config import ConfigError, Optimizer
from jaxdist.config.display import say
from jaxdist.convert.atoms import Shape
from jaxdist.convert.content import MOMENTS

Order = dict[Any, str]  # number or name in the optimizer -> name of the parameter
KEPT = {"state", "param_groups"}  # by AdamW, and by parameter "step" and MOMENTS
UNLIKE: dict[str, Callable[[Mapping[str, Any]], Any]] = {  # what makes a group's optimizer another than our AdamW
    "amsgrad": lambda group: group.get("amsgrad"),
    "maximize": lambda group: group.get("maximize"),
    "momentum_decay": lambda group: "momentum_decay" in group,  # NAdam
    "decoupled_weight_decay": lambda group: (  # Adam, whose groups have amsgrad, and RAdam, whose have not
        not group.get("decoupled_weight_decay", True) and (group.get("weight_decay") or "amsgrad" not in group)
    ),
}
SETTINGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "learning_rate": lambda group: group.get("initial_lr", group.get("lr")),
    "beta1": lambda group: group["betas"][0] if "betas" in group else None,
    "beta2": lambda group: group["betas"][1] if "betas" in group else None,
    "eps": lambda group: group.get("eps"),
}


def order_of(source: str, state: Mapping[str, Any], shapes: Mapping[str, Shape], rename: Callable[[str], str]) -> Order:
    """Which entry of a state dict belongs to which of `shapes`, the model's in their order. Raises ConfigError.

    `rename` turns a name of the optimizer's into one of `shapes`. Numbers are taken for the order of the parameters
    as a training script gives them: all, or those of two or more axes and the others in two groups.
    """
    entries, groups = state.get("state"), state.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list):
        raise ConfigError(f"{source}: its optimizer has no state and param_groups; give that of torch.optim.AdamW")
    more = [name for entry in entries.values() if isinstance(entry, dict) for name in entry.keys() - {"step", *MOMENTS}]
    if more := sorted(map(str, {*more, *(state.keys() - KEPT)})):
        raise ConfigError(
            f"{source}: its optimizer keeps {', '.join(more)} too, AdamW of jaxdist does not; leave it out"
        )
    named = [{key: rename(key) for key in entries}] if all(isinstance(key, str) for key in entries) else []
    for order in (*named, *_orders(groups, shapes, rename)):
        if set(order) == set(entries) and all(_fits(entries[i], shapes.get(name)) for i, name in order.items()):
            return order
    raise ConfigError(
        f"{source}: its optimizer has {len(entries)} entries in {len(groups)} groups, in no order that gives each "
        "parameter moments of its shape; make an AdamW from model.named_parameters(), so that param_names are saved"
    )


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


def steps_of(optimizer: Mapping[str, Any]) -> list[Any]:
    """How many each parameter has made, as its entry says, or its group, as Apex's FusedAdam has it."""
    of_group = {key: group.get("step") for group in optimizer["param_groups"] for key in group["params"]}
    return [entry.get("step", of_group.get(key)) for key, entry in optimizer["state"].items()]


def by_decay(shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """Those of two or more axes, which decay, and all others."""
    return [name for name, shape in shapes.items() if len(shape) >= 2], [n for n, s in shapes.items() if len(s) < 2]


def _fits(entry: Any, shape: Shape | None) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(kind), Tensor) and tuple(entry[kind].shape) == shape for kind in MOMENTS
    )


def named(groups: Sequence[Mapping[str, Any]], order: Order) -> list[dict[str, Any]]:
    """Groups with the names of their parameters in `params`, and in `keys` what the optimizer calls them."""
    known = [[key for key in group["params"] if key in order] for group in groups]
    return [
        {**group, "params": [order[key] for key in keys], "keys": keys}
        for group, keys in zip(groups, known, strict=True)
    ]


def settings(source: str, groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The optimizer section of an experiment, as far as `named` groups say it. Raises ConfigError where no such
    section can say it: for another optimizer than AdamW, and for groups that are trained in different ways."""
    for name, unlike in UNLIKE.items():
        if other := next(filter(unlike, groups), None):
            raise ConfigError(
                f"{source}: its optimizer has {name} = {other[name]}, AdamW of jaxdist has not; leave it out"
            )
    found: dict[str, Any] = {}
    for setting, of in SETTINGS.items():
        values = {of(group) for group in groups} - {None}
        if len(values) > 1:
            raise ConfigError(f"{source}: {setting} of its optimizer's groups are {values}; jaxdist has one for all")
        if values:
            found[setting] = float(values.pop())
    decay = max(group.get("weight_decay", 0) for group in groups)
    apart = [
        name
        for group in groups
        for name in group["params"]
        if group.get("weight_decay", 0) != (decay if len(shapes.get(name, ())) >= 2 else 0)
    ]
    if apart:
        say(f"{source}: its optimizer's decay of {apart[0]} is its own; going on, jaxdist decays matrices alone, alike")
    return found | {"weight_decay": float(decay)}


def state_dict(
    moments: Mapping[str, Mapping[str, Tensor]], groups: Sequence[Mapping[str, Any]], updates: int
) -> dict[str, Any]:
    """What `AdamW.state_dict` would give of `named` groups. `moments`: kind -> name -> tensor."""
    state = {
        key: {"step": torch.tensor(float(updates))} | {kind: moments[kind][name] for kind in MOMENTS}
        for group in groups
        for name, key in zip(group["params"], group["keys"], strict=True)
    }
    unnamed = [{**group, "params": group["keys"]} for group in groups]
    return {"state": state, "param_groups": [{k: v for k, v in group.items() if k != "keys"} for group in unnamed]}


def going_on(group: Mapping[str, Any], o: Optimizer, rate: float, updates: int) -> dict[str, Any]:
    """The group as it is after more steps by `o`; `rate`: the learning rate now."""
    found = {**group, "lr": rate, "betas": (o.beta1, o.beta2), "eps": o.eps}
    found |= {"initial_lr": o.learning_rate} if "initial_lr" in group else {}
    found |= {"step": updates} if "step" in group else {}
    return found | ({"weight_decay": o.weight_decay} if group.get("weight_decay") else {})


def groups_of(shapes: Mapping[str, Shape], o: Optimizer, rate: float) -> list[dict[str, Any]]:
    """`named` groups as this version of torch writes them: matrices decay and come first, then all others.

    `rate`: the learning rate now.
    """
    decayed, others = by_decay(shapes)
    groups = {o.weight_decay: decayed, 0.0: others} if o.weight_decay else {0.0: [*decayed, *others]}
    given = [
        {"params": [(name, torch.nn.Parameter(torch.empty(0))) for name in names], "weight_decay": decay}
        for decay, names in groups.items()
        if names
    ]
    optimizer = torch.optim.AdamW(given, lr=rate, betas=(o.beta1, o.beta2), eps=o.eps)
    return [
        group | {"initial_lr": o.learning_rate, "params": group["param_names"], "keys": group["params"]}
        for group in optimizer.state_dict()["param_groups"]
    ]
