"""Our own torch files: recognized by more than a key, and read without a second copy in memory."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Content, Origin
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.room_test import peak
from jaxdist.formats import torch_zips

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
torch_records = importlib.import_module("jaxdist.convert.kinds.torch_records")

MODEL = MODELS["Qwen2ForCausalLM"]
LOG = b'{"step": 1}\n' * 10_000


def logged() -> Content:
    return replace(content_of(MODEL), metrics=LOG)


def changed(file: Path, **parts: Any) -> Path:
    torch.save(torch.load(file, weights_only=True) | parts, file)
    return file


@pytest.mark.long
@pytest.mark.parametrize("old", [False, True])
def test_the_log_comes_along(old: bool, tmp_path: Path) -> None:
    """The log comes along and back to the run; also as a string, as in older files."""
    file = written(tmp_path / "a.pt", "torch", logged())
    if old:
        changed(file, **{"metrics.jsonl": LOG.decode()})
    main([str(file), str(tmp_path / "run")])
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == LOG
    assert torch_files.read_content(file).origin.extras.keys() == {"model", "optimizer", "scheduler", "step"}


def test_a_long_log_is_no_part_of_the_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of a pickle that we read is limited."""
    monkeypatch.setattr(torch_zips, "MOST_BYTES", len(LOG))
    assert torch_files.read_content(written(tmp_path / "a.pt", "torch", logged())).metrics == LOG


@pytest.mark.long
@pytest.mark.parametrize("kind", ["torch", "orbax"])
def test_a_log_is_read_a_line_at_a_time(kind: str, tmp_path: Path) -> None:
    """All records at once would take ten times as much."""
    log = b'{"step": 1, "loss": 5.785955904024457, "grad_norm": 4.966336995753538, "tokens": 1280}\n' * 20_000
    there = written(tmp_path / "a", kind, replace(content_of(MODEL), metrics=log))
    read_content = KINDS[kind].format.read_content
    read_content(there)  # imports allocate too
    most = peak(lambda: read_content(there))
    assert read_content(there).metrics == log
    assert most < 5 * len(log)


@pytest.mark.parametrize(
    "log",
    ["\ud800", "hello\n", '{"loss": 1}\n', 5, torch.ones(3), torch.tensor([255, 10], dtype=torch.uint8)],
    ids=repr,
)
def test_an_invalid_log(log: Any, tmp_path: Path) -> None:
    file = changed(written(tmp_path / "a.pt", "torch", logged()), **{"metrics.jsonl": log})
    with pytest.raises(ConfigError, match=r"a.pt: its metrics.jsonl is damaged"):
        main([str(file), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", ["../tokenizer.json", "bin/evil.sh", ".bashrc", "model.safetensors", 3])
def test_companion_files_with_other_names_are_refused(name: Any, tmp_path: Path) -> None:
    """Our file is refused if its companion files may not be beside weights, or are weights."""
    file = written(tmp_path / "a.pt", "torch", logged())
    assert torch_files.read_content(file).origin.own
    changed(file, files={name: torch.zeros(2, dtype=torch.uint8)})
    with pytest.raises(ConfigError, match="its files have"):
        torch_files.read_content(file)


@pytest.mark.long
def test_companion_files_are_in_memory_once(tmp_path: Path) -> None:
    """Reading holds one copy; writing takes no more."""
    files = {"LICENSE": bytes(8_000_000), "merges.txt": b"", "tokenizer.json": b"{}"}
    written(tmp_path / "a.pt", "torch", logged())  # imports allocate too
    content = replace(logged(), origin=Origin("hf", "huggingface", files=files))
    most = peak(lambda: written(tmp_path / "b.pt", "torch", content))
    assert torch_files.read_content(tmp_path / "b.pt").origin.files == files
    assert most < 0.5 * len(files["LICENSE"])


def test_an_origin_that_lacks_its_extras(tmp_path: Path) -> None:
    """A damaged file is reported as such, also where that part is read late."""
    content = replace(content_of(MODEL), origin=Origin("dcp", "huggingface", held=lambda: {"more": 5}, step=7))
    file = written(tmp_path / "a.pt", "torch", content)
    kept = torch.load(file, weights_only=True)["origin"]
    changed(file, origin={key: value for key, value in kept.items() if key != "extras"})
    with pytest.raises(ConfigError, match=r"a.pt"):
        main([str(file), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
