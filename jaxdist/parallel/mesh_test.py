"""Devices and threads that JAX uses, seen from outside: they are settled once per process."""

import os
import subprocess
import sys

import jax
import pytest

from jaxdist.config import ConfigError
from jaxdist.conftest import tiny
from jaxdist.parallel import mesh
from jaxdist.runtime import processes
from jaxdist.runtime.processes import World

SCRIPT = """
import os
from pathlib import Path
import jax
from jaxdist.config import Experiment
from jaxdist.parallel.mesh import make_mesh

mesh, _ = make_mesh(Experiment.parse({"parallel": {"mesh": "2x2"}}, source="test"), "cpu")
jax.block_until_ready(jax.jit(lambda: jax.numpy.ones(8), out_shardings=jax.NamedSharding(mesh, jax.P()))())
names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by /proc")
@pytest.mark.parametrize(("given", "threads"), [({}, max(16, os.cpu_count() or 1)), ({"NPROC": "5"}, 5)])
def test_a_device_can_wait_in_several_collectives(given: dict[str, str], threads: int) -> None:
    """Otherwise two devices, each in a collective that the other has not begun, would wait for ever."""
    unset = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=unset | given)
    assert done.stdout.split() == [str(threads)], done.stderr


def test_a_program_that_does_not_join_the_processes_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would train alone, on all devices, and overwrite the others' files."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match="WORLD_SIZE = 8"):
        mesh.make_mesh(tiny(), "cpu")


@pytest.mark.parametrize(
    ("neighbours", "given", "own"),
    [
        ((2,), None, "all"),  # one process per machine
        ((0, 1, 2, 3), None, "4,5"),  # two GPUs each; this process is the third
        ((2, 3), "4,5,6,7", "0,1"),  # indices count the visible ones
        ((0, 1, 2, 3), "6,7", "all"),  # the launcher has assigned them
    ],
)
def test_processes_of_a_machine_share_its_gpus(
    neighbours: tuple[int, ...], given: str | None, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_world", World(4, 2, neighbours))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert mesh.own_gpus(2) == own


def test_each_process_gives_its_first_devices() -> None:
    devices = jax.devices()
    assert mesh.shares(devices, 2) == devices[:2]
    assert len(mesh.shares(devices, 99)) == len(devices)
