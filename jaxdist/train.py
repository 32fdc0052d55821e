"""Train an experiment: `python -m jaxdist.train --mesh 2x4`. `main` reads as the table of contents."""

import gc
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    gc.disable()  # until `run`: of what is imported nothing is garbage, and to look for it takes a tenth of a second

import jax
import jax.numpy as jnp

from jaxdist.command_line.arguments import parse
from jaxdist.config import check_validation, diverged, overflown
from jaxdist.config.errors import LESS
from jaxdist.data import Batches, Dataset, Targets, dataset_of, in_steps
from jaxdist.formats.described import Source, source_of
from jaxdist.formats.origin import Beside, begin
from jaxdist.parallel.mesh import axes_of, make_mesh
from jaxdist.parallel.rematerialization import ALL_OF_IT, in_memory
from jaxdist.runs.display import megabytes, progress, say, show_end, show_start
from jaxdist.runs.folder import RunFolder
from jaxdist.runs.signals import Action, Saving
from jaxdist.runtime.compilation_cache import keep_compiled
from jaxdist.runtime.malloc import keep_freed, share_arena
from jaxdist.runtime.processes import check_same, first, from_first, greatest, run
from jaxdist.runtime.startup import StartupTimer
from jaxdist.training import checkpoint, metrics
from jaxdist.training.finite import check_resumed
from jaxdist.training.optim import learning_rate
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder
from jaxdist.training.scratch import scratch
from jaxdist.training.step import TrainState
from jaxdist.training.validation import pass_over


@in_memory(f"{LESS}, or {ALL_OF_IT}")
def main(argv: Sequence[str] | None = None) -> None:
    """Mesh -> data -> shapes and shardings -> restore or initialize -> compile -> loop -> summary."""
    startup = StartupTimer()
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv, "jaxdist.train", "Train an experiment in JAX.", describe=described)
    experiment = in_steps(arguments.experiment)
    folder = RunFolder(arguments.output, experiment, arguments.resume) if arguments.output else None
    experiment = folder.experiment if folder else experiment

    startup.mark("config")
    keep_compiled()
    share_arena(partial(scratch, experiment), arguments.device)
    mesh, where = make_mesh(experiment, arguments.device)
    keep_freed(mesh)
    startup.mark("devices")
    dataset = dataset_of(experiment)
    experiment = experiment.on_data(dataset.fingerprint)
    check_same("data.fingerprint", dataset.fingerprint)
    program = Program(experiment, mesh)
    startup.mark("data")

    saving = checkpoint.Checkpoints(folder.checkpoints, experiment.checkpoint) if folder else nullcontext()
    with folder or nullcontext(), saving as checkpoints, Saving(experiment.checkpoint, agree=greatest) as schedule:
        with arguments.reading_weights():
            start, state = starting_state(program, arguments.init, folder, checkpoints)
        if folder:
            from_first(partial(begin, folder, experiment, start, partial(beside, arguments.companions_of)))
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
        show_start("jaxdist", experiment, axes_of(mesh), metrics.parameter_count(program.layouts), rows)

        state, records = loop(program, compiled, dataset, state, start, folder, checkpoints, schedule, startup)
        steps = experiment.train.steps
        validation = validation_loss(program, state, dataset, schedule)
        if checkpoints:
            checkpoints.wait()  # it may be the last step that is being written
        check_validation(steps, validation, folder.newest if folder else None)
        if checkpoints and schedule.final() and from_first(partial(checkpoints.saves.missing, steps)):
            keep(program, steps, state, checkpoints, folder)
            checkpoints.wait()
        if schedule.stopping():
            raise schedule.interrupted(steps, folder.checkpoints if folder else None)

    summary = metrics.summary(program, state, traced, compiled, compile_seconds, records)
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


def beside(source: Path | None) -> Beside | None:
    """What lies beside the weights or in the folder that a run begins with."""
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
        return step, program.to_device_order(restored)
    if folder and folder.resume:
        say(f"no checkpoint in {folder.path} yet: starting at step 0")
    if init is None:
        return 0, program.initialize()
    from jaxdist.convert.weights import load_weights  # with all that converts: few runs need it
    from jaxdist.formats.sources import located

    weights = load_weights(program, from_first(partial(located, init, program.experiment.checkpoint.verify)))
    make = jax.jit(program.state_from, out_shardings=program.state_shardings, donate_argnums=0)
    return 0, make(weights)


def loop(
    program: Program,
    compiled: Any,
    dataset: Dataset,
    state: TrainState,
    start: int,
    folder: RunFolder | None,
    checkpoints: checkpoint.Checkpoints | None,
    schedule: Saving,
    startup: StartupTimer,
) -> tuple[TrainState, list[dict[str, Any]]]:
    """Steps `start + 1` to `train.steps`: the state after the last, and a record per step.

    Raises TrainingError where a step cannot be taken, Interrupted where a signal ends the run.
    """
    experiment = program.experiment
    train = experiment.train
    rate = jax.jit(lambda step: learning_rate(experiment.optimizer, train.steps, step))
    tokens, targets = train.batch * experiment.per_row, Targets(dataset, train, start)

    def fetch(step: int) -> Batches:
        return program.place(dataset.batch(step, train.batch, train.seed, rows=program.rows))

    recorder = Recorder(program)
    records: list[dict[str, Any]] = []
    with progress(train.steps, start, experiment.model.input_kind) as show:
        batch = fetch(start + 1) if start < train.steps else None
        for step in range(start + 1, train.steps + 1):
            if folder and batch and step in experiment.record.steps:
                tensors = recorder(state, batch)
                if first():
                    folder.record(step, tensors)
            began = time.perf_counter()
            state, values = compiled(state, batch)
            batch = fetch(step + 1) if step < train.steps else None  # while the devices work
            loss, norm = float(values["loss"]), float(values["grad_norm"])
            seconds = time.perf_counter() - began
            startup.mark("first step")
            finite = math.isfinite(loss) and math.isfinite(norm)
            scale = float(values["loss_scale"]) if "loss_scale" in values else None
            if not finite and train.nonfinite == "stop" and not experiment.precision.recovers(scale):
                tensor = recorder.first_nonfinite(state, fetch(step))
                if checkpoints:
                    checkpoints.wait()
                raise diverged(step, loss, norm, tensor, folder.newest if folder else None)
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
            due = schedule.due(step, failed=bool(checkpoints and checkpoints.failed()))
            if checkpoints and due is Action.FAIL:
                checkpoints.wait()  # raises the reason
            elif due and checkpoints:
                keep(program, step, state, checkpoints, folder)
            if due is Action.STOP:
                if checkpoints:
                    checkpoints.wait()
                raise schedule.interrupted(step, folder.checkpoints if folder else None)
    return state, records


def keep(
    program: Program, step: int, state: TrainState, checkpoints: checkpoint.Checkpoints, folder: RunFolder | None
) -> None:
    """Begin to save `step`. Raises TrainingError where its weights are not finite: a run cannot go on from such."""
    if bad := next((name for name, sound in program.sound(state.parameters).items() if not sound), None):
        checkpoints.wait()
        raise overflown(step, bad, folder.newest if folder else None)
    if folder and first():
        folder.synchronize()
    checkpoints.save(step, program.experiment, program.to_checkpoint_order(state))


def validation_loss(program: Program, state: TrainState, dataset: Dataset, schedule: Saving) -> float | None:
    """Mean nats per token over at most `train.validation_batches` batches of one pass over the validation split; None
    where there is none, or where the run is to end before it is known."""
    train = program.experiment.train
    batches = min(train.validation_batches, dataset.passes("validation", train.batch))
    steps = takewhile(lambda _: not schedule.stopping(), range(1, batches + 1))
    found = pass_over(program, state.parameters, dataset, "validation", steps)
    return None if not batches or schedule.stopping() else found.mean


def notes(memory: dict[str, int], compile_seconds: float, options: dict[str, Any]) -> dict[str, str]:
    """The start-up table's rows about the compiled step."""
    held = {name: megabytes(size) for name, size in memory.items()}
    state = f"parameters {held['parameters']}, gradients {held['gradients']}, optimizer {held['optimizer_state']}"
    if memory["host"]:
        state += f", {held['host']} of them on the host"
    rows = {"memory per device": f"{state}, peak {held['peak']}", "compiled in": f"{compile_seconds:.1f} s"}
    told = "\n".join(f"{name}={value}" for name, value in options.items())
    return rows | ({"compiler options": told} if told else {})


if __name__ == "__main__":
    run(main)
