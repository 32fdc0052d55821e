"""Parts of objects that training scripts save by `torch.save`, found by the scripts' keys and put back there.

Only numbers change: lists, the order of keys and types of counts stay.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jaxdist.config import ConfigError
from jaxdist.formats import naming
from jaxdist.formats.torch_files import GROUPS, OPTIMIZER, inside, key_of, only, tensors_of

MODEL, CURRENT = naming.MODEL, naming.CURRENT
SCALER = ("scaler", "grad_scaler", "scaler_state_dict", "MixedPrecision")  # GradScaler's; the last is Lightning's
APEX = ("amp",)  # of apex.amp: a loss scaler for each loss
ENTRIES = "entries"  # of an optimizer: of each parameter's what is no moment


def put(tree: Mapping[str, Any], keys: tuple[str, ...], part: Any) -> dict[str, Any]:
    """Entries that replace that dict: inside a list, if it was in one."""
    key = key_of(tree, keys)
    return {key: [part] if isinstance(tree.get(key), list) else part}


def has_groups(value: Any) -> bool:
    """Whether the state dict of an optimizer is somewhere in it."""
    return (isinstance(value, dict) and GROUPS in value) or any(map(has_groups, inside(value)))


def unread(source: str, key: str) -> ConfigError:
    """The error for an optimizer under a key where none is read."""
    return ConfigError(
        f"{source}: its {key!r} has an optimizer that is not read; give one alone, as {OPTIMIZER[0]!r}, or leave "
        "it out; --to hf takes the weights alone"
    )


def first_count(*values: Any) -> int:
    """The first of these that steps are counted by; 0 where none is."""
    return next((int(value) for value in values if is_count(value)), 0)


def is_count(value: Any) -> bool:
    """Whether it is a whole number, of Python's or numpy's, an int or not."""
    numeric = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    return numeric and bool(0 <= value < 2**31 and value == int(value))


def copies(tree: Mapping[Any, Any], model: Mapping[str, Any]) -> list[str]:
    """Parts of a tree beside its `model` with tensors in most of its shapes, as averages or fp32 masters have, under
    any names or none; or with as many elements in one tensor. An optimizer's state is none of them."""
    found, weights = [], tensors_of(model)
    shapes, size = Counter(tensor.shape for tensor in weights), sum(tensor.numel() for tensor in weights)
    for key, value in tree.items():
        tensors = [] if only(value) is model or has_groups(value) else tensors_of(value)
        again = shapes & Counter(tensor.shape for tensor in tensors)
        if 2 * again.total() > shapes.total() or any(tensor.numel() == size for tensor in tensors):
            found.append(f"{key!r}, a copy of the weights in {str(tensors[-1].dtype).removeprefix('torch.')}")
    return found


def is_flat(tree: Mapping[str, Any]) -> bool:
    """Whether it is a state dict itself, and has none as its part."""
    return not isinstance(only(tree.get(key_of(tree, MODEL))), dict)


def hollow(model: Mapping[str, Any]) -> Any:
    """A state dict with nothing in place of its tensors: what else is in it, the order and torch's `_metadata` stay."""
    result, nothing = copy.copy(model), torch.empty(0)
    result.update({name: nothing for name, value in model.items() if isinstance(value, Tensor)})  # type: ignore[attr-defined]
    return result


def filled(before: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """A hollow state dict with these tensors."""
    result: Any = copy.copy(before)
    for name in [n for n, value in before.items() if isinstance(value, Tensor) and n not in tensors]:
        del result[name]
    result.update(tensors)
    return result


def like(before: Any, count: int) -> Any:
    """A count of the type that it had before."""
    if isinstance(before, Tensor):
        return torch.full_like(before, count)
    return type(before)(count) if is_count(before) else count


def changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with its tensors changed, in place: a copy would lose what a dict has besides, as `_metadata`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) is tuple:
        return tuple(changed(node, change) for node in tree)
    places = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for place, node in list(places):
        tree[place] = changed(node, change)
    return tree
