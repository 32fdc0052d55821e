"""Processes that join, that are missing, and that do not belong: threads in place of processes."""

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from jaxdist.config import ConfigError, TrainingError
from jaxdist.conftest import free_port
from jaxdist.runtime import rendezvous
from jaxdist.runtime.launcher import NO_RANK, Launch
from jaxdist.runtime.rendezvous import Present, _answer, _call

ARGUMENTS = ["--mesh", "2x4"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LATER", 1)
    monkeypatch.setattr(rendezvous, "HEARD", 0.1)


def meet(*others: Present, size: int, first: Present | None = None, seconds: float = 2) -> list[Any]:
    """Results of the first process, then of the others: hosts, or the error that ends them."""
    address = "localhost", free_port()

    def one(me: Present, function: Callable[..., Any]) -> Any:
        launch = Launch("torchrun", me.size, me.rank, 1, address)
        later = 0 if me.rank == 0 else rendezvous.LATER
        hosts, connections = function(launch, me, time.monotonic() + seconds + later)
        return hosts, {rank: connection.close() for rank, connection in connections.items()}.keys()

    with ThreadPoolExecutor() as pool:
        first = first or Present(0, size, "a", ARGUMENTS)
        running: list[Future[Any]] = [pool.submit(one, first, _call), *(pool.submit(one, o, _answer) for o in others)]
        return [future.exception() or future.result() for future in running]


def test_all_know_all_machines() -> None:
    first, *others = meet(*(Present(rank, 4, "b" if rank > 1 else "a", ARGUMENTS) for rank in (3, 1, 2)), size=4)
    assert first == (["a", "a", "b", "b"], {1, 2, 3})
    assert others == [(["a", "a", "b", "b"], {0})] * 3


@pytest.mark.parametrize(
    ("others", "kind", "message"),
    [
        ([Present(1, 4, "b", ARGUMENTS)], ConfigError, "process 1, on b, was started as one of 4 processes, the first"),
        ([Present(1, 3, "b", ARGUMENTS)] * 2, ConfigError, "two processes are number 1 of 3"),
        ([Present(1, 3, "b", ["--mesh", "8x1"])], ConfigError, "started with '8x1' where the first has '2x4'"),
        ([Present(1, 3, "b", ["--mesh"])], ConfigError, "started with 'nothing more' where the first has '2x4'"),
        ([Present(1, 3, "b", ARGUMENTS)], TrainingError, "2 of 3 processes came to localhost"),
    ],
)
def test_a_mistake_is_reported_by_the_first_process(others: list[Present], kind: type[Exception], message: str) -> None:
    first, *rest = meet(*others, size=3, seconds=0.5)
    assert isinstance(first, kind) and message in str(first)
    assert [type(other) for other in rest] == [SystemExit] * len(others)


REFUSAL = "LOCAL_RANK = 'many': must be a whole number; unset it, or let the launcher set it"


@pytest.mark.parametrize("number", [2, NO_RANK])
def test_a_process_with_inconsistent_variables_is_reported_by_the_first(number: int) -> None:
    others = Present(number, 0, "b", ARGUMENTS, REFUSAL), Present(1, 3, "b", ARGUMENTS)
    first, *rest = meet(*others, size=3, seconds=2)
    assert isinstance(first, ConfigError) and str(first) == f"on b: {REFUSAL}"
    assert [getattr(other, "code", None) for other in rest] == [2, 2]


@pytest.mark.long
def test_a_mistake_on_all_is_reported_once() -> None:
    refusing = [Present(rank, 0, "a", ARGUMENTS, REFUSAL) for rank in range(3)]
    first, *rest = meet(*refusing[1:], size=3, first=refusing[0], seconds=1)
    assert isinstance(first, ConfigError) and str(first) == REFUSAL
    assert [getattr(other, "code", None) for other in rest] == [2, 2]


def test_a_process_that_reaches_no_other_reports_its_variables_itself() -> None:
    launch = Launch("torchrun", 0, 1, 0, ("localhost", free_port()), REFUSAL)
    with pytest.raises(ConfigError) as error:
        _answer(launch, Present(1, 0, "b", ARGUMENTS, REFUSAL), time.monotonic() + 0.3)
    assert str(error.value) == REFUSAL


@pytest.mark.long
def test_strangers_are_passed_over() -> None:
    """A port scanner, or a program that took this port for another."""
    port = free_port()
    launch = Launch("torchrun", 2, 0, 0, ("localhost", port))

    def strange() -> None:
        for text in (b"GET / HTTP/1.0\r\n\r\n", b"{}\n", b""):
            with socket.create_connection(("localhost", port), timeout=2) as connection:
                connection.sendall(text)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(_call, launch, Present(0, 2, "a", []), time.monotonic() + 5)
        time.sleep(0.2)
        strange()
        other = Launch("torchrun", 2, 1, 1, ("localhost", port))
        hosts, connections = _answer(other, Present(1, 2, "b", []), time.monotonic() + 5)
        assert hosts == first.result()[0] == ["a", "b"]
        for connection in (*connections.values(), *first.result()[1].values()):
            connection.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}, at which the 2 processes meet: .* JAX_COORDINATOR_PORT"):
            _call(Launch("torchrun", 2, 0, 0, ("localhost", port)), Present(0, 2, "a", []), time.monotonic() + 1)


def test_the_first_of_another_machine_says_that_it_cannot_reach_the_address() -> None:
    launch = Launch("SLURM", 4, 2, 0, ("localhost", free_port()))
    with pytest.raises(
        TrainingError, match=r"process 2 of 4 could not reach the first one at localhost:\d+: .*refused"
    ):
        _answer(launch, Present(2, 4, "b", []), time.monotonic() + 0.3)


@pytest.mark.parametrize(
    ("sent", "ended"),
    [
        (rendezvous.DONE, []),
        (rendezvous.REPORTED, [(1, "")]),
        (b"", [(1, rendezvous.ENDED)]),
        (b"--", [(1, rendezvous.ENDED)]),
    ],
)
def test_an_end_that_was_not_announced_is_noticed(
    sent: bytes, ended: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    noticed = threading.Event()

    def end(_: Any, *what: Any) -> None:
        found.append(what)
        noticed.set()

    monkeypatch.setattr(rendezvous.Contact, "_end", end)
    ours, theirs = socket.socketpair()
    rendezvous.Contact(Launch("torchrun", 2, 0, 0, ("localhost", 1)), {1: ours}, speaks=True)
    theirs.sendall(sent)
    theirs.close()
    assert noticed.wait(0.5) == bool(ended)
    assert found == ended
    ours.close()


def test_processes_that_are_silent_for_too_long() -> None:
    """Time in which this process itself was stopped does not count."""
    silence = rendezvous.Silence([1, 2, 3], now=0.0)
    silence.left(3)
    for second in range(1, int(rendezvous.SILENT) + 2):
        assert silence.longest(float(second - 1)) is None
        assert silence.beats(float(second)) and not silence.beats(second + 0.5)
        silence.heard(1, float(second))
    assert silence.longest(second + 0.0) == 2
    assert silence.beats(second + 100.0) and silence.longest(second + 100.0) is None
