"""Record a step's tensors, for a comparison with another run (`jaxdist/config/record.py`).

Forward hooks note what every module returns, and hooks on those tensors their gradients; gradients of parameters are
taken before and after the clip, moments and weights after the update. Every rank notes its part; the first one joins
them and writes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jaxdist.config.record import LOGITS
from jaxdist.data import microbatch_order
from jaxdist.runs.folder import RunFolder
from torch_ref.families.layers import at_least_f32
from torch_ref.families.registry import FAMILIES
from torch_ref.parallel.context import TIME, context
from torch_ref.parallel.mesh import BATCH, rank_over
from torch_ref.parallel.pipeline import parts_of
from torch_ref.parallel.weights import local, model_tensors, named, place
from torch_ref.training.inputs import INPUTS
from torch_ref.training.program import Program, TrainState
from torch_ref.training.step import Rows, Watch

Arrays = dict[str, np.ndarray]

# Tensor parallelism leaves slices along dimension 2 of these functions of attention, and of modules whose style is one
# of SLICED: columns or heads. Sequence parallelism may leave times of the others, along dimension 1.
OF_HEADS = {"q_rotated", "k_rotated", "attended"}
SLICED = {"column", "heads"}
SPLIT = 2


def gathered(tensors: dict[str, Tensor]) -> Arrays:
    """Unsharded parameters, or tensors that are laid out as they are, on the first rank; empty on the others. Called by
    all.

    A rank may lack tensors that others hold; a piece that several hold comes from the first of them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {name: (tensor.shape, place(tensor)) for name, tensor in tensors.items()}
    layouts: list[Any] = [None] * size
    dist.all_gather_object(layouts, own)
    first = [name for name, layout in own.items() if all(other.get(name) != layout for other in layouts[:rank])]
    pieces: list[Any] = [None] * size
    dist.gather_object({name: array(local(tensors[name])) for name in first}, None if rank else pieces)
    found: Arrays = {}
    for layout, own_pieces in () if rank else zip(layouts, pieces, strict=True):
        for name, piece in own_pieces.items():
            shape, here = layout[name]
            found.setdefault(name, np.empty(shape, piece.dtype))[here] = piece
    return found


def copy(tensor: Tensor) -> Tensor:
    """A detached copy on the same device."""
    return tensor.detach().clone()


def largest(tensor: Tensor) -> Tensor:
    """The largest magnitude, which is finite where all of `tensor` is."""
    magnitude: Tensor = torch.linalg.vector_norm(tensor.detach(), math.inf)
    return magnitude


def array(tensor: Tensor) -> np.ndarray:
    """A copy on the host; bfloat16 as float32, which numpy has."""
    tensor = tensor.detach()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy().copy()


class Taps:
    """Within `installed`, notes what modules return and, once it is known, its gradient, microbatch by microbatch; of a
    loss in chunks the logits of each."""

    def __init__(self, has_times: bool = True, keep: Callable[[Tensor], Tensor] = copy) -> None:
        """`has_times`: whether activations are [B, T, ...]; `keep`: what of a tensor is noted."""
        self.has_times, self.keep = has_times, keep
        self.noted: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.gradients: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.open = False  # a block that is recomputed in the backward pass is not noted again

    def note(self, name: str, y: Tensor) -> None:
        """Note `y` under `name`, and its gradient when it is known."""
        if not self.open or (self.has_times and y.ndim < 3):  # not over the batch: learned positions
            return
        part = len(self.noted[name])
        self.noted[name].append(self.keep(y))
        self.gradients[name].append(torch.zeros(()))

        def keep(gradient: Tensor) -> None:
            self.gradients[name][part] = self.keep(gradient)

        y.register_hook(keep)

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Within, note what the modules of `model` return."""
        with ExitStack() as stack:
            for part in parts_of(model):
                for path, module in part.named_modules():
                    self._hook(stack, path, module)
            yield

    def _hook(self, stack: ExitStack, path: str, module: nn.Module) -> None:
        def enter(*_: Any) -> None:
            if not path:
                self.open = True

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            if path or getattr(module, "norm", True):  # else it is no logits that a part returns
                self.note(path or LOGITS, output[0] if isinstance(output, tuple) else output)
            if not path:
                self.open = False

        stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        stack.callback(module.register_forward_hook(leave).remove)


def first_nonfinite(model: nn.Module, step: Callable[[Watch], Any]) -> str | None:
    """The first tensor of a `step`, which is taken once more, that is not finite on some rank, in the order of a step.

    Called by all ranks; the step must not update.
    """
    config: Any = parts_of(model)[0].config
    taps, gradients = Taps(INPUTS[config.input_kind].has_times, largest), dict[str, Tensor]()

    def watch(stage: str) -> None:
        if stage == "gradient":
            gradients.update({n: p.grad.clone() for n, p in named(model) if p.grad is not None})

    with taps.installed(model):
        step(watch)
    kinds: dict[str, dict[str, list[Tensor]]] = {
        "weight": {n: [p] for n, p in named(model)},
        "activation": taps.noted,
        "gradient of activation": {n: taps.gradients[n] for n in reversed(taps.gradients)},
        "gradient": {n: [gradients[n]] for n in reversed(gradients)},
    }
    return _first({f"{kind} {name}": parts for kind, tensors in kinds.items() for name, parts in tensors.items()})


def nonfinite_weight(model: nn.Module) -> str | None:
    """The first weight that is not finite on some rank. Called by all ranks."""
    return _first({name: [p] for name, p in named(model)})


def _first(tensors: Mapping[str, list[Tensor]]) -> str | None:
    """The first of them that is not finite on some rank; of a pipeline's, those of earlier stages come first."""
    own = {name: all(bool(torch.isfinite(local(t)).all()) for t in parts) for name, parts in tensors.items()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    names = dict.fromkeys(name for fine in found for name in fine)
    return next((name for name in names if not all(fine.get(name, True) for fine in found)), None)


def depth(name: str) -> float:
    """The layer that a module belongs to; -1 of what comes before them all, infinite of what comes after."""
    kind, _, rest = name.partition(".")
    if kind == "layers":
        return int(rest.partition(".")[0])
    return math.inf if kind in ("norm", "lm_head", LOGITS) else -1


class Recorder:
    """Records of single steps of one rank's model and optimizer."""

    def __init__(self, program: Program, state: TrainState, folder: RunFolder | None):
        """Records go to `folder`; without one there are none."""
        self.program, self.folder = program, folder
        self.model, self.optimizer, self.mesh = *state, program.mesh
        experiment, mesh = program.experiment, program.mesh
        self.steps = experiment.record.steps if folder else ()
        plan = FAMILIES[experiment.model.family].plan
        self.sliced = OF_HEADS | {name.rpartition(".")[2] for name, style in plan.items() if style in SLICED}
        self.every = experiment.record.tensors == "all"
        self.inputs = INPUTS[experiment.model.input_kind]
        self.order = microbatch_order(experiment.train.batch, rank_over(mesh, *BATCH)[1], experiment.train.accumulation)
        over = context(experiment, mesh)
        self.times = over.order(experiment.data.sequence)
        self.length = len(self.times) // over.size

    def program_of(self, step: int) -> Program:
        """The program that takes a step: with all logits at once, if hooks are to see them."""
        if not self.every or step not in self.steps:
            return self.program
        experiment = self.program.experiment
        memory = experiment.memory.model_copy(update={"loss_chunks": 1})
        return replace(self.program, experiment=experiment.model_copy(update={"memory": memory}))

    @contextmanager
    def watching(self, step: int, batch: Rows) -> Iterator[Watch]:
        """Around a step: yields what it is to call between its stages; of a step in `steps` a record is written."""
        if step not in self.steps or self.folder is None:
            yield lambda stage: None
            return
        kinds: dict[str, Arrays] = {}
        taps, scale = Taps(self.inputs.has_times), self.optimizer.scaler.get_scale()

        def watch(stage: str) -> None:
            kinds[stage] = gathered({n: p.grad for n, p in named(self.model) if p.grad is not None})

        if self.every:
            parts = zip(self.inputs.batch._fields, batch, strict=True)
            kinds["batch"] = self.joined({name: [rows] for name, rows in parts})
            kinds["start"] = gathered(dict(model_tensors(self.model)))
        with taps.installed(self.model) if self.every else nullcontext():
            yield watch
        if self.every:
            kinds["activation"] = self.joined(taps.noted)
            backward = {n: [at_least_f32(g) / scale for g in taps.gradients[n]] for n in reversed(taps.gradients)}
            kinds["activation_gradient"] = self.joined(backward, backward=True)
            kinds |= self.moments()
            kinds["weights"] = gathered(dict(model_tensors(self.model)))
        else:
            del kinds["clipped"]
        if dist.get_rank() == 0:
            flat = {f"{kind}/{name}": a for kind, arrays in kinds.items() for name, a in arrays.items()}
            self.folder.record(step, flat)

    def joined(self, parts: dict[str, list[Tensor]], backward: bool = False) -> Arrays:
        """Microbatches and ranks put together, on the first rank; empty on the others. Called by all.

        Of a pipeline each rank has some layers, whose order is that of a forward pass or of a backward pass.
        """
        local = {n: [array(t.full_tensor() if isinstance(t, DTensor) else t) for t in ts] for n, ts in parts.items()}
        rows, ways = rank_over(self.mesh, *BATCH)
        place = (rows, self.mesh.get_local_rank("context"), self.mesh.get_local_rank("tensor"))
        first, size = dist.get_rank() == 0, dist.get_world_size()
        found: list[Any] = [None] * size
        dist.gather_object((place, local), found if first else None)
        if not first:
            return {}
        ranks: dict[Any, dict[str, list[np.ndarray]]] = {}
        for at, arrays in found:
            ranks.setdefault(at, {}).update(arrays)
        order = np.argsort(self.order)
        if not self.inputs.has_times:
            rows_of = {n: np.concatenate([p for r in range(ways) for p in ranks[r, 0, 0][n]]) for n in parts}
            return {n: a[order] for n, a in rows_of.items()}
        over, tensor = (range(self.mesh[axis].size()) for axis in ("context", "tensor"))
        time_order = np.argsort(self.times)

        def join(name: str) -> np.ndarray:
            split = SPLIT if name.rpartition(".")[-1] in self.sliced else TIME
            complete = split == TIME and ranks[0, 0, 0][name][0].shape[TIME] == self.length

            def part(row: int, c: int, microbatch: int) -> np.ndarray:
                slices = [ranks[row, c, t][name][microbatch] for t in tensor]
                return slices[0] if complete else np.concatenate(slices, axis=split)

            return np.concatenate([
                np.concatenate([part(row, c, i) for c in over], axis=TIME)[:, time_order]
                for row in range(ways) for i in range(len(ranks[row, 0, 0][name]))
            ])  # fmt: skip

        names = sorted(ranks[0, 0, 0], key=lambda name: -depth(name) if backward else depth(name))
        return {name: join(name)[order] for name in names}

    def moments(self) -> dict[str, Arrays]:
        """The optimizer's state, by kind and parameter; under ZeRO-1 gathered from the ranks that hold it."""
        state = self.optimizer.state_dict()
        kinds = {kind: {n: s[kind] for n, s in state.items() if kind in s} for kind in self.optimizer.config.kept}
        return {kind: gathered(tensors) for kind, tensors in kinds.items()}
