"""Complete and damaged checkpoints, with made-up content; `*_train_test.py` damage real ones."""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import xxhash

from jaxdist.config import Checkpoint, ConfigError, TrainingError
from jaxdist.config.errors import writes_to
from jaxdist.runs import checkpoints
from jaxdist.runs.checkpoints import (
    DAMAGED,
    MANIFEST,
    UNFINISHED,
    Saves,
    checkpoint_in,
    clean,
    complete_checkpoint,
    damage,
    newest,
    newest_complete,
    publish,
    steps_in,
    thin,
    unfinished,
)
from jaxdist.runs.display import kept


def write(checkpoints: Path, step: int) -> Path:
    """A checkpoint of three files."""
    folder = unfinished(checkpoints, step)
    (folder / "deep").mkdir(parents=True)
    (folder / "a").write_bytes(b"first" * 50 + bytes([step]))
    (folder / "deep" / "b").write_bytes(b"other" * 50 + bytes([step]))
    (folder / "empty").touch()
    publish(checkpoints, step)
    return checkpoints / str(step)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[7] ^= 16
    file.write_bytes(content)


def swap(file: Path) -> None:
    other = file.parent / "deep" / "b"
    one, two = file.read_bytes(), other.read_bytes()
    file.write_bytes(two)
    other.write_bytes(one)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (Path.unlink, "its file a is missing"),
    "empty": (lambda file: file.write_bytes(b""), "its file a has 0 bytes instead of 251"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "its file a has 250 bytes instead of 251"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"!"), "its file a has 252 bytes instead of 251"),
    "flipped": (flip, "its file a has changed since it was written"),
    "swapped": (swap, "its file a has changed since it was written"),
    "elsewhere": (lambda file: file.rename(file.with_name("c")), "its file a is missing"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_found_and_named(tmp_path: Path, case: str) -> None:
    spoil, message = DAMAGES[case]
    folder = write(tmp_path, 3)
    assert damage(folder) is None
    spoil(folder / "a")
    assert message in (damage(folder) or "")
    by_size = damage(folder, "sizes")
    assert by_size is None if case in ("flipped", "swapped") else message in (by_size or "")


def test_a_checkpoint_sealed_again_is_complete(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    flip(folder / "a")
    assert damage(folder)
    checkpoints.seal(folder)
    assert damage(folder) is None


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may have a bad block, or a file no permission."""
    folder = write(tmp_path, 3)

    def broken(file: Path, *_: Any) -> str:
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr(checkpoints, "checksum", broken)
    assert damage(folder) == "its file a cannot be read: Input/output error"
    assert damage(folder, "sizes") is None


def test_an_end_within_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is not read, and the part read gives no verdict."""
    folder, looked = write(tmp_path, 3), list[None]()
    monkeypatch.setattr(checkpoints, "BLOCK", 10)

    def ended() -> bool:
        looked.append(None)
        return len(looked) > 5

    assert damage(folder, ended=ended, threads=1) is None
    assert len(looked) < len((folder / "a").read_bytes()) / 10


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", '{"files": {}}', '{"files": {"a": {}}}', '{"files": []}', '{"files": {"a": {"bytes": "x"}}}'],
)
def test_an_invalid_manifest(tmp_path: Path, content: str) -> None:
    folder = write(tmp_path, 3)
    (folder / MANIFEST).write_text(content)
    assert damage(folder) == f"its {MANIFEST} cannot be read"
    (folder / MANIFEST).unlink()
    assert damage(folder) == f"it has no {MANIFEST}"


def test_manifests_of_before_have_other_checksums(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        del entry["xxh128"]
        entry["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert damage(folder) is None
    (folder / "a").write_bytes((folder / "a").read_bytes()[::-1])
    assert damage(folder) == "its file a has changed since it was written"


@pytest.mark.long
def test_no_flip_in_a_manifest_makes_another_checkpoint_whole(tmp_path: Path) -> None:
    """Each bit: the flip is found, or the manifest still describes the same files alike."""
    folder = write(tmp_path, 3)
    content = (folder / MANIFEST).read_bytes()
    entries = json.loads(content)["files"]
    for place in range(len(content)):
        for bit in range(8):
            (folder / MANIFEST).write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            if damage(folder, "sizes") is None and damage(folder) is None:
                assert json.loads((folder / MANIFEST).read_text())["files"] == entries


def test_a_manifest_names_no_file_outside(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", write(tmp_path / "checkpoints", 3)
    outside.write_text("secret")
    for name in ("../../outside", str(outside), "deep/../../../outside"):
        entry = {"bytes": 6, "sha256": "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"}
        (folder / MANIFEST).write_text(json.dumps({"files": {name: entry}}))
        assert damage(folder) == f"its {MANIFEST} cannot be read"


def test_the_newest_whole_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "checkpoints"
    for step in (2, 4, 10):
        write(run, step)
    assert newest_complete(run) == 10 and not capsys.readouterr().out
    flip(run / "10" / "deep" / "b")
    (run / "4" / MANIFEST).unlink()
    assert newest(run) == 10 and newest_complete(run, "sizes") == 10
    assert newest_complete(run) == 2
    output = capsys.readouterr().out.splitlines()
    assert [line.split(" is damaged: ")[1] for line in output] == [
        "its file deep/b has changed since it was written; going back to step 2",
        f"it has no {MANIFEST}; going back to step 2",
    ]
    assert complete_checkpoint(tmp_path) == run / "2" and checkpoint_in(tmp_path) == run / "10"
    with pytest.raises(ConfigError, match=r"checkpoint .*/10 is damaged: its file deep/b has changed"):
        complete_checkpoint(run / "10")
    flip(run / "2" / "a")
    with pytest.raises(ConfigError, match=r"10 is damaged: .* no other is complete"):
        newest_complete(run)


def test_a_checkpoint_of_a_run_without_its_manifest(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    folder = write(tmp_path / "checkpoints", 2)
    assert complete_checkpoint(folder) == folder
    (folder / MANIFEST).unlink()
    with pytest.raises(ConfigError, match=rf"2 is damaged: it has no {MANIFEST}"):
        complete_checkpoint(folder)


def test_a_copy_under_the_name_of_another_step(tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    shutil.copytree(folder, tmp_path / "4")
    shutil.copytree(folder, tmp_path / "best")
    assert damage(tmp_path / "4") == "it is that of step 2" and newest_complete(tmp_path) == 2
    assert damage(tmp_path / "best") is None
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({"files": manifest["files"]}))  # as written by earlier versions
    assert damage(folder) is None
    (folder / MANIFEST).write_text(json.dumps(manifest | {"step": "2" * 1000}))
    assert damage(folder) == f"its {MANIFEST} cannot be read"


def test_a_kill_while_a_checkpoint_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old or the new one exists at any moment, under one of two names."""
    write(tmp_path, 2)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name.endswith(UNFINISHED):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 2)
    assert damage(tmp_path / f"2{DAMAGED}") is None and damage(unfinished(tmp_path, 2)) is None
    monkeypatch.undo()
    publish(tmp_path, 2)
    assert damage(tmp_path / "2") is None


def test_known_checksums_are_not_computed_again(tmp_path: Path) -> None:
    """Checksums from before writing also reveal a disk that stored something else."""
    (tmp_path / "a").write_bytes(b"right")
    checkpoints.seal(tmp_path, {"a": xxhash.xxh3_128_hexdigest(b"right")})
    assert damage(tmp_path) is None
    checkpoints.seal(tmp_path, {"a": xxhash.xxh3_128_hexdigest(b"other")})
    assert damage(tmp_path) == "its file a has changed since it was written"


def test_other_programs_checkpoints_without_a_manifest_pass(tmp_path: Path) -> None:
    assert complete_checkpoint(tmp_path) == tmp_path and newest_complete(tmp_path / "none") is None


def test_interrupted_saves_are_dropped_and_later_checkpoints_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        write(tmp_path, step)
    unfinished(tmp_path, 12).mkdir()
    (tmp_path / f"{unfinished(tmp_path, 12).name}.orbax-checkpoint-tmp").mkdir()
    clean(tmp_path, 4)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["10.damaged", "2", "4"]
    assert damage(tmp_path / "10.damaged") is None


def test_checkpoints_set_aside_earlier_stay(tmp_path: Path) -> None:
    for text in "abc":
        (write(tmp_path, 10) / "which").write_text(text)
        clean(tmp_path, 4)
    found = {entry.name: (entry / "which").read_text() for entry in tmp_path.iterdir()}
    assert found == {"10.damaged": "a", "10.damaged-2": "b", "10.damaged-3": "c"}


def test_a_step_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 3)
    flip(tmp_path / "3" / "a")
    assert damage(write(tmp_path, 3)) is None and steps_in(tmp_path) == [3]


@pytest.mark.parametrize(
    ("config", "left"),
    [
        (Checkpoint(), [0, 5, 10, 15, 20, 25]),
        (Checkpoint(keep=2), [20, 25]),
        (Checkpoint(keep=2, keep_every=10), [0, 10, 20, 25]),
        (Checkpoint(keep_every=10), [0, 5, 10, 15, 20, 25]),
        (Checkpoint(keep=9), [0, 5, 10, 15, 20, 25]),
    ],
)
def test_which_checkpoints_are_kept(tmp_path: Path, config: Checkpoint, left: list[int]) -> None:
    for step in (5, 10, 15, 20, 25, 0):
        write(tmp_path, step)
    thin(tmp_path, config)
    assert steps_in(tmp_path) == left


@pytest.mark.long
@pytest.mark.parametrize("drop", [checkpoints.settle, checkpoints.sweep])
def test_writers_that_outlive_a_save_that_failed(
    drop: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They recreate its folder three times; removed only once, it would stay."""
    files, remove = iter("abc"), shutil.rmtree

    def remove_and_write_on(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        for name in islice(files, 1):
            (folder / name).mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", remove_and_write_on)
    monkeypatch.setattr(checkpoints, "settle", drop)
    with Saves(tmp_path, Checkpoint(failure="go on")).writing(2):
        unfinished(tmp_path, 2).mkdir()
        raise OSError("No space left on device")
    assert any(tmp_path.iterdir()) == (drop is checkpoints.sweep)


REASON = os.strerror(errno.ENOSPC)
# library error -> the reported reason
WRAPPED = {
    f'RESOURCE_EXHAUSTED: Error writing "a.b/0.0" in OCDBT database at local file "{"x" * 300}": {REASON} [28]': REASON,
    str(OSError(errno.ENOSPC, REASON, "file")): REASON,
    "no memory for a copy": "no memory for a copy",
}


@pytest.mark.parametrize("message", WRAPPED)
def test_a_run_reports_its_saves(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle one of three fails, then the last of four."""
    monkeypatch.setattr(checkpoints, "LINGER", 0.0)
    saves = Saves(tmp_path, Checkpoint(failure="go on"))

    def save(step: int, error: str = "") -> None:
        with saves.writing(step):
            if error:
                raise ValueError(error)
            write(tmp_path, step)

    for step in (2, 4, 6):
        save(step, message if step == 4 else "")
    why = WRAPPED[message]
    expected = f"the checkpoint of step 4 could not be written to {tmp_path}: {why}; training continues without it\n"
    assert capsys.readouterr().out.replace("\n", "") == expected.replace("\n", "")
    assert saves.summary() == {"newest": 6, "failed": {"4": why}}
    saves.check_latest()
    assert kept(saves.summary(), Path("run")).startswith("saved in run; missing checkpoints: 1, the")
    save(8, message)
    assert not saves.missing(8) and saves.missing(10)  # not tried again at the end of the run
    assert kept(saves.summary(), Path("run")).startswith("saved in run up to step 6 only; ")
    with pytest.raises(TrainingError, match=r"step 8 are not saved.*newest checkpoint is that of step 6: ") as raised:
        saves.check_latest()
    assert ("make room" in str(raised.value)) is (why == REASON)  # this helps against nothing else


def test_a_run_that_saves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LINGER", 0.0)
    saves = Saves(tmp_path, Checkpoint(failure="go on"))
    with saves.writing(2):
        raise OSError(errno.ENOSPC, REASON)
    assert kept(saves.summary(), Path("run")).startswith("no checkpoint in run; ")
    with pytest.raises(TrainingError, match="there is no checkpoint: make room, and start again by --resume"):
        saves.check_latest()


def test_earlier_checkpoints_that_are_removed_in_the_middle_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Removals by the run itself, for checkpoint.keep, are not reported."""
    saves = Saves(tmp_path, config := Checkpoint(keep=2))

    def save(step: int) -> str:
        with saves.writing(step):
            if step == 8:
                shutil.rmtree(tmp_path)  # removes the folder; a save recreates it
            write(tmp_path, step)
            thin(tmp_path, config)
        return " ".join(capsys.readouterr().out.split())

    assert [save(step) for step in (2, 4, 6)] == ["", "", ""]
    message = f"checkpoints in {tmp_path} were removed during the run: "
    assert save(8) == f"{message}6" and save(10) == ""
    shutil.rmtree(tmp_path / "8")
    reason = "it was removed during the run"
    assert saves.summary() == {"newest": 10, "failed": {"6": reason, "8": reason}}
    assert " ".join(capsys.readouterr().out.split()) == f"{message}8"
    assert "2, the last that of step 8" in kept(saves.summary(), Path("run"))
    saves.check_latest()


@pytest.mark.parametrize(
    ("number", "helps"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room within the quota, or have it raised"),
        (errno.EROFS, "mount the file system for writing"),
        (errno.EACCES, "allow writing there (chmod)"),
        (errno.EPERM, "allow writing there (chmod, chattr)"),
        (errno.EFBIG, "raise the largest size of a file (ulimit -f)"),
        (errno.ENOTCONN, "fix that"),
    ],
)
def test_the_fix_fits_the_reason(number: int, helps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LINGER", 0.0)
    reason = os.strerror(number)
    saves = Saves(tmp_path, Checkpoint())
    message = rf"{reason}.*; there is no checkpoint: {re.escape(helps)}, and"
    with pytest.raises(TrainingError, match=message), saves.writing(2):
        raise ValueError(f"INTERNAL: Error writing: {reason} [source: file.cc]")
    with pytest.raises(TrainingError, match=rf"{re.escape(helps)}, or give another --output$"), writes_to("--output"):
        raise OSError(number, reason, "report.html")


@pytest.mark.long
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "8.unfinished/_METADATA"), "it is not a folder"),
        (ValueError("No ArrayMetadata found for process_index=0"), "it is not a folder"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "checkpoints"), os.strerror(errno.EACCES)),
    ],
)
def test_a_folder_that_is_gone_is_the_reason(tmp_path: Path, error: Exception, reason: str) -> None:
    saves = Saves(tmp_path / "removed", Checkpoint(failure="go on"))
    with saves.writing(8):
        raise error
    assert saves.failed == {8: reason}


def test_a_run_that_does_not_save_its_last_step(tmp_path: Path) -> None:
    """The last line names existing checkpoints alone."""
    run, why = Path("run"), "; checkpoint.final = false leaves out the last"
    saves = Saves(tmp_path, Checkpoint(final=False, every=4))
    assert kept(saves.summary(), run, 3) == f"no checkpoint in run{why}"
    with saves.writing(4):
        write(tmp_path, 4)
    assert kept(saves.summary(), run, 5) == f"saved in run up to step 4 only{why}"
    for step in (0, 4):  # 0: a finished run that is resumed saves nothing
        assert kept(saves.summary(), run, step) == "saved in run"


def test_old_checkpoints_that_cannot_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link is removed without its target; an unremovable one stays, and the run continues."""
    run = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write(run, step)
    (run / "1").rename(tmp_path / "elsewhere")
    (run / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.MonkeyPatch.context() as patched:

        def closed(path: Path) -> None:
            raise PermissionError(1, "Operation not permitted")

        patched.setattr(shutil, "rmtree", closed)
        thin(run, Checkpoint(keep=1))
    assert steps_in(run) == [2, 3] and (tmp_path / "elsewhere" / MANIFEST).exists()
    assert "2 stays, though there are more than checkpoint.keep: Operation not permitted" in capsys.readouterr().out
