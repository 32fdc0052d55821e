"""Rendezvous of processes before they join `jax.distributed`: one line reports which are missing, and which have ended.

`jax.distributed` ends a process that waits in vain with a stack trace, and does not name the missing one. It notices a
process that died after a minute, in which the others wait within a step and answer no signal. So all connect to the
coordinator's port first, and keep that connection: the kernel closes it when a process ends, however it ends. A process
that is stopped (SIGSTOP), or whose machine is gone, keeps it open, and is noticed by its missing signs of life.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

from jaxdist.config import ConfigError, TrainingError
from jaxdist.config.errors import code_of
from jaxdist.runtime.launcher import ADDRESS, PORT, VARIABLES, Launch, patience

FEW = 16  # processes, where their number makes no sense
LATER = 5  # seconds after which the others give up: the first knows best who is missing
HEARD = 1.0  # seconds: launchers end all processes when one ends, so messages are printed before

DONE, REPORTED = b".", b"!"  # message of a process before it ends: with all others, or alone, with its reason reported
ALIVE = b"-"  # what it sends every BEAT seconds until then
BEAT = 1.0
SILENT = 40.0  # seconds without a sign of life, after which a process counts as stopped


class Present(NamedTuple):
    """A process's introduction."""

    rank: int
    size: int
    host: str
    arguments: list[str]
    refusal: str = ""


def rendezvous(launch: Launch, arguments: Sequence[str]) -> tuple[list[int], "Contact"]:
    """Wait until every process is there; returns the ranks on this machine, itself among them, and the connections.

    An error is reported once: by the first process, or, on machines that can't reach it, by their first process.
    Processes of another number, with the same rank or other arguments are found out too. Raises ConfigError and
    TrainingError; ends processes that have nothing to say, with the same code.
    """
    me = Present(launch.rank, launch.size, socket.gethostname(), list(arguments), launch.refusal)
    until = time.monotonic() + (LATER if me.refusal else patience())
    hosts, connections = _call(launch, me, until) if launch.rank == 0 else _answer(launch, me, until + LATER)
    here = [rank for rank, host in enumerate(hosts) if host == me.host]
    return here, Contact(launch, connections, speaks=launch.rank in (0, min(set(here) - {0}, default=0)))


def _call(launch: Launch, me: Present, until: float) -> tuple[list[str], dict[int, socket.socket]]:
    """The first process: receive from all, and send each of them all hosts, or an error."""
    came: dict[int, Present] = {0: me}
    connections: list[socket.socket] = []
    wrong: ConfigError | TrainingError | None = ConfigError(me.refusal) if me.refusal else None
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(launch))
        while (len(came) < launch.size or me.refusal) and (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                break
            connection.settimeout(LATER)
            try:
                other = Present(**_line(connection))
            except (OSError, ValueError, TypeError):  # none of ours
                connection.close()
                continue
            connections.append(connection)
            if not wrong and (wrong := mismatch(launch, me, other, came)):
                until = min(until, time.monotonic() + LATER)  # for the others to come and hear it
            came[other.rank] = other
        if not wrong and (missing := [str(rank) for rank in range(launch.size) if rank not in came]):
            those = f"process {', '.join(missing)}" if len(missing) < 9 else f"{len(missing)} others"
            wrong = TrainingError(
                f"{len(came)} of {launch.size} processes came to {launch.address} within {patience()} s, {those} did "
                f"not; start as many as {launch.launcher} expects, let them reach this address, or give them longer "
                "by JAXDIST_JOIN_SECONDS"
            )
        hosts = [came[rank].host for rank in sorted(came)]
        line = json.dumps({"hosts": hosts, "code": code_of(wrong) if wrong else 0}) + "\n"
        for connection in connections:
            with suppress(OSError):  # it ended meanwhile, which will be noticed
                connection.sendall(line.encode())
        if wrong:
            raise wrong
        stack.pop_all()
        listener.close()
    return hosts, dict(zip(list(came)[1:], connections, strict=True))


def mismatch(launch: Launch, me: Present, other: Present, came: Mapping[int, Present]) -> ConfigError | None:
    """The complaint of the first process, `me`, about a process that connected; None without one."""
    who = f"process {other.rank}, on {other.host},"
    if other.refusal:
        return ConfigError(f"on {other.host}: {other.refusal}")
    if other.size != me.size:
        return ConfigError(
            f"{who} was started as one of {other.size} processes, the first as one of {me.size}; give all the same "
            "number"
        )
    if not 0 <= other.rank < me.size or other.rank in came:
        _, number, _ = VARIABLES.get(launch.launcher, ("", "JOB_COMPLETION_INDEX", ""))
        each = "machine its own --node-rank" if launch.launcher == "torchrun" else f"process its own {number}"
        return ConfigError(f"two processes are number {other.rank} of {me.size}; give each {each}")
    for theirs, ours in zip_longest(other.arguments, me.arguments, fillvalue="nothing more"):
        if theirs != ours:
            return ConfigError(f"{who} was started with {theirs!r} where the first has {ours!r}; give all the same")
    return None


def _line(connection: socket.socket) -> Any:
    """One line of JSON, byte by byte: what comes after it is not for this. Raises OSError and ValueError."""
    read = bytearray()
    while not read.endswith(b"\n"):
        if not (byte := connection.recv(1)):
            raise ConnectionError("it closed the connection")
        read += byte
    return json.loads(read)


def _listener(launch: Launch) -> socket.socket:
    port = launch.coordinator[1]
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=launch.size or FEW, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=launch.size or FEW)
    except OSError as error:
        raise ConfigError(
            f"port {port}, at which the {launch.size} processes meet: {error.strerror}; give all of them a free one by "
            f"{f'{ADDRESS}=HOST:PORT' if os.environ.get(ADDRESS) else f'{PORT}=PORT'}"
        ) from None


def _answer(launch: Launch, me: Present, until: float) -> tuple[list[str], dict[int, socket.socket]]:
    """Processes other than the first: connect to it and read its reply."""
    while True:
        try:
            with ExitStack() as stack:
                left = max(0.1, until - time.monotonic())
                connection = stack.enter_context(socket.create_connection(launch.coordinator, timeout=left))
                connection.sendall(f"{json.dumps(me._asdict())}\n".encode())
                if code := (answer := _line(connection))["code"]:
                    _leave(code)
                stack.pop_all()
                return answer["hosts"], {0: connection}
        except (OSError, ValueError) as error:  # not there yet, a name not known yet, or another program at its port
            reason = error
        if time.monotonic() > until:
            if me.refusal:
                raise ConfigError(me.refusal)
            if launch.local_rank:
                _leave(1)
            raise TrainingError(
                f"process {launch.rank} of {launch.size} could not reach the first one at {launch.address}: {reason}; "
                f"see that it was started, and that {launch.launcher} names an address that other machines can reach"
            )
        time.sleep(0.1)


def _leave(code: int) -> NoReturn:
    """End a process without a message, after another has printed it."""
    time.sleep(HEARD)
    sys.exit(code)


ENDED = "ended before the others, which stop; see its own output or that of its launcher"
STOPPED = (
    f"has given no sign of life for {SILENT:.0f} s and the others stop: it was stopped, as by SIGSTOP, or its machine "
    "cannot be reached"
)


class Silence:
    """Since when each of the other processes has been silent, in seconds of a clock that is given with each call.

    A process that stood still itself has heard nobody meanwhile, and begins to count anew.
    """

    def __init__(self, ranks: Iterable[int], now: float) -> None:
        self.last = dict.fromkeys(ranks, now)
        self.beat = now

    def heard(self, rank: int, now: float) -> None:
        self.last[rank] = now

    def left(self, rank: int) -> None:
        """Mark a process that has ended, and speaks no more."""
        del self.last[rank]

    def beats(self, now: float) -> bool:
        """Whether it is time for a sign of life of one's own."""
        if now - self.beat < BEAT:
            return False
        if now - self.beat > SILENT / 3:
            self.last = dict.fromkeys(self.last, now)
        self.beat = now
        return True

    def longest(self, now: float) -> int | None:
        """A process that has been silent for too long."""
        return next((rank for rank, last in self.last.items() if now - last > SILENT), None)


class Contact:
    """The connections that processes keep: the first one's to all others, theirs to it.

    A thread waits for one to break, which ends this process as well, with code 1. The first prints which one
    ended, and the others that it did; where it is the first itself, one process of each machine `speaks`.
    """

    def __init__(self, launch: Launch, connections: Mapping[int, socket.socket], speaks: bool) -> None:
        self.launch, self.connections, self.speaks = launch, connections, speaks
        self.over = False
        for connection in connections.values():
            connection.settimeout(None)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        silence = Silence(self.connections, time.monotonic())
        with selectors.DefaultSelector() as selector:
            for rank, connection in self.connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select(BEAT):
                    try:
                        received = key.fileobj.recv(1)  # type: ignore[union-attr]
                    except OSError:
                        received = b""
                    if received == ALIVE:
                        silence.heard(key.data, time.monotonic())
                        continue
                    if received != DONE and not self.over:
                        self._end(key.data, "" if received == REPORTED else ENDED)
                    selector.unregister(key.fileobj)
                    silence.left(key.data)
                if silence.beats(time.monotonic()) and not self.over:
                    self._send(ALIVE)
                    if (silent := silence.longest(time.monotonic())) is not None:
                        self._end(silent, STOPPED)

    def _end(self, rank: int, why: str) -> None:
        """End this process, as that of `rank` has ended; `why` is printed, unless that process has done so."""
        if why and self.speaks:
            print(
                f"error: process {rank} of {self.launch.size} {why}. --resume continues from the newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        self.say(REPORTED)
        if self.launch.rank == 0:
            time.sleep(HEARD)  # JAX ends the others with a stack trace when it loses the first
        os._exit(1)

    def say(self, what: bytes) -> None:
        """Tell the others that this process ends: DONE or REPORTED."""
        self.over = True
        self._send(what)

    def _send(self, what: bytes) -> None:
        for connection in self.connections.values():
            with suppress(OSError):
                connection.sendall(what)
