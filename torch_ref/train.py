"""Train an experiment in PyTorch: `python -m torch_ref.train --mesh 2x4`."""

import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jaxdist.command_line.arguments import Arguments, parse
from jaxdist.config import Experiment, check_validation, diverged, exit_codes, overflown
from jaxdist.config.errors import LESS, in_device_memory
from jaxdist.data import Dataset, Split, Targets, dataset_of, in_steps, microbatch_order
from jaxdist.formats.dcp_index import INDEX
from jaxdist.formats.opening import opening_once, release
from jaxdist.formats.origin import begin
from jaxdist.runs.checkpoints import Saves
from jaxdist.runs.display import megabytes, progress, say, show_end, show_start
from jaxdist.runs.folder import RunFolder
from jaxdist.runs.signals import Action, Interrupted, Saving
from torch_ref.accounting import footprint
from torch_ref.accounting.arithmetic import Arithmetic
from torch_ref.accounting.traffic import Traffic
from torch_ref.families.accounting import flops_per_token
from torch_ref.families.models import module_of
from torch_ref.formats.hf import describe, lies_beside
from torch_ref.parallel import experts, pipeline
from torch_ref.parallel.context import context
from torch_ref.parallel.mesh import BATCH, rank_over
from torch_ref.parallel.weights import draw, fill
from torch_ref.runtime import launch
from torch_ref.training import checkpoint, metrics
from torch_ref.training.elementwise import check_elementwise
from torch_ref.training.inputs import INPUTS
from torch_ref.training.optim import rule_of
from torch_ref.training.parallelize import check_compile, check_offload
from torch_ref.training.program import Program, TrainState
from torch_ref.training.record import Recorder, first_nonfinite, nonfinite_weight
from torch_ref.training.step import Rows, evaluate, train_step

Report = Callable[[dict[str, Any]], None]


@opening_once()
def main(argv: Sequence[str] | None = None) -> None:
    """Check arguments in one process, then train in every rank."""
    arguments = parse(
        sys.argv[1:] if argv is None else argv, "torch_ref.train", "Train an experiment in PyTorch.", describe=describe
    )
    experiment = in_steps(arguments.experiment)
    folder = RunFolder(arguments.output, experiment, arguments.resume) if arguments.output else None
    experiment = folder.experiment if folder else experiment
    with launch.reported_once():
        plan = launch.plan(experiment.parallel, arguments.device)
    launch.meet(plan)
    experiment.check_mesh(plan.axes)
    rule_of(experiment.optimizer)  # of a plugin, it may have no row on torch's side
    module_of(experiment.model)
    experts.check(experiment, plan.axes)
    pipeline.check(experiment, plan.axes)
    check_offload(experiment)  # after what a pipeline refuses: it offloads nothing, whatever goes together
    check_compile(experiment, plan.axes, plan.device)
    # Before the fork, so that text is encoded once, and all ranks share the memory that holds it.
    dataset = dataset_of(experiment)
    experiment = experiment.on_data(dataset.fingerprint)
    for line in () if launch.quiet() else arguments.notes:
        say(line)
    rank = partial(train, experiment, plan, dataset, arguments, folder)
    rank() if launch.launched() else launch.start(plan, rank, release)


@in_device_memory(torch.OutOfMemoryError, LESS)
def train(
    experiment: Experiment, plan: launch.Plan, dataset: Dataset, arguments: Arguments, folder: RunFolder | None
) -> None:
    """One rank: mesh -> model -> optimizer -> restore or initialize -> loop -> summary."""
    with launch.process_group(plan, bool(experiment.memory.offload)) as mesh, folder or nullcontext():
        with Saving(experiment.checkpoint, agree=partial(launch.greatest, device=mesh.device_type)) as schedule:
            check_elementwise(experiment.optimizer, mesh.device_type)
            program = Program(experiment, mesh)
            with arguments.reading_weights():
                start, state = starting_state(program, arguments.init, folder)
            dist.barrier()  # every rank has looked at the run folder before the first writes to it

            model, optimizer = state
            flops_per_token(experiment, model)  # which the end of the run asks for: a plugin's may fail
            memory = footprint.memory(model, optimizer, experiment, mesh)
            first = dist.get_rank() == 0
            saves = Saves(folder.checkpoints, experiment.checkpoint, first) if folder else None
            if folder:
                launch.from_first(
                    lambda: begin(folder, experiment, start, partial(lies_beside, arguments.companions_of))
                )
            release()
            if first:
                say(str(plan))
                rows = dataset.table(experiment.train) | notes(model, memory)
                show_start("torch_ref", experiment, plan.axes, metrics.parameter_count(program.unsharded), rows)
            traffic, arithmetic = Traffic(mesh, getattr(model, "tied", None)), Arithmetic()
            peak = footprint.Peak(model, optimizer.holder, mesh.device_type)
            run = Run(
                program=program,
                dataset=dataset,
                folder=folder,
                saves=saves,
                schedule=schedule,
                start=start,
                meters=(traffic, arithmetic, peak),
            )
            records = loop(run, state)

            steps = experiment.train.steps
            validation = validation_loss(run, state)
            check_validation(steps, validation, run.newest)
            if saves and schedule.final() and saves.missing(steps):
                run.keep(steps, state)
            if schedule.stopping():
                raise run.interrupted(steps)
        memory = footprint.memory(model, optimizer, experiment, mesh, peak)
        summary = metrics.summary(program, memory, traffic.collectives(), records)
        summary |= {"arithmetic": arithmetic.narrowest(), "validation_loss": validation, "data": dataset.fingerprint}
        if isinstance(model, pipeline.Pipeline):
            summary["pipeline"] = {"schedule": experiment.parallel.pipeline_schedule, **model.bubble}
        if first:
            if saves:
                summary["checkpoints"] = saves.summary()
            if folder and (records or not folder.summarized):  # a finished run, resumed, keeps what it measured
                folder.summarize(summary)
            show_end(summary, records, folder.path if folder else None)
        if folder and saves:
            launch.from_first(partial(folder.check_kept, saves))


def starting_state(program: Program, init: Path | None, folder: RunFolder | None) -> tuple[int, TrainState]:
    """(steps already done, state): from the run folder's newest checkpoint, from the weights `init`, or the seed."""
    experiment, state = program.experiment, program.allocate()
    step = launch.from_first(lambda: folder.resume_from(INDEX)) if folder else None
    if step is not None and folder:
        checkpoint.restore(folder.checkpoints / str(step), program, state)
        return step, state
    if folder and folder.resume and dist.get_rank() == 0:
        say(f"no checkpoint in {folder.path} yet: starting at step 0")
    if init is not None:
        checkpoint.initialize(init, state.model, experiment)
    else:
        fill(state.model, partial(draw, experiment.model, experiment.train.seed))
    state.optimizer.begin()
    return 0, state


@dataclass(frozen=True)
class Run:
    """A run in progress: its program and data, the folder and checkpoints it writes, if any, and when it saves."""

    program: Program
    dataset: Dataset
    folder: RunFolder | None
    saves: Saves | None
    schedule: Saving
    start: int
    """Steps done before."""
    meters: Iterable[AbstractContextManager[Any]]
    """Contexts that measure one step."""

    @property
    def experiment(self) -> Experiment:
        """The experiment of the program."""
        return self.program.experiment

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint."""
        return self.folder.newest if self.folder else None

    def batch(self, step: int, split: Split = "train") -> Rows:
        """This rank's part of a step's batch."""
        return fetch(self.dataset, self.experiment, self.program.mesh, step, split)

    def keep(self, step: int, state: TrainState) -> None:
        """Save `step`. Raises TrainingError if its weights are not finite, since no run can continue from them."""
        if not self.folder or not self.saves:
            return
        if bad := nonfinite_weight(state.model):
            raise overflown(step, bad, self.newest)
        if dist.get_rank() == 0:
            self.folder.synchronize()
        checkpoint.save(self.saves, step, self.program, state)

    def interrupted(self, step: int) -> Interrupted:
        """The exception that ends the run after `step`."""
        return self.schedule.interrupted(step, self.folder.checkpoints if self.folder else None)


def loop(run: Run, state: TrainState) -> list[dict[str, Any]]:
    """Train steps `run.start + 1` to `train.steps`, one of them within `run.meters`; `state` is updated in place.
    Returns a record per step.

    Raises TrainingError if a step is not finite or a save fails, Interrupted if a signal ends the run.
    """
    experiment, start = run.experiment, run.start
    train, recorder = experiment.train, Recorder(run.program, state, run.folder)
    tokens, targets = train.batch * experiment.per_row, Targets(run.dataset, train, start)
    measured = metered(range(start + 1, train.steps + 1), recorder.steps)
    records: list[dict[str, Any]] = []
    with reporting(experiment, run.folder, start) as report:
        for step in range(start + 1, train.steps + 1):
            began = time.perf_counter()
            batch = run.batch(step)
            with ExitStack() as measuring:
                if step == measured or step in recorder.steps:
                    # Eagerly: a frame that torch.compile meets within a dispatch mode it never compiles again.
                    measuring.enter_context(torch.compiler.set_stance("force_eager"))
                watch = measuring.enter_context(recorder.watching(step, batch))
                for meter in run.meters if step == measured else ():
                    measuring.enter_context(meter)
                values = train_step(recorder.program_of(step), state, batch, step, watch)
            seconds = time.perf_counter() - began
            scaled = values.loss_scale is not None
            if not values.finite and train.nonfinite == "stop" and not experiment.precision.recovers(values.loss_scale):
                tensor = first_nonfinite(state.model, partial(train_step, run.program, state, batch, step))
                raise diverged(step, values.loss, values.grad_norm, tensor, run.newest)
            record: dict[str, Any] = {"step": step} | {n: x for n, x in values._asdict().items() if x is not None}
            record |= {"tokens": step * tokens, "step_seconds": seconds, "tokens_per_second": tokens / seconds}
            record |= targets.of(step, seconds)
            if scaled or train.skip or train.nonfinite == "skip":
                record["skipped"] = not values.finite or step in train.skip
            records.append(record)
            report(record)
            due = run.schedule.due(step)
            if due:
                run.keep(step, state)
            if due is Action.STOP:
                raise run.interrupted(step)
    return records


def metered(steps: Sequence[int], recorded: Container[int]) -> int | None:
    """The step to be measured: the first that is not recorded, from the second on, since FSDP2 and DDP settle their
    order in the first; None if all are recorded, which takes memory and sends.
    """
    return next((step for step in (*steps[1:], *steps[:1]) if step not in recorded), None)


def fetch(dataset: Dataset, experiment: Experiment, mesh: DeviceMesh, step: int, split: Any = "train") -> Rows:
    """This rank's part of the global batch: 1/n of every microbatch over the axes BATCH and of times over `context`."""
    size = experiment.train.batch
    rank, ranks = rank_over(mesh, *BATCH)
    rows = microbatch_order(size, ranks, experiment.train.accumulation)[
        rank * size // ranks : (rank + 1) * size // ranks
    ]
    if split == "train":
        batch = dataset.batch(step, size, experiment.train.seed, rows=rows)
    else:
        batch = dataset.pass_over(split, step, size, rows)
    kind = INPUTS[experiment.model.input_kind]
    own = (slice(None), context(experiment, mesh).own(experiment.data.sequence)) if kind.has_times else ...
    dtypes = kind.dtype, np.int64
    arrays = (x[own].astype(dtype, copy=False) for x, dtype in zip(batch, dtypes, strict=True))
    return Rows(*(torch.from_numpy(x).to(mesh.device_type) for x in arrays))


def validation_loss(run: Run, state: TrainState) -> float | None:
    """Mean loss in nats per token over at most `train.validation_batches` batches of one pass over the validation
    split; None without such a split, or if the run is ended before it is known."""
    train = run.experiment.train
    batches = min(train.validation_batches, run.dataset.passes("validation", train.batch))
    loss = count = 0.0
    for step in range(1, batches + 1):
        if run.schedule.stopping():
            return None
        total, tokens = evaluate(run.program, state.model, run.batch(step, "validation"))
        loss, count = loss + total, count + tokens
    return loss / count if batches else None


def notes(model: nn.Module, memory: dict[str, int | None]) -> dict[str, str]:
    """The start-up table's rows about this backend. Gradients will be as large as the parameters they belong to."""
    parameters, optimizer = (megabytes(memory[name] or 0) for name in ("parameters", "optimizer_state"))
    state = f"parameters {parameters}, gradients {parameters}, optimizer {optimizer}"
    if memory.get("host"):
        state += f", {megabytes(memory['host'] or 0)} of them on the host"
    return {"memory per device": state, "wrapped by": type(model).__name__}


@contextmanager
def reporting(experiment: Experiment, folder: RunFolder | None, start: int) -> Iterator[Report]:
    """Context manager that yields the consumer of each step's record, on the first rank: progress bar and run
    folder."""
    if dist.get_rank() > 0:
        yield lambda _: None
        return
    with progress(experiment.train.steps, start, experiment.model.input_kind) as show:

        def report(record: dict[str, Any]) -> None:
            show(record)
            if folder:
                folder.log(record)

        yield report


if __name__ == "__main__":
    with launch.ended_at_once():
        exit_codes(main, quiet=launch.quiet())
