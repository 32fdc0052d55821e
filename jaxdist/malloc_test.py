"""What glibc keeps of what is freed, and for which threads."""

import subprocess
import sys
from typing import Any

import pytest

from jaxdist.config.arguments import load
from jaxdist.malloc import ARENA, scratch

FAULTS = """
import resource
from concurrent.futures import ThreadPoolExecutor
import jax
from jaxdist import malloc
from jaxdist.config.arguments import load
jax.config.update("jax_platforms", None)
malloc.PLUGINS = {plugins!r}
malloc.keep_freed(load("default", {fields!r}), {device!r})
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def write():
    began = faults()
    for _ in range(10):
        b"x" * 2**26  # 64 MiB, written and freed at once
    return faults() - began
with ThreadPoolExecutor(1) as other:
    print(write(), other.submit(write).result())
"""
THERE = "json"  # a package that is
SMALL, LARGE = ({"parallel.mesh": "8x1", "model.layers": n} for n in (4, 64))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
@pytest.mark.parametrize(
    ("fields", "device", "plugins", "kept"),
    [
        (LARGE, "auto", (), (True, True)),
        (LARGE, "cpu", (THERE,), (True, True)),
        (SMALL, "auto", (), (True, False)),
        (LARGE, "auto", (THERE,), (False, False)),
    ],
)
def test_what_is_freed_is_kept(fields: Any, device: str, plugins: tuple[str, ...], kept: tuple[bool, bool]) -> None:
    """What is written one after the other lies in the same pages, which else the kernel maps and clears each time, as
    on the hosts of GPUs; of large steps also what other threads than the main one write."""
    line = [sys.executable, "-c", FAULTS.format(fields=fields, device=device, plugins=plugins)]
    done = subprocess.run(line, check=True, capture_output=True, text=True).stdout.split()
    few = 2 * 2**26 // 4096  # pages: of ten times the same, fewer than of two different ones
    assert tuple(int(faults) < few for faults in done) == kept


def test_which_steps_are_large() -> None:
    """Those that need more than an arena holds, of several devices that are known."""
    found = [scratch(load("default", LARGE | {"parallel.mesh": mesh})) > ARENA for mesh in ("8x1", "1x1", "-1x1")]
    assert found == [True, False, False] and scratch(load("default", SMALL)) < ARENA
