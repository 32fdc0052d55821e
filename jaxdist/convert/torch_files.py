"""Files that `torch.save` wrote: a state dict, or what training scripts save, {model, optimizer, scheduler, step, ...}.

No pickle is executed: torch reads them with `weights_only`. Tensors come from their place in the file when asked for,
and go to theirs in one that `torch.save` has laid out before.
"""

import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.display import say
from jaxdist.config.hf import experiment_for, read_model
from jaxdist.convert import adamw, buffers
from jaxdist.convert.content import MOMENTS, PARAMETERS, Content, Leaf, Leaves, Origin, agreed, one_count
from jaxdist.convert.hf import CONFIG, companions
from jaxdist.convert.naming import carried, plain, recognized
from jaxdist.convert.stream import Conversion
from jaxdist.convert.tables import NAMINGS, entries
from jaxdist.optim import learning_rate

# Under which keys training scripts keep what; the first of each is written.
MODEL = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict")
STEP = ("step", "global_step", "iteration", "iter", "iter_num")
EXPERIMENT = "experiment"


def load(path: Path, within: IO[bytes] | None = None, **options: Any) -> Any:
    """What the file holds, or a part `within` it; its tensors on the meta device, where they know their place in the
    file, unless `options` ask for them. Files of before torch 1.6 have no places: all of it is read.
    Raises ConfigError."""
    device = "meta" if within or zipfile.is_zipfile(path) else "cpu"
    try:
        return torch.load(within or path, weights_only=True, **({"map_location": device} | options))
    except UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line.upper()), "")
        raise ConfigError(
            f"{path} is refused: it holds more than tensors and plain values, or is damaged, and loading it could run "
            f"code ({textwrap.shorten(reason or str(error), 200)}); save state dicts alone, or use a whole copy"
        ) from None
    except Exception as error:  # of a damaged file, many kinds
        raise ConfigError(f"{path}: {textwrap.shorten(str(error), 200)}; give a file that torch.save wrote") from None


def leaf(path: Path, name: str, tensor: Tensor, begin: int = 0) -> Leaf:
    """A tensor that `load` found in what begins there. Raises ConfigError for one beyond the end of the file."""
    dtype = dtype_of(tensor.dtype)
    if not tensor.is_meta:
        return Leaf(tuple(tensor.shape), dtype, lambda: to_numpy(tensor))
    start = begin + place(tensor) + int(tensor.storage_offset()) * dtype.itemsize
    spans = [(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    count = 1 + sum(spans) if tensor.numel() else 0
    if min(start, *spans, 0) < 0 or start + count * dtype.itemsize > path.stat().st_size:
        raise ConfigError(f"{path}: tensor {name} {tuple(tensor.shape)} is larger than the file; use a whole copy")

    def read() -> np.ndarray:
        try:
            raw = buffers.read(path, start, (count,), dtype)
        except (OSError, MemoryError, ValueError) as error:
            raise ConfigError(f"{path}: tensor {name}: {error}; use a whole copy") from None
        strides = [stride * dtype.itemsize for stride in tensor.stride()]
        return np.lib.stride_tricks.as_strided(raw, tuple(tensor.shape), strides)

    return Leaf(tuple(tensor.shape), dtype, read)


def place(tensor: Tensor) -> int:
    """Where in the file the storage of a tensor on the meta device begins (torch.serialization)."""
    start: Any = tensor.untyped_storage()
    return int(start._checkpoint_offset)


@contextmanager
def reading(path: Path, part: str) -> Iterator[None]:
    """What a part of another form than torch's makes Python raise becomes a ConfigError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path}: its {part} is not as torch.optim.AdamW saves it: {error!r}; leave it out") from None


def dtype_of(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def empty(leaf: Leaf) -> Tensor:
    """A tensor for it, without its numbers."""
    return torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The same bits, of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(dtype_of(tensor.dtype)).reshape(tensor.shape)


def _part(tree: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((tree[key] for key in keys if key in tree), None)


def _model(tree: Any) -> Mapping[str, Tensor]:
    """The state dict of the model: the tree itself, or its part of that name."""
    if not isinstance(tree, dict):
        return {}
    model = _part(tree, MODEL)
    model = model if isinstance(model, dict) else tree
    return {name: tensor for name, tensor in model.items() if isinstance(name, str) and isinstance(tensor, Tensor)}


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under the file's names. Raises ConfigError."""
    return _parameters(path, load(path))


def _parameters(path: Path, tree: Any) -> dict[str, Leaf]:
    tensors = {name: leaf(path, name, tensor) for name, tensor in _model(tree).items()}
    if not tensors:
        raise ConfigError(f"{path}: no state dict of a model; give one, or a dict that has it as {', '.join(MODEL)}")
    return tensors


def opened(path: Path, wanted: Experiment | None = None) -> Content:
    """The content of a file. Its model is `wanted`, or what lies in or beside it says. Raises ConfigError."""
    tree = load(path)
    tensors, optimizer = _parameters(path, tree), _part(tree, OPTIMIZER)
    experiment = _experiment(path, tree, optimizer, wanted)
    model = experiment.model
    naming, names = recognized(str(path), tensors, model)
    table = NAMINGS[naming][model.family]
    groups: dict[str, Leaves] = {PARAMETERS: {full: tensors[name] for full, name in names.items()}}
    kept = carried(names, naming, model)

    updates = None
    if isinstance(optimizer, dict) and optimizer.get("state"):
        all_shapes = {name: entry.shape for name, entry in entries(naming, model).items()}
        shapes = {name: all_shapes[name] for name in names if name in all_shapes}  # in the order of the file
        with reading(path, "optimizer"):
            order = adamw.order_of(str(path), optimizer, shapes, lambda name: table.full_name(plain(name)))
            vectors = adamw.decayed_vectors(optimizer, order, shapes)
        if vectors:
            say(f"{path}: its optimizer decays {vectors[0]} and other vectors; going on, jaxdist decays matrices alone")
        states = {name: optimizer["state"][key] for key, name in order.items()}
        groups |= {
            kind: {n: leaf(path, f"{kind} of {n}", state[kind]) for n, state in states.items()} for kind in MOMENTS
        }
        updates = one_count(str(path), (count_of(path, state.get("step")) for state in states.values()))
    step = _steps(tree, updates)
    return Content(
        experiment,
        naming,
        groups,
        step,
        updates,
        Origin("torch", naming, kept, files=companions(path.parent), extras=_extras(path, tree)),
    ).checked(path)


def _experiment(path: Path, tree: Any, optimizer: Any, wanted: Experiment | None) -> Experiment:
    """That of `--model`, of the file, or of the config.json beside it. Raises ConfigError where there is none."""
    beside, found = path.parent / CONFIG, None
    own = isinstance(tree, dict) and isinstance(tree.get(EXPERIMENT), dict)
    if own:
        found = Experiment.parse(tree[EXPERIMENT], source=str(path))
    elif beside.exists():
        found = experiment_for(read_model(path.parent).model_dump(), source=str(beside))
    experiment = agreed(str(path), found, wanted)
    if own or wanted or not (isinstance(optimizer, dict) and optimizer.get("param_groups")):
        return experiment
    values = experiment.model_dump(exclude_none=True)
    with reading(path, "optimizer"):
        values["optimizer"] |= adamw.settings(optimizer)
    return Experiment.parse(values, source=f"{path}: optimizer")


def count_of(path: Path, value: Any) -> int:
    """A number, or a tensor of one."""
    if isinstance(value, Tensor):
        value = leaf(path, "step", value).read().item()
    if not isinstance(value, int | float) or value < 0 or value != int(value):
        raise ConfigError(f"{path}: step = {value!r} of its optimizer; give a whole number from 0")
    return int(value)


def _steps(tree: Any, updates: int | None) -> int:
    """Steps done: as the file says, or as its scheduler or its optimizer counted."""
    scheduler = _part(tree, SCHEDULER)
    counted = scheduler.get("last_epoch") if isinstance(scheduler, dict) else None
    said = _part(tree, STEP)
    return next((n for n in (said, counted, updates) if isinstance(n, int) and n >= 0), 0)


def _extras(path: Path, tree: Any) -> Any:
    """What is none of the above: scaler, Apex's amp, RNG states, the scheduler's own values. As torch has it."""
    if not isinstance(tree, dict) or not any(key in tree for key in MODEL):
        return None
    known = {*MODEL, *OPTIMIZER, *STEP, EXPERIMENT}
    if not tree.keys() - known:
        return None
    tree = load(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    return {key: value for key, value in tree.items() if key not in known}


def write(path: Path, conversion: Conversion) -> None:
    """Write {model, optimizer, scheduler, step, experiment} and what a torch file had besides; weights alone where
    there is no optimizer."""
    content = conversion.content
    origin, o = content.origin, content.experiment.optimizer
    names = origin.names if origin.naming == conversion.naming else {}
    head = NAMINGS[conversion.naming][content.experiment.model.family].head
    with FakeTensorMode():
        fakes = {
            group: {name: empty(leaf) for name, leaf in leaves.items()} for group, leaves in conversion.groups.items()
        }
    model = {names.get(name, name): fake for name, fake in fakes[PARAMETERS].items()}
    if content.experiment.model.tied and (head in names or conversion.naming == "huggingface"):
        model[names.get(head, head)] = next(iter(fakes[PARAMETERS].values()))  # a module lists a tied head too
    tree: dict[str, Any] = {"model": model}
    if content.updates is not None:
        with jax.enable_x64(True):
            rate = float(learning_rate(o, content.experiment.train.steps, jnp.asarray(content.step + 1)))
        shapes = {name: tuple(fake.shape) for name, fake in fakes[PARAMETERS].items()}
        tree["optimizer"] = adamw.state_dict(fakes, shapes, o, rate, content.updates)
        groups = len(tree["optimizer"]["param_groups"])
        tree["scheduler"] = {
            "base_lrs": [o.learning_rate] * groups, "last_epoch": content.step, "_step_count": content.step + 1,
            "_last_lr": [rate] * groups, "lr_lambdas": [None] * groups,
        }  # fmt: skip
    tree |= {key: value for key, value in (origin.extras or {}).items() if key not in SCHEDULER}
    tree |= {"step": content.step, EXPERIMENT: content.experiment.model_dump(mode="json", exclude_none=True)}
    path.parent.mkdir(parents=True, exist_ok=True)
    lay_out(path, tree)
    places = {id(fake): start for fake, start in zip(tree_tensors(tree), starts(path), strict=True)}
    for tensor in tree_tensors(tree):
        if not isinstance(tensor, torch._subclasses.FakeTensor):
            buffers.write(path, places[id(tensor)], to_numpy(tensor))
    conversion.each(lambda group, name, array: buffers.write(path, places[id(fakes[group][name])], array), *fakes)


def save_plain(path: Path, tree: Any) -> None:
    """Write a tree of tensors and plain values that `load` reads."""
    torch.save(tree, path)


def tree_tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def lay_out(path: Path, tree: Any) -> None:
    """Write the file of `tree`, with room for the numbers of its tensors. Tied ones share it."""
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tree_map_only(Tensor, lambda tensor: tensor.contiguous(), tree), path)


def starts(path: Path) -> list[int]:
    """Where in the file the numbers of each tensor begin."""
    return [place(tensor) for tensor in tree_tensors(load(path))]
