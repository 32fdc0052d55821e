"""DeepSpeed's ZeRO checkpoints, stages 1, 2 and 3: fp32 master weights and moments put together from each rank's piece.

A folder `global_stepN`, which `latest` names in the folder around it, has `mp_rank_00_model_states.pt` (stage 3: one of
each rank, with placeholders for weights) and `*_optim_states.pt` of each rank. The pieces lie in their files as flat
vectors, without names: `param_shapes` tells names, shapes and order, as DeepSpeed's own zero_to_fp32.py reads them
(https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py). No pickle is executed.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.foreign import within
from jaxdist.convert import buffers, optimizers, rates, torch_files, trainer_folders
from jaxdist.convert.assembled import State, Weights, leaves_of
from jaxdist.convert.atoms import Shape
from jaxdist.convert.content import Content, Leaf, Leaves, Origin, agreed
from jaxdist.convert.torch_leaves import leaf
from jaxdist.convert.torch_parts import GROUPS, first_count, is_count
from jaxdist.convert.trainer_schedule import deepspeed_schedule
from jaxdist.formats.companions import companions
from jaxdist.formats.folders import CONFIG, DEEPSPEED_MODEL, DEEPSPEED_OPTIMIZER, DEEPSPEED_WHOLE, deepspeed_tag
from jaxdist.formats.torch_files import reading

MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")  # of stages 1 and 2, and of stage 3


class Vector(NamedTuple):
    """Numbers of one axis that lie in a file."""

    file: Path
    tensor: Tensor

    def part(self, start: int, size: int) -> Leaf:
        """Some of its numbers, still to be read. Raises ConfigError."""
        return leaf(self.file, "a rank's vector", self.tensor[start : start + size])


Flat = Sequence[Vector]  # which follow each other


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, from the fp32 masters. Raises ConfigError."""
    whole = _without_zero(path)
    return torch_files.described(whole) if whole else dict(Zero(path).weights)


def opened(
    path: Path, wanted: Experiment | None = None, training: bool = True, peak: rates.Peak | None = None
) -> Content:
    """The content of a folder; its model is that of config.json in it or around it, or `wanted`; `peak` decides as in
    `rates`. Raises ConfigError."""
    if whole := _without_zero(path):
        return torch_files.opened(whole, wanted, training, peak)
    zero = Zero(path)
    around = next((f for f in (zero.folder, zero.folder.parent) if (f / CONFIG).is_file()), zero.folder)
    trainer = trainer_folders.trainer_state(zero.folder.parent)
    found = trainer_folders.found_in(around, trainer.get("max_steps"))
    weights = Weights(path, agreed(str(path), found, wanted), zero.weights)
    state = zero.state(weights) if training else None
    kept = zero.model.get("lr_scheduler")
    scheduler = kept if isinstance(kept, dict) else {}

    def found_schedule(state: State) -> Mapping[str, Any]:
        return zero.schedule(scheduler, state) or trainer_folders.logged_schedule(path, state, trainer)

    def schedule(done: int, state: State) -> Mapping[str, Any]:
        told = rates.Told(path, state.groups, done, scheduler, partial(found_schedule, state))
        return rates.going_on(told, weights.experiment, rates.given(wanted), peak)

    steps = zero.model.get("global_steps")
    origin = Origin("deepspeed", files=companions(around), left=zero.left(training))
    return weights.content(state, first_count(steps) if is_count(steps) else None, schedule, origin)


def _without_zero(path: Path) -> Path | None:
    """The one file of a checkpoint that was saved without ZeRO, whose optimizer lies in it too. Raises ConfigError."""
    folder = deepspeed_tag(path) or path
    file = folder / DEEPSPEED_WHOLE
    if not file.is_file() or any(folder.glob(DEEPSPEED_OPTIMIZER)):
        return None
    tree = torch_files.load(file)
    if isinstance(tree, dict) and tree.get("param_shapes"):
        raise ConfigError(
            f"{path}: its fp32 weights and moments are missing, which lie in {DEEPSPEED_OPTIMIZER}; give the whole "
            f"folder, or {file} for the copy of fewer bits"
        )
    return file


class Zero:
    """The files of one checkpoint."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where a rank's file is missing, or of a layout that is not read."""
        self.path, self.folder = path, deepspeed_tag(path) or path
        self.refuse_others()
        models, pieces = (self.ranked(pattern) for pattern in (DEEPSPEED_MODEL, DEEPSPEED_OPTIMIZER))
        if not models or not pieces:
            raise self.wrong(f"it has no {DEEPSPEED_OPTIMIZER if models else DEEPSPEED_MODEL}")
        self.models = [self.loaded(file) for file in models]
        self.model_files, self.files = models, pieces
        self.states = [self.part(file, self.loaded(file), "optimizer_state_dict") for file in pieces]
        self.stage = self.states[0].get("zero_stage")
        self.stage = (3 if MASTERS[1] in self.states[0] else 2) if self.stage is None else self.stage
        self.count_ranks()

    @property
    def model(self) -> dict[Any, Any]:
        """What the first rank kept of the model."""
        return self.models[0]

    def wrong(self, reason: str, fix: str = "give the whole folder") -> ConfigError:
        return ConfigError(f"{self.path}: {reason}; {fix}")

    def refuse_others(self) -> None:
        """Raises ConfigError for parallelism that cuts tensors or layers in ways that are not read here."""
        there = {
            "layer_*-model_states.pt": "layers of DeepSpeed's pipeline",
            "layer_*_expert_*_model_states.pt": "experts of DeepSpeed's mixtures",
            "expp_rank_*_optim_states.pt": "experts of DeepSpeed's mixtures",
            "*mp_rank_01_model_states.pt": "tensors cut by model parallelism",
            "zero": "DeepSpeed's universal checkpoint",
        }
        for pattern, what in there.items():
            if any(self.folder.glob(pattern)):
                raise self.wrong(
                    f"{pattern} are {what}, which are not read",
                    "gather the weights by DeepSpeed (zero_to_fp32.py, or save_16bit_model) and give their folder",
                )

    def ranked(self, pattern: str) -> list[Path]:
        """Files in the order of their ranks. Raises ConfigError for links that lead outside."""

        def rank(file: Path) -> list[int]:
            return [int(number) for number in re.findall(r"\d+", file.name.partition("rank")[2])]

        try:
            return sorted((within(self.folder, file.name) for file in self.folder.glob(pattern)), key=rank)
        except ValueError as error:
            raise self.wrong(str(error)) from None

    def loaded(self, file: Path) -> dict[Any, Any]:
        """The dict that a file holds. Raises ConfigError."""
        tree = torch_files.load(file)
        if not isinstance(tree, dict):
            raise self.wrong(f"{file.name} holds no dict")
        return tree

    def part(self, file: Path, tree: Mapping[Any, Any], key: str) -> dict[Any, Any]:
        """That dict of a file's. Raises ConfigError."""
        found = tree.get(key)
        if not isinstance(found, dict):
            raise self.wrong(f"{file.name} has no {key}", "give what DeepSpeed's save_checkpoint wrote")
        return found

    def count_ranks(self) -> None:
        """Raises ConfigError where there are more or fewer files than ranks wrote some."""
        count = self.states[0].get("partition_count")
        ranks = max(count) if isinstance(count, list | tuple) and count else count
        if ranks is not None and ranks != len(self.files):
            raise self.wrong(f"{ranks} ranks wrote it, and it has {len(self.files)} {DEEPSPEED_OPTIMIZER}")
        if self.stage == 3 and len(self.models) != len(self.files):
            raise self.wrong(f"{len(self.files)} ranks wrote it, and it has {len(self.models)} {DEEPSPEED_MODEL}")

    def schedule(self, scheduler: Mapping[Any, Any], state: State) -> Mapping[str, Any]:
        """The schedule's fields of an optimizer section, of DeepSpeed's own scheduler; empty of another."""
        config, done = self.model.get("ds_config"), scheduler.get("last_batch_iteration")
        settings = config.get("scheduler") if isinstance(config, dict) else None
        rate = state.groups[0].get("lr")
        return (
            deepspeed_schedule(settings, done, float(rate)) if isinstance(done, int) and rate is not None else None
        ) or {}

    def left(self, training: bool) -> list[str]:
        """What is not read, in words."""
        bit16 = {str(t.dtype) for t in self.part(self.model_files[0], self.model, "module").values() if _is_copy(t)}
        copies = [f"the {'/'.join(sorted(bit16))} copy of the fp32 weights".replace("torch.", "")] if bit16 else []
        scale = ["the loss scale"] if training and any(state.get("dynamic_loss_scale") for state in self.states) else []
        return copies + scale + ([] if training else [f"the moments in {DEEPSPEED_OPTIMIZER}"])

    @property
    def shapes(self) -> list[dict[str, Shape]]:
        """Name -> shape of each group's parameters, in the order of their numbers. Raises ConfigError."""
        groups = self.model.get("param_shapes")
        groups = [groups] if isinstance(groups, dict) else groups
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise self.wrong("it has no param_shapes, which tell the names", "save it by DeepSpeed 0.4 or newer")
        found = [{name: tuple(shape) for name, shape in group.items()} for group in groups]
        for name, shape in ((name, shape) for group in found for name, shape in group.items()):
            if not isinstance(name, str) or not all(type(size) is int and size >= 0 for size in shape):
                raise self.wrong(f"its param_shapes have {name!r:.50}: {shape!r:.50}")
        return found

    def vectors(self, rank: int, value: Any, what: str) -> list[Vector]:
        """The flat vectors that a rank holds. Raises ConfigError."""
        held = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(vector, Tensor) and vector.dim() == 1 for vector in held):
            raise self.wrong(f"{self.files[rank].name}: its {what} are no flat vectors")
        return [Vector(self.files[rank], vector) for vector in held]

    @property
    def masters(self) -> list[list[Vector]]:
        """The fp32 weights: of each rank, a vector of each group, or of each sub-group. Raises ConfigError."""
        key = MASTERS[self.stage == 3]
        return [self.vectors(rank, state.get(key), key) for rank, state in enumerate(self.states)]

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

    @property
    def weights(self) -> Leaves:
        """Name -> weights: the masters, what was not trained, buffers, other names of the same. Raises ConfigError."""
        found = self.buffers() | self.frozen() | self.gathered(self.masters)
        shared = self.model.get("shared_params")
        for name, of in shared.items() if isinstance(shared, dict) else ():
            if of in found:
                found[name] = found[of]
        return found

    def buffers(self) -> dict[str, Leaf]:
        """Those of the model. Raises ConfigError."""
        names, module = self.model.get("buffer_names") or (), self.part(self.model_files[0], self.model, "module")
        return leaves_of(self.model_files[0], {name: module[name] for name in names if name in module})

    def frozen(self) -> dict[str, Leaf]:
        """What was not trained. Raises ConfigError."""
        shapes = self.model.get("frozen_param_shapes") or {}
        pieces = [model.get("frozen_param_fragments") or {} for model in self.models]
        found: dict[str, Leaf] = {}
        for name, shape in shapes.items():
            there = [
                leaf(file, name, piece[name].flatten())
                for file, piece in zip(self.model_files, pieces, strict=True)
                if isinstance(piece.get(name), Tensor)
            ]
            found[name] = self.joined(name, tuple(shape), there)
        return found

    def gathered(self, vectors: Sequence[Flat]) -> dict[str, Leaf]:
        """Name -> tensor, from the vectors of each rank. Raises ConfigError where they do not add up."""
        gather = self.gathered_by_parameter if self.stage == 3 else self.gathered_by_group
        return dict(gather(vectors))

    def gathered_by_group(self, vectors: Sequence[Flat]) -> Iterator[tuple[str, Leaf]]:
        """Stages 1 and 2: the ranks' vectors of a group follow each other, and parameters lie within the whole, also
        across two ranks; at its end there may be padding to a multiple of twice the number of ranks."""
        groups, unit = self.shapes, 2 * len(vectors)
        if any(len(held) != len(groups) for held in vectors):
            raise self.wrong(f"its ranks hold other than {len(groups)} groups of parameters")
        for number, shapes in enumerate(groups):
            whole, start = [held[number] for held in vectors], 0
            for name, shape in shapes.items():
                yield name, self.joined(name, shape, list(cut(whole, start, math.prod(shape))))
                start += math.prod(shape)
            there = sum(len(vector.tensor) for vector in whole)
            if math.ceil(start / unit) != math.ceil(there / unit):
                raise self.wrong(f"its ranks hold {there:,} numbers of a group whose parameters have {start:,}")

    def gathered_by_parameter(self, vectors: Sequence[Flat]) -> Iterator[tuple[str, Leaf]]:
        """Stage 3: each rank holds the like part of every parameter, padded to the same length, one after the other."""
        start = 0
        for name, shape in ((name, shape) for group in self.shapes for name, shape in group.items()):
            size = math.ceil(math.prod(shape) / len(vectors))
            yield name, self.joined(name, shape, [piece for held in vectors for piece in cut(held, start, size)])
            start += size
        there = {sum(len(vector.tensor) for vector in held) for held in vectors}
        if there != {start}:
            raise self.wrong(f"its ranks hold {sorted(there)} numbers each of parameters that have {start:,} in each")

    def joined(self, name: str, shape: Shape, pieces: Sequence[Leaf]) -> Leaf:
        """A tensor whose numbers are those of `pieces`, one after the other, without padding at their end."""
        size = math.prod(shape)
        if sum(math.prod(piece.shape) for piece in pieces) < size or not pieces:
            raise self.wrong(f"its ranks hold less of {name} than its {list(shape)}")
        dtype = pieces[0].dtype
        if any(piece.dtype != dtype for piece in pieces):
            raise self.wrong(f"its ranks hold {name} in several dtypes")

        def read() -> np.ndarray:
            flat, start = buffers.empty((size,), dtype), 0
            for piece in pieces:
                numbers = piece.read()[: size - start]
                flat[start : start + len(numbers)] = numbers
                start += len(numbers)
            return flat.reshape(shape)

        return Leaf(shape, dtype, read, besides=max(piece.bytes for piece in pieces))

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


def cut(vectors: Flat, start: int, size: int) -> Iterator[Leaf]:
    """The `size` numbers from `start` on of vectors that follow each other; fewer where they end before."""
    for vector in vectors:
        length = len(vector.tensor)
        if start < length and size > 0:
            taken = min(size, length - start)
            yield vector.part(start, taken)
            size -= taken
        start = max(0, start - length)
