"""Files of torch.save's: their names, the parts of what they hold, and what jaxdist puts into its own.

Tensors are those of the side that read them: of them the shape alone is looked at here.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def is_own(tree: Any) -> bool:
    """Whether jaxdist wrote it: it has an experiment of ours."""
    experiment = tree.get(EXPERIMENT) if isinstance(tree, dict) else None
    return isinstance(experiment, dict) and experiment.keys() >= SECTIONS


@contextmanager
def reading(path: Path, part: str) -> Iterator[None]:
    """What a part of another form than torch's makes Python raise becomes a ConfigError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
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
    """What a list of one holds; all else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def part(tree: Any, keys: tuple[str, ...]) -> dict[Any, Any]:
    """That dict; empty where there is none."""
    found = only(tree.get(key_of(tree, keys))) if isinstance(tree, dict) else None
    return found if isinstance(found, dict) else {}


def state_dict(tree: Any) -> dict[str, Any]:
    """The tensors of the model in what a file holds: those of the tree itself, or of its part of that name."""
    model = part(tree, MODEL) or (tree if isinstance(tree, dict) else {})
    return {name: tensor for name, tensor in model.items() if isinstance(name, str) and is_tensor(tensor)}
