"""DeepSpeed's checkpoints. Those of ZeRO, stages 1, 2 and 3, have fp32 weights and moments in pieces, one a rank.

A folder `global_stepN`, which `latest` names in the folder around it, has `mp_rank_00_model_states.pt` (stage 3: one of
each rank, with placeholders for weights) and `*_optim_states.pt` of each rank. The pieces lie in their files as flat
vectors, without names: `param_shapes` has names, shapes and order, as DeepSpeed's own zero_to_fp32.py reads them
(https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/utils/zero_to_fp32.py). No pickle is executed.
Without ZeRO all is in one `mp_rank_00_model_states.pt`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.config import ConfigError
from jaxdist.config.bounded import file_within
from jaxdist.formats.folders import (
    CONFIG,
    DEEPSPEED_EXPERTS,
    DEEPSPEED_MODEL,
    DEEPSPEED_OPTIMIZER,
    DEEPSPEED_UNIVERSAL,
    DEEPSPEED_UNSHARDED,
    deepspeed_tag,
)
from jaxdist.formats.leaves import Leaf, Leaves, Reader
from jaxdist.formats.refusals import loading
from jaxdist.formats.tables import Shape
from jaxdist.formats.torch_files import is_tensor

COPY = "use an intact copy of its folder"  # where its layout is described in another form than DeepSpeed's
LOAD = "load it by DeepSpeed, save all weights under the names of a Hugging Face model, and give that folder"
MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")  # of stages 1 and 2, and of stage 3


class Vector(NamedTuple):
    """Numbers of one axis that lie in a file."""

    file: Path
    tensor: Any
    reader: Reader

    def part(self, start: int, size: int) -> Leaf:
        """A slice of its numbers, still to be read. Raises ConfigError."""
        return self.reader.leaf(self.file, "a rank's vector", self.tensor[start : start + size])


Flat = Sequence[Vector]  # which follow each other


def read(path: Path, reader: Reader) -> Leaves:
    """Every tensor of the model, from the fp32 masters. Raises ConfigError."""
    kind = Universal if is_universal(path) else Unsharded if is_unsharded(path) else Zero
    with loading(path, COPY):
        return kind(path, reader).weights


def config_around(path: Path) -> Path:
    """The folder with config.json: that of the checkpoint or the one around it; the first where neither has one."""
    folder = deepspeed_tag(path) or path
    return next((f for f in (folder, folder.parent) if (f / CONFIG).is_file()), folder)


def is_unsharded(path: Path) -> bool:
    """Whether a checkpoint was saved without ZeRO: in one file, the optimizer in it too."""
    folder = deepspeed_tag(path) or path
    return (folder / DEEPSPEED_UNSHARDED).is_file() and not any(folder.glob(DEEPSPEED_OPTIMIZER))


def is_universal(path: Path) -> bool:
    """Whether a checkpoint is a universal one, as `ds_to_universal` makes it of another."""
    folder = deepspeed_tag(path) or path
    return (folder / DEEPSPEED_UNIVERSAL).is_dir() and any(folder.glob(DEEPSPEED_MODEL))


class Saved:
    """A checkpoint: its folder, and the files with weights or placeholders for them, one of each rank."""

    model_files: Sequence[Path]
    models: Sequence[dict[Any, Any]]

    def __init__(self, path: Path, reader: Reader) -> None:
        self.path, self.folder, self.reader = path, deepspeed_tag(path) or path, reader

    @property
    def model(self) -> dict[Any, Any]:
        """The first rank's part of the model."""
        return self.models[0]

    @property
    def module(self) -> dict[str, Any]:
        """Name -> tensor of the first rank's weights and buffers. Raises ConfigError."""
        there = self.part(self.model_files[0], self.model, "module")
        if other := [name for name in there if not isinstance(name, str)]:
            raise self.wrong(f"{self.model_files[0].name}: its module has {other[0]!r:.50} among the names", COPY)
        return {name: tensor for name, tensor in there.items() if is_tensor(tensor)}

    def wrong(self, reason: str, fix: str = "give the complete folder") -> ConfigError:
        return ConfigError(f"{self.path}: {reason}; {fix}")

    def refuse_others(self, of_zero: bool = True) -> None:
        """Raises ConfigError for parallelism that cuts tensors or layers in ways that are not read here."""
        merge = (
            "merge them by python -m deepspeed.checkpoint.ds_to_universal, with --inject_missing_state where there is "
            "no universal_checkpoint_info, as those of the plain engine, and give its --output_folder"
        )
        self.refuse("layer_*-model_states.pt", "layers of DeepSpeed's pipeline")
        self.refuse_experts()
        self.refuse("*mp_rank_01_model_states.pt", "tensors cut by model parallelism", merge if of_zero else LOAD)

    def refuse_experts(self) -> None:
        """Raises ConfigError for the experts of a mixture."""
        for pattern in (DEEPSPEED_EXPERTS, "expp_rank_*_optim_states.pt"):
            self.refuse(pattern, "experts of DeepSpeed's mixtures")

    def refuse(self, pattern: str, contents: str, fix: str = LOAD) -> None:
        """Raises ConfigError where there are files of that pattern."""
        if any(self.folder.glob(pattern)):
            raise self.wrong(f"{pattern} are {contents}, which are not read", fix)

    def ranked(self, pattern: str) -> list[Path]:
        """Files in the order of their ranks. Raises ConfigError for links that lead outside."""

        def rank(file: Path) -> list[int]:
            return [int(number) for number in re.findall(r"\d+", file.name.partition("rank")[2])]

        try:
            return sorted((file_within(self.folder, file.name) for file in self.folder.glob(pattern)), key=rank)
        except ValueError as error:
            raise self.wrong(str(error)) from None

    def loaded(self, file: Path) -> dict[Any, Any]:
        """The dict that a file holds. Raises ConfigError."""
        tree = self.reader.load(file)
        if not isinstance(tree, dict):
            raise self.wrong(f"{file.name} holds no dict")
        return tree

    def part(self, file: Path, tree: Mapping[Any, Any], key: str) -> dict[Any, Any]:
        """The dict `key` of a file. Raises ConfigError."""
        found = tree.get(key)
        if not isinstance(found, dict):
            raise self.wrong(f"{file.name} has no {key}", "give what DeepSpeed's save_checkpoint wrote")
        return found


class Unsharded(Saved):
    """A checkpoint without ZeRO. With fp16 or bf16 its optimizer is wrapped: `fp32_groups` has the fp32 weights of each
    of its groups as a list, `fp32_groups_flat` as one vector, as are the moments then."""

    def __init__(self, path: Path, reader: Reader) -> None:
        """Raises ConfigError where the files of ZeRO are missing."""
        super().__init__(path, reader)
        self.refuse_others(of_zero=False)
        self.file = self.folder / DEEPSPEED_UNSHARDED
        self.model_files, self.models = [self.file], [self.loaded(self.file)]
        if self.model.get("param_shapes"):
            raise self.wrong(
                f"its fp32 weights and moments are missing, which are in {DEEPSPEED_OPTIMIZER}",
                f"give the complete folder, or {self.file} for the copy of fewer bits",
            )
        optimizer = self.model.get("optimizer")
        self.wrapped: dict[Any, Any] = optimizer if isinstance(optimizer, dict) else {}

    @property
    def flat(self) -> bool:
        """Whether the tensors of a group lie in one vector."""
        return "fp32_groups_flat" in self.wrapped

    @cached_property
    def copies(self) -> dict[str, Leaf]:
        """Name -> what the module has: of fewer bits where the optimizer has the fp32 weights. Raises ConfigError."""
        return {name: self.reader.leaf(self.file, name, tensor) for name, tensor in self.module.items()}

    @cached_property
    def masters(self) -> list[dict[str, Any]]:
        """Name -> tensor with the fp32 weights, of each of the optimizer's groups; empty where the module has them.
        Their names are not in the file: they are those in whose order the module's are the copies, of those that share
        a place the first. Raises ConfigError."""
        held = self.wrapped.get("fp32_groups_flat" if self.flat else "fp32_groups")
        if held is None:
            return []
        buffers = set(self.model.get("buffer_names") or ())
        first = {leaf.place: name for name, leaf in reversed(self.copies.items())}
        shapes = {n: leaf.shape for n, leaf in self.copies.items() if n not in buffers and first[leaf.place] == n}
        matrices, others = ([n for n in shapes if (len(shapes[n]) > 1) == many] for many in (True, False))
        for names in ([[*shapes]], [matrices, others], [others, matrices]):
            groups = [{name: shapes[name] for name in group} for group in names]
            if len(held) == len(groups) and all(map(self.fits, held, groups)):
                found = [self.cut(tensors, group) for tensors, group in zip(held, groups, strict=True)]
                if all(self.is_master(tensor, name) for group in found for name, tensor in group.items()):
                    return found
        raise self.wrong(
            "which of its fp32 weights is which parameter is not in it, and in no order of them are the others their "
            "copy of fewer bits, as where some parameters are not trained",
            f"for that copy give {self.file} --to hf --model {config_around(self.path) / CONFIG}",
        )

    def is_master(self, tensor: Any, name: str) -> bool:
        """Whether that parameter is the copy of such fp32 weights. Raises ConfigError."""
        copy = self.copies[name].read()
        with np.errstate(over="ignore"):
            rounded = self.reader.leaf(self.file, name, tensor).read().astype(copy.dtype)
        return bool(np.array_equal(rounded, copy, equal_nan=True))

    def fits(self, held: Any, shapes: Mapping[str, Shape]) -> bool:
        """Whether what the optimizer holds of a group may be parameters of these shapes, in this order."""
        if self.flat:
            return is_tensor(held) and tuple(held.shape) == (sum(map(math.prod, shapes.values())),)
        return isinstance(held, list) and [tuple(getattr(t, "shape", (-1,))) for t in held] == [*shapes.values()]

    def cut(self, held: Any, shapes: Mapping[str, Shape]) -> dict[str, Any]:
        """The tensors of a group by name: those of a list, or parts of a vector of all."""
        if not self.flat:
            return dict(zip(shapes, held, strict=True))
        ends = accumulate(map(math.prod, shapes.values()), initial=0)
        return {name: held[a:b].reshape(shapes[name]) for name, (a, b) in zip(shapes, pairwise(ends), strict=True)}

    @property
    def weights(self) -> Leaves:
        """Name -> weights: the fp32 ones where there are any, and whatever else the module has. Raises ConfigError."""
        masters = {
            self.copies[name].place: self.reader.leaf(self.file, name, tensor)
            for group in self.masters
            for name, tensor in group.items()
        }
        return {name: masters.get(leaf.place, leaf) for name, leaf in self.copies.items()}


class Zero(Saved):
    """A checkpoint of ZeRO: the files of its ranks, and the weights in them."""

    def __init__(self, path: Path, reader: Reader) -> None:
        """Raises ConfigError where a rank's file is missing, or of a layout that is not read."""
        super().__init__(path, reader)
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

    def count_ranks(self) -> None:
        """Raises ConfigError where there are more or fewer files than ranks wrote some."""
        count = self.states[0].get("partition_count")
        ranks = max(count) if isinstance(count, list | tuple) and count else count
        if ranks is not None and ranks != len(self.files):
            raise self.wrong(f"{ranks} ranks wrote it, and it has {len(self.files)} {DEEPSPEED_OPTIMIZER}")
        if self.stage == 3 and len(self.models) != len(self.files):
            raise self.wrong(f"{len(self.files)} ranks wrote it, and it has {len(self.models)} {DEEPSPEED_MODEL}")

    @property
    def ranks(self) -> int:
        """Number of ranks that share each tensor."""
        return len(self.states)

    @property
    def shapes(self) -> list[dict[str, Shape]]:
        """Name -> shape of each group's parameters, in the order of their numbers. Raises ConfigError."""
        groups = self.model.get("param_shapes")
        groups = [groups] if isinstance(groups, dict) else groups
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise self.wrong("it has no param_shapes, which have the names", "save it by DeepSpeed 0.4 or newer")
        found = [{name: tuple(shape) for name, shape in group.items()} for group in groups]
        for name, shape in ((name, shape) for group in found for name, shape in group.items()):
            if not isinstance(name, str) or not all(type(size) is int and size >= 0 for size in shape):
                raise self.wrong(f"its param_shapes have {name!r:.50}: {shape!r:.50}")
        return found

    def vectors(self, rank: int, value: Any, what: str) -> list[Vector]:
        """The flat vectors that a rank holds. Raises ConfigError."""
        held = value if isinstance(value, list | tuple) else [value]
        if not all(is_tensor(vector) and len(vector.shape) == 1 for vector in held):
            raise self.wrong(f"{self.files[rank].name}: its {what} are not flat vectors")
        return [Vector(self.files[rank], vector, self.reader) for vector in held]

    @property
    def masters(self) -> list[list[Vector]]:
        """The fp32 weights: of each rank, a vector of each group, or of each sub-group. Raises ConfigError."""
        key = MASTERS[self.stage == 3]
        return [self.vectors(rank, state.get(key), key) for rank, state in enumerate(self.states)]

    @property
    def weights(self) -> Leaves:
        """Name -> weights: the masters, what was not trained, buffers, other names of the same. Raises ConfigError."""
        found = self.buffers() | self.frozen() | self.trained()
        shared = self.model.get("shared_params")
        for name, original in shared.items() if isinstance(shared, dict) else ():
            if original in found:
                found[name] = found[original]
        return found

    def trained(self) -> dict[str, Leaf]:
        """The fp32 weights. Raises ConfigError."""
        return self.gathered(self.masters)

    def buffers(self) -> dict[str, Leaf]:
        """Shapes of the model. Raises ConfigError."""
        names, module = self.model.get("buffer_names") or (), self.module
        there = {name: module[name] for name in names if name in module}
        return {name: self.reader.leaf(self.model_files[0], name, tensor) for name, tensor in there.items()}

    def frozen(self) -> dict[str, Leaf]:
        """Untrained tensors. Raises ConfigError."""
        shapes = self.model.get("frozen_param_shapes") or {}
        pieces = [model.get("frozen_param_fragments") or {} for model in self.models]
        found: dict[str, Leaf] = {}
        for name, shape in shapes.items():
            there = [
                self.reader.leaf(file, name, piece[name].flatten())
                for file, piece in zip(self.model_files, pieces, strict=True)
                if is_tensor(piece.get(name))
            ]
            found[name] = self.joined(name, tuple(shape), there)
        return found

    def gathered(self, vectors: Sequence[Flat]) -> dict[str, Leaf]:
        """Name -> tensor, from the vectors of each rank. Raises ConfigError where they do not add up."""
        gather = self.gathered_by_parameter if self.stage == 3 else self.gathered_by_group
        return dict(gather(vectors))

    def gathered_by_group(self, vectors: Sequence[Flat]) -> Iterator[tuple[str, Leaf]]:
        """Stages 1 and 2: the ranks' vectors of a group follow each other, and parameters lie within their
        concatenation, also across two ranks. With zero_optimization.parameter_alignment padding follows each; at the
        end there may be some to a multiple of twice the number of ranks."""
        groups, unit = self.shapes, 2 * len(vectors)
        paddings = self.states[0].get("param_alignment_paddings") or [[0] * len(group) for group in groups]
        if any(len(held) != len(groups) for held in vectors):
            raise self.wrong(f"its ranks hold other than {len(groups)} groups of parameters")
        known = all(type(padding) is int and padding >= 0 for padding in chain.from_iterable(paddings))
        if not known or [*map(len, paddings)] != [*map(len, groups)]:
            raise self.wrong("its param_alignment_paddings are of other parameters than its param_shapes")
        for number, shapes in enumerate(groups):
            joined, start = [held[number] for held in vectors], 0
            for (name, shape), padding in zip(shapes.items(), paddings[number], strict=True):
                yield name, self.joined(name, shape, list(cut(joined, start, math.prod(shape))))
                start += math.prod(shape) + padding
            there = sum(len(vector.tensor) for vector in joined)
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
            flat, start = np.empty((size,), dtype), 0
            for piece in pieces:
                numbers = piece.read()[: size - start]
                flat[start : start + len(numbers)] = numbers
                start += len(numbers)
            return flat.reshape(shape)

        return Leaf(shape, dtype, read, besides=max(piece.bytes for piece in pieces))


class Universal(Zero):
    """A checkpoint with a folder of each parameter in `zero`: fp32.pt, a file of each moment, step.pt; and with
    optimizer_state.pt, which has the groups. Tensors cut by model parallelism are complete there.

    Files of stages 1 and 2 hold a dict with the tensor as `param`, those of stage 3 a flat tensor, and the steps
    are in optimizer_state.pt, which is all of the first rank's optimizer.
    """

    def __init__(self, path: Path, reader: Reader) -> None:
        """Raises ConfigError where a file is missing, or of a layout that is not read."""
        Saved.__init__(self, path, reader)
        self.refuse_experts()
        self.model_files = self.ranked(DEEPSPEED_MODEL)
        self.models = [self.loaded(file) for file in self.model_files]
        if self.model.get("module", True) is None:
            raise self.wrong(
                f"it has layers of DeepSpeed's pipeline: {self.model_files[0].name} has no module",
                "load the checkpoint that it was made of by DeepSpeed, save all weights under the names of a Hugging "
                "Face model, and give that folder",
            )
        self.files = [self.folder / DEEPSPEED_UNIVERSAL / "optimizer_state.pt"]
        self.states = [self.loaded(self.files[0])]
        self.stage = 3 if MASTERS[1] in self.states[0] else 2

    @property
    def ranks(self) -> int:
        """Number of ranks; under model parallelism, of those of the first part of the model."""
        return sum("mp_rank_00" in file.name for file in self.model_files)

    def file(self, name: str, kind: str) -> Path:
        """The file with that kind of numbers of a parameter. Raises ConfigError."""
        try:
            found = file_within(self.folder, f"{DEEPSPEED_UNIVERSAL}/{name}/{kind}.pt")
        except ValueError as error:
            raise self.wrong(str(error)) from None
        if not found.is_file():
            alone = "" if kind == "fp32" else ", or take the weights alone, --to hf"
            raise self.wrong(f"it has no {DEEPSPEED_UNIVERSAL}/{name}/{kind}.pt", f"give the complete folder{alone}")
        return found

    def kept(self, kind: str) -> dict[str, Leaf]:
        """Name -> that kind of numbers of each trained parameter. Raises ConfigError."""
        shapes = {name: shape for group in self.shapes for name, shape in group.items()}
        return {name: self.merged_leaf(self.file(name, kind), kind, name, shape) for name, shape in shapes.items()}

    def merged_leaf(self, file: Path, kind: str, name: str, shape: Shape) -> Leaf:
        """The tensor of a file. Raises ConfigError."""
        held = self.reader.load(file)
        tensor = held.get("param") if isinstance(held, dict) else held
        place = f"{DEEPSPEED_UNIVERSAL}/{name}/{file.name}"
        if not is_tensor(tensor):
            raise self.wrong(f"{place} has no tensor param")
        leaf = self.reader.leaf(file, f"{kind} of {name}", tensor)
        return leaf if isinstance(held, dict) else self.joined(name, shape, [leaf])

    def trained(self) -> dict[str, Leaf]:
        """The fp32 weights. Raises ConfigError."""
        return self.kept("fp32")


def cut(vectors: Flat, start: int, size: int) -> Iterator[Leaf]:
    """The `size` numbers from `start` on of vectors that follow each other; fewer where they end before."""
    for vector in vectors:
        length = len(vector.tensor)
        if start < length and size > 0:
            taken = min(size, length - start)
            yield vector.part(start, taken)
            size -= taken
        start = max(0, start - length)
