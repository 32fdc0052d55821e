"""Files that a run keeps from its source folder, tested without training."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdist.config import ConfigError, Experiment
from jaxdist.formats.origin import CompanionFiles, begin, companion_files
from jaxdist.runs.folder import RunFolder

CONFIG = {"model_type": "llama", "dtype": "float16"}


def folder(path: Path, *dtypes: type) -> Path:
    """Tensors of these dtypes, or other weights."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    (path / "notes.txt").write_text("notes")
    (path / ".hidden").write_text("")
    (path / "pytorch_model.bin").write_text("")
    if dtypes:
        save_file({str(i): np.zeros(2, dtype) for i, dtype in enumerate(dtypes)}, path / "model.safetensors")
    return path


def run(path: Path, source: Path | None, step: int = 0) -> Path:
    """A run that starts from a source, up to its checkpoint."""
    with RunFolder(path, Experiment(), resume=path.exists()) as run_folder:
        begin(run_folder, Experiment(), step, lambda: companion_files(source))
    return path


def saved(path: Path, step: int) -> Path:
    (path / "checkpoints" / str(step)).mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    ("dtypes", "right"),
    [
        ([np.float32] * 2, "float32"),
        ([np.float32, np.float16], ""),
        ([np.float32, np.int64], "float32"),
        ([], "float16"),
    ],
)
def test_files_and_dtype_of_a_folder(dtypes: list[type], right: str, tmp_path: Path) -> None:
    found = companion_files(folder(tmp_path / "hf", *dtypes))
    assert found and found.files.keys() == {"config.json", "tokenizer.json", "notes.txt"}
    assert found.dtype == right and found.left == (".hidden",)


def test_a_run_from_a_run_keeps_its_origin(tmp_path: Path) -> None:
    source = folder(tmp_path / "hf", np.float32)
    first = saved(run(tmp_path / "a", source), 3)
    for path in (first, first / "checkpoints/3"):
        assert companion_files(path) == companion_files(source)._replace(left=())  # type: ignore[union-attr]
    second = run(tmp_path / "b", first)
    assert (second / "origin/files/tokenizer.json").read_text() == "{}"
    assert companion_files(saved(tmp_path / "none", 1)) is None and companion_files(None) is None


def test_only_the_beginning_writes(tmp_path: Path) -> None:
    """A run with checkpoints keeps its files; one that never saved starts over, also without any."""
    one, other = folder(tmp_path / "one", np.float32), folder(tmp_path / "other", np.float32)
    (other / "notes.txt").write_text("other")
    path = run(tmp_path / "run", one)
    assert (run(path, other) / "origin/files/notes.txt").read_text() == "other"
    (saved(run(path, one), 2) / "origin.tmp").mkdir()
    assert (run(path, other, step=2) / "origin/files/notes.txt").read_text() == "notes"
    (path / "checkpoints/2").rmdir()
    assert not (run(path, None) / "origin").exists()


def test_a_damaged_origin_is_refused(tmp_path: Path) -> None:
    path = saved(run(tmp_path / "run", folder(tmp_path / "hf", np.float32)), 1)
    (path / "origin/files/tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"origin is damaged: its file files/tokenizer.json .*; remove it"):
        companion_files(path)


def test_files_left_behind_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "run", folder(tmp_path / "hf", np.float32))
    assert capsys.readouterr().out == "files of the starting folder that are not copied: .hidden\n"
    assert CompanionFiles({}).left == ()
