"""Learning rate, loss scale, clip, update rule and average of weights, from torch's own parts; ZeRO-1 by
ZeroRedundancyOptimizer."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from jaxdist.config import EMA, Experiment
from jaxdist.config import Optimizer as Config
from jaxdist.config.optimizer import OPTIMIZERS as JAX_OPTIMIZERS
from jaxdist.config.optimizer import ParamRole
from jaxdist.config.plugins import function, piece, running, twin
from torch_ref.families.layers import at_least_f32
from torch_ref.parallel.mesh import SHARDS, over
from torch_ref.parallel.weights import local, named
from torch_ref.training.matrices import Pieces, kept
from torch_ref.training.registry import OPTIMIZERS, Groups

with warnings.catch_warnings():  # its package uses torch.jit, which is deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer


SCALING = {"scale": "scale", "good": "_growth_tracker"}  # of a checkpoint: GradScaler's name


def learning_rate(o: Config, steps: int, step: int) -> float:
    """The learning rate of `step`, counted from 1.

    Warm-up: peak · s / warmup. Then, with p the share of the way from `warmup` to `decay_steps` (or `steps`),
    capped at 1: cosine peak · (f + (1-f)(1 + cos πp)/2), linear peak · (1 - (1-f)p), constant peak; f is
    `final`.
    """
    if step <= o.warmup:
        return o.learning_rate * step / o.warmup
    end = o.decay_steps or steps
    p = min(1.0, (step - o.warmup) / max(1, end - o.warmup))
    if o.decay == "cosine":
        return o.learning_rate * (o.final + (1 - o.final) * (1 + math.cos(math.pi * p)) / 2)
    if o.decay == "linear":
        return o.learning_rate * (1 - (1 - o.final) * p)
    return o.learning_rate


def clip(parameters: Iterable[nn.Parameter], largest: float, norm: Tensor | None = None) -> Tensor:
    """Scale gradients by min(1, largest / (norm + 1e-6)), as `clip_grad_norm_` does; `largest` = 0 disables it. Returns
    the global L2 norm before the clip: `norm`, if gradients are spread over stages."""
    parameters = list(parameters)
    if norm is None:
        norm = global_norm(p.grad for p in parameters if p.grad is not None)
    meshes: dict[DeviceMesh | None, list[nn.Parameter]] = {}  # torch scales the gradients of one at once
    for p in parameters if largest else ():
        meshes.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    for group in meshes.values():
        nn.utils.clip_grads_with_norm_(group, largest, norm)
    return norm


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """L2 norm over gradients and mesh axes: each sum of squares is added over exactly the axes that split it.

    `torch.nn.utils.get_total_norm` gives the same, by all-reduces for every single DTensor.
    """
    sums: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for gradient in gradients:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            split = [axis for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()]
            groups = tuple(gradient.device_mesh.get_group(axis) for axis in split)
        square = at_least_f32(local(gradient)).pow(2).sum()
        sums[groups] = sums[groups] + square if groups in sums else square
    for groups, total in sums.items():
        for group in groups:
            dist.all_reduce(total, group=group)
    return torch.stack(list(sums.values())).sum().sqrt()


class Lion(torch.optim.Optimizer):
    """Sign of β1·m + (1-β1)·g; m decays by β2 (arXiv:2302.06675, algorithm 2). torch has none."""

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Decoupled decay, then the update."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not (state := self.state[p]):
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((beta1 * m + (1 - beta1) * p.grad).sign(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - beta2)


class Rule(NamedTuple):
    """An update rule, as `registry.UpdateRule` has it: its class, what it is made with, whether it counts its updates
    in `step` by itself and asks for `pieces`, and which parameters are a group, with what that has of its own."""

    optimizer: Any  # the class
    settings: Callable[[Config], dict[str, Any]]
    counts: bool
    pieces: bool
    groups: Groups


def rule_of(o: Config) -> Rule:
    """The update rule of an optimizer. Raises ConfigError where a plugin's has none on torch's side."""
    row = twin(JAX_OPTIMIZERS, OPTIMIZERS, o.name, "register_optimizer")
    optimizer = piece(OPTIMIZERS, o.name, "optimizer", "training in torch")
    settings = function(OPTIMIZERS, o.name, "settings", "training in torch", dict)
    return Rule(optimizer, settings, row.counts, row.pieces, row.groups)


def adam(o: Config) -> dict[str, Any]:
    """Arguments of torch.optim.Adam and AdamW."""
    return {"betas": (o.beta1, o.beta2), "eps": o.eps, "foreach": False, "fused": False}


def sgd(o: Config) -> dict[str, Any]:
    """Arguments of torch.optim.SGD."""
    return {"momentum": o.momentum, "nesterov": o.nesterov, "dampening": 0.0, "foreach": False, "fused": False}


def adafactor(o: Config) -> dict[str, Any]:
    """Arguments of `matrices.Adafactor`."""
    return {"beta2_decay": o.beta2_decay, "eps": (o.eps1, o.eps2), "d": o.d}


def muon(o: Config) -> dict[str, Any]:
    """Arguments of `matrices.Muon`: AdamW's, and those of torch.optim.Muon."""
    own = {"momentum": o.momentum, "nesterov": o.nesterov, "ns_steps": o.ns_steps, "adjust_lr_fn": o.adjust_lr_fn}
    return adam(o) | {"muon": own}


def lion(o: Config) -> dict[str, Any]:
    """Arguments of `Lion`."""
    return {"betas": (o.beta1, o.beta2)}


def grouped(o: Config, parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Parameter groups of the rule: matrices decay and come first."""
    by_place = [
        {
            "params": [t for name, t in parameters.items() if applies_to(ParamRole.in_torch(name, t.ndim))],
            "weight_decay": o.weight_decay,
        }
        | own
        for applies_to, own in rule_of(o).groups
    ]
    return [group for group in by_place if group["params"]]


class Optimizer:
    """An update rule over this rank's shards of parameters, with its state by parameter name.

    Decay on parameters of two or more dimensions. The update is elementwise, so it runs on plain local tensors under
    every strategy. With ZeRO-1 a rank of the axis `fsdp` holds the state of, and updates, some full parameters, and
    sends them to the others (arXiv:1910.02054, by parameter instead of by slice).
    """

    def __init__(self, model: nn.Module, experiment: Experiment, mesh: DeviceMesh):
        o = self.config = experiment.optimizer
        self.steps, p = experiment.train.steps, experiment.precision
        self.parameters = dict(named(model))
        self.locals = {name: local(w) for name, w in self.parameters.items()}
        # torch's GradScaler, but all ranks know of an overflow on one of them.
        self.scaler = ShardedGradScaler(
            mesh.device_type,
            init_scale=p.loss_scale,
            backoff_factor=p.backoff_factor,
            growth_factor=p.growth_factor,
            growth_interval=p.growth_interval,
            enabled=bool(p.loss_scale),
        )
        rule = self.rule = rule_of(o)
        construct, settings = rule.optimizer, {"lr": o.learning_rate, **rule.settings(o)}
        if rule.pieces:
            pieces = {t: self.parameters[name] for name, t in self.locals.items()}
            construct = partial(construct, pieces=Pieces(pieces, getattr(torch, p.compute)))
        groups = grouped(o, self.locals)
        self.optimizer: torch.optim.Optimizer
        with running(OPTIMIZERS, o.name, "optimizer"):
            if experiment.parallel.row.splits_update:
                self.optimizer = ZeroRedundancyOptimizer(
                    groups, construct, process_group=over(mesh, *SHARDS).get_group(), **settings
                )
                self.holder: torch.optim.Optimizer = self.optimizer.optim
            else:
                self.optimizer = self.holder = construct(groups, **settings)
        held = {id(t) for group in self.holder.param_groups for t in group["params"]}
        self.state = {name: self._start(name) for name, t in self.locals.items() if id(t) in held}

    def _start(self, name: str) -> dict[str, Tensor]:
        """The state before the first step, laid out as the parameter; made here, so that a restore can fill it."""
        parameter = self.parameters[name].detach()
        role = ParamRole.in_torch(name, parameter.ndim)
        kinds = [kind for kind, applies_to in self.config.states.items() if applies_to(role)]
        state = {"step": torch.tensor(0.0)} | {kind: kept(parameter, kind) for kind in kinds}
        self.holder.state[self.locals[name]] = {key: local(t) for key, t in state.items()}
        return state

    def begin(self) -> None:
        """Initialize the moving average with the starting weights."""
        for name, state in self.state.items():
            if EMA in state:
                local(state[EMA]).copy_(self.locals[name])

    def unscale(self) -> float | None:
        """Divide every `.grad` by the loss scale. Returns the scale; None if the loss is not scaled."""
        for name, parameter in self.parameters.items():
            self.locals[name].grad = None if parameter.grad is None else local(parameter.grad)
        self.scaler.unscale_(self.optimizer)
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def step(self, step: int, taken: bool) -> float:
        """Update every parameter from its `.grad`, unless the step is not `taken`; then the loss scale.

        Returns the learning rate of `step`, counted from 1.
        """
        rate = learning_rate(self.config, self.steps, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if taken:
            self.scaler.step(self.optimizer)
            self._count()
            self._average()
        self.optimizer.zero_grad(set_to_none=True)  # or two steps' gradients would be held
        self.scaler.update()
        return rate

    def _count(self) -> None:
        for state in () if self.rule.counts else self.state.values():
            state["step"] += 1

    def _average(self) -> None:
        """The moving average of the weights after the update, as `AveragedModel` keeps it: the first is a copy."""
        held = [(state, self.locals[name]) for name, state in self.state.items() if EMA in state]
        if held and held[0][0]["step"] == 1:
            self.begin()
        elif held:
            average = get_ema_multi_avg_fn(self.config.ema)
            average([local(state[EMA]) for state, _ in held], [w for _, w in held], None)

    @property
    def scaling(self) -> dict[str, Tensor]:
        """Loss scale, and number of consecutive finite steps since it changed; empty without scaling."""
        state = self.scaler.state_dict()
        return {key: torch.tensor(state[name]) for key, name in SCALING.items()} if state else {}

    @scaling.setter
    def scaling(self, values: dict[str, Tensor]) -> None:
        self.scaler.load_state_dict(self.scaler.state_dict() | {SCALING[key]: t.item() for key, t in values.items()})

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Name -> step and what is kept, laid out as the parameter: what a distributed checkpoint saves.

        Under ZeRO-1 only what this rank holds. The tensors share their memory with the optimizer.
        """
        return {name: dict(state) for name, state in self.state.items()}
