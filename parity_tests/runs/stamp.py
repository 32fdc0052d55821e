"""Stamps of the code that measured a figure, kept in `parity_tests/validation/measured/`."""

import hashlib
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import SIDES

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxdist", "torch_ref", "parity_tests")
CARRYING = (
    *(f"jaxdist.{name}" for name in ("convert", "formats", "training.checkpoint", "runs.checkpoints")),
    "torch_ref.training.checkpoint",
)


@cache
def code() -> str:
    """The SHA-256, cut short, of the sources that make and judge a proof: figures of others are not of this code."""
    found = hashlib.sha256()
    for file in sources():
        text = file.read_bytes()
        found.update(f"{file.parent.name}/{file.name} {len(text)}\n".encode() + text)
    return found.hexdigest()[:12]


def sources() -> list[Path]:
    """The command that runs, and all of ours that it and the train commands import.

    But not what converts or keeps weights and states: that carries bits, which tests of its own compare.
    """
    for side in SIDES:
        import_module(TRAIN[side])
    ours = [m for name, m in sys.modules.items() if name.startswith(PACKAGES) and not name.startswith(CARRYING)]
    command = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    commands = {command} if any(command.is_relative_to(ROOT / package) for package in PACKAGES) else set()
    return sorted(commands | {Path(module.__file__) for module in ours if module.__file__})
