"""DeepSpeed's checkpoints with the optimizer's state in them; their weights are read by `formats/deepspeed.py`."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from jaxdist.config import Experiment
from jaxdist.convert.content import Content, Leaf, Leaves, Origin, agreed
from jaxdist.convert.kinds import torch_files, trainer_folders
from jaxdist.convert.kinds.assembled import State, Weights
from jaxdist.convert.kinds.nanogpt import filled
from jaxdist.convert.kinds.reader import READER
from jaxdist.convert.kinds.torch_parts import first_count, is_count
from jaxdist.convert.optimizers import amp, rates, rules
from jaxdist.convert.optimizers.trainer_schedule import deepspeed_schedule
from jaxdist.formats import deepspeed
from jaxdist.formats.companions import companions
from jaxdist.formats.deepspeed import Saved, Universal, Unsharded, Zero, config_around, is_universal, is_unsharded
from jaxdist.formats.folders import DEEPSPEED_OPTIMIZER
from jaxdist.formats.refusals import loading
from jaxdist.formats.tables import Shape
from jaxdist.formats.torch_files import GROUPS, reading
from jaxdist.runs.display import say

HALVES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # of ds_config


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, from the fp32 masters. Raises ConfigError."""
    return dict(deepspeed.read(path, READER))


def read_content(
    path: Path, wanted: Experiment | None = None, training: bool = True, peak: rates.Peak | None = None
) -> Content:
    """The content of a folder; its model is that of config.json in it or around it, or `wanted`; `peak` decides as in
    `rates`. Raises ConfigError."""
    around = config_around(path)
    with loading(path, deepspeed.COPY):
        saved = saved_at(path)
        leaves = saved.weights
    trainer = trainer_folders.trainer_state(saved.folder.parent) if training else {}
    found = sections(saved) if training else {}
    found["train"] = found.get("train", {}) | trainer_folders.sections(around, trainer, {}).get("train", {})
    completed = filled({"model": {"family": wanted.model.family}, **found}, wanted, str(path)) if wanted else None
    weights = Weights(path, agreed(str(path), trainer_folders.found_in(around, found), completed), leaves)
    state = saved.state(weights) if training else None
    kept = saved.model.get("lr_scheduler")
    scheduler = kept if isinstance(kept, dict) else {}

    def schedule(done: int, state: State) -> Mapping[str, Any]:
        fields, reason = schedule_of(saved, scheduler, done, state)
        logged = partial(trainer_folders.logged_schedule, path, state, trainer)
        recorded = rates.Recorded(path, state.groups, done, scheduler, (lambda: fields) if fields else logged, reason)
        return rates.going_on(recorded, weights.experiment, rates.schedule_origin(wanted), peak)

    steps, scaler = saved.model.get("global_steps"), saved.scaler() if state else {}
    origin = Origin("deepspeed", files=companions(around), left=[*_copies(saved), *saved.left(state is not None)])
    content = weights.content(state, first_count(steps) if is_count(steps) else None, schedule, origin)
    return amp.scaled(path, content, scaler, bool(wanted))


def saved_at(path: Path) -> "TrainedUniversal | TrainedUnsharded | TrainedZero":
    """The checkpoint at `path`. Raises ConfigError."""
    kind = TrainedUniversal if is_universal(path) else TrainedUnsharded if is_unsharded(path) else TrainedZero
    return kind(path, READER)


def sections(saved: Saved) -> dict[str, dict[str, Any]]:
    """Fields of an experiment from ds_config's batch, clip and precision, and a note on them. Values that are still
    "auto" say nothing. Raises ConfigError."""
    config = saved.model.get("ds_config")
    if not isinstance(config, dict):
        return {}
    with reading(saved.model_files[0], "ds_config"):
        policy = next((HALVES[key] for key in HALVES if (config.get(key) or {}).get("enabled") is True), None)
        batch, clip = config.get("train_batch_size"), config.get("gradient_clipping", 0.0)
        train = {"batch": batch, "accumulation": config.get("gradient_accumulation_steps", 1)}
    train = train if all(is_count(number) and number for number in train.values()) else {}
    optimizer = {"clip": float(clip)} if isinstance(clip, int | float) else {}
    shown = [f"{name} {value}" for name, value in {**train, **optimizer, "precision": policy}.items() if value]
    if shown:
        say(f"{saved.path}: ds_config: {', '.join(shown)}")
    return {"train": train, "optimizer": optimizer, "precision": {"policy": policy} if policy else {}}


def schedule_of(saved: Saved, scheduler: Mapping[Any, Any], steps: int, state: State) -> tuple[dict[str, Any], str]:
    """The schedule's fields of an optimizer section for DeepSpeed's own scheduler after `steps` steps; none for another
    scheduler, with the reason. Raises ConfigError."""
    config, done = saved.model.get("ds_config"), scheduler.get("last_batch_iteration")
    rate = state.first_group.get("lr")
    if not isinstance(config, dict) or type(done) is not int or rate is None:
        return {}, ""
    with reading(saved.model_files[0], "ds_config"):
        optimizer = config.get("optimizer") or {}
        base = float(optimizer.get("params", {}).get("lr", 0.0))
        return deepspeed_schedule(config.get("scheduler"), base, (steps, done, float(rate)))


def scaler_of(path: Path, kept: Mapping[str, Any]) -> dict[str, Any]:
    """A dynamic loss scale as torch's GradScaler keeps it. DeepSpeed's first grows after one good step more than
    `scale_window`, which is not a good step here. Raises ConfigError."""
    with reading(path, "loss scale"):
        window, factor = int(kept["scale_window"]), float(kept["scale_factor"])
        good = max(0, int(kept["cur_iter"]) - int(kept["last_overflow_iter"]) - 2) % window
        found = {"scale": float(kept["cur_scale"]), "growth_factor": factor, "backoff_factor": 1 / factor}
    if kept.get("delayed_shift", 1) > 1:
        say(f"{path}: its loss scale falls at overflow {kept['delayed_shift']} (hysteresis), jaxdist's at the first")
    return found | {"growth_interval": window, "_growth_tracker": good}


def static_scale(state: Mapping[str, Any], kept: Any) -> list[str]:
    """A loss scale that stays what it is, in words; nothing where there is none, or it is one."""
    scale = kept.get("cur_scale", 1) if isinstance(kept, dict) else 1
    return [] if state.get("dynamic_loss_scale") or scale == 1 else [f"the static loss scale of {scale!r:.20}"]


class TrainedUnsharded(Unsharded):
    """A checkpoint without ZeRO, with the optimizer's state in it."""

    def state(self, weights: Weights) -> State | None:
        """The optimizer's state by parameter; None where it has made no step. Raises ConfigError."""
        inner, masters = self.wrapped.get("optimizer_state_dict", self.wrapped), self.masters
        if not masters or not isinstance(inner, dict):
            return weights.state(self.file, inner) if isinstance(inner, dict) else None
        with reading(self.file, "optimizer"):
            state, entries, groups = inner["state"], dict[str, Any](), list[dict[str, Any]]()
            for group, names in zip(inner[GROUPS], masters, strict=True):
                found = [state[number] for number in group["params"]]
                if self.flat:
                    (entry,) = found
                    found = self.entries(entry, {name: tuple(tensor.shape) for name, tensor in names.items()})
                entries |= dict(zip(names, found, strict=True))
                groups.append({**group, "params": [*names]})
        return weights.state(self.file, {"state": entries, GROUPS: groups})

    def entries(self, entry: Mapping[str, Any], shapes: Mapping[str, Shape]) -> list[dict[str, Any]]:
        """Optimizer state of each parameter, cut from the state of the flat vector."""
        cut = {kind: self.cut(value, shapes) for kind, value in entry.items() if getattr(value, "ndim", 0)}
        return [{kind: cut[kind][name] if kind in cut else entry[kind] for kind in entry} for name in shapes]

    def scaler(self) -> dict[str, Any]:
        """The loss scale, as GradScaler keeps it; empty of a static one. Raises ConfigError."""
        return scaler_of(self.file, self.wrapped) if self.wrapped.get("dynamic_loss_scale") else {}

    def left(self, training: bool) -> list[str]:
        """A note on content that is not read."""
        if not training:
            return ["the optimizer's state"] if self.wrapped else []
        return static_scale(self.wrapped, self.wrapped)


class TrainedZero(Zero):
    """A checkpoint of ZeRO with the optimizer's state in its files."""

    def scaler(self) -> dict[str, Any]:
        """The loss scale, as GradScaler keeps it; empty of a static one. Raises ConfigError."""
        kept = self.states[0].get("loss_scaler")
        dynamic = self.states[0].get("dynamic_loss_scale")
        return scaler_of(self.files[0], kept) if dynamic and isinstance(kept, dict) else {}

    def left(self, training: bool) -> list[str]:
        """A note on content that is not read."""
        if not training:
            return [f"the moments in {DEEPSPEED_OPTIMIZER}"]
        return static_scale(self.states[0], self.states[0].get("loss_scaler"))

    @property
    def names_by_vector(self) -> list[list[str]]:
        """The parameters whose numbers each vector of a rank holds: those of a group, and in stage 3 those of a
        sub-group, which DeepSpeed fills with full parameters in their order. Raises ConfigError."""
        if self.stage != 3:
            return [list(group) for group in self.shapes]
        sizes = {name: math.ceil(math.prod(s) / self.ranks) for group in self.shapes for name, s in group.items()}
        ends = list(accumulate(len(vector.tensor) for vector in self.masters[0]))
        held: list[list[str]] = [[] for _ in ends]
        for name, end in zip(sizes, accumulate(sizes.values()), strict=True):
            held[bisect_left(ends, end)].append(name)
        return held

    def optimizer(self, rank: int) -> dict[Any, Any]:
        """The state dict of a rank's optimizer, in which a group's flat vector is one parameter. Raises ConfigError."""
        state = self.states[rank]
        key = "optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"
        if isinstance(state.get(key), list):
            raise self.wrong(
                "its optimizer was saved with elastic_checkpoint = true, which is not read",
                "save it with zero_optimization.elastic_checkpoint = false, or take the weights alone, --to hf",
            )
        return self.part(self.files[rank], state, key)

    def state(self, weights: Weights) -> State | None:
        """The optimizer's state by parameter; None where it has made no step. Raises ConfigError."""
        ranks = [self.optimizer(rank) for rank in range(len(self.states))]
        with reading(self.files[0], "optimizer"):
            entries = [[*held["state"].items()] for held in ranks]
            if not all(entries):
                return None
            self.refuse_frozen()
            groups = self.groups(ranks[0], weights)
            rule = rules.rule_of(str(self.path), entries[0][0][1], groups)
            moments: dict[str, Leaves] = {}
            for kind in rule.kinds(groups):
                vectors = [
                    self.vectors(rank, [entry[kind] for _, entry in sorted(held, key=lambda pair: int(pair[0]))], kind)
                    for rank, held in enumerate(entries)
                ]
                moments[kind] = {weights.full_name(name): there for name, there in self.gathered(vectors).items()}
            counts = [torch_files.number(self.files[0], count) for count in rules.steps_of(ranks[0])]
        return State(rule, moments, groups, counts, weights.shapes)

    def refuse_frozen(self) -> None:
        """Raises ConfigError where some parameters were not trained."""
        if frozen := self.model.get("frozen_param_shapes"):
            raise self.wrong(
                f"{next(iter(frozen))} and {len(frozen) - 1} more were not trained; jaxdist trains all parameters",
                "take the weights alone, --to hf",
            )

    def groups(self, optimizer: Mapping[str, Any], weights: Weights) -> list[dict[str, Any]]:
        """The optimizer's groups, with the names of their parameters: each of its own is a vector of some of them.

        Raises ConfigError.
        """
        groups, held = optimizer[GROUPS], self.names_by_vector
        if sorted(number for group in groups for number in group["params"]) != list(range(len(held))):
            raise self.wrong(
                f"its optimizer's groups hold other than the {len(held)} vectors of its weights",
                "take the weights alone, --to hf",
            )
        return [
            {key: torch_files.number(self.files[0], value) for key, value in group.items()}
            | {"params": [weights.full_name(name) for number in group["params"] for name in held[number]]}
            for group in groups
        ]


class TrainedUniversal(Universal, TrainedZero):
    """A universal checkpoint, with the optimizer's state."""

    def state(self, weights: Weights) -> State | None:
        """The optimizer's state by parameter; None where it has made no step. Raises ConfigError."""
        names = [name for group in self.shapes for name in group]
        kinds = {file.stem for name in names for file in self.file(name, "fp32").parent.glob("*.pt")} - {"fp32"}
        if not kinds:
            return None
        self.refuse_frozen()
        if not isinstance(self.states[0].get(GROUPS), list):
            raise self.wrong(f"{self.files[0].name} has no {GROUPS}", "take the weights alone, --to hf")
        with reading(self.files[0], "optimizer"):
            groups = self.groups(self.states[0], weights)
            rule = rules.rule_of(str(self.path), kinds, groups)
            counts = [torch_files.number(file, count) for file, count in self.steps(names)] if rule.counts else []
        moments: dict[str, Leaves] = {
            kind: {weights.full_name(name): leaf for name, leaf in self.kept(kind).items()}
            for kind in rule.kinds(groups)
        }
        return State(rule, moments, groups, counts, weights.shapes)

    def steps(self, names: Sequence[str]) -> list[tuple[Path, Any]]:
        """Number of updates of each parameter, and where it is kept. Raises ConfigError."""
        if self.stage == 3:
            return [(self.files[0], count) for count in rules.steps_of(self.optimizer(0))]
        files = [self.file(name, "step") for name in names]
        return [(file, torch_files.load(file)) for file in files]

    def left(self, training: bool) -> list[str]:
        """A note on content that is not read."""
        return super().left(True) if training else ["the moments"]


def _is_copy(value: Any) -> bool:
    """Whether it is a weight of 16 bits, and not a placeholder of none."""
    return isinstance(value, Tensor) and value.numel() > 0 and value.dtype.itemsize == 2 and value.is_floating_point()


def _copies(saved: Saved) -> list[str]:
    """The copies of fewer bits that stay behind, in words. Raises ConfigError."""
    if isinstance(saved, Unsharded) and not saved.masters:
        return []
    bit16 = {str(t.dtype).removeprefix("torch.") for t in saved.module.values() if _is_copy(t)}
    return [f"the {'/'.join(sorted(bit16))} copy of the fp32 weights"] if bit16 else []
