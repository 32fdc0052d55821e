"""numpy arrays in files of `torch.save`: plain numbers alone, read by one thread at a time, with bounded memory."""

import importlib
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, written

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
torch_records = importlib.import_module("jaxdist.convert.kinds.torch_records")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([print], object), "'O8'"),
        (np.array(["a"]), "'U1'"),
        (np.zeros(1, [("a", "f4")]), "'V4'"),
        (np.zeros(2, "M8[s]"), "'M8'"),
    ],
)
def test_numpy_of_plain_numbers_alone(array: Any, message: str, tmp_path: Path) -> None:
    file = written(tmp_path / "a.pt", "torch", content_of(MODELS["Qwen2ForCausalLM"]))
    tree = torch.load(file, weights_only=True)
    torch.save(tree | {"more": array}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=rf"a.pt.*({message}; give plain numbers|is refused)"):
        main([str(tmp_path / "a.pt"), str(tmp_path / "run")])


@pytest.mark.long
@pytest.mark.parametrize("locked", [True, False])
def test_numpy_by_several_threads(locked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one list of allowed names: a thread would remove those that another needs."""
    torch.save({"rng": np.random.RandomState(0).get_state()}, tmp_path / "a.pt")
    at_once = list[int]()

    class Counting(torch_records.Unpickler):  # type: ignore[name-defined, misc]
        def load(self) -> Any:
            at_once.append(1)
            time.sleep(0.05)
            try:
                return super().load()
            finally:
                at_once.remove(1)

    def read(_: int) -> int:
        with suppress(ConfigError):
            torch_files.load(tmp_path / "a.pt")
        return len(at_once)

    monkeypatch.setattr(torch_records, "Unpickler", Counting)
    if not locked:
        monkeypatch.setattr("jaxdist.convert.kinds.torch_numpy._lock", nullcontext())
    with ThreadPoolExecutor(8) as pool:
        others = list(pool.map(read, range(16)))
    assert (max(others) > 1) != locked


def test_numpy_asks_for_no_memory(tmp_path: Path) -> None:
    """A file that claims more than it holds."""

    class Hostile:
        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __reduce__(self) -> tuple[Any, ...]:
            return self.parts

    def file(shape: Any) -> Path:
        state = (1, shape, np.dtype("f8"), False, b"1234")
        torch.save({"more": Hostile(np.ndarray, ((0,),), state)}, tmp_path / "a.pt")
        return tmp_path / "a.pt"

    for shape in (10**9,), ("x", 3 * 10**8), ([0], 4 * 10**7), (-1, -1), (10**30,):
        file(shape)
        tracemalloc.start()
        with pytest.raises(ConfigError, match=r"numpy array"):
            torch_files.load(tmp_path / "a.pt")
        assert tracemalloc.get_traced_memory()[1] < 10**7
        tracemalloc.stop()
    torch.save({"more": Hostile(np.ndarray, ((10**9,),))}, tmp_path / "a.pt")
    assert torch_files.load(tmp_path / "a.pt")["more"].size == 0
    for value in np.dtype("f4"), np.ndarray:
        torch.save({"more": value}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"it holds a type"):
            torch_files.load(tmp_path / "a.pt")


def test_numpy_in_shared_lists(tmp_path: Path) -> None:
    """They expand to a million; empty arrays are read too."""
    shared: Any = [np.ones(2), (np.zeros((0, 3), np.int64), 5)]
    for _ in range(18):
        shared = [shared, shared]
    torch.save(shared, tmp_path / "a.pt")
    found = torch_files.load(tmp_path / "a.pt")
    for _ in range(18):
        assert found[0] is found[1]
        found = found[0]
    assert np.array_equal(found[0], np.ones(2)) and found[1][0].shape == (0, 3) and found[1][1] == 5
