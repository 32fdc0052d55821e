"""Checkpoints of transformers' Trainer (`checkpoint-N`) and of Accelerate (`save_state`), with FSDP or without.

The Trainer writes config.json, weights, optimizer.pt, scheduler.pt and trainer_state.json; Accelerate weights,
optimizer.bin and scheduler.bin. With FSDP weights and optimizer are two checkpoints of torch.distributed.checkpoint,
pytorch_model_fsdp_0 and optimizer_0, or pytorch_model_fsdp.bin and optimizer.bin. training_args.bin is a
pickle of a class, of which plain values are taken; random_states_*.pkl are named as left behind, and never read.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.bounded import parse, read_bytes
from jaxdist.convert.content import Content, Leaf, Origin, agreed
from jaxdist.convert.kinds import dcp_files, torch_files
from jaxdist.convert.kinds.assembled import State, Weights
from jaxdist.convert.kinds.nanogpt import filled
from jaxdist.convert.kinds.reader import READER
from jaxdist.convert.kinds.torch_parts import first_count, is_count
from jaxdist.convert.optimizers import amp, rates, rules
from jaxdist.convert.optimizers.trainer_schedule import argued_schedule, found_schedule, in_words
from jaxdist.formats import trainer, trainer_arguments
from jaxdist.formats.companions import files_of
from jaxdist.formats.folders import (
    CONFIG,
    FSDP_OPTIMIZER,
    OPTIMIZERS,
    SCALER,
    SCHEDULERS,
    TRAINER_STATE,
)
from jaxdist.formats.hf import experiment_for, read_model
from jaxdist.formats.torch_files import reading
from jaxdist.runs.display import say

MOST_BYTES = 200_000_000  # of trainer_state.json, which logs every few steps


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under the names of its files. Raises ConfigError."""
    return dict(trainer.read(path, READER)[0])


def read_content(
    path: Path, wanted: Experiment | None = None, training: bool = True, peak: rates.Peak | None = None
) -> Content:
    """The content of a folder; its model is that of config.json, or `wanted`; `peak` decides as in `rates`.

    Raises ConfigError."""
    there, read = trainer.read(path, READER)
    logged = trainer_state(path) if training else {}
    arguments = trainer_arguments.read(path) if training else {}
    settings = sections(path, logged, arguments)
    completed = filled({"model": {"family": wanted.model.family}, **settings}, wanted, str(path)) if wanted else None
    weights = Weights(path, agreed(str(path), found_in(path, settings), completed), there)
    state, by = _state(path, weights) if training else (None, "")
    scheduler = _plain(path, SCHEDULERS) if state else {}
    counted = scheduler.get("last_epoch") if state and not state.rule.counts else None
    step = logged.get("global_step", counted)

    def schedule(done: int, state: State) -> Mapping[str, Any]:
        fields, reason = _argued(path, state, logged, arguments)
        found = partial(logged_schedule, path, state, logged)
        recorded = rates.Recorded(
            path, state.groups, done, scheduler, (lambda: fields) if fields or reason else found, reason
        )
        return rates.going_on(recorded, weights.experiment, rates.schedule_origin(wanted), peak)

    used = {trainer_arguments.FILE} if arguments else set[str]()
    files, left = files_of(path, {*read, *used, by, TRAINER_STATE, *((*SCHEDULERS, SCALER) if state else ())})
    origin = Origin("trainer", files=files, left=left)
    content = weights.content(state, first_count(step) if step is not None else None, schedule, origin)
    return _scaled(path, content, bool(wanted)) if state else content


def found_in(path: Path, settings: Mapping[str, Mapping[str, Any]]) -> Experiment | None:
    """The experiment around the model of config.json, with the sections `settings`; None without config.json. Raises
    ConfigError."""
    if not (path / CONFIG).is_file():
        return None
    # Unset fields stay unset: dtypes and loss scale follow from the stated policy.
    found = experiment_for(read_model(path).model_dump(), str(path))
    values: dict[str, Any] = found.model_dump(exclude_unset=True, exclude_none=True)
    source = f"{path}: {TRAINER_STATE}, {trainer_arguments.FILE}"
    return Experiment.parse(values | {name: values.get(name, {}) | fields for name, fields in settings.items()}, source)


def sections(path: Path, logged: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Steps, batch, optimizer and precision from trainer_state.json and training_args.bin. Raises ConfigError."""
    steps: dict[str, Any] = {"steps": int(logged["max_steps"])} if logged.get("max_steps") else {}
    if not arguments:
        return {"train": steps} if steps else {}
    with reading(path / trainer_arguments.FILE, "batch or schedule"):
        settings = _from_arguments(path, logged, arguments)
    return settings | {"train": steps | settings["train"]}


ADAMW = {
    "learning_rate": "learning_rate", "weight_decay": "weight_decay", "beta1": "adam_beta1", "beta2": "adam_beta2",
    "eps": "adam_epsilon",
}  # fmt: skip


def _from_arguments(path: Path, logged: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of an experiment from the arguments, and a note on them."""
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    each = logged.get("train_batch_size")  # of a process, which may have several GPUs
    each = each if type(each) is int else arguments.get("per_device_train_batch_size", 8)
    processes = len([*path.glob("rng_state_*.pth")]) or 1
    batch, clip = each * accumulation * processes, arguments.get("max_grad_norm", 0.0)
    policy = next((half for half in ("bf16", "fp16") if arguments.get(half)), None)
    optimizer: dict[str, Any] = {"clip": clip}
    if arguments.get("optim", "").startswith("adamw"):  # of which an optimizer's state says more, where there is one
        optimizer |= {field: arguments[key] for field, key in ADAMW.items() if key in arguments}
        peak, steps = optimizer.get("learning_rate"), logged.get("max_steps")
        optimizer |= argued_schedule(arguments, peak, int(steps), None)[0] if peak and steps else {}
    say(
        f"{path}: {trainer_arguments.FILE}: a batch of {batch}, {each} x {accumulation} accumulated x {processes} "
        f"processes; clip {clip}{f', {policy}' if policy else ''}"
    )
    return {
        "train": {"batch": batch, "accumulation": accumulation},
        "optimizer": optimizer,
        "precision": {"policy": policy} if policy else {},
    }


def _state(path: Path, weights: Weights) -> tuple[State | None, str]:
    """The optimizer's state, and the name of what holds it. Raises ConfigError."""
    if (path / FSDP_OPTIMIZER).is_dir():
        return _distributed(path / FSDP_OPTIMIZER, weights), FSDP_OPTIMIZER
    name = next((name for name in OPTIMIZERS if (path / name).is_file()), "")
    return (weights.state(path / name, _loaded(path / name)), name) if name else (None, "")


def _distributed(folder: Path, weights: Weights) -> State:
    """The state in a checkpoint of torch.distributed.checkpoint, by the parameters' names. Raises ConfigError."""
    tensors = dcp_files.Tensors(folder)
    prefix = tensors.prefixes["optimizer"]
    extras = tensors.extras(prefix)
    with reading(folder, "optimizer"):
        states = dcp_files.states_of({**tensors.leaves, **extras}, prefix)
        groups = list(dcp_files.groups_of(extras, f"{prefix}{dcp_files.GROUPS}.").values())
        rule = rules.rule_of(str(folder), (kind for _, kind in states), groups)
        moments = {
            kind: {
                weights.full_name(n): leaf for (n, k), leaf in states.items() if k == kind and isinstance(leaf, Leaf)
            }
            for kind in rule.kinds(groups)
        }
        named = [
            {key: torch_files.number(folder, value) for key, value in group.items()}
            | {"params": [weights.full_name(name) for name in group["params"]]}
            for group in groups
        ]
        counts = dcp_files.counts_of(str(folder), states, needed=rule.counts)
    return State(rule, moments, named, counts, weights.shapes)


def _loaded(file: Path) -> dict[Any, Any]:
    """The dict that a file of torch.save holds. Raises ConfigError."""
    tree = torch_files.load(file)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds no state dict; use an intact copy, or leave it out")
    return tree


def _plain(path: Path, names: tuple[str, ...]) -> dict[Any, Any]:
    """The dict of the first of these files that is there; empty without one. Raises ConfigError."""
    return next((_loaded(path / name) for name in names if (path / name).is_file()), {})


def trainer_state(path: Path) -> dict[str, Any]:
    """Content of trainer_state.json; its log may contain NaN. Raises ConfigError."""
    if not (file := path / TRAINER_STATE).exists():
        return {}
    try:
        found = parse(read_bytes(file, MOST_BYTES), float)
        if not isinstance(found, dict):
            raise ValueError("it is not a table of settings")
        for key in ("global_step", "max_steps"):
            if key in found and not is_count(found[key]):
                raise ValueError(f"{key} = {found[key]!r:.50} is not a count of steps")
        return found
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file}: {error}; use an intact copy, or leave it out to count the optimizer's steps"
        ) from None


def _argued(
    path: Path, state: State, logged: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    """Like `argued_schedule`, and print it. Raises ConfigError."""
    peak, rate = (state.first_group.get(key) for key in ("initial_lr", "lr"))
    steps, done = logged.get("max_steps"), logged.get("global_step")
    if not peak or rate is None or not steps or done is None:
        return {}, ""
    with reading(path / trainer_arguments.FILE, "schedule"):
        found, reason = argued_schedule(arguments, float(peak), int(steps), (int(done), float(rate)))
    if found:
        say(f"{path}: its schedule continues, by {trainer_arguments.FILE}: {in_words(found)}")
    return found, reason


def logged_schedule(path: Path, state: State, trainer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schedule's fields of an optimizer section, by the rates that trainer_state.json logs; empty where they fit
    none."""
    peak, rate = (state.first_group.get(key) for key in ("initial_lr", "lr"))
    steps, done, logged = (trainer.get(key) for key in ("max_steps", "global_step", "log_history"))
    if not peak or rate is None or type(steps) is not int or type(done) is not int or steps < 1:
        return {}
    log = logged if isinstance(logged, list) else []
    if not (found := found_schedule(float(peak), steps, (done, float(rate)), log)):
        return {}
    warmup = found["warmup"] - 1
    say(f"{path}: its rates equal those of decay = {found['decay']} over {steps} steps, {warmup} of them warm-up")
    return found


def _scaled(path: Path, content: Content, wanted: bool) -> Content:
    """The content with the loss scale of the folder, where it has one. Raises ConfigError."""
    kept = _plain(path, (SCALER,))
    scaler = {key: torch_files.number(path / SCALER, value) for key, value in kept.items()}
    return amp.scaled(path, content, scaler, wanted)
