"""DeepSpeed's ZeRO checkpoints with the optimizer's state in them; their weights are read by `formats/deepspeed.py`."""

import math
from bisect import bisect_left
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from jaxdist.config import Experiment
from jaxdist.convert import optimizers, rates, torch_files, trainer_folders
from jaxdist.convert.assembled import State, Weights
from jaxdist.convert.content import Content, Leaf, Leaves, Origin, agreed
from jaxdist.convert.reader import READER
from jaxdist.convert.torch_parts import first_count, is_count
from jaxdist.convert.trainer_schedule import deepspeed_schedule
from jaxdist.formats import deepspeed
from jaxdist.formats.companions import companions
from jaxdist.formats.deepspeed import Zero, config_around, without_zero
from jaxdist.formats.folders import DEEPSPEED_OPTIMIZER
from jaxdist.formats.torch_files import GROUPS, reading


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, from the fp32 masters. Raises ConfigError."""
    return dict(deepspeed.read(path, READER))


def opened(
    path: Path, wanted: Experiment | None = None, training: bool = True, peak: rates.Peak | None = None
) -> Content:
    """The content of a folder; its model is that of config.json in it or around it, or `wanted`; `peak` decides as in
    `rates`. Raises ConfigError."""
    if whole := without_zero(path, READER):
        return torch_files.opened(whole, wanted, training, peak)
    zero, around = Trained(path, READER), config_around(path)
    trainer = trainer_folders.trainer_state(zero.folder.parent)
    found = trainer_folders.found_in(around, trainer.get("max_steps"))
    weights = Weights(path, agreed(str(path), found, wanted), zero.weights)
    state = zero.state(weights) if training else None
    kept = zero.model.get("lr_scheduler")
    scheduler = kept if isinstance(kept, dict) else {}

    def schedule(done: int, state: State) -> Mapping[str, Any]:
        fields, reason = zero.schedule(scheduler, done, state)
        logged = partial(trainer_folders.logged_schedule, path, state, trainer)
        told = rates.Told(path, state.groups, done, scheduler, (lambda: fields) if fields else logged, reason)
        return rates.going_on(told, weights.experiment, rates.given(wanted), peak)

    steps = zero.model.get("global_steps")
    origin = Origin("deepspeed", files=companions(around), left=zero.left(training))
    return weights.content(state, first_count(steps) if is_count(steps) else None, schedule, origin)


class Trained(Zero):
    """A checkpoint with the optimizer's state in its files."""

    def schedule(self, scheduler: Mapping[Any, Any], steps: int, state: State) -> tuple[dict[str, Any], str]:
        """The schedule's fields of an optimizer section, of DeepSpeed's own scheduler after so many steps; of another
        none, and why. Raises ConfigError."""
        config, done = self.model.get("ds_config"), scheduler.get("last_batch_iteration")
        rate = state.groups[0].get("lr")
        if not isinstance(config, dict) or type(done) is not int or rate is None:
            return {}, ""
        with reading(self.model_files[0], "ds_config"):
            optimizer = config.get("optimizer") or {}
            base = float(optimizer.get("params", {}).get("lr", 0.0))
            return deepspeed_schedule(config.get("scheduler"), base, (steps, done, float(rate)))

    def left(self, training: bool) -> list[str]:
        """What is not read, in words."""
        bit16 = {str(t.dtype) for t in self.part(self.model_files[0], self.model, "module").values() if _is_copy(t)}
        copies = [f"the {'/'.join(sorted(bit16))} copy of the fp32 weights".replace("torch.", "")] if bit16 else []
        scale = ["the loss scale"] if training and any(state.get("dynamic_loss_scale") for state in self.states) else []
        return copies + scale + ([] if training else [f"the moments in {DEEPSPEED_OPTIMIZER}"])

    @property
    def names_by_vector(self) -> list[list[str]]:
        """The parameters whose numbers each vector of a rank holds: those of a group, and in stage 3 those of a
        sub-group, which DeepSpeed fills with whole parameters in their order. Raises ConfigError."""
        if self.stage != 3:
            return [list(group) for group in self.shapes]
        ranks = len(self.states)
        sizes = {name: math.ceil(math.prod(s) / ranks) for group in self.shapes for name, s in group.items()}
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
            if frozen := self.model.get("frozen_param_shapes"):
                raise self.wrong(
                    f"{next(iter(frozen))} and {len(frozen) - 1} more were not trained; jaxdist trains all parameters",
                    "take the weights alone, --to hf",
                )
            groups = self.groups(ranks[0], weights)
            rule = optimizers.rule_of(str(self.path), entries[0][0][1], groups)
            moments: dict[str, Leaves] = {}
            for kind in rule.kinds(groups):
                vectors = [
                    self.vectors(rank, [entry[kind] for _, entry in sorted(held, key=lambda pair: int(pair[0]))], kind)
                    for rank, held in enumerate(entries)
                ]
                moments[kind] = {weights.full_name(name): there for name, there in self.gathered(vectors).items()}
            counts = [torch_files.number(self.files[0], count) for count in optimizers.steps_of(ranks[0])]
        return State(rule, moments, groups, counts, weights.shapes)

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


def _is_copy(value: Any) -> bool:
    """Whether it is a weight of 16 bits, and not a placeholder of none."""
    return isinstance(value, Tensor) and value.numel() > 0 and value.dtype.itemsize == 2 and value.is_floating_point()
