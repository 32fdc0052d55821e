"""From `--mesh` and `--device` to ranks: their own when no launcher started them, else the launcher's."""

import gc
import math
import os
import signal
import socket
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from jaxdist.config import ConfigError, Parallel, TrainingError, environment_integer, exit_codes
from jaxdist.runs.signals import SAVE, STOP
from torch_ref.runtime import rendezvous
from torch_ref.runtime.compat import default_store

Result = TypeVar("Result")

SECOND = 1.0  # between two looks at whether a rank is stopped
SILENT_SECONDS = 40  # for which a rank may be
STORE_SECONDS = 5  # within which torch's store answers
GRACE_SECONDS = 10  # for the other ranks to end by themselves after one failed

# Error texts of gloo's and NCCL's collectives, and of torch's store, when another rank does not answer or has ended.
SILENCE = ("Timed out waiting", "timed out", "Application timeout", "wait timeout")
LOSS = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "remote process exited",
    "Read error",
    "Write error",
)


@dataclass(frozen=True)
class Plan:
    """Description of the devices of a run."""

    axes: dict[str, int]
    device: str  # "cpu" or "cuda"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        kind = "GPU" if self.device == "cuda" else "CPU rank (gloo)" if self.ranks == 1 else "CPU ranks (gloo)"
        return f"running on {self.ranks} {kind}"


def launched() -> bool:
    """Whether torchrun or its like started this process as one rank of many."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def quiet() -> bool:
    """Whether another rank says what is wrong: all ranks see the same arguments. For a number that none of them has, no
    other can."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "")
    return rank.isdecimal() and int(rank) > 0 and not (size.isdecimal() and int(rank) >= int(size))


def ranks_started() -> int:
    """Number of ranks that a launcher started; 0 without one. Raises ConfigError for variables that make no sense."""
    if not launched():
        return 0
    size, rank = environment_integer("WORLD_SIZE"), environment_integer("RANK")
    if rank >= size:
        raise ConfigError(f"RANK = {rank}: must be below WORLD_SIZE = {size}; let the launcher set both")
    here = environment_integer("LOCAL_WORLD_SIZE", size)
    if (local := environment_integer("LOCAL_RANK")) >= here:
        name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE"
        raise ConfigError(f"LOCAL_RANK = {local}: must be below {name} = {here}; let the launcher set both")
    return size


@contextmanager
def reported_once() -> Iterator[None]:
    """Around checks of what a launcher set, which may be wrong on any rank, and of what follows from it."""
    try:
        yield
    except ConfigError as error:
        if not launched():
            raise
        rendezvous.refuse(error)


def meet(plan: Plan) -> None:
    """Wait for all ranks of a launcher, before any of them reads data. Raises as `meeting`."""
    if launched():
        rank = environment_integer("RANK")
        with meeting(rank):
            rendezvous.meet(rank, plan.ranks, address())


def address() -> str:
    """Address at which the ranks of a launcher meet, as host:port."""
    return ":".join(os.environ.get(name, f"({name} is not set)") for name in ("MASTER_ADDR", "MASTER_PORT"))


def plan(parallel: Parallel, device: str) -> Plan:
    """The mesh and the kind of device; `auto`: GPUs if there are enough. Raises ConfigError."""
    world = ranks_started()
    # Counted by NVML: CUDA stays untouched, so that a fork is safe.
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    axes = parallel.axes(world or gpus or None)
    ranks = math.prod(axes.values())
    if world and world != ranks:
        raise ConfigError(
            f"parallel.mesh = {parallel.mesh!r} has {ranks} devices, the launcher started {world} ranks; start {ranks}"
        )
    here = environment_integer("LOCAL_WORLD_SIZE", ranks) if world else ranks
    if gpus >= here:
        return Plan(axes, "cuda")
    if device == "gpu" and not gpus:
        raise ConfigError("--device gpu: torch finds no GPU here; use --device cpu, or a build of torch with CUDA")
    if device == "gpu":
        raise ConfigError(
            f"--device gpu: parallel.mesh = {parallel.mesh!r} needs {here} GPUs here, there are {gpus}; "
            f"use --mesh {parallel.mesh_of(gpus)} or --device cpu"
        )
    return Plan(axes, "cpu")


@contextmanager
def process_group(plan: Plan, offloaded: bool = False) -> Iterator[DeviceMesh]:
    """This rank's membership: a mesh with the axes data, fsdp and tensor. `offloaded` state is summed by gloo."""
    rank = environment_integer("RANK")
    local_rank = environment_integer("LOCAL_RANK", rank)
    store = os.environ.get("TORCH_REF_STORE")
    tf32 = torch.backends.cudnn.allow_tf32
    if plan.device == "cuda":
        torch.cuda.set_device(local_rank)
        torch.backends.cudnn.allow_tf32 = False  # float32 is float32, as torch has it of matrix products
    with meeting(rank):
        dist.init_process_group(
            "gloo" if plan.device == "cpu" else "cpu:gloo,cuda:nccl" if offloaded else "nccl",
            store=dist.FileStore(store, plan.ranks) if store else rendezvous.meet(rank, plan.ranks, address()),
            rank=rank,
            world_size=plan.ranks,
            device_id=torch.device("cuda", local_rank) if plan.device == "cuda" else None,
        )
    if not store:  # else `start` watches
        threading.Thread(target=watch, args=(ranks_of_this_host(), rank), daemon=True).start()
    try:
        with without_the_others(rank, of_start=bool(store)):
            yield init_device_mesh(plan.device, tuple(plan.axes.values()), mesh_dim_names=tuple(plan.axes))
            dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()
        torch.backends.cudnn.allow_tf32 = tf32


@contextmanager
def meeting(rank: int) -> Iterator[None]:
    """Context manager for joining the ranks.

    Raises ConfigError where they cannot meet. The first rank reports it; so does the second, as the first may be the
    one that is missing.
    """
    try:
        yield
    except (dist.DistError, ValueError) as error:  # ValueError: of variables that are missing
        reason = textwrap.shorten(str(error).partition("\n")[0], 200)
        apart = ConfigError(
            f"rank {rank} cannot meet the others at MASTER_ADDR:MASTER_PORT = {address()}: {reason}; start all ranks, "
            "and give each the address of the first, with a port that is free there"
        )
        if rank == 1:
            print(f"error: {apart}", file=sys.stderr, flush=True)
        raise apart from None


@contextmanager
def without_the_others(rank: int, of_start: bool) -> Iterator[None]:
    """Around collectives: where one fails for want of another rank, one line in place of the backend's stack trace.

    One of the ranks that are left says it, and each ends with 1. Among ranks `of_start`, one that ends says why itself,
    or `start` does.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not (is_collective_error(error) and any(sign in text for sign in (*SILENCE, *LOSS))):
            raise
        silent = any(sign in text for sign in SILENCE)
        if of_start and not silent:
            sys.exit(1)
        what = "does not answer: it hangs, or its machine cannot be reached" if silent else "is gone"
        if speaks(rank):
            print(
                f"error: rank {rank} waited in a collective for another rank, which {what}; the run ends, and --resume "
                "continues from its newest checkpoint",
                file=sys.stderr,
                flush=True,
            )
        if rank == 0:  # which may hold the store: the others would find it gone
            asked(wait_for_others)
        sys.exit(1)


def is_collective_error(error: BaseException) -> bool:
    """Whether a collective raised an error, or torch's store."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def speaks(rank: int) -> bool:
    """Whether this rank says what all that are left have met: the first that comes to the store does.

    Where the store is gone, with the first rank that held it, the second does.
    """
    place = asked(lambda store: store.add("lost", 1))
    return rank in (0, 1) if place is None else place == 1


def wait_for_others(store: dist.Store) -> None:
    """Wait until all but one rank reach the store, or time out."""
    until = time.monotonic() + 2 * SECOND
    while store.add("lost", 0) < dist.get_world_size() - 1 and time.monotonic() < until:
        time.sleep(SECOND / 20)


def asked(function: Callable[[dist.Store], Result]) -> Result | None:
    """Result of `function` on torch's store; None where the store does not answer, or this rank has joined no
    others."""
    found: list[Result] = []

    def ask() -> None:
        with suppress(RuntimeError, ValueError):
            found.append(function(default_store()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(STORE_SECONDS)
    return found[0] if found else None


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Ends a rank that a launcher started as soon as it has an exit code, as `start` ends its own.

    gloo's threads free the tensors of collectives after these have returned; one that does so while Python is being
    finalized aborts the process (pytorch/pytorch#179291).
    """
    try:
        yield
    except SystemExit as end:
        if launched():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(end.code or 0))
        raise


def from_first(function: Callable[[], Result]) -> Result:
    """Return, or raise, on every rank what `function` does on the first, the only one to call it."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [function()]
        except Exception as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    result: Result = found[0]
    return result


def greatest(value: int, device: str) -> int:
    """The greatest of all ranks' values, on each of them."""
    agreed = torch.tensor(value, device=device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    return int(agreed)


def end_with_parent() -> None:
    """A rank whose parent was killed must not continue: it would write beside the run that is begun in its place."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Still:
    """Seconds for which each rank has been stopped, as by SIGSTOP: the others wait for it in a collective meanwhile.

    Counted in looks, one a second, so that a stop of this process as well, as by Ctrl-Z, does not count.
    """

    def __init__(self) -> None:
        self.looks: Counter[int] = Counter()

    def look(self, processes: Mapping[int, int]) -> None:
        """`processes`: rank -> process id. Raises TrainingError for a rank that has been stopped for too long."""
        for rank, pid in processes.items():
            self.looks[rank] = self.looks[rank] + 1 if stopped(pid) else 0
            if self.looks[rank] * SECOND > SILENT_SECONDS:
                raise TrainingError(
                    f"rank {rank} has been stopped for {SILENT_SECONDS} s, as by SIGSTOP; the run ends, and --resume "
                    "continues from its newest checkpoint"
                )


def stopped(pid: int) -> bool:
    """Whether a process is stopped. Where the system has no /proc, as macOS, no."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):  # or it has ended
        return False


def ranks_of_this_host() -> dict[int, int]:
    """Rank -> process id, of those that this one sees. All ranks call it."""
    namespace = Path("/proc/self/ns/pid")
    here = socket.gethostname(), str(namespace.readlink()) if namespace.exists() else ""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (here, os.getpid()))
    return {rank: pid for rank, (there, pid) in enumerate(found) if there == here}


def watch(processes: Mapping[int, int], own: int) -> None:
    """Ends this rank, which a launcher of others' started, where one of this host is stopped; the first that is not
    says why."""
    still = Still()
    while True:
        time.sleep(SECOND)
        try:
            still.look(processes)
        except TrainingError as error:
            if own == next(rank for rank, pid in processes.items() if not stopped(pid)):
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                time.sleep(2 * SECOND)  # the launcher may end all when one ends
            os._exit(1)


def divide_cores(ranks: int) -> None:
    """Divide this host's cores among its ranks' threads, unless OMP_NUM_THREADS sets their number, which torch follows
    by itself."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))


def start(plan: Plan, function: Callable[[], None], forked: Callable[[], None] = lambda: None) -> None:
    """Run `function` in every rank of `plan`, each a fork of this process, and `forked` here once all are; ends it
    where a rank fails.

    Fork, because importing torch is most of a start-up: 8 ranks in 0.2 s. It is safe as long as this process
    has run no torch operation, since threads do not survive a fork.
    """
    with tempfile.TemporaryDirectory() as folder:

        def rank_main(rank: int) -> None:
            for number in STOP:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(SAVE, signal.SIG_IGN)  # until `Saving` heeds it: there is nothing to save yet
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(plan.ranks)}
            os.environ["TORCH_REF_STORE"] = str(Path(folder) / "store")
            divide_cores(plan.ranks)
            threading.Thread(target=end_with_parent, daemon=True).start()
            exit_codes(function, quiet())

        def pass_on(number: int, _: Any) -> None:
            for process in ranks:
                if process.pid and process.is_alive():
                    os.kill(process.pid, number)

        ranks = [get_context("fork").Process(target=rank_main, args=(rank,)) for rank in range(plan.ranks)]
        before = {number: signal.signal(number, pass_on) for number in (*STOP, SAVE)}
        gc.freeze()  # a rank would look for garbage among all that is imported, and copy it to do so
        try:
            for process in ranks:
                process.start()
            forked()
            running = {process.sentinel: process for process in ranks}
            still = Still()
            while running and not any(process.exitcode for process in ranks):
                for sentinel in wait(list(running), SECOND):
                    running.pop(sentinel).join()  # type: ignore[arg-type]
                still.look({rank: process.pid for rank, process in enumerate(ranks) if process.pid})
            first = [process.exitcode or 0 for process in ranks]  # the others may be ended from here
            deadline = time.monotonic() + GRACE_SECONDS
            for process in running.values():
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()  # a rank that waits for another heeds nothing else
            for number, handler in before.items():
                signal.signal(number, handler)
    if (code := min(first)) < 0:
        hint = ", often for lack of memory" if -code == signal.SIGKILL else ""
        raise TrainingError(
            f"rank {first.index(code)} was ended by {signal.Signals(-code).name}{hint}; the run stops, and --resume "
            "continues from its newest checkpoint"
        )
    codes = {process.exitcode or 0 for process in ranks} - {0}
    if codes:
        sys.exit(codes.pop() if len(codes) == 1 else min(codes & {1, 2}, default=1))
