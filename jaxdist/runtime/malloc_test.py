"""What glibc keeps of what is freed, and for which threads."""

import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.long

FAULTS = """
import resource
from concurrent.futures import ThreadPoolExecutor
import jax
from jaxdist.training.scratch import scratch
from jaxdist.command_line.arguments import load
from jaxdist.parallel.mesh import make_mesh
from jaxdist.runtime import malloc
jax.config.update("jax_platforms", {platforms!r})
malloc.PLUGINS = {plugins!r}
experiment = load("default", {fields!r})
malloc.share_arena(lambda: scratch(experiment), {device!r})
if {keeps!r}:
    malloc.keep_freed(make_mesh(experiment, "cpu")[0])
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


def faults(fields: Any, device: str, *plugins: str, platforms: str | None = None, keeps: bool = True) -> list[int]:
    """Pages that the kernel mapped: of the main thread and of another."""
    line = FAULTS.format(fields=fields, device=device, plugins=plugins, platforms=platforms, keeps=keeps)
    done = subprocess.run([sys.executable, "-c", line], check=True, capture_output=True, text=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
@pytest.mark.slow
def test_what_is_freed_is_kept() -> None:
    """What is written one after the other lies in the same pages, which else the kernel maps and clears each time; of
    large steps on CPUs alone also what other threads than the main one write."""
    all_of_it = min(faults(SMALL, "cpu", keeps=False))
    assert 4 * max(faults(LARGE, "auto")) < all_of_it
    main, other = faults(SMALL, "cpu")
    assert 4 * main < all_of_it < 2 * other


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
def test_what_is_freed_is_kept_beside_another_platform() -> None:
    all_of_it = min(faults(SMALL, "cpu", keeps=False))
    for kept in faults(LARGE, "cpu", THERE), faults(LARGE, "auto", THERE, platforms="cpu"):
        assert 4 * max(kept) < all_of_it
    main, other = faults(LARGE, "auto", THERE)
    assert 4 * main < all_of_it < 2 * other
