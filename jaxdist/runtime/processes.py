"""Several processes as one run: they join by `jax.distributed`, agree on what one of them sees, and end together.

Without a launcher a command is one process, and nothing here has an effect.
"""

import atexit
import gc
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdist.config import ConfigError, exit_codes
from jaxdist.config.errors import code_of
from jaxdist.runs.display import console
from jaxdist.runtime.compat import key_value_store
from jaxdist.runtime.launcher import launched, patience
from jaxdist.runtime.rendezvous import DONE, HEARD, REPORTED, Contact, rendezvous

Result = TypeVar("Result")

# Seconds without a sign of life, after which JAX ends the other processes with a stack trace: `Contact` is earlier.
LOST = 100
TOGETHER = 5  # seconds within which an error that every process meets is met by all
FOREVER = 10**9  # milliseconds: whoever dies meanwhile is noticed by its lost signs of life


@dataclass(frozen=True)
class World:
    """The processes of this run."""

    size: int = 1
    rank: int = 0
    neighbours: tuple[int, ...] = (0,)
    """The ranks of those on this machine, itself among them."""


_world = World()
_agreements = count()


def world() -> World:
    """The processes of this run: one, unless it has joined others."""
    return _world


def first() -> bool:
    """Whether this process speaks and writes for all."""
    return _world.rank == 0


def run(main: Callable[[], None]) -> NoReturn:
    """Run a command as one process of those that a launcher started, if one did, and end it by `exit_codes`.

    Imported objects are left out of garbage collection, which is turned on if imports ran without it, and runs less
    often than by Python's default: hardly any of what a trace allocates is garbage.
    """
    gc.freeze()  # what is imported stays: the first collection while a step is traced would look at all of it
    gc.set_threshold(200_000)
    gc.enable()
    exit_codes(lambda: _one_of_many(main))


def _one_of_many(main: Callable[[], None]) -> None:
    if (launch := launched()) is None:
        main()
        return
    global _world
    neighbours, contact = rendezvous(launch, sys.argv[1:])
    _world = World(launch.size, launch.rank, tuple(neighbours))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it heeds SIGTERM, which `Saving` does
    jax.distributed.initialize(
        launch.address,
        launch.size,
        launch.rank,
        cluster_detection_method="deactivate",  # it would give a process one GPU, whatever the mesh
        initialization_timeout=patience(),
        heartbeat_timeout_seconds=LOST,
    )
    console.quiet = not first()
    with _silence_gloo(), _ending_together(contact):
        main()


@contextmanager
def _silence_gloo() -> Iterator[None]:
    """Within, file descriptor 1, where gloo prints, is /dev/null, and sys.stdout is the terminal."""
    before = sys.stdout
    before.flush()
    with (
        os.fdopen(os.dup(1), "w", buffering=1, encoding=before.encoding) as terminal,
        Path(os.devnull).open("w") as nowhere,
    ):
        os.dup2(nowhere.fileno(), 1)
        sys.stdout = terminal
        try:
            yield
        finally:
            sys.stdout = before
            terminal.flush()
            os.dup2(terminal.fileno(), 1)


@contextmanager
def _ending_together(contact: Contact) -> Iterator[None]:
    """The first process reports an error that all processes raise; a process reports an error that it raises alone."""
    try:
        yield
    except BaseException as error:
        if not _met("end", TOGETHER):
            atexit.register(_end_alone, contact, code_of(error))
            raise
        _leave(contact)
        if first() or isinstance(error, SystemExit):
            raise
        time.sleep(HEARD)
        sys.exit(code_of(error))
    _leave(contact)


def _leave(contact: Contact) -> None:
    contact.say(DONE)
    jax.distributed.shutdown()


def _end_alone(contact: Contact, code: int) -> None:
    """End a process, after it has printed why, without the others: JAX would wait for them, who wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    contact.say(REPORTED)
    time.sleep(HEARD)  # JAX ends the others with a stack trace when it loses the first
    os._exit(code)


def _met(name: str, seconds: float) -> bool:
    """Whether all processes come here within `seconds`."""
    try:
        key_value_store().wait_at_barrier(f"jaxdist/{name}", int(1000 * seconds))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def agreement() -> str:
    """A name for what all processes are to agree on; each asks for as many as the others, in the same order."""
    return f"jaxdist/{next(_agreements)}"


def from_first(function: Callable[[], Result], name: str | None = None) -> Result:
    """Return, or raise, on every process what `function` does on the first, the only one to call it, when all are here.

    `name`: of the `agreement`, where another thread than the main one comes to it.
    """
    if _world.size == 1:
        return function()
    key, client = name or agreement(), key_value_store()
    client.wait_at_barrier(key, FOREVER)
    if first():
        try:
            found: Any = function()
        except Exception as error:
            found = error
        client.key_value_set_bytes(key, pickle.dumps(found))
    else:
        found = pickle.loads(client.blocking_key_value_get_bytes(key, FOREVER))
    if isinstance(found, Exception):
        raise found
    result: Result = found
    return result


def together(function: Callable[[], None]) -> None:
    """Call `function` on every process; an error that one of them meets is raised on all, when all are here."""
    if _world.size == 1:
        function()
        return
    key, client = agreement(), key_value_store()
    try:
        function()
    except Exception as error:
        client.key_value_set_bytes(f"{key}/{_world.rank}", pickle.dumps(error))
    client.wait_at_barrier(key, FOREVER)
    for _, met in client.key_value_dir_get_bytes(key):
        raise pickle.loads(met)


def check_same(field: str, value: str) -> None:
    """Raises ConfigError on a process that has another `value` than the first."""
    if (theirs := from_first(lambda: value)) != value:
        raise ConfigError(
            f"{field} = {value!r} on process {_world.rank}, {theirs!r} on the first; give all machines the same"
        )


def greatest(value: int) -> int:
    """The greatest of all processes' values, on each of them."""
    if _world.size == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


def on_host(array: jax.Array) -> np.ndarray:
    """All of an array, whichever processes hold it, which must all call this."""
    if _world.size == 1 or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
