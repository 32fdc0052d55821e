"""Train an experiment: `python -m jaxdist.train --mesh 2x4`. `main` reads as the table of contents."""

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until `processes.run`: nothing imported is garbage, and looking for it takes a tenth of a second

import jax
import jax.numpy as jnp

from jaxdist.accounting import forms
from jaxdist.command_line.arguments import parse
from jaxdist.config import Experiment, check_validation, diverged, overflown
from jaxdist.config.errors import LESS
from jaxdist.data import Batches, Dataset, Targets, dataset_of, in_steps
from jaxdist.formats.described import Source, source_of
from jaxdist.formats.opening import opening_once, release
from jaxdist.formats.origin import CompanionFiles, begin
from jaxdist.parallel.mesh import axes_of, make_mesh
from jaxdist.parallel.rematerialization import ALL_OF_IT, in_memory
from jaxdist.runs.display import megabytes, progress, say, show_end, show_start
from jaxdist.runs.folder import RunFolder
from jaxdist.runs.signals import Action, Interrupted, Saving
from jaxdist.runtime import processes
from jaxdist.runtime.compilation_cache import keep_compiled
from jaxdist.runtime.malloc import keep_freed, share_arena
from jaxdist.runtime.processes import check_same, first, from_first, greatest
from jaxdist.runtime.startup import StartupTimer
from jaxdist.training import checkpoint, metrics
from jaxdist.training.elementwise import check_elementwise
from jaxdist.training.finite import check_resumed
from jaxdist.training.optim import learning_rate
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder
from jaxdist.training.scratch import scratch
from jaxdist.training.step import TrainState
from jaxdist.training.validation import pass_over


@in_memory(f"{LESS}, or {ALL_OF_IT}")
@opening_once()
@keep_compiled()
def main(argv: Sequence[str] | None = None) -> None:
    """Mesh -> data -> shapes and shardings -> restore or initialize -> compile -> loop -> summary."""
    startup = StartupTimer()
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv, "jaxdist.train", "Train an experiment in JAX.", describe=described)
    experiment = in_steps(arguments.experiment)
    folder = RunFolder(arguments.output, experiment, arguments.resume) if arguments.output else None
    experiment = folder.experiment if folder else experiment

    startup.mark("config")
    share_arena(partial(scratch, experiment), arguments.device)
    mesh, where = make_mesh(experiment, arguments.device)
    keep_freed(mesh)
    startup.mark("devices")
    dataset = dataset_of(experiment)
    experiment = experiment.on_data(dataset.fingerprint)
    check_same("data.fingerprint", dataset.fingerprint)
    check_elementwise(experiment.optimizer)
    program = Program(experiment, mesh)
    forms.check(experiment, program.param_specs, axes_of(mesh))
    startup.mark("data")

    saving = checkpoint.Checkpoints(folder.checkpoints, experiment.checkpoint) if folder else nullcontext()
    with folder or nullcontext(), saving as checkpoints, Saving(experiment.checkpoint, agree=greatest) as schedule:
        with arguments.reading_weights():
            start, state = starting_state(program, arguments.init, folder, checkpoints)
        if folder:
            from_first(partial(begin, folder, experiment, start, partial(companion_files, arguments.companions_of)))
        release()
        for line in (*arguments.notes, where):
            say(line)
        startup.mark("initialize")

        say("compiling the step ...")
        traced = program.step.trace(program.abstract, program.abstract_batch)
        lowered = program.step.lowered(traced)
        startup.mark("trace")
        compiled = lowered.compile()
        startup.mark("compile")
        compile_seconds = startup.seconds["trace"] + startup.seconds["compile"]
        rows = dataset.table(experiment.train) | notes(
            metrics.memory(program, traced, compiled), compile_seconds, program.compiler_options
        )
        show_start("jaxdist", experiment, axes_of(mesh), metrics.parameter_count(program.param_specs), rows)

        run = Run(
            program=program,
            dataset=dataset,
            folder=folder,
            checkpoints=checkpoints,
            schedule=schedule,
            compiled=compiled,
            start=start,
            startup=startup,
        )
        state, records = loop(run, state)
        steps = experiment.train.steps
        validation = validation_loss(run, state)
        run.wait()  # the last step may still be being written
        check_validation(steps, validation, run.newest)
        if checkpoints and schedule.final() and from_first(partial(checkpoints.saves.missing, steps)):
            run.keep(steps, state)
            run.wait()
        if schedule.stopping():
            raise run.interrupted(steps)

    held = metrics.memory(program, traced, compiled, state) | metrics.allocated(program)
    summary = metrics.summary(program, held, traced, compile_seconds, records)
    summary["data"] = dataset.fingerprint
    summary["validation_loss"] = validation
    summary["start_seconds"] = startup.seconds
    if checkpoints:
        summary["checkpoints"] = from_first(checkpoints.saves.summary)
    if folder and first() and (records or not folder.summarized):  # a finished run, resumed, keeps what it measured
        folder.summarize(summary)
    show_end(summary, records, folder.path if folder else None)
    if folder and checkpoints:
        from_first(partial(folder.check_kept, checkpoints.saves))


def described(path: Path) -> Source | None:
    """The model of weights of any kind; what converts is imported where both backends' reader cannot tell."""
    if found := source_of(path):
        return found
    from jaxdist.convert import weights

    return weights.described(path)


def companion_files(source: Path | None) -> CompanionFiles | None:
    """Tokenizer and other files beside the weights, or in the folder, that a run starts from."""
    if source is None:
        return None
    from jaxdist.convert.weights import lies_beside

    return lies_beside(source)


def starting_state(
    program: Program,
    init: Path | None,
    folder: RunFolder | None,
    checkpoints: checkpoint.Checkpoints | None,
) -> tuple[int, TrainState]:
    """(steps already done, state): from the run folder's newest checkpoint, from the weights `init`, or the seed."""
    step = from_first(partial(folder.resume_from, marker="parameters")) if folder else None
    if step is not None and checkpoints:
        say(f"resuming from step {step}")
        restored = checkpoints.restore(step, program.abstract)
        check_resumed(program, checkpoints.folder / str(step), step, restored)
        return step, program.placement.to_device_order(restored)
    if folder and folder.resume:
        say(f"no checkpoint in {folder.path} yet: starting at step 0")
    if init is None:
        return 0, program.initialize()
    from jaxdist.convert.weights import load_weights  # with all that converts: few runs need it
    from jaxdist.formats.sources import located

    weights = load_weights(program, from_first(partial(located, init, program.experiment.checkpoint.verify)))
    make = jax.jit(program.state_from, out_shardings=program.state_shardings, donate_argnums=0)
    return 0, make(weights)


@dataclass(frozen=True)
class Run:
    """A run in progress: its program and data, the folder and checkpoints it writes, if any, and when it saves."""

    program: Program
    dataset: Dataset
    folder: RunFolder | None
    checkpoints: checkpoint.Checkpoints | None
    schedule: Saving
    compiled: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    """The compiled step: (state, batch) -> (state, metrics)."""
    start: int
    """Steps done before."""
    startup: StartupTimer

    @property
    def experiment(self) -> Experiment:
        """The experiment of the program."""
        return self.program.experiment

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint."""
        return self.folder.newest if self.folder else None

    def batch(self, step: int) -> Batches:
        """The training batch of a step, on the devices."""
        train, placement = self.experiment.train, self.program.placement
        return placement.put(self.dataset.batch(step, train.batch, train.seed, rows=placement.rows))

    def keep(self, step: int, state: TrainState) -> None:
        """Start to save `step`. Raises TrainingError if its weights are not finite, since no run can continue from
        them."""
        if not self.checkpoints:
            return
        if bad := next((name for name, valid in self.program.all_valid(state.parameters).items() if not valid), None):
            self.wait()
            raise overflown(step, bad, self.newest)
        if self.folder and first():
            self.folder.synchronize()
        self.checkpoints.save(step, self.experiment, self.program.placement.to_checkpoint_order(state))

    def wait(self) -> None:
        """Wait for the save in progress. Raises TrainingError if it has failed."""
        if self.checkpoints:
            self.checkpoints.wait()

    def interrupted(self, step: int) -> Interrupted:
        """The exception that ends the run after `step`."""
        return self.schedule.interrupted(step, self.folder.checkpoints if self.folder else None)


def loop(run: Run, state: TrainState) -> tuple[TrainState, list[dict[str, Any]]]:
    """Train steps `run.start + 1` to `train.steps`. Returns the state after the last, and a record per step.

    Raises TrainingError if a step is not finite or a save fails, Interrupted if a signal ends the run.
    """
    experiment, folder, start = run.experiment, run.folder, run.start
    train, recorder = experiment.train, Recorder(run.program)
    rate = jax.jit(lambda step: learning_rate(experiment.optimizer, train.steps, step))
    tokens, targets = train.batch * experiment.per_row, Targets(run.dataset, train, start)
    records: list[dict[str, Any]] = []
    with progress(train.steps, start, experiment.model.input_kind) as show:
        batch = run.batch(start + 1) if start < train.steps else None
        for step in range(start + 1, train.steps + 1):
            if folder and batch and step in experiment.record.steps:
                tensors = recorder(state, batch)
                if first():
                    folder.record(step, tensors)
            began = time.perf_counter()
            state, values = run.compiled(state, batch)
            batch = run.batch(step + 1) if step < train.steps else None  # while the devices work
            loss, norm = float(values["loss"]), float(values["grad_norm"])
            seconds = time.perf_counter() - began
            run.startup.mark("first step")
            finite = math.isfinite(loss) and math.isfinite(norm)
            scale = float(values["loss_scale"]) if "loss_scale" in values else None
            if not finite and train.nonfinite == "stop" and not experiment.precision.recovers(scale):
                tensor = recorder.first_nonfinite(state, run.batch(step))
                run.wait()
                raise diverged(step, loss, norm, tensor, run.newest)
            record = {
                "step": step,
                "loss": loss,
                "grad_norm": norm,
                "learning_rate": float(rate(jnp.asarray(step))),
                "tokens": step * tokens,
                "step_seconds": seconds,
                "tokens_per_second": tokens / seconds,
            } | targets.of(step, seconds)
            if scale is not None:
                record["loss_scale"] = scale
            if scale is not None or train.skip or train.nonfinite == "skip":
                record["skipped"] = not finite or step in train.skip
            records.append(record)
            show(record)
            if folder and first():
                folder.log(record)
            due = run.schedule.due(step, failed=bool(run.checkpoints and run.checkpoints.failed()))
            if due is Action.FAIL:
                run.wait()  # raises the reason
            elif due:
                run.keep(step, state)
            if due is Action.STOP:
                run.wait()
                raise run.interrupted(step)
    return state, records


def validation_loss(run: Run, state: TrainState) -> float | None:
    """Mean loss in nats per token over at most `train.validation_batches` batches of one pass over the validation
    split; None without such a split, or if the run is ended before it is known."""
    train = run.experiment.train
    batches = min(train.validation_batches, run.dataset.passes("validation", train.batch))
    steps = takewhile(lambda _: not run.schedule.stopping(), range(1, batches + 1))
    found = pass_over(run.program, state.parameters, run.dataset, "validation", steps)
    return None if not batches or run.schedule.stopping() else found.mean


def notes(memory: dict[str, int], compile_seconds: float, options: dict[str, Any]) -> dict[str, str]:
    """The start-up table's rows about the compiled step."""
    held = {name: megabytes(size) for name, size in memory.items()}
    state = f"parameters {held['parameters']}, gradients {held['gradients']}, optimizer {held['optimizer_state']}"
    if memory["host"]:
        state += f", {held['host']} of them on the host"
    rows = {"memory per device": f"{state}, peak {held['peak']}", "compiled in": f"{compile_seconds:.1f} s"}
    row = "\n".join(f"{name}={value}" for name, value in options.items())
    return rows | ({"compiler options": row} if row else {})


if __name__ == "__main__":
    processes.run(main)
