"""Terminal output of a run: start-up table, progress bar, closing line. Plain lines if stdout is not a terminal."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

from jaxdist.config.errors import printable
from jaxdist.config.experiment import Experiment

console = Console(highlight=False)


def say(line: str) -> None:
    """One line on standard output."""
    console.print(printable(line), markup=False, soft_wrap=True)


@contextmanager
def aside(needed: bool = True) -> Iterator[None]:
    """Context manager: if `needed`, print to stderr and keep stdout for machine-readable output."""
    before, console.stderr = console.stderr, needed
    try:
        yield
    finally:
        console.stderr = before


def megabytes(count: float) -> str:
    """Bytes as MB or GB, decimal."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def microbatches(experiment: Experiment) -> str:
    """Number of tokens or images of a step, in words."""
    count = experiment.train.accumulation
    return f"{count} microbatch{'es' if count > 1 else ''}"


def perplexity(loss: float) -> float:
    """exp(loss), of a loss in nats per token; infinite where no float holds it."""
    return math.inf if loss > 709 else math.exp(loss)


def show_start(
    title: str, experiment: Experiment, axes: Mapping[str, int], parameters: int, notes: Mapping[str, str]
) -> None:
    """The start-up table: what is trained, how it is laid out, and a backend's own `notes`."""
    e, model, p = experiment, experiment.model, experiment.precision
    rows = {
        "model": f"{model.family}, {model.describe()}",
        "parameters": f"{parameters:,}",
        "mesh": " × ".join(f"{axis} {size}" for axis, size in axes.items()),
        "strategy": e.parallel.strategy,
        "precision": f"{p.policy} (weights {p.parameters}, compute {p.compute}, reduce {p.reduce})",
        "batch": f"{e.train.batch} {model.describe_rows(e.data.sequence)}, {microbatches(e)}",
    }
    table = Table("", Column(overflow="fold"), title=title, show_header=False, title_justify="left")
    for name, value in (rows | dict(notes)).items():
        table.add_row(name, value)
    console.print(table)


def show_end(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]], path: Path | None) -> None:
    """One closing line."""
    parts, takes = [f"done: loss {records[-1]['loss']:.4f}"] if records else ["done"], summary.get("counted", "tokens")
    if (validation := summary["validation_loss"]) is not None:
        parts.append(f"validation loss {validation:.4f}")
        parts += [f"perplexity {perplexity(validation):.2f}"] if takes == "tokens" else []
    if summary["tokens_per_second"]:
        parts.append(pace(summary, takes))
    parts.append(kept(summary.get("checkpoints"), path, records[-1]["step"] if records else 0))
    say(", ".join(parts))


def pace(rates: Mapping[str, Any], counted: str) -> str:
    """Tokens or images per second, of a step or a run; and how many have a target, where some have none."""
    every, targets = rates["tokens_per_second"], rates.get("target_tokens_per_second")
    without = f" ({targets:,.0f} with a target)" if targets and targets < every else ""
    return f"{every:,.0f} {counted}/s{without}"


def kept(checkpoints: Mapping[str, Any] | None, path: Path | None, step: int = 0) -> str:
    """Folder of a run, and missing checkpoints. `checkpoints`: as `Saves.summary` gives them; `step`: the last one that
    was made."""
    if path is None:
        return "nothing saved (--output DIR keeps a run)"
    if not checkpoints:
        return f"saved in {path}"
    newest, failed = checkpoints["newest"], [*map(int, checkpoints["failed"])]
    last = max(step, *failed, 0)
    why = f"; missing checkpoints: {len(failed)}, the last that of step {max(failed)}" if failed else ""
    if newest is None or newest < last:
        why = why or "; checkpoint.final = false leaves out the last"
    if newest is None:
        return f"no checkpoint in {path}{why}"
    return f"saved in {path}{f' up to step {newest} only' if newest < last else ''}{why}"


@contextmanager
def progress(total: int, done: int, counted: str = "tokens") -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar over steps; call what it yields with each step's metrics. Off a terminal, a line every tenth of the run."""
    every = max(1, total // 10)
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done, text="")

        def update(record: Mapping[str, Any]) -> None:
            text = f"loss {record['loss']:.4f}  {pace(record, counted)}"
            bar.update(task, completed=record["step"], text=text)
            if not console.is_terminal and (record["step"] % every == 0 or record["step"] == total):
                left = (total - record["step"]) * record["step_seconds"]
                say(f"step {record['step']}/{total}  {text}  {left:.0f} s left")

        yield update


@contextmanager
def transfer(total: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes; call what it yields with the number of those just done. Off a terminal, a line every tenth."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        done, shown, began = 0, 0, time.monotonic()

        def update(count: int) -> None:
            nonlocal done, shown
            done += count
            bar.update(task, completed=done)
            if not console.is_terminal and done * 10 // total > shown and total > 1e9:
                shown = done * 10 // total
                left = (time.monotonic() - began) * (total - done) / done
                say(f"{megabytes(done)} of {megabytes(total)}, {left:.0f} s left")

        yield update
