"""A start opens its source once for the model, the weights and the files beside them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import jaxdist.train
import torch_ref.train
from jaxdist.config import ConfigError
from jaxdist.conftest import free_port
from jaxdist.formats import opening, sources
from jaxdist.formats.leaves import Reader
from jaxdist.formats.sources import Found, found
from parity_tests.suite.source_kinds_test import SOURCES, as_it_is
from torch_ref.formats import hf

pytestmark = pytest.mark.long

LINE = "--device cpu --mesh 1x1 --train.steps 0 --train.validation_batches 0 --checkpoint.final false"
SIDES = {"jaxdist": jaxdist.train.main, "torch_ref": torch_ref.train.main}


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Paths that one rank in this process opens."""
    paths: list[Path] = []

    def counted(path: Path, reader: Reader) -> Found:
        paths.append(path)
        return found(path, reader)

    for module in (sources, hf):
        monkeypatch.setattr(module, "found", counted)
    yield paths


@pytest.fixture(params=SIDES)
def main(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """The command of a side."""
    if request.param == "torch_ref":
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        monkeypatch.delenv("TORCH_REF_STORE", raising=False)
    return SIDES[request.param]


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["ZeRO 2", "the Trainer, pytorch_model.bin", "Meta", "Hugging Face", "torchtitan"])
def test_a_source_is_opened_once(
    name: str, main: Callable[[list[str]], None], tmp_path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readers of convert, which read more of a kind, are removed."""
    _, write, model, tells = SOURCES[name]
    path = write(made(tmp_path / "source"), as_it_is)
    for kind in sources.KINDS:
        monkeypatch.delattr(sources.KINDS[kind].format, "read_content")
    (np.arange(999, dtype=np.uint16) % 5).tofile(tmp_path / "ids.bin")
    data = ["--data.path", str(tmp_path / "ids.bin"), "--data.bin_dtype", "uint16", "--data.sequence", "8"]
    fields = model.model_dump(exclude_unset=True, exclude={"family"})
    given = [] if tells else [part for n, v in fields.items() for part in (f"--model.{n}", str(v).lower())]
    main([*LINE.split(), *data, *given, "--init", str(path), "--output", str(tmp_path / "run")])
    assert opened == [path]
    assert not opening.opened.cache_info().currsize


def test_a_refused_start_leaves_nothing_open(
    main: Callable[[list[str]], None], tmp_path: Path, opened: list[Path]
) -> None:
    path = SOURCES["Meta"][1](made(tmp_path / "source"), as_it_is)
    with pytest.raises(ConfigError, match=r"model\.layers"):
        main([*LINE.split(), "--model.layers", "7", "--init", str(path)])
    assert opened and not opening.opened.cache_info().currsize


def test_weights_by_themselves_are_those_of_now(tmp_path: Path, opened: list[Path]) -> None:
    """Outside of a start nothing is cached, as a file may be rewritten."""
    path, model = SOURCES["Hugging Face"][1](made(tmp_path / "a"), as_it_is), SOURCES["Hugging Face"][2]
    other = SOURCES["Hugging Face"][1](made(tmp_path / "b"), lambda tensors: {n: t + 1 for n, t in tensors.items()})
    before = hf.Weights(path, model).read("norm.weight")
    shutil.copytree(other, path, dirs_exist_ok=True)
    assert (hf.Weights(path, model).read("norm.weight") == before + 1).all() and opened == [path, path]
