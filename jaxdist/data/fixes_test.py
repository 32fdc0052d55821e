"""Following each fix in messages on data literally makes the data readable."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Data
from jaxdist.conftest import open_dataset
from jaxdist.data import Dataset
from jaxdist.data.dataset import Sequences
from jaxdist.data.ids_formats_test import llm_c, megatron
from jaxdist.data.ids_test import header, rewrite, text_ids

Fields = dict[str, Any]
IDS = text_ids(6000, 50_257)
DOCUMENTS = [IDS[:1000].tolist(), IDS[1000:].tolist()]


def opened(path: Path, **fields: Any) -> Dataset:
    """The data, after reading a batch of each split. `vocab` and `split_read` are no fields of Data."""
    vocab, split = fields.pop("vocab", 65_536), fields.pop("split_read", "train")
    values: Fields = {"path": str(path), "sequence": 4} | fields
    found = open_dataset(Data(**values), vocab)
    found.batch(1, 1, 0, split=split)
    return found


def text(name: str, content: str | bytes, up: int = 0) -> Callable[[Path], Path]:
    """A function that writes a file and returns its path, or that of a folder `up` levels above it."""

    def make(folder: Path) -> Path:
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return [file, *file.parents][up]

    return make


def raw(name: str, dtype: str, ids: Any = IDS, before: bytes = b"") -> Callable[[Path], Path]:
    return text(name, before + np.asarray(ids).astype(dtype).tobytes())


def array(name: str, ids: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        np.save(folder / name, ids, allow_pickle=True)
        return folder / name

    return make


def several(*files: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        for file in files:
            file(folder)
        return folder

    return make


def pair(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        index = megatron(folder / "a", DOCUMENTS).with_suffix(".idx")
        index.write_bytes(change(index.read_bytes()))
        return folder / "a.bin"

    return make


def renamed(ending: str) -> Callable[[Path, str], Any]:
    def follow(path: Path, message: str) -> Path:
        assert f"give it the ending {ending}" in message
        return path.rename(path.with_suffix(ending))

    return follow


def away(name: str) -> Callable[[Path, str], Any]:
    def follow(path: Path, message: str) -> None:
        ((path if path.is_dir() else path.parent) / name).unlink()

    return follow


def fields(**values: Any) -> Callable[[Path, str], Fields]:
    return lambda path, message: values


def anew(content: str | bytes, name: str = "") -> Callable[[Path, str], Path]:
    return lambda path, message: text(name or path.name, content)(path.parent)


def code(length: int = 0) -> Callable[[Path, str], Any]:
    def follow(path: Path, message: str) -> None:
        name = re.search(r"\.tofile\(path\) for (\S+)$", message)
        rewrite(path / name[1] if name else path, message, length)

    return follow


LINE = json.dumps({"text": "some text of a record"}) + "\n"
ROW = "id,text\n1,some text of a row\n"
# problem -> data, the fields to read them with, the fix's words, and a function that follows it: it changes files, or
# returns another path or other fields
FIXES: dict[str, tuple[Callable[[Path], Path], Fields, str, Callable[[Path, str], Any]]] = {
    "big-endian": (raw("a.bin", ">u2"), {}, "as by numpy", code()),
    "float32": (raw("a.bin", "<f4"), {}, "as by numpy", code()),
    "a header": (raw("a.bin", "<u2", before=header(7, 1, 6000, 0)), {}, "offset=16", code()),
    "the last id is cut": (text("a.bin", IDS.astype("<u4").tobytes()[:-2]), {}, "drop the last id", code()),
    "a width that is not": (raw("a.bin", "<u4"), {"bin_dtype": "uint16"}, "set data.bin_dtype = uint32, or auto",
        fields(bin_dtype="uint32")),
    "zeros": (raw("a.bin", "<u2", np.zeros(64)), {}, "set data.bin_dtype = uint16, ", fields(bin_dtype="uint16")),
    "another declared than llm.c's": (lambda folder: llm_c(folder / "a.bin", 20240520, 1, IDS.astype(np.uint16)),
        {"bin_dtype": "int64"}, "set data.bin_dtype = auto", fields(bin_dtype="auto")),
    "llm.c's, cut": (lambda folder: llm_c(folder / "a.bin", 20240520, 1, IDS.astype(np.uint16), 4000), {},
        "or write the ids alone, as by", code()),
    "several types": (several(raw("a.bin", "<u4"), raw("b.bin", "<u2")), {}, "write all as uint32, as by", code()),
    "several types, llm.c's": (several(raw("a.bin", "<i8"),
        lambda folder: llm_c(folder / "b.bin", 20240520, 1, IDS.astype(np.uint16))), {},
        "write all as int64, as by", code()),
    "an index of another": (pair(lambda index: b"TNTIDX" + index), {}, "move the index elsewhere", away("a.idx")),
    "an index that is cut": (pair(lambda index: index[:-8]), {}, "move the index elsewhere", away("a.idx")),
    "an index of floats": (pair(lambda index: index[:17] + b"\x07" + index[18:]), {}, "move the index", away("a.idx")),
    "an index of other ids": (pair(lambda index: index[:34] + bytes(4) + index[38:]), {}, "move the index",
        away("a.idx")),
    "an id above the vocabulary": (raw("a.bin", "<u4"), {"vocab": 40_000}, "raise model.vocab above 4|above 5",
        lambda path, message: {"vocab": int(re.findall(r"above (\d+)", message)[0]) + 1}),
    "16 bits for more": (array("a.npy", IDS.astype(np.uint16)), {"vocab": 70_000}, "or set model.vocab = 65536",
        fields(vocab=65_536)),
    "a square array": (array("a.npy", IDS.reshape(60, 100)), {}, "save .* as a 1-D array of integers, with numpy",
        lambda path, message: np.save(path, np.load(path).ravel())),
    "an array of floats": (array("a.npy", IDS / 1), {}, "save .* as a 1-D array of integers, with numpy",
        lambda path, message: np.save(path, np.load(path).astype(np.int32))),
    "a packed array": (text("a.npy.gz", b"\x1f\x8b"), {}, "unpack it", lambda path, message: array("a.npy", IDS)(
        path.parent)),
    "a .npy called .bin": (text("a.bin", b"\x93NUMPY" + bytes(64)), {}, "give it the ending .npy",
        lambda path, message: array("a.npy", IDS)(path.parent)),
    "text called .bin": (text("a.bin", "some text, long enough to be taken for that"), {}, "the ending .txt",
        renamed(".txt")),
    "JSON called .bin": (text("a.bin", LINE * 3), {}, "the ending .jsonl", renamed(".jsonl")),
    "JSON called text": (text("a.txt", LINE * 3), {}, "the ending .jsonl", renamed(".jsonl")),
    "JSON called text, kept": (text("a.txt", LINE * 3), {}, "set data.text_field = ''", fields(text_field="")),
    "CSV called text": (text("a.txt", ROW + ROW[8:] * 3), {}, "the ending .csv", renamed(".csv")),
    "CSV called text, kept": (text("a.txt", ROW + ROW[8:] * 3), {}, "set data.text_field = ''", fields(text_field="")),
    "text called Parquet": (text("a.parquet", "some text"), {}, "rename it to its format",
        lambda path, message: path.rename(path.with_suffix(".txt"))),
    "an empty Parquet": (several(text("a.parquet", ""), text("b.jsonl", LINE)), {}, "keep one kind", away("a.parquet")),
    "another key": (text("a.jsonl", '{"body": "some text", "id": 1}\n'), {}, "it has body, .*set it to the key of the",
        fields(text_field="body")),
    "a nested key": (text("a.jsonl", '{"a": {"body": "some text"}}\n'), {}, r"it has a\.body; ",
        fields(text_field="a.body")),
    "another column": (text("a.csv", "id,body\n1,some text\n"), {}, "it has id, body; .*set it to",
        fields(text_field="body")),
    "ids in records": (text("a.jsonl", json.dumps({"input_ids": IDS.tolist()})), {}, "save them by numpy.save",
        lambda path, message: array("b.npy", IDS)(path.parent)),
    "a number for a record": (text("a.jsonl", LINE + "3\n"), {}, "correct or remove it", anew(LINE)),
    "half a record": (text("a.jsonl", LINE + LINE[:9] + "\n"), {}, "correct or remove this line", anew(LINE)),
    "a key twice": (text("a.jsonl", '{"text": "some text", "text": "more"}\n'), {}, "keep one of them", anew(LINE)),
    "half a pair": (text("a.jsonl", '{"text": "some text \\ud800"}\n'), {}, "remove that from the text", anew(LINE)),
    "a ragged row": (text("a.csv", ROW + "2,a,b\n"), {}, "correct or remove this row", anew(ROW)),
    "a column twice": (text("a.csv", "text,text\na,some text\n"), {}, "give each its own name",
        anew("other,text\na,some text\n")),
    "latin1 records": (text("a.jsonl", '{"text": "some café"}'.encode("latin1")), {}, "convert the file to UTF-8",
        lambda path, message: text("a.jsonl", path.read_bytes().decode("latin1"))(path.parent)),
    "latin1": (text("a.txt", "some café".encode("latin1")), {}, "convert it to UTF-8",
        lambda path, message: text("a.txt", path.read_bytes().decode("latin1"))(path.parent)),
    "UTF-16 without a mark": (text("a.txt", "some text".encode("utf-16-le")), {}, "convert it to UTF-8",
        lambda path, message: text("a.txt", path.read_bytes().decode("utf-16-le"))(path.parent)),
    "a cut archive": (text("a.txt.gz", gzip.compress(b"some text", mtime=0)[:-9]), {}, "copy or download it again",
        anew(gzip.compress(b"some text", mtime=0))),
    "nothing there": (lambda folder: folder / "a.txt", {}, "give one that exists", anew("some text", "b.txt")),
    "an empty folder": (lambda folder: folder, {}, "put text or token ids in it",
        lambda path, message: text("a.txt", "some text")(path).parent),
    "two kinds": (several(text("a.txt", "some text"), raw("b.bin", "<u2")), {}, "keep one kind", away("a.txt")),
    "twice, packed and not": (several(text("a.txt", "some text"), text("a.txt.gz", b"\x1f\x8b")), {},
        "keep one of them", away("a.txt.gz")),
    "weights": (text("a.pt", "PK"), {}, "give text or token ids", anew("some text", "a.txt")),
    "an index alone": (text("a.idx", b"MMIDIDX\0\0"), {}, "without a.bin next to it; put that there",
        lambda path, message: megatron(path.with_suffix(""), DOCUMENTS).with_suffix(".idx")),
    "too long sequences": (text("a.txt", "some text"), {"sequence": 9}, "set data.sequence = 8 or less",
        fields(sequence=8)),
    "one token": (text("a.txt", "a"), {}, "token; give longer text", anew("some text")),
    "documents of one token": (text("a.jsonl", '{"text": "a"}\n' * 9), {"documents": "padded"}, "token; give longer",
        anew(LINE)),
    "no tokens": (text("a.txt", ""), {}, "give a file or folder that does", anew("some text")),
    "no validation": (text("a.txt", "some text, and more"), {"validation": 0.0, "split_read": "validation"},
        "set data.validation = 0.05", fields(validation=0.05)),
    "one sequence": (text("a.txt", "text."), {"split_read": "validation"}, "validation; give more data",
        anew("some text, and more")),
    "an empty validation file": (several(text("train.txt", "some text"), text("val.txt", "a")),
        {"split_read": "validation"}, "give longer ones",
        lambda path, message: text("val.txt", "more text")(path).parent),
    "a file of no split": (several(*(text(f"{name}.txt", "some text") for name in ("train", "val", "more"))), {},
        "or set data.split = share", fields(split="share")),
    "folders of no split": (text("en/a.txt", "some text", up=2), {}, r"\(en\); give one of these",
        lambda path, message: path / "en"),
    "other data": (text("a.txt", "some text"), {"fingerprint": "0" * 32}, "with data.fingerprint = ''",
        fields(fingerprint="")),
    "no token of a tokenizer": (text("a.txt", "some text"), {"tokenizer": "no/such.json"}, "; use bytes",
        fields(tokenizer="bytes")),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXES)
def test_each_fix_is_followed_and_the_data_are_read(tmp_path: Path, name: str) -> None:
    make, values, fix, follow = FIXES[name]
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=fix) as raised:
        opened(path, **values)
    done = follow(path, str(raised.value))
    found = opened(done if isinstance(done, Path) else path, **values | (done if isinstance(done, dict) else {}))
    assert found.sequences("train") >= 1
    if "numpy.fromfile" in str(raised.value):
        assert isinstance(found, Sequences)
        assert found._stream.read(0, 5999).tolist() == IDS[:5999].tolist()
