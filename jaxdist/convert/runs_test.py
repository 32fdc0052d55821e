"""Content of a run folder for the way back: a model's buffers, and the run of a linked checkpoint."""

import json
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.conftest import often, slow
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Origin
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.formats.sources import kind_of
from jaxdist.runs.checkpoints import MANIFEST, checkpoint_in, seal

pytestmark = pytest.mark.long

GPT2 = MODELS["GPT2LMHeadModel"]
MASKS: dict[str, np.ndarray] = {
    f"transformer.h.{i}.attn.{kind}": array
    for i in range(GPT2.layers)
    for kind, array in (("bias", np.tril(np.ones((1, 1, 5, 5), bool))), ("masked_bias", np.array(-1e4, np.float32)))
}


def read_content(path: Path) -> Any:
    return KINDS[kind_of(path)].format.read_content(path)


class TestBuffers:
    """Buffers are no parameters, and come back unchanged."""

    def test_of_a_hugging_face_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = written(tmp_path / "hf", "hf", content_of(GPT2)) / "model.safetensors"
        save_file(before := load_file(file) | MASKS, file, {"format": "pt"})
        main([str(tmp_path / "hf"), str(tmp_path / "run")])
        assert "6 buffers, transformer.h.0.attn.bias first" in capsys.readouterr().out
        main([str(tmp_path / "run"), str(tmp_path / "back")])
        after = load_file(tmp_path / "back" / "model.safetensors")
        assert before.keys() == after.keys()
        for name, array in before.items():
            assert (array.dtype, array.shape, array.tobytes()) == (
                after[name].dtype, after[name].shape, after[name].tobytes(),
            )  # fmt: skip

    def test_through_a_torch_file(self, tmp_path: Path) -> None:
        """Buffers, names without a prefix, a stored tied head, and metadata of file and index come back."""
        pytest.importorskip("torch")
        folder = written(tmp_path / "hf", "hf", content_of(GPT2))
        weights = load_file(folder / "model.safetensors") | MASKS
        before = {name.removeprefix("transformer."): array for name, array in weights.items()}
        before["lm_head.weight"] = before["wte.weight"]
        save_file(before, folder / "model.safetensors", {"format": "pt", "note": "mine"})
        for source, target in (("hf", "a.pt"), ("a.pt", "run"), ("run", "b.pt"), ("b.pt", "back")):
            main([str(tmp_path / source), str(tmp_path / target), *(["--to", "hf"] if target == "back" else [])])
        with safe_open(tmp_path / "back" / "model.safetensors", "numpy") as file:
            assert file.metadata() == {"format": "pt", "note": "mine"}
        after = load_file(tmp_path / "back" / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(array.tobytes() == after[name].tobytes() for name, array in before.items())
        config = (folder / "config.json").read_bytes()
        assert (tmp_path / "back" / "config.json").read_bytes() == config

    def test_of_a_torch_file(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        weights = torch.load(written(tmp_path / "a.pt", "torch", content_of(GPT2)), weights_only=True)["model"]
        weights = {f"module.{name}": tensor for name, tensor in weights.items()}
        weights |= {f"module.{name}": torch.tensor(array) for name, array in MASKS.items()}
        torch.save(dict(sorted(weights.items())), tmp_path / "given.pt")
        main([str(tmp_path / "given.pt"), str(tmp_path / "run"), *self.config(tmp_path)])
        main([str(tmp_path / "run"), str(tmp_path / "back.pt")])
        before, after = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("given", "back"))
        assert [*before] == [*after]
        assert all(t.dtype == after[n].dtype and torch.equal(t, after[n]) for n, t in before.items())

    def test_of_a_distributed_checkpoint(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        dcp = pytest.importorskip("torch.distributed.checkpoint")
        dcp_files = pytest.importorskip("jaxdist.convert.kinds.dcp_files")
        weights = torch.load(written(tmp_path / "a.pt", "torch", content_of(GPT2)), weights_only=True)["model"]
        weights |= {name: torch.tensor(array) for name, array in MASKS.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that there is no process group
            dcp.save({"model": weights}, checkpoint_id=tmp_path / "given", no_dist=True)
        main([str(tmp_path / "given"), str(tmp_path / "run"), *self.config(tmp_path)])
        main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "dcp"])
        before, after = (dcp_files.Tensors(checkpoint_in(tmp_path / name)).leaves for name in ("given", "back"))
        assert before.keys() == after.keys()
        assert all(leaf.equals(after[name]) for name, leaf in before.items())

    def config(self, folder: Path) -> list[str]:
        (folder / "model.toml").write_text(content_of(GPT2).experiment.to_toml())
        return ["--model", str(folder / "model.toml")]


def test_a_run_from_a_torch_file_converts_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hugging Face folder needs no torch; targets that keep torch's extras do."""
    pytest.importorskip("torch")
    source = written(tmp_path / "a.pt", "torch", content_of(MODELS["Qwen3ForCausalLM"]))
    main([str(source), str(tmp_path / "run")])
    assert (tmp_path / "run" / "origin" / "extras.pt").exists()
    for name in [name for name in sys.modules if name.startswith("jaxdist.convert.kinds.torch_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    main([str(tmp_path / "run"), str(tmp_path / "hf")])
    for kind in ("orbax", "torch"):
        with pytest.raises(ConfigError, match="needs torch; pip install"):
            main([str(tmp_path / "run"), str(tmp_path / "b"), "--to", kind])


def test_a_run_without_its_empty_folders(tmp_path: Path) -> None:
    """git and object stores keep no empty folders."""
    pytest.importorskip("torch")
    source = written(tmp_path / "a.pt", "torch", content_of(MODELS["Qwen3ForCausalLM"]))
    main([str(source), str(tmp_path / "run")])
    (tmp_path / "run" / "origin" / "files").rmdir()
    main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
    assert tensors(tmp_path / "b.pt") == tensors(source)


def test_a_long_index_of_origin_is_read(tmp_path: Path) -> None:
    """The places of a distributed checkpoint's entries, possibly a million."""
    run = written(tmp_path / "run", "orbax", replace(content_of(MODELS["Qwen3ForCausalLM"]), origin=Origin("dcp")))
    folder = run / "origin"
    origin = json.loads((folder / "origin.json").read_text())
    ways = {f"model.{i}": ["model", str(i)] for i in range(1000)} | {f"model.{'x' * 2**24}": ["model", "x" * 2**24]}
    (folder / "origin.json").write_text(json.dumps(origin | {"index": ways}))
    seal(folder)
    assert read_content(run).origin.index == ways


def test_a_config_that_names_another_dtype_than_the_weights_have(tmp_path: Path) -> None:
    """Many on the Hub do: kept while the weights are unchanged, corrected otherwise."""
    source = written(tmp_path / "hf", "hf", content_of(MODELS["Qwen3ForCausalLM"]))
    config = source / "config.json"
    config.write_text(config.read_text().replace("float32", "bfloat16"))
    main([str(source), str(tmp_path / "run")])
    for name, more in (("same", []), ("half", ["--dtype", "float16"])):
        main([str(tmp_path / "run"), str(tmp_path / name), *more])
    assert (tmp_path / "same" / "config.json").read_bytes() == config.read_bytes()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize("kind", often(["orbax", "dcp"], ["orbax"]))
@pytest.mark.parametrize("link", ["step", "latest of linked checkpoints", *slow(["latest", "checkpoints", "run"])])
def test_a_linked_checkpoint_finds_its_run(kind: str, link: str, tmp_path: Path) -> None:
    """The link may be the checkpoint, the checkpoints folder, the run, or a step."""
    if kind == "dcp":
        pytest.importorskip("torch")
    run = tmp_path / "run"
    content = replace(content_of(MODELS["Qwen3ForCausalLM"]), metrics=b'{"step": 7}\n')
    content = replace(content, origin=Origin("hf", "huggingface", files={"tokenizer.json": b"{}"}, step=7))
    source = written(run, kind, content)
    right = tensors(run)
    if link == "run":
        source = tmp_path / "linked"
        source.symlink_to(run)
    if link.startswith("latest"):
        source = run / "latest"
        source.symlink_to("checkpoints/7")
    if link.endswith(("checkpoints", "step")):
        moved = run / "checkpoints" if link.endswith("checkpoints") else run / "checkpoints" / "7"
        moved.rename(tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")
    found = read_content(source)
    assert found.origin.files == {"tokenizer.json": b"{}"} and found.metrics == b'{"step": 7}\n'
    assert tensors(source) == right


@pytest.mark.parametrize("kind", ["orbax", "dcp"])
def test_a_newest_checkpoint_without_the_files_of_its_kind(kind: str, tmp_path: Path) -> None:
    """The newest complete one is read, as for other missing files."""
    if kind == "dcp":
        pytest.importorskip("torch")
    run = written(tmp_path / "run", kind, content_of(MODELS["Qwen3ForCausalLM"]))
    right = tensors(run)
    newer = shutil.copytree(run / "checkpoints" / "7", run / "checkpoints" / "9")
    (newer / MANIFEST).unlink()
    seal(newer, step=9)
    assert checkpoint_in(run) == newer
    (newer / ("parameters/_METADATA" if kind == "orbax" else ".metadata")).unlink()
    assert tensors(run) == right


@pytest.mark.parametrize("values", [{"names": ["a"]}, {"step": "7"}, {"index": 3}, {"kind": None}, {"more": 1}, []])
def test_an_origin_with_values_of_another_type(values: Any, tmp_path: Path) -> None:
    run = written(tmp_path / "run", "orbax", replace(content_of(MODELS["Qwen3ForCausalLM"]), origin=Origin("hf")))
    file = run / "origin" / "origin.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values if values else values))
    (run / "origin" / MANIFEST).unlink()
    seal(run / "origin")
    with pytest.raises(ConfigError, match=r"origin.json is damaged: .*; remove \S+origin, or use a copy"):
        read_content(run)


def test_a_model_whose_config_sets_no_sequence(tmp_path: Path) -> None:
    """A conversion reads no data: the default length is limited to the positions, and written to the run's config. A
    length that is set is checked."""
    model = GPT2.model_copy(update={"positions": 48})
    written(tmp_path / "hf", "hf", content_of(model))
    config = tmp_path / "model.toml"
    config.write_text(tomli_w.dumps({"model": model.model_dump(exclude_none=True)}))
    main([str(tmp_path / "hf"), str(tmp_path / "run"), "--model", str(config)])
    assert load(tmp_path / "run" / "config.toml", {}).data.sequence == 48
    config.write_text(config.read_text() + "\n[data]\nsequence = 49\n")
    with pytest.raises(ConfigError, match=r"data.sequence = 49 is longer than model.positions = 48"):
        main([str(tmp_path / "hf"), str(tmp_path / "other"), "--model", str(config)])
    with pytest.raises(ConfigError, match=r"data.sequence = 128 is longer than model.positions = 48"):
        load(None, {"model.positions": 48})
