"""What a conversion leaves where it writes: its target, whole, or nothing."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, TrainingError
from jaxdist.convert import buffers
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.formats_test import content_of, tensors, written
from jaxdist.convert.target import whole_or_nothing

pytest.importorskip("torch")
MODEL = MODELS["Qwen2ForCausalLM"]
# The command, which writes a tensor a second.
SLOW = """
    import runpy, time
    from jaxdist.convert import buffers
    put = buffers.write
    buffers.write = lambda *arguments: (time.sleep(1), put(*arguments))
    runpy.run_module("jaxdist.convert", run_name="__main__")
"""


def test_of_two_at_once_the_first(tmp_path: Path) -> None:
    """The second is refused, and does no harm."""
    with whole_or_nothing(tmp_path / "b") as partial:
        partial.write_text("whole")
        with (
            pytest.raises(ConfigError, match="is being written by another conversion"),
            whole_or_nothing(tmp_path / "b"),
        ):
            pass
        assert partial.read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["b"] and (tmp_path / "b").read_text() == "whole"


def test_a_lock_that_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / ".b.lock").touch()
    with whole_or_nothing(tmp_path / "b") as partial:
        partial.write_text("whole")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("name", ["new/b", "new/deep/b", "new/deep/b.pt"])
def test_in_a_folder_that_is_to_be_made(name: str, tmp_path: Path) -> None:
    """It is there with the target, and not without."""
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    main([str(source), str(tmp_path / name), "--dry-run"])
    with pytest.raises(ConfigError), whole_or_nothing(tmp_path / name):
        raise ConfigError("in between")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    main([str(source), str(tmp_path / name), "--to", "torch" if name.endswith(".pt") else "hf"])
    assert tensors(tmp_path / name) == tensors(source)


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch"])
def test_a_disk_that_fills_up(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a tensor, whose memory is still in use then."""
    source, left = written(tmp_path / "a", "hf", content_of(MODEL)), [3]
    put, lock = buffers._put, threading.Lock()

    def full(file: Any, start: int, data: memoryview) -> None:
        with lock:
            left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        put(file, start, data)

    monkeypatch.setattr(buffers, "_put", full)
    with pytest.raises(TrainingError, match="No space left on device; nothing is left"):
        main([str(source), str(tmp_path / "b"), "--to", kind])
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_whole_pages_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of its own, not one of the memory that the pages went through."""
    (tmp_path / "a").touch()

    def full(file: Any, start: int, data: memoryview) -> None:
        if data:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(buffers, "_put", full)
    with pytest.raises(OSError, match="No space left"):
        buffers.write(tmp_path / "a", 0, np.zeros(4_000_000, np.uint8))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_conversion_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    line = [sys.executable, "-c", textwrap.dedent(SLOW), str(source), str(tmp_path / "new" / "b"), "--to", "hf"]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "new" / ".b.partial").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
