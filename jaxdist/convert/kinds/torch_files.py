"""Files that `torch.save` wrote: a state dict, or what training scripts save, {model, optimizer, scheduler, step, ...}.

No pickle is executed: torch reads them with `weights_only`. Tensors come from their place in the file when asked for,
and go to theirs in one that `torch.save` has laid out before (`torch_zip`).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - names bfloat16 and float8 for numpy
import torch
from torch import Tensor

from jaxdist.config import EMA, ConfigError, Experiment
from jaxdist.config.bounded import LFS, check_fetched, size_of
from jaxdist.convert import entries
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, Origin, agreed, one_count
from jaxdist.convert.entries import trainable
from jaxdist.convert.kinds import nanogpt, torch_numpy
from jaxdist.convert.kinds.torch_compat import FakeTensorMode, tree_map_only
from jaxdist.convert.kinds.torch_leaves import empty, leaf
from jaxdist.convert.kinds.torch_own import BUFFERS, METRICS, ORIGIN, log_of, origin_of, put_own
from jaxdist.convert.kinds.torch_parts import (
    APEX,
    ENTRIES,
    MODEL,
    SCALER,
    changed,
    copies,
    filled,
    first_count,
    has_groups,
    hollow,
    is_count,
    is_flat,
    like,
    put,
    unread,
)
from jaxdist.convert.kinds.torch_records import Records
from jaxdist.convert.kinds.torch_zip import TorchFile
from jaxdist.convert.optimizers import amp, rates, rules
from jaxdist.convert.stream import Conversion
from jaxdist.formats import models
from jaxdist.formats.companions import neighbours
from jaxdist.formats.dcp import COPY
from jaxdist.formats.folders import trainer_state_files
from jaxdist.formats.naming import carried, recognized, renaming
from jaxdist.formats.nanogpt import LOOP, has_loop, is_nanogpt
from jaxdist.formats.own_files import FILES, files_of
from jaxdist.formats.refusals import TORCH_WROTE, check_torch, loading
from jaxdist.formats.stand_ins import restored
from jaxdist.formats.tables import HUGGINGFACE, table_of
from jaxdist.formats.torch_files import (
    EXPERIMENT,
    GROUPS,
    OPTIMIZER,
    SCHEDULER,
    STEP,
    is_own,
    key_of,
    part,
    reading,
    walked,
)
from jaxdist.formats.torch_pickles import PICKLES, rehearse
from jaxdist.formats.torch_weights import weights_of
from jaxdist.formats.torch_zips import Place, is_zip
from jaxdist.runs.display import say

AVERAGES = "state_dict"  # of Lightning's WeightAveraging
AVERAGED, INNER = "n_averaged", "module."  # in the state dict of torch's AveragedModel


def load(path: Path, part: Place | None = None, mapped: bool = False) -> Any:
    """Content of the file, or of a part of it; its tensors are on the meta device, with their offset in the file, or
    `mapped` into memory. Files from before torch 1.6 have no offsets and are read in full. Raises ConfigError."""
    with loading(path, COPY if part else TORCH_WROTE):
        if not (size := size_of(path)):
            raise ValueError("it is empty")
        if part or is_zip(path):
            return restored(walked(Records(path, part).tree(mapped)))
        check_torch(path)
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            check_fetched(content[: len(LFS)])
            rehearse(content, size, PICKLES)
        with torch_numpy.allowed():
            tree = torch.load(path, map_location="cpu", weights_only=True)
        return restored(walked(tree))


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under the file's names. Raises ConfigError."""
    return weights_of(path, load(path), leaf)


def experiment_in(path: Path) -> Experiment:
    """The experiment of a file or of the config.json beside it, whether or not its tensors are those of the model.

    Raises ConfigError, also where there is none."""
    tree = load(path)
    if found := models.experiment_in(path, tree):
        return found
    found = agreed(str(path), models.experiment_beside(path), None)
    return found.model_copy(update={"model": models.fitted(str(path), found.model, weights_of(path, tree, leaf))})


def read_content(
    path: Path, wanted: Experiment | None = None, training: bool = True, peak: rates.Peak | None = None
) -> Content:
    """The content of a file. Its model is `wanted`, or what lies in or beside it says; `peak` decides as in `rates`.

    Raises ConfigError."""
    if own := is_own(tree := load(path)):
        rates.check_unasked(path, peak)
    for note in models.notes(path, tree):
        say(note)
    is_average = models.has_averages(tree)
    tensors, optimizer = weights_of(path, tree, leaf), _optimizer(path, tree) if training else {}
    found = _found(path, tree, wanted)
    naming, names = recognized(str(path), tensors, found.model)
    model = found.model if models.states_model(tree) else models.with_tokens(found.model, naming, names, tensors)
    found = found.model_copy(update={"model": model})
    rename = renaming(names, naming, model)
    carries = carried(names, naming, model)
    groups: dict[str, Leaves] = {PARAMETERS: {full: tensors[name] for full, name in names.items()}}
    Content(found, naming, groups, origin=Origin("torch", naming, carries)).check_weights(path)

    all_shapes = {name: entry.shape for name, entry in trainable(naming, model).items()}
    shapes = {name: all_shapes[name] for name in names if name in all_shapes}  # in the order of the file
    updates, trained = None, list[dict[str, Any]]()
    order, kinds = rules.Order(), tuple[str, ...]()
    with reading(path, "optimizer"):
        optimizer = rules.with_entries(optimizer)
    if optimizer.get("state"):
        with reading(path, "optimizer"):
            kept_as = partial(entries.kept, naming, model)
            rule, order = rules.order_of(str(path), optimizer, shapes, kept_as, rename)
            trained = rules.named(tree_map_only(Tensor, partial(number, path), optimizer[GROUPS]), order)
        states, kinds = {name: optimizer["state"][i] for i, name in order.items()}, rule.kinds(trained)
        groups |= {
            kind: {n: leaf(path, f"{kind} of {n}", s[kind]) for n, s in states.items() if s.get(kind) is not None}
            for kind in kinds
        }
        with reading(path, "optimizer"):
            counts = rules.steps_of(optimizer)
            if rule.counts or any(count is not None for count in counts):
                updates = one_count(str(path), (count_of(path, step) for step in counts))
    step, experiment = _steps(path, tree, updates), found
    updates = step if order and updates is None else updates
    averaged = own and EMA in found.optimizer.kept
    if training and averaged:
        with reading(path, EMA):
            averages = {k.removeprefix(INNER): t for k, t in tree[EMA].items() if k != AVERAGED}
            groups |= {EMA: {rename(n): leaf(path, f"{EMA} of {n}", t) for n, t in averages.items()}}
            updates = count_of(path, tree[EMA][AVERAGED])
    scaling = None
    if order:
        with reading(path, "optimizer"):
            settings = rules.settings(str(path), rule, trained, shapes)
            if not own:
                whose = rates.schedule_origin(wanted, f"its {LOOP}" if has_loop(tree) else "")
                recorded = rates.Recorded(path, trained, step, part(tree, SCHEDULER))
                settings |= rates.going_on(recorded, found, whose, peak)
        experiment = trained_by(found, settings, f"{path}: optimizer")
        with reading(path, "scaler"):
            scaler, apex = (tree_map_only(Tensor, partial(number, path), part(tree, key)) for key in (SCALER, APEX))
            scaling = amp.scaling(scaler, apex)
        if scaling and not own:
            experiment = amp.going_on(path, experiment, scaler, bool(wanted))
    extras = _extras(path, tree, order, kinds, averaged)
    files = neighbours(path) | files_of(path, tree, leaf)
    others = {key: value for key, value in tree.items() if not (is_average and key == AVERAGES)}
    left = [*copies(others, part(tree, MODEL)), *trainer_state_files(path)]
    origin = Origin("torch", naming, carries, files=files, held=lambda: extras, step=step, own=own, left=left)
    if own and ORIGIN in tree:
        origin = replace(origin_of(path, tree), files=files, held=partial(_own_extras, path))
    logged = log_of(path, tree) if training and own else b""
    content = Content(experiment, naming, groups, step, updates, origin, logged, scaling).checked(path)
    return replace(content, averages=_averages(path, tree[AVERAGES], names)) if is_average else content


def _averages(path: Path, averages: Any, names: Mapping[str, str]) -> dict[str, Leaf]:
    """Averages of Lightning's WeightAveraging, by full name; `names` are the weights' names in the file."""
    with reading(path, AVERAGES):
        return {full: leaf(path, f"{name} of {AVERAGES}", averages[name]) for full, name in names.items()}


def _own_extras(path: Path) -> Any:
    """Content of a script's file that a file of ours keeps. Raises ConfigError."""
    with reading(path, ORIGIN):
        return contiguous(path, load(path, mapped=True)[ORIGIN]["extras"])


def _optimizer(path: Path, tree: Any) -> dict[Any, Any]:
    """The optimizer's state dict; empty where there is none. Raises ConfigError for another one that lies elsewhere."""
    taken = part(tree, OPTIMIZER)
    known = {key_of(tree, OPTIMIZER)} if GROUPS in taken else set()
    for key, value in tree.items():
        if key not in known and has_groups(value):
            raise unread(str(path), key)
    return taken


def trained_by(experiment: Experiment, settings: Mapping[str, Any], source: str) -> Experiment:
    """The experiment with these settings of its optimizer. Raises ConfigError."""
    values = experiment.model_dump(exclude_none=True)
    return Experiment.parse(values | {"optimizer": values["optimizer"] | settings}, source)


def rate_of(content: Content) -> float:
    """The learning rate of the step to come."""
    return rates.rate_at(content.experiment, content.step + 1)


def _found(path: Path, tree: Any, wanted: Experiment | None) -> Experiment:
    """The experiment of `--model`, of the file, or of the config.json next to it. Raises ConfigError where there is
    none."""
    if is_nanogpt(tree) and not is_own(tree):
        return nanogpt.experiment_of(path, tree, wanted)
    return agreed(
        str(path), models.experiment_in(path, tree) or (None if wanted else models.experiment_beside(path)), wanted
    )


def count_of(path: Path, value: Any) -> int:
    """A number, or a tensor of one."""
    value = number(path, value)
    if not is_count(value):
        raise ConfigError(f"{path}: step = {value!r} of its optimizer; give a whole number from 0 to 2**31 - 1")
    return int(value)


def number(path: Path, value: Any) -> Any:
    """The number in a tensor with one element; other values unchanged."""
    return leaf(path, "number", value).read().item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _steps(path: Path, tree: Any, updates: int | None) -> int:
    """Steps done: as the file says, or as its scheduler or its optimizer counted, whichever counted more."""
    saved = next((number(path, tree[key]) for key in STEP if key in tree), None) if isinstance(tree, dict) else None
    counted = part(tree, SCHEDULER).get("last_epoch", -1)
    if is_count(counted) and counted < (updates or 0):
        if not is_count(saved):
            say(f"{path}: its optimizer made {updates} steps, its scheduler {counted}, of epochs: steps are counted")
        counted = updates
    return first_count(saved, counted, updates)


def _extras(path: Path, tree: Any, order: rules.Order, kinds: Sequence[str], averaged: bool) -> Any:
    """The file as torch has it, without the numbers of weights and moments: its keys in their order, the optimizer's
    groups, with names, the scheduler, scaler, Apex's amp, RNG states."""
    kept = load(path, mapped=True) if is_zip(path) else copy.copy(tree)  # all is there already
    if is_own(kept):
        del kept[EXPERIMENT]
        for key in (METRICS, FILES, ORIGIN):
            kept.pop(key, None)
        if averaged:
            del kept[EMA]
    if is_flat(kept):
        kept = hollow(kept)
    else:
        kept |= put(kept, MODEL, hollow(part(kept, MODEL)))
    if order:
        optimizer = part(kept, OPTIMIZER)
        entries = {i: {k: None if k in kinds else v for k, v in e.items()} for i, e in optimizer["state"].items()}
        kept |= put(kept, OPTIMIZER, {GROUPS: rules.named(optimizer[GROUPS], order), ENTRIES: entries})
    return contiguous(path, kept)


def contiguous(path: Path, tree: Any) -> Any:
    """A tree whose tensors have numbers of their own. Raises ConfigError where they show few of the file many times."""
    most = left = path.stat().st_size

    def own(tensor: Tensor) -> Tensor:
        nonlocal left
        size = tensor.numel() * tensor.itemsize
        left -= 0 if tensor.is_contiguous() else size  # what is copied
        if size > most or left < 0:
            what = f"a tensor {tuple(tensor.shape)} is" if size > most else "its tensors, written out, are"
            raise ConfigError(f"{path}: {what} larger than the file; use an intact copy")
        return tensor.contiguous()

    return changed(tree, own)


def check(conversion: Conversion) -> None:
    """Anything can be written."""


def write(path: Path, conversion: Conversion) -> None:
    """Write {model, optimizer, scheduler, scaler, step, experiment} and what a torch file had besides, as it had it;
    no optimizer where the source has none."""
    content = conversion.content
    origin = content.origin
    names = origin.names_in("torch")
    head = table_of(conversion.naming, content.experiment.model).head
    with FakeTensorMode():
        fakes = {
            group: {name: empty(leaf) for name, leaf in leaves.items()} for group, leaves in conversion.groups.items()
        }
    later: list[tuple[Tensor, Leaf]] = []

    def room(leaves: Leaves) -> dict[str, Tensor]:
        """In the file, and what is to be there."""
        with FakeTensorMode():
            found = {name: empty(leaf) for name, leaf in leaves.items()}
        later.extend((found[name], leaf) for name, leaf in leaves.items())
        return found

    def listed(group: str) -> dict[str, Tensor]:
        found = {names.get(name, name): fake for name, fake in fakes[group].items()}
        modules = conversion.naming == HUGGINGFACE and not origin.from_script  # which list a tied head too
        if content.experiment.model.tied and (head in names or modules):
            found[names.get(head, head)] = next(iter(fakes[group].values()))
        return found

    model = listed(PARAMETERS) | room(origin.buffers_in("torch"))
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = copy.copy(origin.extras or {}) if origin.kind == "torch" else {}
    if origin.kind == "torch" and is_flat(tree) and (content.updates is None or part(tree, OPTIMIZER)):
        tree = filled(tree, model)
    else:
        tree = filled(tree, {}) if is_flat(tree) else tree
        tree |= put(tree, MODEL, filled(part(tree, MODEL), model))
    if content.updates is not None:
        tree |= _training(content, conversion.naming, content.updates, tree, fakes)
    elif content.step and not origin.from_script:
        tree[STEP[0]] = content.step
    if EMA in fakes:
        average = {f"{INNER}{name}": fake for name, fake in listed(EMA).items()}
        tree[EMA] = {AVERAGED: torch.tensor(content.updates)} | average
    theirs = origin.from_script and (content.step == origin.step or EXPERIMENT in tree)
    tree |= {} if theirs else put_own(content, room)
    if origin.kind not in ("", "torch"):
        tree[ORIGIN] = {"said": origin.fields(), BUFFERS: room(origin.buffers), "extras": origin.extras}
    file = TorchFile(path, tree)
    conversion.each(lambda group, name, array: file.write(fakes[group][name], array), *fakes)
    for fake, there in later:
        file.write(fake, there.contiguous())
    file.seal()


def _training(
    content: Content,
    naming: str,
    updates: int,
    tree: Mapping[str, Any],
    fakes: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Optimizer, scheduler, scaler and step under the keys of `tree`: as they were there, if no step has been made
    since."""
    o, kept = content.experiment.optimizer, part(tree, OPTIMIZER)
    kept = {} if "state" in kept else kept  # it had no state yet, and its groups have no names
    rate = rate_of(content)
    shapes = {name: tuple(fakes[PARAMETERS][name].shape) for name in trainable(naming, content.experiment.model)}
    groups = kept[GROUPS] if kept else rules.groups_of(shapes, o, rate, fakes.get("momentum_buffer", {}))
    scheduler = part(tree, SCHEDULER) if kept else {
        "base_lrs": [o.learning_rate] * len(groups), "lr_lambdas": [None] * len(groups)
    }  # fmt: skip
    unchanged = bool(kept) and content.step == content.origin.step
    if not unchanged:
        groups = [rules.going_on(group, o, rate, updates) for group in groups]
        now = {"last_epoch": content.step, "_step_count": content.step + 1, "_last_lr": [rate] * len(groups)}
        if kept and scheduler and scheduler.get("last_epoch") != content.origin.step:
            now = {}
            say(
                "the scheduler counts other than steps, and stays as it was: construct it again, and step it to the end"
            )
        elif "_schedulers" in scheduler:
            say("the scheduler holds others, whose counters stay unchanged: construct it again, and step it to the end")
        scheduler = scheduler and scheduler | now
    counted = not content.origin.from_script
    held, before = rules.moments_by_key(o, fakes, groups), kept.get(ENTRIES)
    entries = (
        rules.new_entries(o, held, updates, counted)
        if before is None
        else rules.continued_entries(before, held, updates)
    )
    new = put(tree, OPTIMIZER, rules.state_dict(groups, entries))
    new |= put(tree, SCHEDULER, scheduler) if scheduler else {}
    if content.scaling and not unchanged:
        new |= amp.put_scaling(tree, content.scaling, content.experiment.precision)
    if unchanged and content.origin.from_script:
        return new  # with the step as it was, or none
    name = next((name for name in STEP if name in tree), STEP[0])
    return new | {name: like(tree.get(name), content.step)}


def save_plain(path: Path, tree: Any) -> None:
    """Write a tree of tensors and plain values that `load` reads."""
    torch.save(tree, path)
