"""Files laid out by `torch.save` and filled by us: no tensor stays without its numbers."""

import collections
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.foreign_sources_test import config
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.torch_files_test import same

torch = pytest.importorskip("torch")
fake_tensor = importlib.import_module("torch._subclasses.fake_tensor")
torch_zip = importlib.import_module("jaxdist.convert.kinds.torch_zip")
MODEL = MODELS["Qwen2ForCausalLM"]


def script(folder: Path, extra: Any) -> tuple[list[str], dict[str, Any]]:
    """A training script's file with an extra entry: the command's arguments for it, and its content."""
    file = folder / "a.pt"
    written(file, "torch", content_of(MODEL))
    tree = {key: torch.load(file, weights_only=True)[key] for key in ("model", "optimizer", "step")} | {"extra": extra}
    torch.save(tree, file)
    return [str(file), *config(folder, MODEL)], tree


@pytest.mark.long
@pytest.mark.parametrize("way", ["torch", "orbax"])
def test_tensors_within_any_kind_of_dict_or_tuple(way: str, tmp_path: Path) -> None:
    counted = collections.Counter({"a": torch.full((2,), 5.0)})
    ordered = collections.OrderedDict(a=[torch.full((3,), 6.0)], b=(torch.full((1,), 7.0), torch.Size([2])))
    (file, *more), tree = script(tmp_path, {"counted": counted, "ordered": ordered})
    main([file, str(tmp_path / ("b.pt" if way == "torch" else "run")), *more, "--to", way])
    if way == "orbax":
        main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
    same(torch.load(tmp_path / "b.pt", weights_only=True)["extra"], tree["extra"])


def with_attribute() -> Any:
    tensor = torch.ones(3)
    tensor.scale = torch.full((2,), 7.0)
    return tensor


REFUSED = {
    "a tensor with others as its attributes, scale": with_attribute,
    "tensors in a set": lambda: {torch.ones(2)},
    "tensors in a set, or in keys": lambda: {("a", torch.ones(2)): 1},
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_in_unusual_places(case: str, tmp_path: Path) -> None:
    (file, *more), _ = script(tmp_path, REFUSED[case]())
    with pytest.raises(ConfigError, match=rf"a\.pt: it has {case}"):
        main([file, str(tmp_path / "run"), *more])
    assert not (tmp_path / "run").exists()


def test_views_of_one_storage_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, write = list[int](), torch_zip.buffers.write

    def counted(path: Path, start: int, numbers: np.ndarray) -> None:
        sizes.append(numbers.nbytes)
        write(path, start, numbers)

    monkeypatch.setattr(torch_zip.buffers, "write", counted)
    flat, other = torch.arange(1000.0), torch.ones(10)
    tree = {"views": list(flat.split(10)), "flat": flat, "half": flat.bfloat16(), "other": [other, other.clone()]}
    torch_zip.TorchFile(tmp_path / "a.pt", tree).seal()
    assert sorted(sizes) == [40, 40, 2000, 4000]
    same(torch.load(tmp_path / "a.pt", weights_only=True), tree)


def test_a_file_with_a_part_never_written(tmp_path: Path) -> None:
    with fake_tensor.FakeTensorMode():
        tree = {"a": torch.empty(2), "b": torch.empty(3)}
    file = torch_zip.TorchFile(tmp_path / "a.pt", tree)
    file.write(tree["a"], np.ones(2, np.float32))
    with pytest.raises(ValueError, match="data/1 has no numbers"):
        file.seal()
    file.write(tree["b"], np.ones(3, np.float32))
    file.seal()
    same(torch.load(tmp_path / "a.pt", weights_only=True), {"a": torch.ones(2), "b": torch.ones(3)})
