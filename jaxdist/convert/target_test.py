"""A conversion leaves its complete target, or nothing."""

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
from jaxdist.convert import target as target_module
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds import hf
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.target import atomic_target, sibling
from jaxdist.formats import buffers
from jaxdist.runs.folder import LOCK
from jaxdist.runs.lock import alone

pytest.importorskip("torch")
MODEL = MODELS["Qwen2ForCausalLM"]
# The command with a delay of two seconds per tensor, of which there are thirty.
SLOW = """
    import runpy, signal, time
    from jaxdist.convert.stream import Resharder
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background jobs
    convert = Resharder.convert
    Resharder.convert = lambda *arguments: (time.sleep(2), convert(*arguments))[1]
    runpy.run_module("jaxdist.convert", run_name="__main__")
"""


def no_check(target: Path) -> None:
    """Accept any existing target."""


def contents(folder: Path) -> dict[str, bytes]:
    """Every name below a folder, with the content of files."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in folder.rglob("*")}


def test_of_two_conversions_at_once_the_first_wins(tmp_path: Path) -> None:
    """The second is refused without doing harm."""
    with atomic_target(tmp_path / "b") as partial:
        partial.write_text("whole")
        with (
            pytest.raises(ConfigError, match="is being written by another conversion"),
            atomic_target(tmp_path / "b"),
        ):
            pass
        assert partial.read_text() == "whole"
    assert [p.name for p in tmp_path.iterdir()] == ["b"] and (tmp_path / "b").read_text() == "whole"


def test_a_lock_that_a_kill_left(tmp_path: Path) -> None:
    sibling(tmp_path / "b", "lock").touch()
    with atomic_target(tmp_path / "b") as partial:
        partial.write_text("whole")
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("name", ["new/b", "new/deep/b", "new/deep/b.pt"])
def test_in_a_folder_that_is_to_be_made(name: str, tmp_path: Path) -> None:
    """The folder is created together with the target."""
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    main([str(source), str(tmp_path / name), "--dry-run"])
    with pytest.raises(ConfigError), atomic_target(tmp_path / name):
        raise ConfigError("in between")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    main([str(source), str(tmp_path / name), "--to", "torch" if name.endswith(".pt") else "hf"])
    assert tensors(tmp_path / name) == tensors(source)


@pytest.mark.parametrize("kind", ["hf", "dcp", "torch"])
def test_a_disk_that_fills_up(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails in the middle of a tensor whose memory is still in use."""
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
    """The disk's error is reported, not one about the mapped pages."""
    (tmp_path / "a").touch()

    def full(file: Any, start: int, data: memoryview) -> None:
        if data:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(buffers, "_put", full)
    with pytest.raises(OSError, match="No space left"):
        buffers.write(tmp_path / "a", 0, np.zeros(4_000_000, np.uint8))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "number"), [("hf", signal.SIGINT), ("orbax", signal.SIGTERM)])
def test_a_conversion_that_is_ended(kind: str, number: signal.Signals, tmp_path: Path) -> None:
    """It ends soon and leaves nothing."""
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    line = [sys.executable, "-c", textwrap.dedent(SLOW), str(source), str(tmp_path / "new" / "b"), "--to", kind]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not sibling(tmp_path / "new" / "b", "partial").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(3)
        process.send_signal(number)
        assert process.wait(10) == 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_old_target_returns_if_the_new_one_cannot_take_its_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "b", Path.rename
    old = target if kind == "file" else target / "old"
    old.parent.mkdir(exist_ok=True)
    old.write_text("old")

    def interrupted(path: Path, to: Path) -> Path:
        if path == sibling(target, "partial"):
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_target(target, no_check) as partial:
        partial.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["b"] and old.read_text() == "old"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_target_created_meanwhile_is_kept(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "b"
    theirs = target if kind == "file" else target / "theirs"
    with pytest.raises(ConfigError, match=r"TARGET \S+ exists"), atomic_target(target) as partial:
        partial.write_text("new")
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("theirs")
    assert [p.name for p in tmp_path.iterdir()] == ["b"] and theirs.read_text() == "theirs"


def test_files_added_to_a_target_meanwhile_are_kept(tmp_path: Path) -> None:
    source, target = (written(tmp_path / name, "hf", content_of(MODEL)) for name in "ab")
    write = KINDS["hf"].format.write

    def slow(path: Path, conversion: Any) -> None:
        write(path, conversion)
        (target / "results.csv").write_text("work")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "write", slow)
        with pytest.raises(ConfigError, match=rf"TARGET {target} has results.csv, which is of no checkpoint"):
            main([str(source), str(target), "--to", "hf", "--force"])
    assert (target / "results.csv").read_text() == "work" and (target / "config.json").exists()


@pytest.mark.parametrize("part", ["partial", "old"])
def test_a_link_under_a_name_of_ours(part: str, tmp_path: Path) -> None:
    """The link's target stays unchanged: it is not written through."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    sibling(tmp_path / "b", part).symlink_to(tmp_path / "mine")
    with atomic_target(tmp_path / "b") as partial:
        partial.mkdir()
    assert contents(tmp_path / "mine") == {"file": b"mine"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "mine"] and not (tmp_path / "b").is_symlink()


def test_a_target_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_module, "TRIES", 1)
    monkeypatch.setattr(target_module.shutil, "rmtree", lambda *_, **__: None)
    sibling(tmp_path / "b", "partial").mkdir()
    with (
        pytest.raises(ConfigError, match=r"\.b\.jaxdist-partial cannot be removed; remove it"),
        atomic_target(tmp_path / "b"),
    ):
        pass


def test_a_file_is_never_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file or the new one exists after a kill at any moment."""
    target, rename, there = tmp_path / "b", Path.rename, list[bool]()
    target.write_text("old")

    def watched(path: Path, to: Path) -> Path:
        found = rename(path, to)
        there.append(target.exists())
        return found

    monkeypatch.setattr(Path, "rename", watched)
    with atomic_target(target, no_check) as partial:
        partial.write_text("new")
    assert there and all(there) and target.read_text() == "new"


def test_a_lock_that_is_a_link(tmp_path: Path) -> None:
    """The link's target stays unchanged."""
    (tmp_path / "mine").write_text("mine")
    sibling(tmp_path / "b", "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="TARGET"), atomic_target(tmp_path / "b"):
        pass
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    main([str(source), str(tmp_path / "run"), "--to", "orbax"])
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match=rf"its lock \S+{LOCK}: .*remove it"):
        main([str(source), str(tmp_path / "run"), "--to", "orbax", "--force"])
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("more", [[], ["--force"], ["--dry-run"], ["--dry-run", "--force"]], ids=str)
def test_other_files_beside_a_target_stay(more: list[str], tmp_path: Path) -> None:
    """Files named like a conversion's own are neither removed nor moved to the target."""
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    for name in (".b.old", ".b.partial", ".b.lock"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("work")
    before = contents(tmp_path)
    main([str(source), str(tmp_path / "b"), *more])
    assert {n: x for n, x in contents(tmp_path).items() if n.split("/")[0] != "b"} == before
    assert (tmp_path / "b").exists() == ("--dry-run" not in more)


@pytest.mark.long
@pytest.mark.parametrize("killed", ["between", "after"])
def test_a_dry_run_touches_nothing(killed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a killed conversion's files, nor a run's lock in what it would replace."""
    source, target = written(tmp_path / "a", "hf", content_of(MODEL)), tmp_path / "b"
    written(sibling(target, "old"), "orbax", content_of(MODEL))
    sibling(target, "partial").mkdir()
    if killed == "after":
        written(target, "orbax", content_of(MODEL))
        (target / LOCK).touch()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"TARGET \S+ exists"):
        main([str(source), str(target), "--dry-run"])
    main([str(source), str(target), "--dry-run", "--force"])
    assert contents(tmp_path) == before
    assert ("the next puts it back" in capsys.readouterr().out) == (killed == "between")
    lock = sibling(target, "lock")
    with alone(lock), pytest.raises(ConfigError, match="is being written by another conversion"):
        main([str(source), str(target), "--dry-run", "--force"])


@pytest.mark.parametrize("more", [["--force"], ["--dry-run", "--force"]], ids=str)
def test_a_restored_target_is_checked(more: list[str], tmp_path: Path) -> None:
    """A restored target is replaced only if it may be."""
    source, target = written(tmp_path / "a", "hf", content_of(MODEL)), tmp_path / "b"
    old = written(sibling(target, "old"), "hf", content_of(MODEL))
    (old / "thesis.tex").write_text("work")
    with pytest.raises(ConfigError, match=rf"TARGET {target} has thesis.tex, which is of no checkpoint"):
        main([str(source), str(target), *more])
    assert ((old if "--dry-run" in more else target) / "thesis.tex").read_text() == "work"


def test_a_source_that_was_being_replaced(tmp_path: Path) -> None:
    old = written(sibling(tmp_path / "b", "old"), "hf", content_of(MODEL))
    with pytest.raises(ConfigError, match=rf"b: no such file or folder, it was being replaced .*, and is in {old}"):
        main([str(tmp_path / "b"), "--inspect"])


@pytest.mark.parametrize("more", [[], ["--force"]], ids=str)
def test_files_of_a_killed_conversion_as_source_are_refused(more: list[str], tmp_path: Path) -> None:
    """It would be restored or removed while it is read."""
    target = written(tmp_path / "b", "hf", content_of(MODEL))
    source = written(sibling(target, "old"), "hf", content_of(MODEL))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"TARGET \S+ (with --force )?would replace SOURCE"):
        main([str(source), str(target), *more])
    assert contents(tmp_path) == before
