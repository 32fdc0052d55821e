"""Ranks that cannot continue end the others."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jaxdist.config import ConfigError
from torch_ref.runtime import launch

pytestmark = pytest.mark.long

STOPPED = """
import os, signal, time
from jaxdist.config import exit_codes
from torch_ref.runtime import launch

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
        "error: rank 1 has been stopped for 2 s, as by SIGSTOP; the run ends, and --resume continues from its newest "
        "checkpoint"
    ]


@pytest.mark.slow
def test_a_rank_that_is_not_stopped_is_left_alone() -> None:
    """A rank may sleep longer than the limit for stopped ranks."""
    assert run(STOPPED.replace("signal.SIGSTOP", "0").replace("120", "4")).returncode == 0


JOINED = """
import os, signal, time
import torch
from torch import distributed
from jaxdist.config import exit_codes
from torch_ref.runtime import launch

launch.SILENT_SECONDS = 2

def main():
    with launch.process_group(launch.Plan({"fsdp": 3}, "cpu")):
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSTOP)
        distributed.all_reduce(torch.zeros(1))

exit_codes(main)
"""


# Forks ranks once torch is imported, which takes seconds. Prints their exit codes; null for a stopped one.
FORKS = """
import json, os, signal, sys
from torch_ref.runtime import launch
folder, script, stopped = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ranks = range(int(os.environ["WORLD_SIZE"]))
processes = []
for rank in ranks:
    if not (process := os.fork()):
        os.environ["RANK"] = str(rank)
        os.dup2(os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
        exec(script)
        sys.exit()
    processes.append(process)
codes = [None if rank == stopped else os.waitstatus_to_exitcode(os.waitpid(processes[rank], 0)[1]) for rank in ranks]
if stopped is not None:
    if os.waitpid(processes[stopped], os.WNOHANG) != (0, 0):
        sys.exit("the stopped rank has ended")
    os.kill(processes[stopped], signal.SIGKILL)
print(json.dumps(codes))
"""


def ranks(
    script: str, count: int, folder: Path, stopped: int | None = None
) -> tuple[list[int | None], list[list[str]]]:
    """Exit codes and stderr lines of ranks started by another launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    line = [sys.executable, "-c", FORKS, str(folder), script, json.dumps(stopped)]
    done = subprocess.run(line, env=os.environ | address, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), [(folder / str(rank)).read_text().splitlines() for rank in range(count)]


@pytest.mark.slow
def test_a_stopped_rank_ends_those_that_another_launcher_started(tmp_path: Path) -> None:
    """The others wait in a collective; each ends with 1, and the first reports the cause in one line."""
    codes, outputs = ranks(JOINED, 3, tmp_path, stopped=0)
    assert codes == [None, 1, 1]
    assert [lines[-1:] for lines in outputs[1:]] == [
        [
            "error: rank 0 has been stopped for 2 s, as by SIGSTOP; the run ends, and --resume continues from its "
            "newest checkpoint"
        ],
        [],
    ]
    assert not any("Traceback" in line or "terminate" in line for lines in outputs for line in lines)


PEER = "[gloo/transport/tcp/pair.cc:553] {} [127.0.0.1]:1958. This is typically caused by a remote worker crashing."
LOST = [PEER.format(what) for what in ("Connection closed by peer", "Read error: Connection reset by peer")]
SILENT = ["[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete"]


@pytest.mark.parametrize("text", [*LOST, *SILENT])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_collective_that_lost_a_rank_is_reported_in_one_line(
    rank: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 0 and 1 report it without a store to ask, as rank 0 may be the lost one."""
    state = "which does not answer: it hangs" if text in SILENT else "which is gone"
    message = f"rank {rank} waited in a collective for another rank, {state}"
    with pytest.raises(SystemExit) as ended, launch.without_the_others(rank, of_start=False):
        raise RuntimeError(text)
    assert ended.value.code == 1 and capsys.readouterr().err.count(f"error: {message}") == (rank < 2)


@pytest.mark.parametrize("text", LOST)
def test_where_start_says_which_rank_ended_the_others_are_silent(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, launch.without_the_others(1, of_start=True):
        raise RuntimeError(text)
    assert ended.value.code == 1 and not capsys.readouterr().err
    with pytest.raises(SystemExit), launch.without_the_others(0, of_start=True):
        raise RuntimeError(SILENT[0])
    assert "does not answer" in capsys.readouterr().err


def test_other_errors_keep_their_trace() -> None:
    for text in ("mat1 and mat2 shapes cannot be multiplied", "the data timed out"):
        with pytest.raises(RuntimeError, match=text), launch.without_the_others(0, of_start=False):
            raise RuntimeError(text)


SLOW = [pytest.param(count, killed, marks=pytest.mark.slow) for count, killed in ((2, 1), (3, 2))]


@pytest.mark.parametrize(("count", "killed"), [(3, 0), *SLOW])
def test_a_killed_rank_ends_those_that_another_launcher_started(count: int, killed: int, tmp_path: Path) -> None:
    """One line, from any of the survivors."""
    script = JOINED.replace("3}", f"{count}}}").replace('== "0"', f'== "{killed}"').replace("SIGSTOP", "SIGKILL")
    codes, outputs = ranks(script, count, tmp_path)
    assert codes == [-signal.SIGKILL if rank == killed else 1 for rank in range(count)]
    (line,) = (line for lines in outputs for line in lines if line.startswith("error: "))
    assert line.endswith(
        "waited in a collective for another rank, which is gone; the run ends, and --resume continues from its newest "
        "checkpoint"
    )
    assert not any("Traceback" in line for lines in outputs for line in lines)


@pytest.mark.parametrize("code", [0, 2])
def test_a_rank_of_a_launcher_ends_before_python_is_finalized(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit) as own, launch.ended_at_once():
        sys.exit(code)
    assert own.value.code == code and ended == []  # `start` ends its own ranks
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit), launch.ended_at_once():
        sys.exit(code)
    assert ended == [code]


@pytest.mark.parametrize("taken", [True, False], ids=["port taken", "no address"])
def test_ranks_that_cannot_meet_say_so_in_one_line(taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        for name in ("MASTER_ADDR", "MASTER_PORT", "TORCH_REF_STORE"):
            monkeypatch.delenv(name, raising=False)
        address = {"RANK": "0", "WORLD_SIZE": "2"}
        port = str(other.getsockname()[1])
        address |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if taken else {}
        for name, value in address.items():
            monkeypatch.setenv(name, value)
        where = f"127.0.0.1:{port}: " if taken else "(MASTER_ADDR is not set):(MASTER_PORT is not set): "
        with pytest.raises(ConfigError) as error, launch.process_group(launch.Plan({"fsdp": 2}, "cpu")):
            pass
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"rank 0 cannot meet the others at MASTER_ADDR:MASTER_PORT = {where}")
    assert line.endswith("start all ranks, and give each the address of the first, with a port that is free there")


def test_the_second_rank_says_that_the_first_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), launch.meeting(1):
        raise torch.distributed.DistNetworkError("The client socket has timed out after 60000ms\nException raised from")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1 cannot meet the others") and "has timed out after 60000ms; start all" in line


def test_ranks_divide_the_cores_unless_the_environment_sets_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for ranks in (2, 16):
        launch.divide_cores(ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch.divide_cores(2)
    assert found == [4, 1]
