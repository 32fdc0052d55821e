"""How ranks that do not go on end the others."""

import subprocess
import sys

STOPPED = """
import os, signal, time
from jaxdist.config import exit_codes
from torch_ref import launch

launch.SILENT_SECONDS = 2

def rank():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(120)

exit_codes(lambda: launch.start(launch.Plan({"fsdp": 2}, "cpu"), rank))
"""


def run(script: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)


def test_a_rank_that_is_stopped_ends_the_others_with_one_line() -> None:
    done = run(STOPPED)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: rank 1 has been stopped for 2 s, as by SIGSTOP; the run ends, and --resume goes on from its newest "
        "checkpoint"
    ]


def test_a_rank_that_is_not_stopped_is_left_alone() -> None:
    """It sleeps for longer than one may be stopped."""
    assert run(STOPPED.replace("signal.SIGSTOP", "0").replace("120", "4")).returncode == 0
