"""When a run is saved: by steps, by minutes, and by signals, as schedulers of clusters send them before they end a job.

SIGTERM and SIGINT (Ctrl-C) end the run after the step in progress, with a checkpoint and exit code 75; a second Ctrl-C
ends it at once. SIGUSR1 saves, and the run continues.
"""

import signal
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from jaxdist.config.errors import Interrupted
from jaxdist.config.experiment import Checkpoint
from jaxdist.runs.checkpoints import last_complete

STOP, SAVE = (signal.SIGTERM, signal.SIGINT), signal.SIGUSR1
SAME_SECONDS = 1.0  # a terminal sends Ctrl-C to a group of processes, and one of them may pass it on


class Action(IntEnum):
    """Actions due after a step."""

    NOTHING = 0
    SAVE = 1
    STOP = 2  # saved before
    FAIL = 3  # a save in progress has failed


class Saving:
    """Handle signals within the context. `clock`: seconds. `agree`: of what each of several processes finds due,
    what all of them do."""

    def __init__(
        self,
        config: Checkpoint,
        clock: Callable[[], float] = time.monotonic,
        agree: Callable[[int], int] = int,
    ) -> None:
        self.config, self.clock, self.agree = config, clock, agree
        self.saved = clock()
        self.asked = Action.NOTHING
        self.ended_by: signal.Signals | None = None
        self.ended_at = 0.0
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Saving":
        if threading.current_thread() is threading.main_thread():  # no other may ask for signals
            for number in (*STOP, SAVE):
                self.before[number] = signal.signal(number, self._heed)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heed(self, number: int, _: FrameType | None = None) -> None:
        if number == SAVE:
            self.asked = max(self.asked, Action.SAVE)
        elif number == signal.SIGINT and self.ended_by and self.clock() - self.ended_at > SAME_SECONDS:
            raise KeyboardInterrupt
        else:
            self.asked, self.ended_by, self.ended_at = Action.STOP, signal.Signals(number), self.clock()

    def due(self, step: int, failed: bool = False) -> Action:
        """Actions due after `step`; a requested save counts as done. `failed`: a save in progress has failed."""
        every, minutes = self.config.every, self.config.minutes
        by_step, by_time = every and step % every == 0, minutes and self.clock() - self.saved >= 60 * minutes
        asked, self.asked = self.asked, Action.NOTHING  # a signal from here on is for the next step
        by_config = Action.SAVE if by_step or by_time else Action.NOTHING
        found = Action(self.agree(Action.FAIL if failed else max(asked, by_config)))
        if found:
            self.saved = self.clock()
        return found

    def final(self) -> bool:
        """Whether the last step is to be saved: where the config asks for it, or a signal has."""
        return self.config.final or self.stopping()

    def stopping(self) -> bool:
        """Whether a signal has asked the run to end; it stays asked."""
        return self.agree(self.asked) == Action.STOP

    def interrupted(self, step: int, checkpoints: Path | None) -> Interrupted:
        """The exception that ends the run after `step`; its message names the checkpoint in `checkpoints` to resume
        from, if any."""
        if checkpoints is None:
            what = "nothing is kept without --output DIR"
        elif (saved := int(last.name) if (last := last_complete(checkpoints)) else 0) == step:
            what = f"step {step} is saved: continue by --resume"
        else:
            what = f"it could not be saved: --resume continues from step {saved}"
        return Interrupted(f"ended by {self.ended_by.name if self.ended_by else 'a signal'} after step {step}; {what}")
