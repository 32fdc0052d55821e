"""What JAX's devices run on, seen from outside: it is settled once per process."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
from pathlib import Path
import jax
from jaxdist.config import Experiment
from jaxdist.mesh import make_mesh

mesh, _ = make_mesh(Experiment.parse({"parallel": {"mesh": "2x2"}}, source="test"), "cpu")
jax.block_until_ready(jax.jit(lambda: jax.numpy.ones(8), out_shardings=jax.NamedSharding(mesh, jax.P()))())
names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
print(sum("XLAEigen" in name for name in names))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by /proc")
@pytest.mark.parametrize(("given", "threads"), [({}, max(16, os.cpu_count() or 1)), ({"NPROC": "5"}, 5)])
def test_a_device_can_wait_in_several_collectives(given: dict[str, str], threads: int) -> None:
    """Or two devices, each in a collective that the other has yet to begin, would wait for ever."""
    unset = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=unset | given)
    assert done.stdout.split() == [str(threads)], done.stderr
