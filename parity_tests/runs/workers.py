"""A process for each side, in which many of its commands are run: imports, traces and compiled programs stay."""

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from jaxdist.config import ConfigError, Experiment, TrainingError, exit_codes
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder
from parity_tests.runs.run import SIDES
from torch_ref.runtime import launch


def prepare(log: Path) -> None:
    """A new process and its own processes complain into `log`; what one run has built up, the next ones find."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    launch.start = Ranks().start
    inherit(Program, lambda program: (compiled_from(program.experiment), program.mesh))
    inherit(Recorder, lambda recorder: (compiled_from(recorder.program.experiment), recorder.program.mesh))


def inherit(cls: type[Any], key: Callable[[Any], Hashable]) -> None:
    """Let instances of `cls` begin with all that the first one of their `key` has computed and cached, from here on."""
    initialize, first = cls.__init__, dict[Hashable, Any]()

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        earlier = vars(first.setdefault(key(self), self))
        vars(self).update({name: earlier[name] for name in earlier.keys() - vars(self).keys()})

    cls.__init__ = __init__


def compiled_from(experiment: Experiment) -> str:
    """Fields that a compiled program depends on: all except the data and their order."""
    values = experiment.model_dump(exclude={"data": {"path", "fingerprint"}, "train": {"seed"}})
    return json.dumps(values, sort_keys=True, default=str)


RUNS = 16  # of one process group each: gloo's threads for it, three for each axis, outlive it


class Ranks:
    """Ranks of torch_ref, which stay for RUNS: torch works out how to distribute an operation once in a process."""

    def __init__(self) -> None:
        self.pipes: dict[int, list[Connection]] = {}  # by the number of ranks
        self.runs = Counter[int]()

    def start(self, plan: launch.Plan, function: Callable[[], None], forked: Callable[[], None] = lambda: None) -> None:
        """Run `function` in every rank of `plan`, and `forked` here, as `launch.start`; end where a rank fails."""
        if self.runs[plan.ranks] % RUNS == 0:
            self.pipes[plan.ranks] = self.fork(plan.ranks)
        self.runs[plan.ranks] += 1
        ranks = self.pipes[plan.ranks]
        with TemporaryDirectory() as folder:
            for pipe in ranks:
                pipe.send((str(Path(folder) / "store"), function))
            forked()
            running = set(ranks)
            while running:
                ended = running & set(wait(running))
                running -= ended
                if code := max(pipe.recv() for pipe in ended):
                    sys.exit(code)

    def fork(self, count: int) -> list[Connection]:
        """Connections to new ranks, which replace earlier ones."""
        for pipe in self.pipes.pop(count, ()):
            pipe.send(None)
        found = []
        for rank in range(count):
            ours, theirs = Pipe()
            get_context("fork").Process(target=serve, args=(theirs, rank, count), daemon=True).start()
            found.append(ours)
        return found


def serve(pipe: Connection, rank: int, count: int) -> None:
    """One rank: runs what it is sent, and answers with the exit code, until it is sent None."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    threading.Thread(target=launch.end_with_parent, daemon=True).start()
    for os.environ["TORCH_REF_STORE"], function in iter(pipe.recv, None):
        pipe.send(code_of(partial(exit_codes, function, launch.quiet())))


def work(module: str, arguments: Sequence[str]) -> int:
    """`python -m MODULE ...` within this process: its exit code."""
    package = find_spec(module)
    assert package is not None
    name = f"{module}.__main__" if package.submodule_search_locations else module
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return code_of(partial(exit_codes, partial(import_module(name).main, arguments)))


def code_of(command: Callable[[], None]) -> int:
    """The exit code with which `command` ends."""
    try:
        command()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


class Workers:
    """A process for each side, which runs its commands one after the other: imports and compiled programs stay."""

    def __init__(self, folder: Path, devices: int) -> None:
        """`folder`: for compiled programs, which a second start finds, and what the processes complain of."""
        self.folder = folder
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.before = dict(os.environ)
        self.pools: dict[str, ProcessPoolExecutor] = {}

    def __enter__(self) -> "Workers":
        os.environ |= self.environment  # to be inherited: a worker begins by importing this file, and with it jax
        for side in SIDES:
            self.pools[side] = ProcessPoolExecutor(1, get_context("spawn"), prepare, (self.folder / side,))
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self.pools.values():
            pool.shutdown(cancel_futures=True)
        for name in self.environment.keys() - self.before.keys():
            os.environ.pop(name, None)
        os.environ |= self.before

    def submit(self, module: str, arguments: Sequence[str]) -> Future[int]:
        """Run a command when those before it on its side have ended."""
        return self.pools[module.partition(".")[0]].submit(work, module, arguments)

    def wait(self, module: str, future: Future[int]) -> None:
        """Wait until a command has ended. Raises ConfigError or TrainingError where it failed."""
        try:
            code = future.result()
        except BrokenExecutor:
            code = -1
        if code:
            output = (self.folder / module.partition(".")[0]).read_text(encoding="utf-8").strip()[-2000:]
            raise (ConfigError if code == 2 else TrainingError)(f"python -m {module} ended with {code}:\n{output}")
