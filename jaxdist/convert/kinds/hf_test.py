"""Files beside a Hugging Face folder's weights: which come along, and which are left behind and named."""

import json
import os
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.formats import companions
from jaxdist.formats.foreign import INDEX, SINGLE

MODEL = MODELS["LlamaForCausalLM"]
ALONG = {
    "README.md": b"card", "LICENSE": b"license", "modeling_x.py": b"code", "vocab.txt": b"words",
    "tokenizer.json": b"{}", ".gitattributes": b"lfs", "notes": b"",
}  # fmt: skip
BEHIND = {
    "pytorch_model.bin": b"\x80\x04.", "pytorch_model.bin.index.json": b"{}", "model.gguf": b"", ".env": b"secret",
    "other.safetensors": b"", "flax_model.msgpack": b"", "rust_model.ot": b"", "original/consolidated.00.pth": b"",
    INDEX: b"{}",
}  # fmt: skip


def folder(path: Path, files: dict[str, bytes]) -> Path:
    """Weights with these files beside them."""
    written(path, "hf", content_of(MODEL))
    for name, file in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(file)
    return path


def beside_weights(path: Path) -> dict[str, bytes]:
    """Files of a folder besides its config and weights."""
    found = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return {name: file.read_bytes() for name, file in found.items() if name not in ("config.json", SINGLE)}


@pytest.mark.parametrize("way", [[], ["run"], ["a.pt", "run"], ["dcp"]], ids=str)
def test_which_files_come_along(way: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Companion files pass through any kinds; other formats' weights, hidden files, folders and links to outside are
    named."""
    if way != ["run"] and way:
        pytest.importorskip("torch")
    source = folder(tmp_path / "a", ALONG | BEHIND)
    (tmp_path / "secret").write_text("secret")
    (source / "linked.txt").symlink_to(tmp_path / "secret")
    os.mkfifo(source / "pipe")
    right = tensors(source)
    for name in [*way, "back"]:
        kind = {"a.pt": "torch", "dcp": "dcp", "back": "hf"}.get(name, "orbax")
        main([str(source), str(tmp_path / name), "--to", kind])
        output = capsys.readouterr().out
        behind = sorted({*(name.split("/")[0] for name in BEHIND), "linked.txt", "pipe"})
        first = ", ".join(behind[: len(behind) - 3])
        assert (f"a: what stays behind: {first} and 3 more\n" in output) == (source.name == "a")
        assert ("what stays behind" in output) == (source.name == "a")
        source = tmp_path / name
    assert beside_weights(source) == ALONG and tensors(source) == right


@pytest.mark.parametrize("name", ["10.12\u202fAM.png", "two\nlines.txt", "caf\udce9.txt", "tokenizer\u00a0copy.json"])
def test_names_that_cannot_be_written_again_stay_behind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torch file with such names would be refused when read."""
    pytest.importorskip("torch")
    source = folder(tmp_path / "a", {name: b"x", "README.md": b"card"})
    main([str(source), str(tmp_path / "b.pt")])
    assert "a: what stays behind: " in capsys.readouterr().out
    main([str(tmp_path / "b.pt"), str(tmp_path / "back"), "--to", "hf"])
    assert beside_weights(tmp_path / "back") == {"README.md": b"card"} and tensors(tmp_path / "back") == tensors(source)


def test_large_files_stay_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One exceeds the limit for a file, another the total."""
    monkeypatch.setattr(companions, "MOST_EACH", 10)
    source = folder(tmp_path / "a", {"a.txt": b"x" * 10, "b.txt": b"x" * 11, "c.txt": b"x" * 10, "d.txt": b"x" * 10})
    monkeypatch.setattr(companions, "MOST_BYTES", (source / "config.json").stat().st_size + 25)
    main([str(source), str(tmp_path / "back"), "--to", "hf"])
    assert beside_weights(tmp_path / "back").keys() == {"a.txt", "c.txt"}
    assert "a: what stays behind: b.txt, d.txt\n" in capsys.readouterr().out


NO_NAMES = ["", ".", "..", "a/b.txt", "../README.md", "a\0b", "a" * 256, "\udcff", "additional_chat_templates"]


@pytest.mark.parametrize("name", [*BEHIND, *NO_NAMES])
def test_files_that_a_torch_file_may_not_bring(name: str) -> None:
    assert all(map(companions.is_companion, ALONG)) and not companions.is_companion(name)


def test_a_card_is_replaced_by_the_same_alone(tmp_path: Path) -> None:
    """--force replaces no file that would be lost."""
    source = folder(tmp_path / "a", ALONG)
    main([str(source), str(tmp_path / "run")])
    for _ in range(2):
        main([str(tmp_path / "run"), str(tmp_path / "b"), "--force"])
    (tmp_path / "b" / "README.md").write_text("work")
    with pytest.raises(ConfigError, match=r"has README.md, which is of no checkpoint"):
        main([str(tmp_path / "run"), str(tmp_path / "b"), "--force"])
    assert (tmp_path / "b" / "README.md").read_text() == "work"


def test_metadata_of_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Metadata that all shards share, or only one has, is kept; contradictions are named."""
    source = folder(tmp_path / "a", {})
    weights = load_file(source / SINGLE)
    (source / SINGLE).unlink()
    parts = {"one": dict(list(weights.items())[:9]), "two": dict(list(weights.items())[9:])}
    for part, some in parts.items():
        save_file(some, source / f"{part}.safetensors", {"format": "pt", "part": part, part: "alone"})
    places = {name: f"{part}.safetensors" for part, some in parts.items() for name in some}
    (source / INDEX).write_text(json.dumps({"weight_map": places}))
    main([str(source), str(tmp_path / "run")])
    assert "a: what stays behind: the metadata 'part', in which its files differ\n" in capsys.readouterr().out
    main([str(tmp_path / "run"), str(tmp_path / "back")])
    with safe_open(tmp_path / "back" / SINGLE, "numpy") as file:
        assert file.metadata() == {"format": "pt", "one": "alone", "two": "alone"}
    assert not beside_weights(tmp_path / "back")
