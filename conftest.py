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

gc.disable()  # collected modules and items stay alive; scanning them takes a third of the collection's time
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # empty in the first process, whose environment the workers inherit
if not WORKER:
    # several threads would spin while waiting for each other, on cores shared by all workers
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = "32"  # as in `make_mesh`
    # LLVM's optimizations double compile time, and XLA's fusion emitters double it again; the tests are about the
    # program before them. Parallel code generation takes a third more CPU time, and each core has a pytest worker.
    quick = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # later releases refuse the flag
    quick += ["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10.")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick])
    # Many tests compile the same program: within a session they share compiled programs.
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ["JAXDIST_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="jaxdist-compiled-")
COMPILED = Path(os.environ["JAXDIST_TESTS_COMPILED"])
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED / WORKER)  # one per worker: JAX does not write them atomically


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: tests wait for a quarter of their time, on files, sockets and processes."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exempt collected modules and items from later garbage collection."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    if not WORKER:
        shutil.rmtree(COMPILED, ignore_errors=True)


TRAINING_FIXTURES = {"mixed", "runs", "start", "train"}  # these run the command line
PROCESS_EVENTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
started: list[str] = []  # audit events of processes that the current test has started


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests `fast` that are neither `slow` nor `long` and use no fixture that trains. Start with the files with
    the most other tests, so that the longest are not left to a single worker at the end."""
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
    """Start a `multiprocessing` process; unlike others, spawning one raises no audit event."""
    sys.audit("os.posix_spawn")
    start(self)


BaseProcess.start = start_audited  # type: ignore[method-assign]
sys.addaudithook(note_process)
