"""Hostile torch files, distributed checkpoints and run folders give a ConfigError: no code runs, nothing hangs or
allocates."""

import importlib
import os
import pathlib
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds import orbax_files
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.formats.dcp_index import read_index
from jaxdist.formats.hf import experiment_for
from jaxdist.runs.checkpoints import checkpoint_in

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
dcp = importlib.import_module("torch.distributed.checkpoint")

MODEL = MODELS["Qwen2ForCausalLM"]


NAMED = {
    "a class": b"cpathlib\nPosixPath\n",
    "one of the index's classes": b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
    "a function": b"ctorch.serialization\n_get_layout\n",
    "a path": b"cpathlib\nPosixPath\n)R",
    "one of the index's": b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n)R",
}
SLOTS = b"N}U\x07patchedI1\ns\x86"  # (None, {"patched": 1})


class TestIndex:
    """The index of a distributed checkpoint is a pickle."""

    def saved(self, folder: Path) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that there is no process group
            dcp.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
        return folder / ".metadata"

    def built(self, index: Path, named: bytes, state: bytes) -> None:
        """Prepends the opcode BUILD on `named`, with a state."""
        intact = pickle.dumps(pickle.loads(index.read_bytes()), protocol=2)
        index.write_bytes(intact[:2] + named + state + pickle.BUILD + pickle.POP + intact[2:])

    @pytest.mark.parametrize("case", NAMED)
    def test_nothing_gets_attributes_as_slots(self, case: str, tmp_path: Path) -> None:
        index = self.saved(tmp_path)
        read_index(tmp_path)
        self.built(index, NAMED[case], SLOTS)
        with pytest.raises(ConfigError, match=r"is refused: it changes .*, which is nothing of an index"):
            read_index(tmp_path)
        assert not hasattr(pathlib.PosixPath, "patched")

    @pytest.mark.parametrize("case", ["a function", "a path"])
    def test_only_classes_of_an_index_get_attributes(self, case: str, tmp_path: Path) -> None:
        index = self.saved(tmp_path)
        self.built(index, NAMED[case], b"}U\x07patchedI1\ns")
        with pytest.raises(ConfigError, match="is refused: it changes"):
            read_index(tmp_path)
        assert not hasattr(torch.serialization._get_layout, "patched")


def read_content(file: Path) -> Any:
    return torch_files.read_content(file, experiment_for(MODEL.model_dump(), "test"))


class TestFiles:
    """A file of `torch.save`; `own` is one of ours."""

    @pytest.fixture
    def own(self, tmp_path: Path) -> Path:
        return written(tmp_path / "own.pt", "torch", content_of(MODEL))

    def changed(self, file: Path, **parts: Any) -> Path:
        torch.save(torch.load(file, weights_only=True) | parts, file)
        return file

    def test_files_along_that_show_few_bytes_often(self, own: Path) -> None:
        many = {"tokenizer.json": torch.zeros(1, dtype=torch.uint8).expand(10**14)}
        with pytest.raises(ConfigError, match=r"'tokenizer\.json': it is not a tensor of at most 200,000,000 bytes"):
            read_content(self.changed(own, files=many))

    def test_many_tensors_that_show_few_numbers_often(self, own: Path) -> None:
        """Each is as large as the file, together far larger."""
        size = own.stat().st_size
        few = torch.zeros(1, dtype=torch.uint8)
        read_content(self.changed(own, more=[few.expand(size // 2)]))
        with pytest.raises(ConfigError, match="its tensors, written out, are larger than the file"):
            read_content(self.changed(own, more=[few.expand(size // 2 + i) for i in range(10)]))

    def test_a_weight_that_shows_few_numbers_often(self, own: Path) -> None:
        weights = torch.load(own, weights_only=True)["model"]
        with pytest.raises(ConfigError, match=r"tensor x \(100000000000000,\) is larger than the file"):
            read_content(self.changed(own, model=weights | {"x": torch.zeros(1).expand(10**14)}))

    @pytest.mark.parametrize("dtype", ["bits8", "float4_e2m1fn_x2"])
    def test_numbers_that_numpy_does_not_know(self, dtype: str, own: Path) -> None:
        if not hasattr(torch, dtype):
            pytest.skip(f"this torch has no {dtype}")
        weights = torch.load(own, weights_only=True)["model"]
        with pytest.raises(ConfigError, match=rf"tensor x is torch.{dtype}, which is not read; leave it out"):
            read_content(self.changed(own, model=weights | {"x": torch.empty(2, dtype=getattr(torch, dtype))}))

    @pytest.mark.parametrize("old", [False, True])
    def test_a_sign_that_is_a_bit_of_the_tensor(self, old: bool, tmp_path: Path) -> None:
        """x.conj().imag is a view of x.imag with a negative bit; x.conj() has a conjugate bit."""
        x, y = torch.randn(2, 3, 5, dtype=torch.complex64).unbind()
        tree = {"negative": x.conj().imag, "turned": x.conj().imag.T, "conjugate": y.clone().conj()}
        assert tree["negative"].is_neg() and tree["conjugate"].is_conj()
        torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
        for name, leaf in torch_files.described(tmp_path / "a.pt").items():
            right = tree[name].resolve_conj().resolve_neg().numpy()
            assert np.array_equal(leaf.read(), right), name

    @pytest.mark.parametrize("experiment", [{"model": {3: 4}}, {"model": {}, 5: 3}, {"model": {"family": [1]}}])
    def test_an_invalid_experiment(self, experiment: Any, own: Path) -> None:
        intact = torch.load(own, weights_only=True)["experiment"]
        with pytest.raises(ConfigError, match=r"own.pt: "):
            torch_files.read_content(self.changed(own, experiment=intact | experiment))

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("Qwen2ForCausalLM", {"layers": 300_000}, "model.layers = 300000 is absurd; use at most 10,000"),
            ("GPT2LMHeadModel", {"layers": 300_000}, "model.layers = 300000 is absurd"),
            ("MixtralForCausalLM", {"experts": 300_000}, "model.experts = 300000 is absurd"),
            ("MixtralForCausalLM", {"layers": 9_999, "experts": 9_999}, "99,980,001 experts, more than 100,000"),
        ],
    )
    @pytest.mark.timeout(30)
    def test_an_absurd_experiment(self, name: str, changes: dict[str, int], message: str, tmp_path: Path) -> None:
        own = written(tmp_path / "own.pt", "torch", content_of(MODELS[name]))
        experiment = torch.load(own, weights_only=True)["experiment"]
        experiment["model"] |= changes
        with pytest.raises(ConfigError, match=f"own.pt: .*{message}"):
            torch_files.read_content(self.changed(own, experiment=experiment))

    def test_a_log_nested_deeply(self, own: Path) -> None:
        with pytest.raises(ConfigError, match=r"its metrics.jsonl is damaged: .*nested too deeply"):
            torch_files.read_content(self.changed(own, **{"metrics.jsonl": "[" * 100_000 + "\n"}))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def terabyte(file: Path) -> None:
    """Sparse zeros, without room on the disk."""
    with file.open("wb") as data:
        data.truncate(10**12)


def deep(file: Path) -> None:
    file.write_text("[" * 100_000)


def a_list(file: Path) -> None:
    file.write_text("[]")


class TestRunFolders:
    """A checkpoint of Orbax without a manifest, so that no checksum shows a changed file."""

    @pytest.fixture
    def lone(self, tmp_path: Path) -> Path:
        run = written(tmp_path / "run", "orbax", content_of(MODEL))
        shutil.copytree(checkpoint_in(run), tmp_path / "lone" / "5")
        (tmp_path / "lone" / "5" / "manifest.json").unlink()
        return tmp_path / "lone" / "5"

    @pytest.mark.long
    @pytest.mark.parametrize("change", [pipe, terabyte, deep, a_list])
    @pytest.mark.parametrize("name", ["experiment/metadata", "parameters/_METADATA"])
    @pytest.mark.timeout(60)
    def test_invalid_json(self, change: Callable[[Path], None], name: str, lone: Path) -> None:
        orbax_files.read_content(lone)
        change(lone / name)
        with pytest.raises(ConfigError, match="lone/5"):
            orbax_files.read_content(lone)


@pytest.mark.parametrize("values", [[], None, 5, "x", {5: 3}])
def test_an_experiment_that_is_no_table(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"a file: .* is not a table of settings; give"):
        Experiment.parse(values, "a file")


def test_a_terabyte_beside_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unrelated large neighbours are left out of the conversion."""
    file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
    terabyte(tmp_path / "tokenizers.tar")
    main([str(file), str(tmp_path / "b"), "--to", "hf"])
    assert (tmp_path / "b" / "model.safetensors").exists()
    assert "a.pt stay behind: " in capsys.readouterr().out


def test_a_tokenizer_of_a_terabyte(tmp_path: Path) -> None:
    source = written(tmp_path / "a", "hf", content_of(MODEL))
    terabyte(source / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"its config.json and tokenizer have 1,000,0\d\d,\d+,\d+ bytes, more than"):
        main([str(source), str(tmp_path / "b")])
