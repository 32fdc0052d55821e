"""Targets that --force replaces, and those that it leaves alone."""

import shutil
import subprocess
import sys
import textwrap
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Content, Origin
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.target import atomic_target
from jaxdist.runs.folder import LOCK
from jaxdist.runs.lock import alone

MODEL = MODELS["Qwen3ForCausalLM"]
# Files that belong to no checkpoint of the kind, though a part of their path does.
WORK = {
    "hf": [
        "thesis.tex", ".git/config", "_work/thesis.tex", "tokenizer_code/thesis.py", "README.md", "mine.safetensors",
        "tokenizer_thesis.tex", "config.json.d/1", "params/_METADATA", "checkpoints/7/manifest.json", "d/thesis.tex",
    ],
    "orbax": [
        "checkpoints/notes.txt", "record/thesis.tex", "record/1.safetensors/thesis.tex", "origin/thesis.tex",
        "checkpoints/7/thesis.tex", "checkpoints/7/params/thesis/1",
        "checkpoints/7/parameters/embed.embedding/thesis.tex",
    ],
    "dcp": ["checkpoints/7/thesis.distcp"],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hf", "orbax", "dcp", "torch"])
def test_a_checkpoint_of_any_kind(kind: str, tmp_path: Path) -> None:
    if kind in ("dcp", "torch"):
        pytest.importorskip("torch")
    source = written(tmp_path / "source", "hf", content_of(MODEL))
    target = written(tmp_path / ("b.pt" if kind == "torch" else "b"), kind, content_of(MODELS["GPT2LMHeadModel"]))
    if kind in ("orbax", "dcp"):  # as after training
        for name in ("summary.json", "events.out.tfevents.1"):
            (target / name).touch()
        (target / "record").mkdir()
        (target / "record" / "1.safetensors").touch()
        (target / "checkpoints" / "9.unfinished.orbax-checkpoint-tmp").mkdir()
        (target / "checkpoints" / "9.unfinished.orbax-checkpoint-tmp" / "half").touch()
    main([str(source), str(target), "--force", "--to", kind])
    (*_, right), (*_, found) = (sorted(tensors(path).items())[-1] for path in (source, target))
    assert found[2:] == right[2:]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "work"), [(kind, name) for kind, names in WORK.items() for name in names])
def test_a_checkpoint_with_work_beside_it(kind: str, work: str, tmp_path: Path) -> None:
    if kind == "dcp":
        pytest.importorskip("torch")
    source = written(tmp_path / "source", "hf", with_vocabulary(b"[]"))
    target = written(tmp_path / "b", kind, with_vocabulary(b"{}"))
    (target / work).parent.mkdir(exist_ok=True, parents=True)
    (target / work).write_text("work")
    with pytest.raises(ConfigError, match=rf"TARGET \S+ has {work}, which is of no checkpoint"):
        main([str(source), str(target), "--force", "--to", "hf"])
    assert (target / work).read_text() == "work"


def with_vocabulary(file: bytes) -> Content:
    return replace(content_of(MODEL), origin=Origin("hf", "huggingface", files={"vocab.json": file}, step=7))


def test_a_tokenizer_gives_way_to_another_one_alone(tmp_path: Path) -> None:
    target = written(tmp_path / "b", "hf", with_vocabulary(b"{}"))
    without, other = (
        written(tmp_path / name, "hf", content)
        for name, content in {"a": content_of(MODEL), "c": with_vocabulary(b"[]")}.items()
    )
    with pytest.raises(ConfigError, match=r"TARGET \S+ has vocab.json, which is of no checkpoint or does not come"):
        main([str(without), str(target), "--force", "--to", "hf"])
    assert (target / "vocab.json").read_bytes() == b"{}"
    main([str(other), str(target), "--force", "--to", "hf"])
    assert (target / "vocab.json").read_bytes() == b"[]"


@pytest.mark.long
@pytest.mark.parametrize("other", ["5", "7.damaged", "7.damaged-2"])
def test_a_run_with_other_checkpoints(other: str, tmp_path: Path) -> None:
    """--force replaces one checkpoint; a damaged one is kept until it is removed by hand."""
    source, target = (written(tmp_path / name, "orbax", content_of(MODEL)) for name in ("source", "b"))
    shutil.copytree(target / "checkpoints" / "7", target / "checkpoints" / other)
    with pytest.raises(ConfigError, match=rf"TARGET \S+ has checkpoints/{other} too, and --force replaces one"):
        main([str(source), str(target), "--force", "--to", "dcp"])
    shutil.rmtree(target / "checkpoints" / other)
    main([str(source), str(target), "--force", "--to", "hf"])


@pytest.mark.parametrize("kind", ["run", "checkpoint", "orbax", "pytree"])
def test_orbax_checkpoints_are_replaced(kind: str, tmp_path: Path) -> None:
    """Arrays in a database, as runs write them, and checkpoints without a manifest, as other programs write them."""
    source, target = written(tmp_path / "source", "hf", content_of(MODEL)), tmp_path / "b"
    if kind in ("run", "checkpoint"):
        run = written(target, "orbax", content_of(MODEL))
        (run / "checkpoints" / "7" / "manifest.json").unlink()
        (run / "config.toml").rename(run / "config.toml.tmp")
        target = target if kind == "run" else run / "checkpoints" / "7"
    elif kind == "orbax":
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
            writer.save(target, args=ocp.args.Composite(params=ocp.args.StandardSave({"a": {"b": np.ones(3)}})))
    else:
        with ocp.StandardCheckpointer() as writer:
            writer.save(target, {"a": {"b": np.ones(3)}})
    main([str(source), str(target), "--force", "--to", "hf"])
    assert (target / "model.safetensors").exists()


@pytest.mark.long
def test_an_unreadable_folder_is_left_alone(tmp_path: Path) -> None:
    """The content of an unreadable folder is unknown: it is neither listed nor replaced, with one message."""
    _, target = (written(tmp_path / name, "hf", content_of(MODEL)) for name in ("source", "b"))
    (target / "closed").mkdir()
    (tmp_path / "c").mkdir()
    lines = [["--inspect", "c"], ["source", "c", "--force"], ["c", "d"], ["source", "b", "--force"]]
    code = f"""
        import ctypes, os, sys
        os.chdir({str(tmp_path)!r})
        for folder in ("c", "b/closed"):
            os.chmod(folder, 0)
        if os.geteuid() == 0:  # no file is closed to root, unless it gives up the capabilities that are bits 1 and 2
            call, header = ctypes.CDLL(None).syscall, (ctypes.c_uint32 * 2)(0x20080522, 0)
            held = (ctypes.c_uint32 * 6)()
            capget, capset = dict(x86_64=(125, 126), aarch64=(90, 91))[os.uname().machine]
            assert call(capget, header, held) == 0
            held[0] &= ~6
            assert call(capset, header, held) == 0
        from jaxdist.config import ConfigError
        from jaxdist.convert.__main__ import main
        for line in {lines!r}:
            try:
                main(line)
            except ConfigError as error:
                print("refused:", error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    for folder in ("c", "b/closed"):
        (tmp_path / folder).chmod(0o755)
    refusals = [line for line in done.stdout.splitlines() if line.startswith("refused:")]
    assert len(refusals) == len(lines) and all("Permission denied; give" in line for line in refusals), done
    assert (target / "model.safetensors").exists()


def test_a_checkpoint_with_a_run_beside_it(tmp_path: Path) -> None:
    """The run's files have the usual names, one folder deeper."""
    source, target = (written(tmp_path / name, "hf", content_of(MODEL)) for name in ("source", "b"))
    run = written(target / "mine", "orbax", content_of(MODEL))
    with pytest.raises(ConfigError, match=r"TARGET \S+ has mine/\S+, which is of no checkpoint"):
        main([str(source), str(target), "--force", "--to", "hf"])
    assert (run / "config.toml").exists()


@pytest.mark.parametrize("name", ["tokens.bin", "notes.pt", "thesis.docx", "thesis.pt", "notes.safetensors"])
def test_a_file_that_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    source = written(tmp_path / "source", "hf", content_of(MODEL))
    (tmp_path / name).write_bytes(b"\1\0\2\0")
    if name.startswith("thesis"):
        with zipfile.ZipFile(tmp_path / name, "w") as document:
            document.writestr("word/document.xml", "work")
    before = (tmp_path / name).read_bytes()
    with pytest.raises(ConfigError, match=rf"{name} is not a checkpoint, and --force replaces nothing else"):
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


@pytest.mark.long
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
    """It starts after the first look, while the target is written: the run stays, and the target is dropped."""
    target = tmp_path / "run"
    target.mkdir()

    with (
        ExitStack() as stack,
        pytest.raises(ConfigError, match="is being written by a run"),
        atomic_target(target, lambda _: None) as partial,
    ):
        partial.write_text("new")
        stack.enter_context(alone(target / LOCK))
        (target / "config.toml").write_text("of the run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (target / "config.toml").read_text() == "of the run"
