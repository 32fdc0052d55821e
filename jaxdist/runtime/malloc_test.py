"""Freed memory that glibc keeps, and for which threads."""

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
THERE = "json"  # an installed package
SMALL, LARGE = ({"parallel.mesh": "8x1", "model.layers": n} for n in (4, 64))


def faults(fields: Any, device: str, *plugins: str, platforms: str | None = None, keeps: bool = True) -> list[int]:
    """Page faults of the main thread and of another one."""
    line = FAULTS.format(fields=fields, device=device, plugins=plugins, platforms=platforms, keeps=keeps)
    done = subprocess.run([sys.executable, "-c", line], check=True, capture_output=True, text=True)
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
@pytest.mark.slow
def test_freed_memory_is_kept() -> None:
    """Later allocations reuse the pages, which the kernel would otherwise map and clear each time; for threads other
    than the main one only with large steps on CPUs alone."""
    all_of_it = min(faults(SMALL, "cpu", keeps=False))
    assert 4 * max(faults(LARGE, "auto")) < all_of_it
    main, other = faults(SMALL, "cpu")
    assert 4 * main < all_of_it < 2 * other


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
def test_freed_memory_is_kept_beside_another_platform() -> None:
    all_of_it = min(faults(SMALL, "cpu", keeps=False))
    for kept in faults(LARGE, "cpu", THERE), faults(LARGE, "auto", THERE, platforms="cpu"):
        assert 4 * max(kept) < all_of_it
    main, other = faults(LARGE, "auto", THERE)
    assert 4 * main < all_of_it < 2 * other
