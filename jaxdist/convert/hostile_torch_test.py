"""Torch files, distributed checkpoints and run folders that lie: a ConfigError, and no code, hang or allocation."""

import importlib
import pathlib
import pickle
import warnings
from pathlib import Path

import pytest

from jaxdist.config import ConfigError
from jaxdist.config.dcp import read_index
from jaxdist.convert.convert_test import MODELS

torch = pytest.importorskip("torch")
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
            warnings.simplefilter("ignore")  # that no process group is here
            dcp.save({"a": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
        return folder / ".metadata"

    def built(self, index: Path, named: bytes, state: bytes) -> None:
        """Before all else, the opcode BUILD on what is named, with a state."""
        whole = pickle.dumps(pickle.loads(index.read_bytes()), protocol=2)
        index.write_bytes(whole[:2] + named + state + pickle.BUILD + pickle.POP + whole[2:])

    @pytest.mark.parametrize("what", NAMED)
    def test_nothing_gets_attributes_as_slots(self, what: str, tmp_path: Path) -> None:
        index = self.saved(tmp_path)
        read_index(tmp_path)
        self.built(index, NAMED[what], SLOTS)
        with pytest.raises(ConfigError, match=r"is refused: it changes .*, which is nothing of an index"):
            read_index(tmp_path)
        assert not hasattr(pathlib.PosixPath, "patched")

    @pytest.mark.parametrize("what", ["a function", "a path"])
    def test_only_what_an_index_is_made_of_gets_attributes(self, what: str, tmp_path: Path) -> None:
        index = self.saved(tmp_path)
        self.built(index, NAMED[what], b"}U\x07patchedI1\ns")
        with pytest.raises(ConfigError, match="is refused: it changes"):
            read_index(tmp_path)
        assert not hasattr(torch.serialization._get_layout, "patched")
