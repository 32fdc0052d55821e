"""Setup of all tests: the environment, compiled programs, and the mark `fast`.

Tests of one process share 8 virtual CPU devices; what needs its own devices runs the command line.
"""

import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

gc.disable()  # what the collection imports and makes stays: to look through it takes a third of its time
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # empty in the first process, whose environment workers inherit
if not WORKER:
    os.environ["OMP_NUM_THREADS"] = "1"  # more would wait for each other by spinning, on cores that all workers share
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = "32"  # as `make_mesh` has it
    # LLVM's optimizations double the time to compile, and XLA's own code for fusions doubles it again; what is tested
    # here is the program that they are given.
    quick = ["--xla_backend_optimization_level=0"]
    quick += ["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10.")  # later ones refuse it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick])
    # Many tests compile the same program; what one of them compiled serves the others, and only this session.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAXDIST_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="jaxdist-compiled-")
COMPILED = Path(os.environ["JAXDIST_TESTS_COMPILED"])
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED / WORKER)  # each its own: JAX does not write them atomically


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what the collection has made out of all that is looked through for garbage later."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    if not WORKER:
        shutil.rmtree(COMPILED, ignore_errors=True)


TRAINING_FIXTURES = {"mixed", "runs", "start", "train"}  # they run the command line
PROCESS_EVENTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
started: list[str] = []  # audit events of processes that the current test has started


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests `fast` that are neither `slow` nor `long` and use no fixture that trains. Begin with the files that
    have the most other tests: what takes longest must not be left for last, to one worker alone."""
    others: Counter[Path] = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & {"slow", "long"} and TRAINING_FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("fast")
        else:
            others[item.path] += "slow" not in marks
    items.sort(key=lambda item: -others[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget processes that the collection started."""
    started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Under `pytest -m fast`, fail a test that started a process."""
    try:
        return (yield)
    finally:
        events = started.copy()
        started.clear()
        if events and item.config.getoption("markexpr") == "fast":
            pytest.fail(f"{item.nodeid} starts a process ({events[0]}); mark it `long`", pytrace=False)


def note_process(event: str, _: object) -> None:
    if event in PROCESS_EVENTS:
        started.append(event)


def start_audited(self: BaseProcess, start=BaseProcess.start) -> None:  # type: ignore[no-untyped-def]
    """Start a process of `multiprocessing`, which raises no audit event when it spawns one."""
    sys.audit("os.posix_spawn")
    start(self)


BaseProcess.start = start_audited  # type: ignore[method-assign]
sys.addaudithook(note_process)
