"""Variables of each launcher, and the result of reading them."""

import os

import pytest

from jaxdist.config import ConfigError
from jaxdist.runtime import compat, launcher
from jaxdist.runtime.launcher import Launch, launched

TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[003,007-009],login", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
PLAIN = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "jaxdist-0.jaxdist:29500"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables of a launcher that started these tests."""
    for name in set(os.environ) - {"PATH", "HOME"}:
        if name.startswith(("JAX_", "SLURM_", "OMPI_", "MASTER_", "KUBERNETES_")) or name in TORCHRUN | POD:
            monkeypatch.delenv(name)


def launch_under(monkeypatch: pytest.MonkeyPatch, *settings: dict[str, str]) -> Launch | None:
    for setting in settings:
        for name, value in setting.items():
            monkeypatch.setenv(name, value)
    return launched()


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        (TORCHRUN, Launch("torchrun", 4, 3, 1, ("node1", 29501))),  # torchrun itself uses the port
        (PLAIN, Launch("the environment", 2, 1, 0, ("jaxdist-0.jaxdist", 29500))),
        (SLURM, Launch("SLURM", 4, 2, 0, ("gpu003", 61441))),  # 61440, JAX's first port, + 4097 % 4096
        (OPEN_MPI, Launch("Open MPI", 4, 1, 1, ("10.96.0.1", 1314521088 // 4096 % 4096 + 61440))),
        (SLURM | TORCHRUN, Launch("torchrun", 4, 3, 1, ("node1", 29501))),  # torchrun, started by srun
        (TORCHRUN | {"JAX_COORDINATOR_PORT": "7"}, Launch("torchrun", 4, 3, 1, ("node1", 7))),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "[::1]:7"}, Launch("SLURM", 4, 2, 0, ("::1", 7))),
    ],
)
def test_launchers_are_known_by_their_variables(
    environment: dict[str, str], found: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch_under(monkeypatch, environment) == found


def test_jax_asks_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ("train-0.pods:55527", 4, 2, None)
    monkeypatch.setattr(compat, "cluster", lambda _: answer)
    assert launch_under(monkeypatch, POD) is None  # may be a run of its own, if JAX cannot ask
    monkeypatch.setattr(launcher, "find_spec", lambda _: True)
    assert launched() == Launch("Kubernetes", 4, 2, 0, ("train-0.pods", 55527))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
        {n: v for n, v in SLURM.items() if n != "SLURM_STEP_NUM_TASKS"},  # a script of sbatch, outside srun
    ],
)
def test_one_process_is_alone(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_under(monkeypatch, environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE = 'many': must be a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK = 4: must be below WORLD_SIZE = 4"),
        (TORCHRUN | {"RANK": "x", "MASTER_ADDR": ""}, "RANK = 'x': must be a whole number"),
        (TORCHRUN | {"RANK": "x", "WORLD_SIZE": "1"}, "RANK = 'x': must be a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK = 4: must be below WORLD_SIZE = 4; let the launcher set both"),
        (TORCHRUN | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK = 2: must be below LOCAL_WORLD_SIZE = 2"),
        (PLAIN | {"JAX_LOCAL_PROCESS_ID": "-1"}, "JAX_LOCAL_PROCESS_ID = '-1': must be a whole number"),
        (SLURM | {"SLURM_LOCALID": "many"}, "SLURM_LOCALID = 'many': must be a whole number"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, "WORLD_SIZE = 4 without MASTER_ADDR and MASTER_PORT"),
        ({n: v for n, v in PLAIN.items() if "ADDRESS" not in n}, "set JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        ({n: v for n, v in OPEN_MPI.items() if "uri" not in n}, "set JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        (PLAIN | {"JAX_COORDINATOR_ADDRESS": "node1"}, "JAX_COORDINATOR_ADDRESS = 'node1': must be host:port"),
        (PLAIN | {"JAX_COORDINATOR_ADDRESS": "node1:70000"}, "the port from 1 to 65535"),
    ],
)
def test_inconsistent_variables_are_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        launch = launch_under(monkeypatch, environment)
        refusal = launch.refusal if launch else ""  # reported by the first process
    except ConfigError as error:
        refusal = str(error)
    assert message in refusal
