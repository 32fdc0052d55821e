"""Number of this process and of all processes, from the variables that launchers set.

| launcher | how many | which one | where the first one is |
|---|---|---|---|
| torchrun, Kubeflow's PyTorchJob | WORLD_SIZE | RANK | MASTER_ADDR and the port after MASTER_PORT, torchrun's own |
| whatever sets them, as a job of Kubernetes | JAX_NUM_PROCESSES | JAX_PROCESS_ID | JAX_COORDINATOR_ADDRESS |
| SLURM, by srun | SLURM_STEP_NUM_TASKS | SLURM_PROCID | JAX reads it from the list of nodes |
| Open MPI, by mpirun | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_RANK | JAX reads it from mpirun's address |
| an Indexed Job of Kubernetes | JAX asks the cluster, by the package `kubernetes` | | |

JAX_COORDINATOR_ADDRESS, as host:port, goes before what a launcher says, and so does JAX_COORDINATOR_PORT.
"""

import os
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec

from jaxdist.config import ConfigError, environment_integer
from jaxdist.runtime import compat

# Launcher -> its variables for the number of processes, this one's number, and that on its own machine.
VARIABLES = {
    "torchrun": ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "the environment": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_PROCESS_ID"),
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
ADDRESS, PORT = "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"
NO_RANK = -1  # of a process whose number makes no sense
LOCAL_SIZES = {"torchrun": "LOCAL_WORLD_SIZE", "Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE"}
SECONDS = 40  # rendezvous timeout


@dataclass(frozen=True)
class Launch:
    """This process among those that a launcher started."""

    launcher: str
    size: int
    rank: int
    local_rank: int
    coordinator: tuple[str, int]
    """Host and port at which the first process can be reached."""
    refusal: str = ""
    """Error in this process's launcher variables; other processes may not see it."""

    @property
    def address(self) -> str:
        host, port = self.coordinator
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def launched() -> Launch | None:
    """This process in its launcher's world; None without a launcher, or with one process.

    Where variables make no sense, it has a `refusal`. Raises ConfigError where such a process can reach no other.
    """
    known = (launcher for launcher, names in VARIABLES.items() if os.environ.keys() >= set(names[:2]))
    if launcher := next(known, None):
        try:
            size, rank, local_rank = _numbers(launcher)
        except ConfigError as error:
            return _refusing(launcher, error)
    elif os.environ.keys() >= {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} and find_spec("kubernetes"):
        launcher, name = "Kubernetes", "JOB_COMPLETION_INDEX"
        size, rank, local_rank = asked(launcher)[1], environment_integer(name), 0
        _check_below(name, rank, "the job's parallelism", size)
    else:
        return None
    return Launch(launcher, size, rank, local_rank, coordinator(launcher)) if size > 1 else None


def _numbers(launcher: str) -> tuple[int, int, int]:
    """The number of processes, that of this one, and that on its machine. Raises ConfigError."""
    names = VARIABLES[launcher]
    size, rank, local_rank = (environment_integer(name) for name in names)
    _check_below(names[1], rank, names[0], size)
    here = LOCAL_SIZES.get(launcher, "")
    here = here if here in os.environ else names[0]
    _check_below(names[2], local_rank, here, environment_integer(here))
    return size, rank, local_rank


def _check_below(name: str, number: int, size_name: str, size: int) -> None:
    if number >= size:
        raise ConfigError(f"{name} = {number}: must be below {size_name} = {size}; let the launcher set both")


def _refusing(launcher: str, error: ConfigError) -> Launch:
    """This process, of which variables make no sense, on its way to the first one, which informs the others. Raises
    `error` where it is alone or knows no way."""
    size, rank = (os.environ[name] for name in VARIABLES[launcher][:2])
    number = int(rank) if rank.isdecimal() else NO_RANK
    if size == "1":
        raise error
    try:
        return Launch(launcher, 0, number, 0, coordinator(launcher), str(error))
    except ConfigError:
        raise error from None


def coordinator(launcher: str) -> tuple[str, int]:
    """Host and port of the first process. Raises ConfigError."""
    name, address = ADDRESS, os.environ.get(ADDRESS)
    if not address and launcher == "torchrun":
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ConfigError(
                f"WORLD_SIZE = {os.environ['WORLD_SIZE']} without MASTER_ADDR and MASTER_PORT: processes cannot find "
                "each other; start them by torchrun, or unset WORLD_SIZE for a run of one process"
            )
        port = environment_integer(PORT, environment_integer("MASTER_PORT") + 1)
        name, address = f"MASTER_ADDR:{PORT}", f"{os.environ['MASTER_ADDR']}:{port}"
    elif not address:
        address = asked(launcher)[0]
    if not address:
        raise ConfigError(f"{launcher} does not say where process 0 is; set {ADDRESS}=HOST:PORT")
    host, _, text = address.rpartition(":")
    if not host or not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ConfigError(f"{name} = {address!r}: must be host:port, the port from 1 to 65535; set {ADDRESS}=HOST:PORT")
    return host.strip("[]"), int(text)


def asked(launcher: str) -> tuple[str | None, int]:
    """The coordinator's address and the number of processes, as JAX finds them. Raises ConfigError."""
    try:
        return compat.cluster(SECONDS)
    except Exception as error:  # of several kinds of clusters and their libraries
        reason = textwrap.shorten(str(error), 300)
        more = ", JAX_NUM_PROCESSES, JAX_PROCESS_ID" if launcher == "Kubernetes" else ""
        raise ConfigError(
            f"{launcher}: JAX cannot tell where process 0 is: {reason}; set {ADDRESS}=HOST:PORT{more}"
        ) from None


def patience() -> int:
    """Seconds within which all processes have to come."""
    return environment_integer("JAXDIST_JOIN_SECONDS", SECONDS)
