"""Stamp of a measurement: machine, time and source version."""

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jaxdist import __version__

VERSIONS = ("jax", "jaxlib", "torch")


@dataclass(frozen=True)
class Machine:
    """Description of the machine, its memory in bytes, and the requested device."""

    cores: int | None
    cpu: str
    memory: int
    gpus: tuple[str, ...]
    device: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Stamp:
    """`load`: the mean number of processes at work in the minute before; `others`: what others took meanwhile, as a
    share of all cores, None where the system does not report it."""

    machine: Machine
    date: str
    load: float
    commit: str
    others: float | None = None


def stamp(device: str) -> Stamp:
    """To be called before anything runs."""
    root = Path(__file__).resolve().parents[2]
    return Stamp(
        machine(device),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        load=round(os.getloadavg()[0], 2),
        commit=output_of("git", "-C", str(root), "describe", "--always", "--dirty") if (root / ".git").exists() else "",
    )


class Others:
    """Share of the machine that other processes used since construction. They slow runs down, torch's more than JAX's,
    because torch's threads wait for each other after each operation."""

    def __init__(self) -> None:
        self._before = self._seconds()

    @property
    def share(self) -> float | None:
        """Share of the time of all cores, from 0 to 1; None if the system does not report it."""
        if self._before is None or (now := self._seconds()) is None:
            return None
        wall, used = (b - a for a, b in zip(self._before, now, strict=True))
        return round(max(0.0, used / wall / (os.cpu_count() or 1)), 3) if wall else None

    @staticmethod
    def _seconds() -> tuple[float, float] | None:
        """Seconds on the clock, and those of all cores at work for others than this process and its ended children."""
        try:
            user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
        except (OSError, ValueError):
            return None
        own = os.times()
        used = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        return own.elapsed, used - own.user - own.system - own.children_user - own.children_system


def machine(device: str) -> Machine:
    """Facts of this machine."""
    return Machine(
        cores=os.cpu_count(),
        cpu=cpu(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus(),
        device=device,
        versions={"python": platform.python_version(), "jaxdist": __version__} | versions(),
    )


def gpus() -> tuple[str, ...]:
    """Names of NVIDIA's, one that is empty where there are none."""
    return tuple(output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").split("\n"))


def versions() -> dict[str, str]:
    """Versions of the installed packages."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cpu() -> str:
    """The processor's name, from Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def output_of(*command: str) -> str:
    """Output of a command; "" if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
