"""Estimated temporary memory of a step."""

import pytest

from jaxdist.command_line.arguments import load
from jaxdist.runtime.malloc import HEAP
from jaxdist.runtime.processes import World
from jaxdist.training import scratch

pytestmark = pytest.mark.long

SMALL, LARGE = ({"parallel.mesh": "8x1", "model.layers": n} for n in (4, 64))


def test_which_steps_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that exceed a malloc heap, on several devices known to this process."""
    found = [
        scratch.scratch(load("default", LARGE | {"parallel.mesh": mesh})) > HEAP for mesh in ("8x1", "1x1", "-1x1")
    ]
    assert found == [True, False, False] and scratch.scratch(load("default", SMALL)) < HEAP
    monkeypatch.setattr(scratch, "world", lambda: World(8))
    assert scratch.scratch(load("default", LARGE)) == 0
