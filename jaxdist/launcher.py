"""Which process of how many this is, by what launchers set in the environment, and the roll call before they join.

| launcher | how many | which one | where the first one is |
|---|---|---|---|
| torchrun, Kubeflow's PyTorchJob | WORLD_SIZE | RANK | MASTER_ADDR and the port after MASTER_PORT, torchrun's own |
| whatever sets them, as a job of Kubernetes | JAX_NUM_PROCESSES | JAX_PROCESS_ID | JAX_COORDINATOR_ADDRESS |
| SLURM, by srun | SLURM_STEP_NUM_TASKS | SLURM_PROCID | JAX reads it from the list of nodes |
| Open MPI, by mpirun | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_RANK | JAX reads it from mpirun's address |
| an Indexed Job of Kubernetes | JAX asks the cluster, by the package `kubernetes` | | |

JAX_COORDINATOR_ADDRESS, as host:port, goes before what a launcher says, and so does JAX_COORDINATOR_PORT.
"""

import json
import os
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any, NamedTuple

from jax._src.clusters import ClusterEnv  # what `jax.distributed.initialize` asks; it has no public name

from jaxdist.config import ConfigError, TrainingError, whole_number
from jaxdist.config.errors import code_of

# Launcher -> its variables for the number of processes, this one's number, and that on its own machine.
VARIABLES = {
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "the environment": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_PROCESS_ID"),
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
SECONDS = 40  # for all to come
LATER = 5  # seconds after which the others give up: the first knows best who is missing
HEARD = 1.0  # seconds: launchers end all processes when one ends, so what is to be said is said before


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started."""

    launcher: str
    size: int
    rank: int
    local_rank: int
    coordinator: tuple[str, int]
    """Host and port at which the first process can be reached."""

    @property
    def address(self) -> str:
        return "{}:{}".format(*self.coordinator)


def launched() -> Launch | None:
    """What a launcher says of this process; None where there is none, or it started this one alone.

    Raises ConfigError for variables that make no sense.
    """
    told = (launcher for launcher, names in VARIABLES.items() if os.environ.keys() >= set(names[:2]))
    if launcher := next(told, None):
        names = VARIABLES[launcher]
        size, rank, local_rank = (whole_number(name) for name in names)
    elif os.environ.keys() >= {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} and find_spec("kubernetes"):
        launcher, names = "Kubernetes", ("the job's parallelism", "JOB_COMPLETION_INDEX", "")
        size, rank, local_rank = asked(launcher)[1], whole_number(names[1]), 0
    else:
        return None
    if rank >= size:
        raise ConfigError(f"{names[1]} = {rank}: must be below {names[0]} = {size}; let the launcher set both")
    return Launch(launcher, size, rank, local_rank, coordinator(launcher)) if size > 1 else None


def coordinator(launcher: str) -> tuple[str, int]:
    """Host and port of the first process. Raises ConfigError."""
    name = "JAX_COORDINATOR_ADDRESS"
    address = os.environ.get(name)
    if not address and launcher == "torchrun":
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ConfigError(
                f"WORLD_SIZE = {os.environ['WORLD_SIZE']} without MASTER_ADDR and MASTER_PORT: processes cannot find "
                "each other; start them by torchrun, or unset WORLD_SIZE for a run of one process"
            )
        port = whole_number("JAX_COORDINATOR_PORT", whole_number("MASTER_PORT") + 1)
        name, address = "MASTER_ADDR:JAX_COORDINATOR_PORT", f"{os.environ['MASTER_ADDR']}:{port}"
    elif not address:
        address = asked(launcher)[0]
    if not address:
        raise ConfigError(f"{launcher} does not say where process 0 is; give it by {name}=HOST:PORT")
    host, _, text = address.rpartition(":")
    if not host or not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ConfigError(f"{name} = {address!r}: must be host:port, the port from 1 to 65535")
    return host.strip("[]"), int(text)


def asked(launcher: str) -> tuple[Any, ...]:
    """(coordinator's address, number of processes), as JAX finds them. Raises ConfigError."""
    try:
        return ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, SECONDS)[:2]
    except Exception as error:  # of several kinds of clusters and their libraries
        reason = textwrap.shorten(str(error), 300)
        raise ConfigError(
            f"{launcher}: JAX cannot tell where process 0 is: {reason}; give it by JAX_COORDINATOR_ADDRESS=HOST:PORT"
        ) from None


def patience() -> int:
    """Seconds within which all processes have to come."""
    return whole_number("JAXDIST_JOIN_SECONDS", SECONDS)


class Present(NamedTuple):
    """What a process says at the roll call."""

    rank: int
    size: int
    host: str
    arguments: list[str]


def roll_call(launch: Launch, arguments: Sequence[str]) -> list[int]:
    """Wait until every process is at the coordinator's port; returns the ranks that are on this machine, itself among
    them.

    `jax.distributed` ends a process that waits in vain with a stack trace, and cannot say who is missing. This says it,
    once: the first process does, or on other machines, where it cannot be reached, their first one. Processes of
    another number, with the same rank or other arguments, are found out too. Raises ConfigError and TrainingError;
    ends processes that have nothing to say, with the same code.
    """
    me = Present(launch.rank, launch.size, socket.gethostname(), list(arguments))
    until = time.monotonic() + patience()
    hosts = _call(launch, me, until) if launch.rank == 0 else _answer(launch, me, until + LATER)
    return [rank for rank, host in enumerate(hosts) if host == me.host]


def _call(launch: Launch, me: Present, until: float) -> list[str]:
    """The first process: hear all, and tell each of them all hosts, or what is wrong."""
    came: dict[int, Present] = {0: me}
    wrong: ConfigError | TrainingError | None = None
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(launch))
        connections: list[socket.socket] = []
        while len(came) < launch.size and not wrong and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(LATER)
                other = Present(**json.loads(connection.makefile().readline()))
            except (OSError, ValueError, TypeError):  # too late, or none of ours
                continue
            connections.append(connection)
            wrong = mismatch(me, other, came)
            came[other.rank] = other
        if not wrong and (missing := [str(rank) for rank in range(launch.size) if rank not in came]):
            those = f"process {', '.join(missing)}" if len(missing) < 9 else f"{len(missing)} others"
            wrong = TrainingError(
                f"{len(came)} of {launch.size} processes came to {launch.address} within {patience()} s, {those} did "
                f"not; start as many as {launch.launcher} was told, let them reach this address, or give them longer "
                "by JAXDIST_JOIN_SECONDS"
            )
        hosts = [came[rank].host for rank in sorted(came)]
        line = json.dumps({"hosts": hosts, "code": code_of(wrong) if wrong else 0}) + "\n"
        for connection in connections:
            try:
                connection.sendall(line.encode())
                connection.recv(1)  # until the other side has closed, so that the port is free again
            except OSError:
                continue
    if wrong:
        raise wrong
    return hosts


def mismatch(me: Present, other: Present, came: dict[int, Present]) -> ConfigError | None:
    """What is wrong with a process that came, seen by the first."""
    who = f"process {other.rank}, on {other.host},"
    if other.size != me.size:
        return ConfigError(f"{who} was started as one of {other.size} processes, the first as one of {me.size}; start "
                           "all with the same number")  # fmt: skip
    if not 0 <= other.rank < me.size or other.rank in came:
        return ConfigError(f"two processes are number {other.rank} of {me.size}; give each machine a --node-rank of "
                           "its own")  # fmt: skip
    for theirs, ours in zip_longest(other.arguments, me.arguments, fillvalue="nothing more"):
        if theirs != ours:
            return ConfigError(f"{who} was started with {theirs!r} where the first has {ours!r}; give all the same")
    return None


def _listener(launch: Launch) -> socket.socket:
    port = launch.coordinator[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=launch.size, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=launch.size)
    except OSError as error:
        raise ConfigError(
            f"port {port}, at which the {launch.size} processes meet: {error.strerror}; give all of them a free one by "
            "JAX_COORDINATOR_PORT"
        ) from None


def _answer(launch: Launch, me: Present, until: float) -> list[str]:
    """Every other process: go to the first, and hear what it says."""
    while True:
        try:
            with socket.create_connection(launch.coordinator, timeout=max(0.1, until - time.monotonic())) as connection:
                connection.sendall(f"{json.dumps(me._asdict())}\n".encode())
                connection.settimeout(max(0.1, until - time.monotonic()))
                told = json.loads(connection.makefile().readline())
            break
        except (OSError, ValueError) as error:  # not there yet, a name not known yet, or another program at its port
            reason = error
        if time.monotonic() > until:
            if launch.local_rank:
                time.sleep(HEARD)
                sys.exit(1)
            raise TrainingError(
                f"process {launch.rank} of {launch.size} could not reach the first one at {launch.address}: {reason}; "
                f"see that it was started, and that {launch.launcher} names an address that other machines can reach"
            )
        time.sleep(0.1)
    if told["code"]:
        time.sleep(HEARD)
        sys.exit(told["code"])
    return told["hosts"]
