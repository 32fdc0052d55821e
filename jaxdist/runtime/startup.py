"""Phases of the time from the command to the first step."""

import os
import time
from contextlib import suppress
from pathlib import Path


class StartupTimer:
    """Timer of start-up phases: `seconds` by phase, in order; `imports` is the time before construction."""

    def __init__(self) -> None:
        self.seconds = {"imports": since_the_process_began()}
        self._before = time.perf_counter()

    def mark(self, name: str) -> None:
        """Since the last of these calls; the first of a name counts."""
        if name not in self.seconds:
            now = time.perf_counter()
            self.seconds[name] = now - self._before
            self._before = now


def since_the_process_began() -> float:
    """Seconds, to a hundredth; 0 where the system does not report it (Linux does)."""
    with suppress(OSError, AttributeError):
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0
