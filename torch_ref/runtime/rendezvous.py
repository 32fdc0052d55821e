"""Rendezvous of a launcher's ranks at torch's store, before they join a process group.

A launcher's settings may be wrong on one rank alone: that rank reports it, and the others, which would wait for it in
`init_process_group`, end with it.
"""

import os
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import NoReturn

import torch.distributed as dist

from jaxdist.config import ConfigError

CAME, SEEN, REFUSED = "torch_ref/came", "torch_ref/seen", "torch_ref/refused"  # counters of ranks, in the store
LATER = 5.0  # seconds within which ranks that are started together have come
JOINED_SECONDS = 1800  # within which all ranks have to come, as torch has it of gloo
LOOK_SECONDS = 0.05


def store(first: bool, seconds: float) -> dist.TCPStore:
    """torch's store at MASTER_ADDR:MASTER_PORT, which torchrun holds, or else the `first` rank.

    Raises ValueError for variables that are missing, and DistError where the store cannot be reached in `seconds`."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(f"{missing[0]} is not set")
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=first and not held,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )


@cache
def meet(rank: int, ranks: int, address: str) -> dist.TCPStore:
    """The store at `address`, when all ranks have come, each once. Raises as `store`; ends this rank with 2 where
    another refuses its variables."""
    met = store(rank == 0, JOINED_SECONDS)
    met.add(CAME, 1)
    until = time.monotonic() + JOINED_SECONDS
    while (came := met.add(CAME, 0)) < ranks:
        if met.add(REFUSED, 0):
            _leave(rank == 0)
        if time.monotonic() > until:
            raise dist.DistStoreError(f"timed out: {came} of {ranks} ranks came in {JOINED_SECONDS} s")
        time.sleep(LOOK_SECONDS)
    met.add(SEEN, 1)
    until = time.monotonic() + LATER
    while rank == 0 and met.add(SEEN, 0) < ranks and time.monotonic() < until:  # it may hold the store, and end next
        time.sleep(LOOK_SECONDS)
    return met


def refuse(error: ConfigError) -> NoReturn:
    """End this rank with 2 for what its launcher set; the first rank that refuses reports it."""
    first = os.environ.get("RANK") == "0"
    met = None
    with suppress(ValueError, RuntimeError, OSError):  # RuntimeError: torch's DistError
        if not first:
            _wait_for_address()
        met = store(first, LATER)
    if met is None or met.add(REFUSED, 1) == 1:
        print(f"error: {error}", file=sys.stderr, flush=True)
    _leave(first and met is not None)


def _wait_for_address() -> None:
    """Until the store can be reached: torch prints a stack trace where it cannot. Raises OSError and ValueError."""
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
    until = time.monotonic() + LATER
    while True:
        try:
            socket.create_connection(address, timeout=LATER).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(LOOK_SECONDS)


def _leave(holds: bool) -> NoReturn:
    """End this rank; the one that may hold the store when the others have looked at it."""
    if holds:
        time.sleep(LATER)
    sys.exit(2)
