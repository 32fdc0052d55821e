"""When a run saves and ends; `*train_test.py` send signals to real ones."""

import os
import signal
from pathlib import Path

import pytest

from jaxdist.config import Checkpoint
from jaxdist.config.errors import Interrupted
from jaxdist.config.exits import exit_codes
from jaxdist.runs.checkpoints import seal
from jaxdist.runs.signals import Action, Saving


class Clock:
    """A clock whose seconds pass on request."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps(saving: Saving, clock: Clock, seconds: float, last: int = 10) -> list[int]:
    """Steps after which a run of `last` steps saves, at so many seconds each."""
    found = []
    for step in range(1, last + 1):
        clock.now += seconds
        if saving.due(step):
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("config", "seconds", "saved"),
    [
        (Checkpoint(), 1000, []),
        (Checkpoint(every=3), 1000, [3, 6, 9]),
        (Checkpoint(minutes=0.5), 10, [3, 6, 9]),
        (Checkpoint(minutes=0.5), 40, list(range(1, 11))),
        (Checkpoint(every=4, minutes=0.5), 10, [3, 4, 7, 8]),  # counted from the last save, for any reason
    ],
)
def test_by_steps_and_minutes(config: Checkpoint, seconds: float, saved: list[int]) -> None:
    clock = Clock()
    assert steps(Saving(config, clock), clock, seconds) == saved


def test_processes_agree_on_saves_and_stops() -> None:
    """Another process gets the signal, or its minutes pass: this one counts from then, too."""
    clock, others = Clock(), [Action.NOTHING, Action.SAVE, Action.NOTHING, Action.STOP]
    saving = Saving(Checkpoint(minutes=0.5), clock, agree=lambda own: max(own, others.pop(0)))
    found = []
    for step in range(1, 5):
        clock.now += 20
        found.append(saving.due(step))
    assert found == [Action.NOTHING, Action.SAVE, Action.NOTHING, Action.STOP]
    assert str(saving.interrupted(4, None)).startswith("ended by a signal after step 4")


def test_a_save_that_failed_comes_first() -> None:
    """It precedes anything due, on all processes: a run that ends saves nothing."""
    assert Saving(Checkpoint(every=1)).due(1, failed=True) is Action.FAIL
    assert Saving(Checkpoint(every=1), agree=lambda own: max(own, Action.FAIL)).due(1) is Action.FAIL


def test_signals(tmp_path: Path) -> None:
    clock = Clock()
    with Saving(Checkpoint(), clock) as saving:
        assert saving.due(1) is Action.NOTHING
        os.kill(os.getpid(), signal.SIGUSR1)
        assert saving.due(2) is Action.SAVE and saving.due(3) is Action.NOTHING
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert saving.due(4) is Action.STOP
        assert "nothing is kept" in str(saving.interrupted(4, None))
        assert str(saving.interrupted(4, tmp_path)).endswith("it could not be saved: --resume continues from step 0")
        (tmp_path / "2").mkdir()
        # the checkpoint is incomplete
        assert str(saving.interrupted(4, tmp_path)).endswith("--resume continues from step 0")
        (tmp_path / "2" / "weights").touch()
        seal(tmp_path / "2")
        assert str(saving.interrupted(4, tmp_path)).endswith("--resume continues from step 2")
        (tmp_path / "2").rename(tmp_path / "4")
        assert str(saving.interrupted(4, tmp_path)).startswith("ended by SIGTERM after step 4; step 4 is saved")


def test_a_second_interrupt_ends_at_once() -> None:
    clock = Clock()
    with Saving(Checkpoint(), clock) as saving:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same signal, forwarded
        clock.now += 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert saving.due(1) is Action.STOP


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    with Saving(Checkpoint()):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [(Interrupted("ended by SIGTERM"), 75, "error: ended by SIGTERM"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_exit_codes(error: BaseException, code: int, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        exit_codes(main)
    assert end.value.code == code and capsys.readouterr().err == f"{expected}\n"
