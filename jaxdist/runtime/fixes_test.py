"""Following the fixes in messages on launchers and processes literally lets the processes start."""

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.fixes_test import advice
from jaxdist.conftest import free_port
from jaxdist.parallel import mesh
from jaxdist.runtime import compat, launcher, processes, rendezvous
from jaxdist.runtime.launcher import ADDRESS, PORT, launched, patience
from jaxdist.runtime.launcher_test import OPEN_MPI, PLAIN, POD, SLURM, TORCHRUN, bare
from jaxdist.runtime.processes import World
from jaxdist.runtime.rendezvous import Present, _call
from jaxdist.runtime.rendezvous_test import ARGUMENTS, hasty, meet

__all__ = ["bare", "hasty"]  # fixtures

Environment = dict[str, str]
OWN = dict.fromkeys((ADDRESS, PORT), "")
SHARED = Path(launcher.__file__).parents[1]
ROUNDS = 4  # fixes that may be needed one after another; more mean a circle

ENVIRONMENTS: list[Environment] = [
    *(TORCHRUN | {name: "many"} for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", PORT)),
    TORCHRUN | {"RANK": "4"},
    TORCHRUN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
    TORCHRUN | {"LOCAL_RANK": "4"},
    PLAIN | {"JAX_LOCAL_PROCESS_ID": "-1"},
    SLURM | {"SLURM_LOCALID": "many"},
    OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"},
    {"WORLD_SIZE": "4", "RANK": "0"},
    TORCHRUN | {"MASTER_ADDR": ""},
    TORCHRUN | {"MASTER_PORT": "65535"},
    TORCHRUN | {ADDRESS: "node1"},
    PLAIN | {ADDRESS: ""},
    PLAIN | {ADDRESS: "node1:70000"},
    PLAIN | {"JAX_PROCESS_ID": "2"},
    SLURM | {PORT: "many"},
    SLURM | {"SLURM_JOB_ID": ""},
    OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": ""},
    OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;"},
    POD | {"JOB_COMPLETION_INDEX": "4", ADDRESS: "train-0.pods:55527"},
    POD,
]


def ways(message: str) -> Iterator[Environment]:
    """Environment set by each fix of a message; a variable to unset is empty."""
    problem, _, fix = message.rpartition("; ")
    subject = problem.partition(" = ")[0]
    for way in fix.split(", or "):
        if found := re.search(r"unset (\S+)", way):
            yield {subject if found[1] == "it" else found[1]: ""}
        elif found := re.search(r"(?:set|by) (\w+)=(HOST:)?PORT(?:, (\w+), (\w+))?$", way):
            yield {found[1]: f"{'localhost:' if found[2] else ''}{free_port()}"} | (
                {found[3]: "4", found[4]: "3"} if found[3] else {}
            )
        elif "let the launcher set" in way:
            yield dict.fromkeys(re.findall(r"\b[A-Z_]{4,}\b", problem) if "both" in way else [subject], "")
        elif way.endswith("start them by torchrun"):
            yield TORCHRUN


def refusal(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> str:
    """Message that a process gets in an environment (empty variables are not set); empty if it starts."""
    with monkeypatch.context() as here:
        for name, value in environment.items():
            here.setenv(name, value) if value else here.delenv(name, raising=False)
        try:
            launch = launched()
            patience()
            return launch.refusal if launch else ""
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("environment", [*ENVIRONMENTS, {"JAXDIST_JOIN_SECONDS": "long"}], ids=str)
def test_wrong_variables_of_a_launcher(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fix leads to a next message, and finally to a process that starts."""

    def cluster(_: int) -> tuple[str | None, int]:
        raise RuntimeError("no such cluster")

    if "JOB_COMPLETION_INDEX" in environment:
        monkeypatch.setattr(launcher, "find_spec", lambda _: True)
        answer = (environment.get(ADDRESS), 4)
        monkeypatch.setattr(compat, "cluster", (lambda _: answer) if ADDRESS in environment else cluster)
    monkeypatch.setattr(launcher, "SECONDS", 1)
    message = refusal(environment, monkeypatch)
    firsts = list(ways(message))
    assert firsts, f"no fix that can be followed: {message!r}"
    for first in firsts:
        current, messages = environment | first, [message]
        while after := refusal(current, monkeypatch):
            assert after not in messages and len(messages) < ROUNDS, f"following {first} led to the same: {after}"
            current, messages = current | next(ways(after)), [*messages, after]


Ranks = list[Present]


def ranks(*numbers: int, size: int = 3, arguments: list[str] = ARGUMENTS) -> Ranks:
    return [Present(number, size, "b", arguments) for number in numbers]


@pytest.mark.parametrize(
    ("wrong", "fix", "right"),
    [
        (ranks(1, 2, size=4), "give all the same number", ranks(1, 2)),
        (ranks(1, 1), "give each machine its own --node-rank", ranks(1, 2)),
        (ranks(1, 2, arguments=["--mesh", "8x1"]), "give all the same", ranks(1, 2)),
        (ranks(1), "start as many as torchrun expects", ranks(1, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_processes_that_do_not_meet(wrong: Ranks, fix: str, right: Ranks) -> None:
    first, *_ = meet(*wrong, size=3, seconds=0.5)
    assert fix in str(first)
    first, *others = meet(*right, size=3)
    assert first[0] == ["a", "b", "b"] == others[0][0]


@pytest.mark.parametrize("name", ["SLURM", "Open MPI", "the environment", "Kubernetes"])
def test_the_number_of_a_process_is_that_of_its_launcher(name: str) -> None:
    """Two processes have the same number: the message names the launcher's own variable."""
    own = launcher.VARIABLES.get(name, ("", "JOB_COMPLETION_INDEX"))[1]
    launch = launcher.Launch(name, 3, 0, 0, ("localhost", 1))
    (first,), (other,) = ranks(0), ranks(1)
    wrong = rendezvous.mismatch(launch, first, other, {0: first, 1: other})
    assert str(wrong).endswith(f"; give each process its own {own}")


@pytest.mark.parametrize(
    "environment",
    [TORCHRUN, PLAIN, SLURM, OPEN_MPI, TORCHRUN | {ADDRESS: "localhost:1"}],
    ids=["torchrun", "plain", "slurm", "mpi", "address"],
)
def test_a_port_that_is_taken_is_changed_for_all(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fix names the variable that sets it: an address's port, if there is one."""
    with socket.create_server(("", 0)) as taken, monkeypatch.context() as here:
        port = str(taken.getsockname()[1])
        chosen = {ADDRESS: f"localhost:{port}"} if ADDRESS in environment else {PORT: port}
        for name, value in (environment | chosen).items():
            here.setenv(name, value)
        launch = launched()
        assert launch and launch.coordinator[1] == int(port)
        with pytest.raises(ConfigError) as error:
            _call(launch, Present(0, launch.size, "a", []), 0)
        assert launch.size > 1
        (way,) = ways(str(error.value))
        for name, value in way.items():
            here.setenv(name, value)
        after = launched()
        assert after and str(after.coordinator[1]) == next(iter(way.values())).rpartition(":")[2]
        rendezvous._listener(after).close()


def test_longer_patience_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = meet(*ranks(1), size=3, seconds=0.2)
    assert str(first).endswith("or give them longer by JAXDIST_JOIN_SECONDS")
    assert patience() == launcher.SECONDS
    monkeypatch.setenv("JAXDIST_JOIN_SECONDS", "7")
    assert patience() == 7


class Gpu:
    platform, device_kind, process_index = "gpu", "GPU", 0


@pytest.fixture
def mesh_or_message(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Message of `make_mesh` for a mesh, processes and GPUs; empty if the mesh is made."""

    def of(parallel: Mapping[str, str], count: int, gpus: int) -> str:
        devices = [Gpu()] * gpus or jax.devices("cpu")
        monkeypatch.setattr(mesh, "world", lambda: World(count, 0, tuple(range(count))))
        monkeypatch.setattr(jax, "devices", lambda *_: devices)
        monkeypatch.setattr(jax.config, "update", lambda *_: None)  # would affect the whole process
        monkeypatch.setattr(mesh, "shares", lambda found, size: found[: size * count])
        monkeypatch.setattr(mesh, "lay_out", lambda axes, taken: None)
        monkeypatch.setattr(mesh, "describe", lambda found: "")
        try:
            mesh.make_mesh(
                Experiment.parse({"parallel": parallel, "train": {"batch": 24}}, source="here"),
                "gpu" if gpus else "cpu",
            )
        except ConfigError as error:
            return str(error)
        return ""

    return of


@pytest.mark.parametrize("axis", ["fsdp", "data"])
def test_a_mesh_that_the_devices_cannot_form(axis: str, mesh_or_message: Callable[..., str]) -> None:
    settings = {"mesh": f"{axis}=8", "strategy": "fsdp" if axis == "fsdp" else "ddp"}
    message = mesh_or_message(settings, count=3, gpus=0)
    assert message.endswith("cannot share equally; start 1")
    assert not mesh_or_message(settings, count=1, gpus=0)
    message = mesh_or_message(settings, count=1, gpus=4)
    assert message.endswith(f"there are 4 GPUs; use --mesh {axis}=4 or --device cpu")
    assert not mesh_or_message(settings | {"mesh": f"{axis}=4"}, count=1, gpus=4)


def test_every_fix_is_followed() -> None:
    """Each fix in the source is among those that the tests above follow."""
    known = [
        *("give all the same number", "give each machine its own --node-rank", "give all the same"),
        *("give all machines the same", "let the launcher set both", f"give all of them a free one by {PORT}=PORT"),
        *("start them by torchrun, or unset WORLD_SIZE for a run of one process", f"set {ADDRESS}=HOST:PORT"),
    ]
    files = [Path(module.__file__ or "") for module in (launcher, rendezvous, processes)]
    assert not [p for p in advice(*files) if not any(re.fullmatch(p, fix) for fix in known)]
