"""What --force takes, and what it leaves alone."""

import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from jaxdist.config import ConfigError
from jaxdist.config.folder import LOCK
from jaxdist.config.lock import alone
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.formats_test import content_of, tensors, written
from jaxdist.convert.target import whole_or_nothing

MODEL = MODELS["Qwen3ForCausalLM"]


@pytest.mark.parametrize("kind", ["hf", "orbax", "dcp", "torch"])
def test_a_checkpoint_of_any_kind(kind: str, tmp_path: Path) -> None:
    if kind in ("dcp", "torch"):
        pytest.importorskip("torch")
    source = written(tmp_path / "source", "hf", content_of(MODEL))
    target = written(tmp_path / ("b.pt" if kind == "torch" else "b"), kind, content_of(MODELS["GPT2LMHeadModel"]))
    if kind in ("orbax", "dcp"):  # as a run leaves it that was trained on
        for name in ("summary.json", "events.out.tfevents.1"):
            (target / name).touch()
        (target / "record").mkdir()
    main([str(source), str(target), "--force", "--to", kind])
    (*_, right), (*_, found) = (sorted(tensors(path).items())[-1] for path in (source, target))
    assert found[2:] == right[2:]


@pytest.mark.parametrize("beside", ["thesis.tex", ".git/config"])
def test_a_checkpoint_with_work_beside_it(beside: str, tmp_path: Path) -> None:
    source, target = (written(tmp_path / name, "hf", content_of(MODEL)) for name in ("source", "b"))
    (target / beside).parent.mkdir(exist_ok=True)
    (target / beside).write_text("work")
    with pytest.raises(ConfigError, match=rf"TARGET \S+ has {beside.split('/')[0]}, which is of no checkpoint"):
        main([str(source), str(target), "--force", "--to", "hf"])
    assert (target / beside).read_text() == "work"


def test_a_checkpoint_with_a_run_beside_it(tmp_path: Path) -> None:
    """Which is of the same names as the rest, one folder deeper."""
    source, target = (written(tmp_path / name, "hf", content_of(MODEL)) for name in ("source", "b"))
    run = written(target / "mine", "orbax", content_of(MODEL))
    with pytest.raises(ConfigError, match=r"TARGET \S+ has mine, which is of no checkpoint"):
        main([str(source), str(target), "--force", "--to", "hf"])
    assert (run / "config.toml").exists()


@pytest.mark.parametrize("name", ["tokens.bin", "notes.pt", "thesis.docx", "thesis.pt"])
def test_a_file_that_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    source = written(tmp_path / "source", "hf", content_of(MODEL))
    (tmp_path / name).write_bytes(b"\1\0\2\0")
    if name.startswith("thesis"):
        with zipfile.ZipFile(tmp_path / name, "w") as document:
            document.writestr("word/document.xml", "work")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ConfigError, match=rf"{name} is no checkpoint, and --force replaces nothing else"):
        main([str(source), str(tmp_path / name), "--force", "--to", "torch"])
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_torch_file_cut_short(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    source = written(tmp_path / "source", "hf", content_of(MODEL))
    target = written(tmp_path / f"b{suffix}", "torch", content_of(MODEL))
    target.write_bytes(target.read_bytes()[:1000])
    main([str(source), str(target), "--force"])
    assert tensors(target).keys() == tensors(source).keys()


def test_a_checkpoint_of_a_run_in_progress(tmp_path: Path) -> None:
    source, run = (written(tmp_path / name, "orbax", content_of(MODEL)) for name in ("source", "run"))
    target = run / "checkpoints" / "7"
    before = {path.relative_to(run) for path in run.rglob("*")}
    with alone(run / LOCK), pytest.raises(ConfigError, match=r"7 is being written by a run; wait until it ends"):
        main([str(source), str(target), "--force", "--to", "hf"])
    assert {path.relative_to(run) for path in run.rglob("*")} == before
    main([str(source), str(target), "--force", "--to", "hf"])
    assert (target / "config.json").exists()


def test_a_run_that_began_meanwhile(tmp_path: Path) -> None:
    """After the first look, while the new target was written: the run stays, and the target is not written."""
    target = tmp_path / "run"
    target.mkdir()

    with (
        ExitStack() as stack,
        pytest.raises(ConfigError, match="is being written by a run"),
        whole_or_nothing(target, lambda _: None) as partial,
    ):
        partial.write_text("new")
        stack.enter_context(alone(target / LOCK))
        (target / "config.toml").write_text("of the run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (target / "config.toml").read_text() == "of the run"
