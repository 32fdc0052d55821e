"""Hugging Face's own implementation under DDP or FSDP2: the reference of `--against transformers`.

`python -m parity_tests.runs.transformers_train --init HF_FOLDER --output DIR` takes the arguments of `torch_ref.train`.
Model, schedule, clip and update are transformers' and torch's own, so that no mistake of ours in them is shared. Ours
are the batches, the settings that torch's optimizer gets from the config, Lion, which torch has not, the sums over
ranks, the start of the ranks and the run folder. Names in the records are transformers'.
"""

import logging
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from jaxdist import __version__
from jaxdist.command_line.arguments import parse
from jaxdist.config import (
    EMA,
    ConfigError,
    Experiment,
    Optimizer,
    Parallel,
    check_finite,
    exit_codes,
    same_model,
)
from jaxdist.data import IGNORED, Dataset, dataset_of, in_steps, microbatch_order
from jaxdist.formats.hf import read_model
from jaxdist.runs.display import progress, say
from jaxdist.runs.folder import RunFolder
from parity_tests.runs.names import BLOCK, base, containers
from parity_tests.runs.torch_taps import torch_taps
from torch_ref.accounting import footprint
from torch_ref.accounting.arithmetic import Arithmetic
from torch_ref.accounting.traffic import Traffic
from torch_ref.families.layers import at_least_f32
from torch_ref.parallel.weights import local
from torch_ref.runtime import launch
from torch_ref.runtime.compat import all_gather_tensor, all_gather_tensor_autograd
from torch_ref.train import fetch, metered
from torch_ref.training.optim import grouped, rule_of
from torch_ref.training.parallelize import check_offload, offload_policy
from torch_ref.training.record import Arrays, array, gathered


class Double(TorchFunctionMode):
    """Makes float64 of every float32 that is asked for by name: transformers' norms, rotation and softmax ask for it.

    Without it their float64 run would be off by 1.6e-7, and prove nothing smaller.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        at_least_f32 = {torch.float32: torch.float64}
        args = tuple(at_least_f32.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        named = {k: at_least_f32.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return func(*args, **named)


def main(argv: Sequence[str] | None = None) -> None:
    """Check what can be checked by one process, then train in every rank."""
    a = parse(sys.argv[1:] if argv is None else argv, "parity_tests.runs.transformers_train", __doc__ or "")
    if a.init is None or a.output is None:
        missing = [flag for flag, path in (("--init HF_FOLDER", a.init), ("--output DIR", a.output)) if path is None]
        raise ConfigError(f"{' and '.join(missing)} missing; give {'them' if missing[1:] else 'it'}")
    same_model(a.experiment.model, read_model(a.init), f"--init {a.init}")
    experiment = on_batch_axes(in_steps(a.experiment))
    check_offload(experiment)
    plan = launch.plan(experiment.parallel, a.device)
    experiment.check_mesh(plan.axes)
    dataset = dataset_of(experiment)
    folder = RunFolder(a.output, experiment)
    launch.start(plan, partial(train, experiment.on_data(dataset.fingerprint), plan, dataset, a.init, folder))


def on_batch_axes(experiment: Experiment) -> Experiment:
    """The experiment, its mesh reduced to the axes that split the batch. Raises ConfigError for other strategies."""
    parallel, precision = experiment.parallel, experiment.precision
    if parallel.strategy not in ("ddp", "fsdp"):
        raise ConfigError(
            f"--strategy {parallel.strategy}: transformers is run under DDP or FSDP2; use --strategy ddp or fsdp"
        )
    if parallel.strategy == "ddp" and len({precision.parameters, precision.compute, precision.reduce}) > 1:
        raise ConfigError(
            f"--precision {precision.policy} under --strategy ddp would be autocast's, not the policy's; use "
            "--strategy fsdp"
        )
    if capacity := experiment.model.capacity:
        raise ConfigError(
            f"model.capacity = {capacity}: transformers leaves out no token; use model.capacity = 0, or --against torch"
        )
    if (chunks := experiment.memory.loss_chunks) > 1:
        raise ConfigError(
            f"memory.loss_chunks = {chunks}: transformers' models return all logits at once; leave it out, or use "
            "--against torch"
        )
    if experiment.model.input_kind == "images":
        raise ConfigError(
            f"model.family = {experiment.model.family}: a loop of transformers' is proved with tokens alone; use "
            "--against torch"
        )
    if not experiment.optimizer.elementwise:
        raise ConfigError(
            f"optimizer.name = {experiment.optimizer.name}: transformers' loop would take pieces of matrices for full "
            "ones; use --against torch, or a run folder of a loop on one device"
        )
    axes = parallel.axes()
    mesh = f"data={axes['data']},fsdp={axes['fsdp']}"
    return experiment.model_copy(update={"parallel": parallel.model_copy(update={"mesh": mesh})})


def train(experiment: Experiment, plan: launch.Plan, dataset: Dataset, init: Path, folder: RunFolder) -> None:
    """One rank: model -> DDP or FSDP2 -> loop -> summary."""
    errors_alone()
    double = experiment.precision.compute == "float64"
    with launch.process_group(plan, bool(experiment.memory.offload)) as mesh, Double() if double else nullcontext():
        plain = build(init, experiment, mesh)
        model = distribute(plain, experiment, mesh)
        optimizer, schedule = optimizer_of(plain, experiment)
        p = experiment.precision
        scaler = ShardedGradScaler(
            mesh.device_type, p.loss_scale, p.backoff_factor, p.growth_factor, p.growth_interval, bool(p.loss_scale)
        )
        average = Average(plain, optimizer, experiment.optimizer.ema)
        trainer = Trainer(experiment, mesh, model, optimizer, scaler, average)
        first = dist.get_rank() == 0
        if first:
            folder.create(experiment)
            say(str(plan))
        traffic, arithmetic = Traffic(mesh), Arithmetic()
        counted = metered(range(1, experiment.train.steps + 1), experiment.record.steps)
        with progress(experiment.train.steps, 0) if first else nullcontext(lambda record: None) as show:
            for step in range(1, experiment.train.steps + 1):
                began = time.perf_counter()
                with ExitStack() as stack:
                    scale = scaler.get_scale()
                    keep = Keeping(plain, optimizer, step, experiment, scale)
                    stack.enter_context(keep.activations())
                    if step == counted:
                        stack.enter_context(traffic)
                        stack.enter_context(arithmetic)
                    batch = fetch(dataset, experiment, mesh, step)
                    values = trainer.step(batch, step, keep)
                    rate = schedule.get_last_lr()[0]
                    schedule.step()
                record = {"step": step, **values, "learning_rate": rate}
                if scaler.is_enabled():
                    record |= {"loss_scale": scale}
                if scaler.is_enabled() or experiment.train.skip:
                    record["skipped"] = not math.isfinite(values["grad_norm"]) or step in experiment.train.skip
                if not p.recovers(record.get("loss_scale")):
                    check_finite(step, **values)
                tokens, seconds = experiment.train.batch * experiment.data.sequence, time.perf_counter() - began
                record |= {"tokens": step * tokens, "step_seconds": seconds, "tokens_per_second": tokens / seconds}
                kept = keep.after(mesh, experiment.optimizer.kept)
                if first:
                    folder.log(record)
                    show(record)
                    if kept:
                        folder.record(step, kept)
        memory = footprint.memory(plain, optimizer, experiment, mesh)
        if first:
            steps = experiment.optimizer.landmarks(experiment.train.steps)
            rates = {step: experiment.optimizer.learning_rate * schedule.lr_lambdas[0](step) for step in steps}
            dtypes = {"arithmetic": arithmetic.narrowest(), "schedule": rates}
            folder.summarize(summary(experiment, plain, mesh, memory, traffic) | dtypes)


def errors_alone() -> None:
    """Have this rank's transformers, which it imports later, and FSDP2 log errors alone."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.getLogger("torch.distributed.fsdp").setLevel(logging.ERROR)


def build(init: Path, experiment: Experiment, mesh: DeviceMesh) -> nn.Module:
    """transformers' model of a folder, in the dtype of the policy's parameters."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, str(experiment.precision.parameters))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(init, dtype=dtype, output_loading_info=True, **eager)
    model, report = loaded
    if wrong := [f"{what}: {', '.join(map(str, names))}" for what, names in report.items() if names]:
        raise ConfigError(f"--init {init}: {'; '.join(wrong)}; give all weights of its config.json")
    model.config.use_cache = False
    return model.to(mesh.device_type).eval()  # no dropout


def distribute(model: nn.Module, experiment: Experiment, mesh: DeviceMesh) -> nn.Module:
    """Under DDP, or sharded by FSDP2 block by block."""
    sizes = [mesh[axis].size() for axis in ("data", "fsdp")]
    if experiment.parallel.strategy == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("data")) if sizes[0] > 1 else model
    over = mesh["data", "fsdp"] if sizes[0] > 1 else mesh["fsdp"]
    dtypes = [getattr(torch, str(d)) for d in (experiment.precision.compute, experiment.precision.reduce)]
    policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1], cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": over, "mp_policy": policy, "offload_policy": offload_policy(experiment, mesh)}
    blocks = containers(experiment.model.family)[BLOCK].removesuffix(".{layer}")
    for block in model.get_submodule(blocks).children():
        fully_shard(block, reshard_after_forward=experiment.parallel.reshards, **options)
    fully_shard(model, **options)
    return model


def optimizer_of(model: nn.Module, experiment: Experiment) -> tuple[torch.optim.Optimizer, Any]:
    """torch's optimizer with decay on matrices, and transformers' schedule at its first step."""
    o = experiment.optimizer
    rule = rule_of(o)
    optimizer = rule.optimizer(grouped(o, dict(model.named_parameters())), lr=o.learning_rate, **rule.settings(o))
    optimizer.step()  # without gradients: a schedule expects a step before its own
    schedule = SCHEDULES[o.decay](optimizer, o, o.decay_steps or experiment.train.steps)
    schedule.step()  # step 1 of a run is the schedule's second: its first has a learning rate of 0
    return optimizer, schedule


def _cosine(optimizer: Any, o: Optimizer, steps: int) -> Any:
    from transformers import get_cosine_with_min_lr_schedule_with_warmup as schedule

    return schedule(optimizer, o.warmup, steps, min_lr_rate=o.final)


def _linear(optimizer: Any, o: Optimizer, steps: int) -> Any:
    from transformers import get_polynomial_decay_schedule_with_warmup as schedule

    return schedule(optimizer, o.warmup, steps, lr_end=o.final * o.learning_rate)


def _constant(optimizer: Any, o: Optimizer, _: int) -> Any:
    from transformers import get_constant_schedule_with_warmup as schedule

    return schedule(optimizer, o.warmup)


SCHEDULES: dict[str, Callable[[Any, Optimizer, int], Any]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
}


@dataclass(frozen=True)
class Trainer:
    """State of a rank's training: the distributed model, torch's optimizer and loss scale, and the average of
    weights."""

    experiment: Experiment
    mesh: DeviceMesh
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: ShardedGradScaler
    average: "Average"

    def step(self, batch: Any, step: int, keep: "Keeping") -> dict[str, float]:
        """Loss over the global batch's valid tokens, clip_grad_norm_, update. DDP and FSDP2 average: times the
        ranks."""
        self.optimizer.zero_grad()
        e, ranks = self.experiment, self.mesh.size()
        parts, count = e.train.accumulation, (batch.targets != IGNORED).sum()
        dist.all_reduce(count)
        total = torch.zeros((), dtype=torch.float64, device=count.device)
        asked = {"output_router_logits": True} if e.model.balance else {}
        for i, (tokens, targets) in enumerate(zip(batch.inputs.chunk(parts), batch.targets.chunk(parts), strict=True)):
            with summing(self.model, e.parallel, last=i == parts - 1):
                found = self.model(tokens, **asked)
                logits = found.logits.float()
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
                )
                added = balance(found.router_logits, targets != IGNORED, e.model) / parts if asked else 0
                self.scaler.scale(loss * ranks / count + added).backward()
            total += loss.detach() / count
        dist.all_reduce(total)
        self.scaler.unscale_(self.optimizer)
        keep.gradients("gradient")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), e.optimizer.clip or math.inf, foreach=False)
        keep.gradients("clipped")
        if step not in e.train.skip:
            self.scaler.step(self.optimizer)
            if norm.isfinite():
                self.average.update()
        self.scaler.update()
        return {"loss": total.item(), "grad_norm": (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()}


def balance(logits: Sequence[Tensor], valid_BT: Tensor, c: Any) -> Any:
    """The balance loss of the microbatch of all ranks, by transformers' own function; of each block's logits [B·T, E].

    Its attention mask is of the tokens whose target has a loss. The last token of a padded document has none: were it
    counted, a document of T + 1 tokens would count as T in sequences of T, and as T + 1 in longer ones.

    Each rank has all of it: its gradient, summed over ranks by the gather, is averaged by DDP or FSDP2 as others are.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    ranks = list(range(dist.get_world_size()))
    of_all = tuple(all_gather_tensor_autograd(block, 0, ranks) for block in logits)
    mask = all_gather_tensor(valid_BT.to(torch.uint8), 0, ranks)
    loss: Any = load_balancing_loss_func(of_all, c.experts, c.top_k, mask)
    return c.balance * loss


def summing(model: nn.Module, parallel: Parallel, last: bool) -> AbstractContextManager[None]:
    """Within it, only the last microbatch's gradients are summed over ranks; FSDP2's over shards by parallel.reduce."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or parallel.reduce != "step")
        model.set_requires_all_reduce(last)
        model.set_reshard_after_backward(last or parallel.reshards)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


class Average:
    """The moving average of a model's weights, by torch's own function, beside what the optimizer keeps of each; of
    none where there is no decay."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float):
        self.optimizer, self.decay = optimizer, decay
        self.parameters = list(model.parameters()) if decay else []

    @torch.no_grad()
    def update(self) -> None:
        """After an update of the weights; the first is copied, as `AveragedModel` does."""
        for p in self.parameters:
            kept = self.optimizer.state[p]
            if EMA not in kept:
                kept[EMA] = p.detach().clone()
            else:
                get_ema_multi_avg_fn(self.decay)([local(kept[EMA])], [local(p)], None)


class Keeping:
    """Tensors of a step for its record: gradients, or all; the last step's state in any case."""

    model: Any  # transformers' PreTrainedModel

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, experiment: Experiment, scale: float
    ):
        self.model, self.optimizer, self.scale = model, optimizer, scale
        self.recorded = step in experiment.record.steps
        self.every = self.recorded and experiment.record.tensors == "all"
        self.last = step == experiment.train.steps
        self.arrays: Arrays = {}
        train = experiment.train
        self.order = np.argsort(microbatch_order(train.batch, dist.get_world_size(), train.accumulation))
        if self.every:
            self._keep("start", dict(model.named_parameters()))
        self.noted: defaultdict[str, list[Tensor]] = defaultdict(list)

    def _keep(self, kind: str, tensors: dict[str, Tensor]) -> None:
        """Under the names of files, in which experts lie one by one."""
        from transformers.core_model_loading import revert_weight_conversion

        found = {name: torch.from_numpy(a) for name, a in gathered(tensors).items()}
        self.arrays |= {f"{kind}/{name}": array(a) for name, a in revert_weight_conversion(self.model, found).items()}

    def gradients(self, kind: str) -> None:
        if self.recorded and (self.every or kind == "gradient"):
            self._keep(kind, {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})

    def activations(self) -> AbstractContextManager[None]:
        """Notes what every module returns, and its gradient."""
        return torch_taps(self.model, self._note) if self.every else nullcontext()

    def _note(self, path: str, y: Tensor) -> None:
        name = base(path)  # a microbatch calls again
        if y.requires_grad and y.ndim >= 3:
            self.noted[f"activation/{name}"].append(y.detach().clone())
            # the loss was multiplied by the ranks, for DDP and FSDP2 to divide gradients by them
            factor = dist.get_world_size() * self.scale
            y.register_hook(
                lambda g: self.noted[f"activation_gradient/{name}"].append(at_least_f32(g.detach()) / factor)
            )

    def after(self, mesh: DeviceMesh, kept: Sequence[str]) -> Arrays:
        """The unsharded record on the first rank; called by all."""
        for name, parts in self.noted.items():
            local = torch.cat(parts)
            rows = [torch.empty_like(local) for _ in range(mesh.size())]
            dist.all_gather(rows, local.contiguous())
            every = array(torch.cat(rows))
            # The output of learned positions has no batch axis.
            self.arrays[name] = every[self.order] if len(every) == len(self.order) else every
        if self.every or self.last:
            parameters = dict(self.model.named_parameters())
            self._keep("weights", dict(parameters))
            for kind in kept:
                self._keep(kind, {n: self.optimizer.state[p][kind] for n, p in parameters.items()})
        return self.arrays


def summary(
    experiment: Experiment, model: nn.Module, mesh: DeviceMesh, memory: dict[str, int | None], traffic: Traffic
) -> dict[str, Any]:
    """Entries of summary.json that this run can state."""
    import transformers

    return {
        "backend": "transformers",
        "versions": {"jaxdist": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "parameters": sum(p.numel() for p in model.parameters()),
        "devices": mesh.size(),
        "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
        "strategy": experiment.parallel.strategy,
        "precision": experiment.precision.policy,
        "memory": memory,
        "collectives": traffic.collectives(),
    }


if __name__ == "__main__":
    exit_codes(main, quiet=launch.quiet())
