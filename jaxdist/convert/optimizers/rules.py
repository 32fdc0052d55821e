"""The state of torch's optimizers by parameter: they number them, and only their order identifies them."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jaxdist.config import EMA, ConfigError, Optimizer
from jaxdist.config.optimizer import OPTIMIZERS
from jaxdist.convert.kinds.torch_parts import like
from jaxdist.convert.mappings.atoms import Entry, Shape
from jaxdist.convert.optimizers.rates import peak_in
from jaxdist.convert.optimizers.unsupported import WEIGHTS_ALONE, Group, unsupported
from jaxdist.runs.display import say

Order = dict[Any, str]  # number or name in the optimizer -> name of the parameter
STATE_DICT_KEYS = {"state", "param_groups"}  # keys that every optimizer's state_dict has


class Rule(NamedTuple):
    """An update rule of torch: its name in a config, whether a group of such a state is of it, what makes a group
    unlike ours, the fields that its groups have, and the optimizer with these fields over given groups."""

    name: str
    matches: Callable[[Group], bool]
    unlike: dict[str, Callable[[Group], Any]]
    fields: dict[str, Callable[[Group], Any]]
    build: Callable[[Any, float, Optimizer], torch.optim.Optimizer]
    counts: bool = False  # its updates, in `step`

    def kinds(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """Kinds of state per parameter; none if no group has a momentum."""
        still = self.name == "sgd" and groups and all(group.get("momentum") == 0 for group in groups)
        return () if still else tuple(OPTIMIZERS[self.name].states)


def _decoupled(group: Group) -> bool:
    """Whether it is AdamW's: Adam's groups say that it is not."""
    return bool(group.get("decoupled_weight_decay", True))


MAXIMIZES: dict[str, Callable[[Group], Any]] = {"maximize": lambda group: group.get("maximize")}
ADAMW = MAXIMIZES | {"decoupled_weight_decay": lambda group: not _decoupled(group)}
ADAM = MAXIMIZES | {"decoupled_weight_decay": _decoupled}
MUON = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")  # of the groups that use it


def _muon(name: str) -> Callable[[Group], Any]:
    return lambda group: group.get(name)


RATE: dict[str, Callable[[Group], Any]] = {
    "learning_rate": lambda group: group.get("lr") if (peak := peak_in(group)) is None else peak
}
BETAS = RATE | {
    "beta1": lambda group: group["betas"][0] if "betas" in group else None,
    "beta2": lambda group: group["betas"][1] if "betas" in group else None,
}
EPS = BETAS | {"eps": lambda group: group.get("eps")}
TORCH_RULES = (
    Rule(
        "adamw", _decoupled, ADAMW, EPS,
        lambda groups, rate, o: torch.optim.AdamW(groups, lr=rate, betas=(o.beta1, o.beta2), eps=o.eps), counts=True,
    ),
    Rule(
        "adam", lambda group: not _decoupled(group), ADAM, EPS,
        lambda groups, rate, o: torch.optim.Adam(groups, lr=rate, betas=(o.beta1, o.beta2), eps=o.eps), counts=True,
    ),
    Rule(
        "sgd", lambda group: "momentum" in group, MAXIMIZES | {"dampening": lambda group: group.get("dampening")},
        RATE | {"momentum": lambda group: group["momentum"], "nesterov": lambda group: group.get("nesterov", False)},
        lambda groups, rate, o: torch.optim.SGD(groups, lr=rate, momentum=o.momentum, nesterov=o.nesterov),
    ),
    Rule(
        "lion", lambda group: "betas" in group, MAXIMIZES, BETAS,
        lambda groups, rate, o: torch.optim.Optimizer(
            groups, {"lr": rate, "betas": (o.beta1, o.beta2), "weight_decay": 0.0}
        ),
    ),
    Rule(
        "adafactor", lambda group: "beta2_decay" in group, MAXIMIZES,
        RATE | {
            "beta2_decay": lambda group: group.get("beta2_decay"),
            "d": lambda group: group.get("d"),
            "eps1": lambda group: group.get("eps", (None,))[0],
            "eps2": lambda group: group.get("eps", (None, None))[1],
        },
        lambda groups, rate, o: torch.optim.Adafactor(
            groups, lr=rate, beta2_decay=o.beta2_decay, eps=(o.eps1 or None, o.eps2), d=o.d
        ),
        counts=True,
    ),
    Rule(
        "muon", lambda group: "use_muon" in group, MAXIMIZES, EPS | {name: _muon(name) for name in MUON},
        lambda groups, rate, o: torch.optim.Optimizer(
            groups, {"lr": rate, "betas": (o.beta1, o.beta2), "eps": o.eps, "weight_decay": 0.0}
        ),
        counts=True,
    ),
)  # fmt: skip


def plugin_rule(name: str) -> Rule:
    """The rule of a plugin's optimizer, whose groups have no more than every optimizer's."""
    return Rule(
        name, lambda group: True, MAXIMIZES, RATE,
        lambda groups, rate, o: torch.optim.Optimizer(groups, {"lr": rate, "weight_decay": 0.0}),
    )  # fmt: skip


def by_name() -> dict[str, Rule]:
    """All rules, ours first."""
    ours = {rule.name: rule for rule in TORCH_RULES}
    return ours | {name: plugin_rule(name) for name in OPTIMIZERS if name not in ours}


DEFAULTS = Optimizer()


def rule_of(source: str, found: Iterable[str], groups: Sequence[Group]) -> Rule:
    """The rule that keeps these kinds of state. Raises ConfigError for none of ours."""
    kept = set(found) - {"step"}
    if name := unsupported(kept, groups):
        raise ConfigError(
            f"{source}: its optimizer is {name}, a rule that jaxdist does not have ({', '.join(by_name())}); "
            + WEIGHTS_ALONE
        )
    alike = [(rule, kinds) for rule in by_name().values() if kept.issuperset(kinds := rule.kinds(groups))]
    if not alike:
        raise ConfigError(
            f"{source}: its optimizer keeps {', '.join(sorted(kept)) or 'nothing'}, as none of jaxdist's does "
            f"({', '.join(by_name())}); {WEIGHTS_ALONE}"
        )
    most = max(len(kinds) for _, kinds in alike)
    likely = [(rule, kinds) for rule, kinds in alike if len(kinds) == most]
    rule, kinds = next((pair for pair in likely if groups and all(map(pair[0].matches, groups))), likely[0])
    if more := sorted(kept.difference(kinds)):
        raise ConfigError(
            f"{source}: its optimizer keeps {', '.join(more)} too, {rule.name} of jaxdist does not; {WEIGHTS_ALONE}"
        )
    return rule


def with_entries(optimizer: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state dict of torch's with an entry for each parameter where its rule keeps nothing: SGD without momentum
    saves an empty `state` however many steps it made. All others are as they are."""
    groups = optimizer.get("param_groups")
    if optimizer.get("state") or not isinstance(groups, list) or not groups:
        return dict(optimizer)
    stateless = all(isinstance(group, dict) and group.get("momentum") == 0 and "dampening" in group for group in groups)
    return {**optimizer, **({"state": {key: {} for group in groups for key in group["params"]}} if stateless else {})}


Kept = Callable[[Optimizer, str], Mapping[str, Entry]]  # what such an optimizer keeps as a kind, by parameter


def order_of(
    source: str, state: Mapping[str, Any], shapes: Mapping[str, Shape], kept: Kept, rename: Callable[[str], str]
) -> tuple[Rule, Order]:
    """The rule of a state dict, and which entry of it belongs to which of `shapes`, the model's in their order.

    Raises ConfigError.

    `rename` turns a name of the optimizer's into one of `shapes`. Numbers are taken for the order of the parameters
    as a training script gives them: all, or those of two or more axes and the others in two groups.
    """
    entries, groups = state.get("state"), state.get("param_groups")
    if not isinstance(entries, dict) or not isinstance(groups, list):
        raise ConfigError(f"{source}: its optimizer has no state and param_groups; give that of torch.optim.AdamW")
    held = (entry for entry in entries.values() if isinstance(entry, dict))
    there = [str(kind) for entry in held for kind, value in entry.items() if value is not None]
    rule = rule_of(source, [*there, *map(str, state.keys() - STATE_DICT_KEYS)], groups)
    like_it = Optimizer(name=rule.name)
    wanted = {kind: {n: e.shape for n, e in kept(like_it, kind).items()} for kind in rule.kinds(groups)}
    named = [{key: rename(key) for key in entries}] if all(isinstance(key, str) for key in entries) else []

    def fitting(orders: Iterable[Order]) -> Order | None:
        fits = (order for order in orders if set(order) == set(entries))
        return next((o for o in fits if all(_fits(wanted, name, entries[i]) for i, name in o.items())), None)

    order = fitting((*named, *_orders(groups, shapes, rename)))
    if list(shapes) == sorted(shapes) and not named:  # whoever sorted the names lost the order of the parameters
        of_model = {name: shapes[name] for kind in wanted.values() for name in kind if name in shapes}
        other = fitting(_orders(groups, of_model, rename))
        if order and other and order != other:
            raise ConfigError(
                f"{source}: its tensors are sorted by name, and its optimizer fits them both in that order and in the "
                "order of the model's parameters; save it with param_names, by model.named_parameters(), or "
                + WEIGHTS_ALONE
            )
        order = order or other
    if order:
        return rule, order
    if len(entries) < len(shapes):
        named_of = (zip(group["params"], group.get("param_names", ()), strict=False) for group in groups)
        missing = [name for numbered in named_of for i, name in numbered if i not in entries]
        raise ConfigError(
            f"{source}: its optimizer has {len(entries)} entries for {len(shapes)} parameters, and none "
            f"{f'for {missing[0]}' if missing else 'for the others'}, as where some are not trained, or by another "
            f"optimizer; jaxdist trains all by one: {WEIGHTS_ALONE}"
        )
    raise ConfigError(
        f"{source}: its optimizer has {len(entries)} entries in {len(groups)} groups, in no order that gives each "
        "parameter moments of its shape; make one from model.named_parameters(), so that param_names are saved"
    )


def _orders(groups: list[Any], shapes: Mapping[str, Shape], rename: Callable[[str], str]) -> Iterable[Order]:
    """Number -> name, the likeliest first."""
    numbers = [i for group in groups for i in group["params"]]
    if all("param_names" in group for group in groups):
        yield dict(zip(numbers, [rename(name) for group in groups for name in group["param_names"]], strict=False))
    yield dict(zip(numbers, shapes, strict=False))
    decayed, others = by_decay(shapes)
    # nanoGPT of before mid-2023 had the names of each group in alphabetical order.
    for first, second in ((decayed, others), (others, decayed), (sorted(decayed), sorted(others))):
        if [len(group["params"]) for group in groups] == [len(first), len(second)]:
            yield dict(zip(numbers, (*first, *second), strict=True))


def steps_of(optimizer: Mapping[str, Any]) -> list[Any]:
    """Number of updates of each parameter, from its entry, or from its group as Apex's FusedAdam keeps it."""
    of_group = {key: group.get("step") for group in optimizer["param_groups"] for key in group["params"]}
    return [entry.get("step", of_group.get(key)) for key, entry in optimizer["state"].items()]


def by_decay(shapes: Mapping[str, Shape]) -> tuple[list[str], list[str]]:
    """Parameters of two or more axes, which decay, and all others."""
    return [name for name, shape in shapes.items() if len(shape) >= 2], [n for n, s in shapes.items() if len(s) < 2]


def _fits(wanted: Mapping[str, Mapping[str, Shape]], name: str, entry: Any) -> bool:
    """Whether an entry has what is kept of a parameter, in its shape, and no more of these kinds."""
    return isinstance(entry, dict) and all(
        tuple(value.shape) == shapes.get(name) if isinstance(value := entry.get(kind), Tensor) else name not in shapes
        for kind, shapes in wanted.items()
    )


def named(groups: Sequence[Group], order: Order) -> list[dict[str, Any]]:
    """Groups with the names of their parameters in `params`, and in `keys` what the optimizer calls them."""
    known = [[key for key in group["params"] if key in order] for group in groups]
    return [
        {**group, "params": [order[key] for key in keys], "keys": keys}
        for group, keys in zip(groups, known, strict=True)
    ]


def settings(source: str, rule: Rule, groups: Sequence[Group], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """The optimizer section of an experiment, as far as `named` groups say it; empty without groups. Raises ConfigError
    where no such section can say it: for another optimizer than ours, and for groups that are trained in different
    ways."""
    if not groups:
        return {}
    for name, unlike in rule.unlike.items():
        if other := next(filter(unlike, groups), None):
            raise ConfigError(
                f"{source}: its optimizer has {name} = {other.get(name)}, {rule.name} of jaxdist has not; "
                + WEIGHTS_ALONE
            )
    found: dict[str, Any] = {"name": rule.name}
    for setting, value_of in rule.fields.items():
        values = {value_of(group) for group in groups} - {None}
        if len(values) > 1:
            raise ConfigError(f"{source}: {setting} of its optimizer's groups are {values}; jaxdist has one for all")
        if values:
            found[setting] = type(getattr(DEFAULTS, setting))(values.pop())
    if strange := [name for group in groups for name in group["params"] if name not in shapes]:
        raise ConfigError(f"{source}: its optimizer has {strange[0]!r:.80}, which the model has not; leave it out")
    decay = max(group.get("weight_decay", 0) for group in groups)
    for line in _decay_changes(groups, shapes, decay):
        say(f"{source}: {line}")
    return found | {"weight_decay": float(decay)}


def _decay_changes(groups: Sequence[Group], shapes: Mapping[str, Shape], decay: float) -> Iterator[str]:
    """A note on parameters whose weight decay changes under jaxdist."""
    had = {name: group.get("weight_decay", 0) for group in groups for name in group["params"]}
    matrices, vectors = by_decay({name: shapes[name] for name in had})
    if others := [name for name in vectors if had[name]]:
        yield (
            f"its optimizer decayed norms and biases too ({len(others)}, such as {others[0]}, at {had[others[0]]:g}); "
            "when training continues in jaxdist, they are no longer decayed"
        )
    if others := [name for name in matrices if had[name] != decay]:
        yield (
            f"its optimizer decayed {len(others)} matrices, such as {others[0]}, at {had[others[0]]:g}; when training "
            f"continues in jaxdist, all matrices are decayed at {decay:g}"
        )


def moments_by_key(
    o: Optimizer, moments: Mapping[str, Mapping[str, Tensor]], groups: Sequence[Group]
) -> dict[Any, dict[str, Tensor]]:
    """Key of torch's optimizer -> kind -> tensor, for `named` groups. `moments`: kind -> name -> tensor."""
    kinds = [kind for kind in o.kept if kind != EMA]
    names = {key: name for group in groups for name, key in zip(group["params"], group["keys"], strict=True)}
    return {key: {kind: moments[kind][n] for kind in kinds if n in moments[kind]} for key, n in names.items()}


def new_entries(o: Optimizer, held: Mapping[Any, dict[str, Tensor]], updates: int, counted: bool) -> dict[Any, Group]:
    """State of torch's class, by key, of the moments `held`; `counted`: also of a rule that keeps no count."""
    step = {"step": torch.tensor(float(updates))} if counted or by_name()[o.name].counts else {}
    return {key: {**step, **own} for key, own in held.items()}


def continued_entries(
    before: Mapping[Any, Group], held: Mapping[Any, dict[str, Tensor]], updates: int
) -> dict[Any, Group]:
    """The entries `before` with the moments `held` and, where they have one, the count `updates`."""
    return {
        key: {**entry, **({"step": like(entry["step"], updates)} if entry.get("step") is not None else {})} | held[key]
        for key, entry in before.items()
    }


def state_dict(groups: Sequence[Group], entries: Mapping[Any, Group]) -> dict[str, Any]:
    """The `state_dict` of torch's class for `named` groups and their entries."""
    unnamed = [{**group, "params": group["keys"]} for group in groups]
    return {"state": entries, "param_groups": [{k: v for k, v in group.items() if k != "keys"} for group in unnamed]}


def going_on(group: Group, o: Optimizer, rate: float, updates: int) -> dict[str, Any]:
    """The group after `updates` updates by `o`; `rate`: the current learning rate."""
    now = {"lr": rate, "initial_lr": o.learning_rate, "step": updates, "betas": (o.beta1, o.beta2), "eps": o.eps}
    now |= {name: getattr(o, name) for name in (*MUON, "beta2_decay", "d")}
    now |= {"eps": (o.eps1, o.eps2)} if o.name == "adafactor" else {}
    now |= {"weight_decay": o.weight_decay} if group.get("weight_decay") else {}
    kept = {key: value for key, value in now.items() if key in group}
    return {**group, **{key: _as(group[key], value) for key, value in kept.items()}}


def _as(before: Any, value: Any) -> Any:
    """A setting as a tensor where it was one."""
    return torch.full_like(before, value) if isinstance(before, Tensor) else value


def groups_of(shapes: Mapping[str, Shape], o: Optimizer, rate: float, inner: Container[str]) -> list[dict[str, Any]]:
    """`named` groups as this version of torch writes them: matrices decay and come first, then all others.

    `rate`: the learning rate now. `inner`: the matrices of blocks.
    """
    muon, groups = o.name == "muon", dict[tuple[float, bool], list[str]]()
    for names, decay in zip(by_decay(shapes), (o.weight_decay, 0.0), strict=True):
        for name in names:
            groups.setdefault((decay, muon and name in inner), []).append(name)
    own = {name: getattr(o, name) for name in MUON}
    parameter_groups = [
        {"params": [(name, torch.nn.Parameter(torch.empty(0))) for name in names], "weight_decay": decay}
        | ({"use_muon": turned} if muon else {})
        | (own if turned else {})
        for (decay, turned), names in groups.items()
    ]
    optimizer = by_name()[o.name].build(parameter_groups, rate, o)
    return [
        group | {"initial_lr": o.learning_rate, "params": group["param_names"], "keys": group["params"]}
        for group in optimizer.state_dict()["param_groups"]
    ]
