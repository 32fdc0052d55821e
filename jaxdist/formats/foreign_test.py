"""Files of others are not trusted: JSON, file names, a header, a manifest."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.config.bounded import file_within, read_json
from jaxdist.formats import foreign
from jaxdist.formats.foreign import INDEX, check_header, indexed
from jaxdist.runs.checkpoints import MANIFEST, damage, seal

BAD_JSON: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "Expecting value"),
    "cut short": (b'{"a": 1', "delimiter"),
    "not UTF-8": (b'{"a": "\xff"}', "invalid start byte"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "invalid start byte"),
    "byte order mark": (b'\xef\xbb\xbf{"a": 1}', "BOM"),
    "too deep": (b"[" * 100_000, "nested too deeply"),
    "deep tables": (b'{"a":' * 100_000, "nested too deeply"),
    "NaN": (b'{"a": NaN}', "NaN is not a number"),
    "Infinity": (b'{"a": -Infinity}', "-Infinity is not a number"),
    "5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
    "a key twice": (b'{"a": {"b": 1, "c": 2, "b": 1}}', "'b' twice"),
    "half a pair as a key": (b'{"\\ud800": 1}', "surrogates not allowed"),
    "half a pair as a value": (b'{"a": "\\udc80"}', "surrogates not allowed"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_refused(name: str, tmp_path: Path) -> None:
    content, message = BAD_JSON[name]
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_json(tmp_path / "x.json")
    assert len(repr(error.value)) < 300


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="is not a file"):
            read_json(path)
        with pytest.raises(ConfigError, match="is not a file"):
            check_header(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


def test_files_beyond_the_limit_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse files, which would fill the memory."""
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read"))
    with (tmp_path / "x").open("wb") as file:
        file.write((10**12).to_bytes(8, "little"))
        file.truncate(2 * 10**12)
    with pytest.raises(ValueError, match="2,000,000,000,000 bytes"):
        read_json(tmp_path / "x")
    with pytest.raises(ConfigError, match="a header of 1,000,000,000,000 bytes in a file of 2,000,000,000,000"):
        check_header(tmp_path / "x")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file `a`, and a similar one outside."""
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "a").write_text("weights")
    (tmp_path / "outside").write_text("weights")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "folder" / "alias").symlink_to("a")
    (tmp_path / "folder" / "up").symlink_to("..")
    (tmp_path / "folder" / "loop").symlink_to("loop")
    return tmp_path / "folder"


OUTSIDE = ("../outside", "deep/../../outside", "deep/../a", "../folder/a", "/dev/zero", "link", "up/outside", "a\0")


@pytest.mark.parametrize("name", [*OUTSIDE, "itself"])
def test_names_that_lead_outside(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked from within too, with a relative path to the folder."""
    name = str(folder / "a") if name == "itself" else name
    entry = {"bytes": 7, "sha256": "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"}
    (folder / INDEX).write_text(json.dumps({"weight_map": {"t": name}}))
    (folder / MANIFEST).write_text(json.dumps({"files": {name: entry}}))
    monkeypatch.chdir(folder)
    for root in (folder, Path()):
        with pytest.raises(ValueError, match=r"is outside of|null byte"):
            file_within(root, name)
        with pytest.raises(ConfigError, match=f"{INDEX}: ValueError.* in its folder"):
            indexed(root)
        assert damage(root) == f"its {MANIFEST} cannot be read"


def test_links_in_a_circle(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"files": {"loop": {"bytes": 7, "sha256": ""}}}')
    # Since Python 3.13 they resolve to a missing file.
    assert damage(folder) in (f"its {MANIFEST} cannot be read", "its file loop is missing")


@pytest.mark.parametrize("name", ["a", "alias", "deep/new", "./a"])
def test_names_that_stay_inside(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert file_within(folder, name) == folder / name and file_within(Path(), name) == Path(name)


def cache(root: Path) -> Path:
    """A repository as huggingface_hub stores it: a revision with links to files named by their hashes."""
    revision = root / "models--org--name" / "snapshots" / "c0ffee"
    (revision / "part").mkdir(parents=True)
    (root / "models--org--name" / "blobs").mkdir()
    (root / "models--org--name" / "blobs" / "5ad1").write_text("weights")
    (revision / "1.safetensors").symlink_to("../../blobs/5ad1")
    (revision / "part" / "1.safetensors").symlink_to("../../../blobs/5ad1")
    return revision


def test_links_of_the_hugging_face_cache(tmp_path: Path) -> None:
    revision, blobs = cache(tmp_path), tmp_path / "models--org--name" / "blobs"
    (tmp_path / "via").symlink_to(revision)
    assert file_within(revision, "1.safetensors").read_text() == "weights"
    assert file_within(revision / "part", "1.safetensors").read_text() == "weights"
    assert file_within(tmp_path / "via", "1.safetensors").read_text() == "weights"
    (tmp_path / "secret").write_text("secret")
    (revision / "2.safetensors").symlink_to("../../../secret")
    (blobs / "badc0de").symlink_to("../../secret")
    (revision / "3.safetensors").symlink_to("../../blobs/badc0de")
    for name in ("2.safetensors", "3.safetensors", "../../blobs/5ad1"):
        with pytest.raises(ValueError, match="is outside of"):
            file_within(revision, name)


def test_blobs_in_another_place(tmp_path: Path) -> None:
    revision, blobs = cache(tmp_path), tmp_path / "models--org--name" / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is outside of"):
        file_within(revision, "1.safetensors")


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "{}", '{"weight_map": 3}', '{"weight_map": {"t": 3}}', '{"weight_map": {"t": ["a"]}}']
)
def test_an_invalid_index(content: str, folder: Path) -> None:
    (folder / INDEX).write_text(content)
    with pytest.raises(ConfigError, match=f"{INDEX}: .*give an index with a weight_map"):
        indexed(folder)


def test_an_index(folder: Path) -> None:
    assert indexed(folder) is None
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {"t": "a", "u": "a", "v": "deep/b"}}')
    (folder / "deep").mkdir(exist_ok=True)
    (folder / "deep/b").touch()
    assert indexed(folder) == {"t": folder / "a", "u": folder / "a", "v": folder / "deep" / "b"}


SIZES: list[Any] = [True, 7.0, "7", None, [7], {}]


@pytest.mark.parametrize("entry", [*({"bytes": size, "sha256": "x"} for size in SIZES), {"bytes": 7, "sha256": 1}, []])
def test_a_manifest_of_other_kinds(entry: Any, folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"files": {"a": entry}}))
    assert damage(folder) == damage(folder, "sizes") == f"its {MANIFEST} cannot be read"


def failing(*args: Any) -> Any:
    raise OSError(5, "Input/output error")  # as raised by `read`, without the file's name


@pytest.mark.parametrize(
    "put", [Path.mkdir, os.mkfifo, lambda file: file.symlink_to("b")], ids=["folder", "pipe", "dangling link"]
)
def test_other_entries_in_place_of_a_file(put: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("weights")
    seal(tmp_path)
    (tmp_path / "a").unlink()
    put(tmp_path / "a")
    assert damage(tmp_path) == "its file a is missing"


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("weights")
    seal(tmp_path)
    monkeypatch.setattr("jaxdist.runs.checkpoints.CHECKSUMS", {"xxh128": failing})
    assert damage(tmp_path) == "its file a cannot be read: Input/output error"
    monkeypatch.setattr(Path, "is_file", failing)
    assert damage(tmp_path, "sizes") == "its file a cannot be read: Input/output error"


def test_a_pipe_in_place_of_the_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / MANIFEST)
    assert damage(tmp_path) == f"its {MANIFEST} cannot be read"


def test_without_its_check_a_name_leads_outside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "file_within", lambda folder, name: folder / name)
    (folder / INDEX).write_text('{"weight_map": {"t": "../outside"}}')
    found = indexed(folder)
    assert found and found["t"].read_text() == "weights"
