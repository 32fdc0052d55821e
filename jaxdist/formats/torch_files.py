"""Contents of files that `torch.save` wrote: key names of training scripts, their parts, and the keys of jaxdist's own.

Tensors may be of any library, as each side loads its own; only shape, dtype and layout are used here.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.formats.naming import CURRENT, MODEL

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
EXPERIMENT = "experiment"  # jaxdist's, in its own files
SECTIONS = {"model", "optimizer", "train", "parallel", "precision"}  # of ours; a script's own experiment has other ones
# Under which keys training scripts keep what; the first of each is written. Lightning's are lists.
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim", "optimizer_states")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_schedulers")
STEP = ("step", "global_step", "global_steps", "iteration", "iter", "iter_num")
GROUPS = "param_groups"  # of an optimizer
MARKS = {GROUPS, "last_epoch", "growth_factor"}  # what an optimizer's state has, a scheduler's, a scaler's; no settings
MOST = 10_000_000  # values in a file
DENSE = "torch.strided"
EMPTY = "it was saved without its numbers, on torch's meta device"


def is_own(tree: Any) -> bool:
    """Whether jaxdist wrote it: it has an experiment of ours."""
    experiment = tree.get(EXPERIMENT) if isinstance(tree, dict) else None
    return isinstance(experiment, dict) and experiment.keys() >= SECTIONS


@contextmanager
def reading(path: Path, part: str) -> Iterator[None]:
    """Turn Python's errors on a part with an unexpected structure into ConfigErrors."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:  # torch's own are the last
        raise ConfigError(f"{path}: its {part} is not as torch saves it: {error!r}; leave it out") from None


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor of torch's."""
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "numel")


def key_of(tree: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Under which of the keys the tree has a state, a dict or a list of one; or any dict, as of settings; or would."""
    if keys == MODEL and isinstance(tree.get(CURRENT), dict):
        return CURRENT
    dicts = [key for key in keys if isinstance(only(tree.get(key)), dict)]
    return next((key for key in dicts if _is_state(only(tree[key]))), next(iter(dicts), keys[0]))


def _is_state(value: Mapping[str, Any]) -> bool:
    return bool(MARKS & value.keys()) or any(is_tensor(tensor) for tensor in value.values())


def only(value: Any) -> Any:
    """The item of a list of one; other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def part(tree: Any, keys: tuple[str, ...]) -> dict[Any, Any]:
    """The dict; empty without one."""
    found = only(tree.get(key_of(tree, keys))) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}


def state_dict(tree: Any) -> dict[str, Any]:
    """The tensors of the model in what a file holds: those of the tree itself, or of its part of that name."""
    model = part(tree, MODEL) or (tree if isinstance(tree, dict) else {})
    return {name: tensor for name, tensor in model.items() if isinstance(name, str) and is_tensor(tensor)}


def inside(node: Any) -> Collection[Any]:
    """Items of a dict, list or tuple, of any subclass; none for other values."""
    return node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()


def tensors_of(tree: Any) -> list[Any]:
    """Tensors of a tree, in its order."""
    return [tree] if is_tensor(tree) else [tensor for node in inside(tree) for tensor in tensors_of(node)]


def walked(tree: Any) -> Any:
    """A tree that was read, if it can be gone through. Raises ValueError for one that holds itself, that is more than
    MOST when lists within lists are written out, or has tensors that are not dense, carry more, or are hashed."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if is_tensor(node) and (str(node.layout) != DENSE or node.is_quantized):
            raise ValueError(f"it has a tensor that is {node.layout if str(node.layout) != DENSE else 'quantized'}")
        if is_tensor(node) and tensors_of([*vars(node).values()]):
            raise ValueError(f"it has a tensor with others as its attributes, {', '.join(vars(node))}; save it without")
        if isinstance(node, set | dict) and tensors_of([*node]):
            raise ValueError("it has tensors in a set, or in keys; save them in a list")
        if not isinstance(node, dict | list | tuple):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = MOST  # if it comes again before its size is known, it holds itself
            sizes[id(node)] = 1 + sum(map(size, inside(node)))
        if sizes[id(node)] >= MOST:
            raise ValueError(f"it holds itself, or more than {MOST:,} values")
        return sizes[id(node)]

    size(tree)
    return tree


def dtype_of(path: Path, name: str, tensor: Any) -> np.dtype:
    """numpy's dtype of a tensor. Raises ConfigError for one that numpy does not know, and for a tensor that is larger
    than its file, which shows few numbers many times."""
    import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy

    try:
        dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    except TypeError:
        raise ConfigError(f"{path}: tensor {name} is {tensor.dtype}, which is not read; leave it out") from None
    if tensor.numel() * dtype.itemsize > path.stat().st_size:
        raise ConfigError(f"{path}: tensor {name} {tuple(tensor.shape)} is larger than the file; use an intact copy")
    return dtype


def without_numbers(path: Path, name: str, reason: str = EMPTY) -> ConfigError:
    """The error of a tensor of which the file has no numbers."""
    return ConfigError(f"{path}: tensor {name}: {reason}; leave it out")
