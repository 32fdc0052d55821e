"""What a person sees: a start-up table, a progress bar, one closing line. Plain lines when no one is watching."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

console = Console(highlight=False)


def say(line: str) -> None:
    """One line on standard output."""
    console.print(line, markup=False, soft_wrap=True)


def show_table(rows: Mapping[str, str], title: str) -> None:
    """A two-column table."""
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def megabytes(count: float) -> str:
    """Bytes as MB or GB, decimal."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A bar over steps; call what it yields with each step's metrics. Off a terminal, a line every tenth of the run."""
    every = max(1, total // 10)
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=done, text="")

        def update(record: Mapping[str, Any]) -> None:
            text = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
            bar.update(task, completed=record["step"], text=text)
            if not console.is_terminal and (record["step"] % every == 0 or record["step"] == total):
                left = (total - record["step"]) * record["step_seconds"]
                say(f"step {record['step']}/{total}  {text}  {left:.0f} s left")

        yield update
