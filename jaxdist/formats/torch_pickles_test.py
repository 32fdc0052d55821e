"""Hostile pickles, small but costly in memory or time, are refused; those of `torch.save` are not."""

import collections
import importlib
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.kinds.torch_files_test import same
from jaxdist.convert.kinds.torch_records_test import rezipped, with_content
from jaxdist.formats import pickles, torch_zips
from jaxdist.formats.dcp_index import read_index

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
torch_records = importlib.import_module("jaxdist.convert.kinds.torch_records")

PAIRS = b")q\x00" + b"h\x00\x86q\x00" * 60  # a tuple with one value twice, one with that twice, ...: 2^60 values
BILLION = b"J\x00\xca\x9a\x3b"
TEXT = b"X\xa0\x86\x01\x00" + b"x" * 100_000 + b"q\x01"  # in the memo, reused by many calls
LATIN = b"X\x06\x00\x00\x00latin1"
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85cbuiltins\nbytes\n)R\x87R"
STATE = b"(K\x01J\xa0\x86\x01\x00\x85cnumpy\ndtype\nX\x02\x00\x00\x00u1\x89\x88\x87R\x89h\x02tb"

LONG = {
    "a key": b"}" + PAIRS + b"K\x01s",
    "keys": b"}(" + PAIRS + b"K\x01u",
    "the key of a storage": b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + PAIRS + b"X\x03\x00\x00\x00cpuK\x01tQ",
    "a set": b"c__builtin__\nset\n]" + PAIRS + b"a\x85R",
    "a dict of a list": b"ccollections\nOrderedDict\n]]" + PAIRS + b"aK\x01aa\x85R",
    "a layout": b"ctorch.serialization\n_get_layout\n" + PAIRS + b"\x85R",
    "a dict of pairs": b"(" + PAIRS + b"K\x01d",
    "a large number": b"}\x8b" + (10**6).to_bytes(4, "little") + b"\x01" * 10**6 + b"K\x01s",
}
LARGE = {
    "a bytearray": b"c__builtin__\nbytearray\n" + BILLION + b"\x85R",
    "a new bytearray": b"cbuiltins\nbytearray\n" + BILLION + b"\x85\x81",
    "a bytearray by another call": b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\n"
    + b"c__builtin__\nbytearray\n" + BILLION + b"\x85}tR",
    "a bytearray of a tensor": b"c__builtin__\nbytearray\nctorch._utils\n_rebuild_tensor\n((X\x07\x00\x00\x00storage"
    + b"ctorch\nLongStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00))tR\x85R",
    "a size of a tensor": b"ctorch\nSize\nctorch._utils\n_rebuild_tensor\n((X\x07\x00\x00\x00storage"
    + b"ctorch\nLongStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00))tR\x85R",
    "a tensor": b"ctorch\nFloatTensor\n" + BILLION + b"\x85R",
    "torch's tensor": b"ctorch\nTensor\n" + BILLION + b"\x85\x81",
    "a storage": b"ctorch.storage\nUntypedStorage\n" + BILLION + b"\x85R",
    "many bytearrays of one text": b"](" + TEXT + (b"c__builtin__\nbytearray\nh\x01" + LATIN + b"\x86R") * 9000 + b"e",
    "many bytes of one text": b"](" + TEXT + (b"c_codecs\nencode\nh\x01" + LATIN + b"\x86R") * 9000 + b"e",
    "another encoding": b"c_codecs\nencode\n" + TEXT + b"X\x05\x00\x00\x00utf32\x86R",
    "many arrays of the same bytes": b"](c_codecs\nencode\n" + TEXT + LATIN + b"\x86Rq\x02"
    + (ARRAY + STATE) * 900 + b"e",
    "many sets of one list": b"](](" + b"M\x00\x01" * 2000 + b"eq\x01"
    + (b"c__builtin__\nset\nh\x01\x85R") * 9000 + b"e",
    "many sizes of one tuple": b"]((" + b"K\x01" * 900 + b"tq\x01" + (b"ctorch\nSize\nh\x01\x85R") * 9000 + b"e",
}  # fmt: skip


WHY = (
    r"of more than 1,000 values|copy more than the file has|neither a tensor nor a plain value|a number of \d+,"
    r"|the operation DICT"
)


def file_of(folder: Path, content: bytes, old: bool) -> Path:
    """A torch.save file with this pickle."""
    file = folder / "a.pt"
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=not old)
    stream = b"\x80\x02" + content + b"."
    if old:
        before = file.read_bytes()
        begin = before.index(b"}", before.index(b"type_sizes")) + 1
        begin = before.index(b".\x80\x02}", begin) + 1  # after the pickle about the system
        file.write_bytes(before[:begin] + stream + b"\x80\x02].")  # without storages
    else:
        rezipped(file, with_content("data.pkl", stream))
    return file


@pytest.mark.long
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("case", LONG | LARGE)
@pytest.mark.timeout(60)
def test_a_hostile_file(case: str, old: bool, tmp_path: Path) -> None:
    file = file_of(tmp_path, (LONG | LARGE)[case], old)
    began = time.process_time()
    tracemalloc.start()
    with pytest.raises(ConfigError, match=WHY):
        torch_files.load(file)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()
    assert time.process_time() - began < 10


@pytest.mark.parametrize("old", [False, True])
def test_it_is_read_where_nothing_is_hostile(old: bool, tmp_path: Path) -> None:
    """Shows that the refusals above are due to the hostile parts."""
    few = b"}(" + b"K\x01K\x02\x86" + TEXT + b"c_codecs\nencode\nh\x01" + LATIN + b"\x86Rq\x02"
    found = torch_files.load(file_of(tmp_path, few + ARRAY + STATE + b"u", old))
    assert found[1, 2] == "x" * 100_000 and np.array_equal(found[b"x" * 100_000], np.full(100_000, ord("x")))


INDEXED = LONG | {
    "a name": b"}ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}X\x03\x00\x00\x00fqn"
    + PAIRS
    + b"sbK\x01s",
    "a format": b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n" + PAIRS + b"\x85R",
    "many sizes of one tuple": LARGE["many sizes of one tuple"],
}  # fmt: skip
del INDEXED["a set"], INDEXED["the key of a storage"]


@pytest.mark.parametrize("case", INDEXED)
@pytest.mark.timeout(60)
def test_a_hostile_index(case: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + INDEXED[case] + b".")
    with pytest.raises(ConfigError, match=rf"is refused: .*({WHY})"):
        read_index(tmp_path)


def test_more_operations_than_a_checkpoint_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte creates a list of sixty."""
    file = file_of(tmp_path, b"](" + b"]" * 1000 + b"e", old=False)
    assert torch_files.load(file) == [[]] * 1000
    monkeypatch.setattr(pickles, "OPERATIONS", 999)
    with pytest.raises(ConfigError, match="it has more than 999 operations"):
        torch_files.load(file)


def test_a_pickle_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file may take few bytes on disk."""
    file = file_of(tmp_path, TEXT, old=False)
    assert torch_files.load(file) == "x" * 100_000
    monkeypatch.setattr(torch_zips, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"its record data\.pkl has 100,010 bytes, more than 1,000"):
        torch_files.load(file)


@pytest.mark.parametrize("old", [False, True])
def test_another_protocol(old: bool, tmp_path: Path) -> None:
    for protocol in (4, 5):
        torch.save([1], tmp_path / "a.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
        with pytest.raises(ConfigError, match=rf"saved with pickle_protocol={protocol}, .*; save it with 2"):
            torch_files.load(tmp_path / "a.pt")


def optimizer(name: str, lines: list[Any]) -> Any:
    """torch's optimizer of that name after a few steps."""
    kind = getattr(torch.optim, name)
    instance = kind(lines, lr=0.1)
    for _ in range(3):
        for line in lines:
            line.grad = torch.ones_like(line)
        instance.step(lambda: torch.tensor(1.0)) if name == "LBFGS" else instance.step()
    return instance


SAVED: dict[str, Any] = {
    "bytes": [b"", b"a", bytes(range(256)) * 9, b"a", [b"b"] * 50],
    "bytearrays": [bytearray(), bytearray(range(256)), [bytearray(b"x")] * 50],
    "sets": [set(), {1, (2, 3)}, {"a", None, 1.5}],
    "counter": collections.Counter("hello"),
    "ordered": collections.OrderedDict({(1, "a"): 2, 3: collections.OrderedDict()}),
    "numbers": [1, -1, 2**100, 1.5, 2j, True, None, "x" * 300, "ü"],
    "shared": [[(0.9, 0.999)] * 30, [torch.Size([2, 3])] * 30, [{"a": 1}] * 30],
    "python's states": random.Random(0).getstate(),
    "torch's": [torch.get_rng_state(), torch.float8_e5m2, torch.device("cpu"), torch.strided, torch.Size([])],
    "a long tuple": tuple(range(100_000)),
    "parameters": [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)],
}  # fmt: skip


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("case", SAVED)
def test_values_that_scripts_save(case: str, old: bool, tmp_path: Path) -> None:
    torch.save({"a": SAVED[case]}, tmp_path / "a.pt", _use_new_zipfile_serialization=not old)
    found = torch_files.load(tmp_path / "a.pt", **({} if old else {"mapped": True}))["a"]
    assert type(found) is type(SAVED[case])
    same(found, SAVED[case])


def test_tensors_with_attributes(tmp_path: Path) -> None:
    tensor, parameter = torch.arange(3.0), torch.nn.Parameter(torch.ones(3))
    tensor.kind, parameter.kind = "mine", ["yours"]
    torch.save([tensor, parameter], tmp_path / "a.pt")
    found = torch_files.load(tmp_path / "a.pt", mapped=True)
    assert found[0].kind == "mine" and found[1].kind == ["yours"] and type(found[1]) is torch.nn.Parameter
    same(list(found), [tensor, parameter])


@pytest.mark.parametrize("dtype", ["f4", ">f8", "u1", "c8", "?"])
def test_numpys_arrays(dtype: str, tmp_path: Path) -> None:
    arrays = [np.ones((3, 5), dtype), np.zeros((0, 2), dtype), *[np.ones((), dtype)[()]] * 20]
    arrays += [np.full(1000, i, dtype) for i in range(5)]
    torch.save(arrays, tmp_path / "a.pt")
    for found, right in zip(torch_files.load(tmp_path / "a.pt"), arrays, strict=True):
        assert found.dtype == right.dtype and np.array_equal(found, right)


OPTIMIZERS = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"Optimizer", "SparseAdam"}))
def test_optimizers_of_torch(name: str, tmp_path: Path) -> None:
    lines = [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(40)]
    instance = optimizer(name, lines)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(instance, 1.0, 50) if "momentum" in instance.defaults else None,
        torch.optim.lr_scheduler.ReduceLROnPlateau(instance),
        torch.optim.lr_scheduler.MultiStepLR(instance, [3, 3, 5]),
    ]
    saved = [instance.state_dict(), [scheduler.state_dict() for scheduler in schedulers if scheduler]]
    torch.save(saved, tmp_path / "a.pt")
    same(torch_files.load(tmp_path / "a.pt", mapped=True), saved)
