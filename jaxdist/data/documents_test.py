import bz2
import gzip
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxdist.config import ConfigError, Data
from jaxdist.data.sources import open_stream

TEXTS = [f"document {number}: naïve café \u2028 line, 猫" for number in range(60)]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
RAW = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
WANTED = "".join(text + "\n" for text in TEXTS).encode()


def read(path: Path, **fields: Any) -> bytes:
    stream = open_stream(Data(path=str(path), **fields), 256)
    return bytes(stream.read(0, len(stream)).astype(np.uint8))


def zst(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


FILES: dict[str, bytes] = {
    "a.jsonl": LINES.encode(),
    "a.json": LINES.encode(),
    "a.ndjson": RAW.encode(),
    "A.JSONL": RAW.encode(),
    "a.jsonl.gz": gzip.compress(LINES.encode()),
    "two members.jsonl.gz": gzip.compress(LINES[:1000].encode()) + gzip.compress(LINES[1000:].encode()),
    "a.jsonl.zst": zst(RAW.encode()),
    "two frames.json.zst": zst(LINES[:1000].encode()) + zst(LINES[1000:].encode()),
    "of pzstd.jsonl.zst": b"\x50\x2a\x4d\x18\4\0\0\0\1\2\3\4" + zst(LINES.encode()),
    "another frame to skip.jsonl.zst": b"\x5f\x2a\x4d\x18\4\0\0\0\1\2\3\4" + zst(LINES.encode()),
    "a.jsonl.bz2": bz2.compress(LINES.encode()),
    "a.ndjson.xz": lzma.compress(LINES.encode()),
    "packed, whatever its name.jsonl": gzip.compress(LINES.encode()),
    "unpacked, whatever its name.jsonl.gz": LINES.encode(),
    "mark.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "mark.json": b"\xef\xbb\xbf" + json.dumps(RECORDS).encode(),
    "crlf.jsonl": LINES.replace("\n", "\r\n\r\n").encode(),
    "utf16.jsonl": RAW.encode("utf-16"),
    "utf16be.json": b"\xfe\xff" + json.dumps(RECORDS, indent=1).encode("utf-16-be"),
    "utf32.jsonl": RAW.encode("utf-32"),
    "no newline at the end.jsonl": LINES[:-1].encode(),
    "array.json": json.dumps(RECORDS).encode(),
    "array.jsonl": json.dumps(RECORDS).encode(),
    "array of texts.json": json.dumps(TEXTS).encode(),
    "indented.json": json.dumps(RECORDS, indent=2, ensure_ascii=False).encode(),
    "objects over lines.json": "\n".join(json.dumps(record, indent=1) for record in RECORDS).encode(),
    "two arrays.json": (json.dumps(RECORDS[:20]) + "\n" + json.dumps(RECORDS[20:])).encode(),
    "an array a line.jsonl": "".join(json.dumps([text]) + "\n" for text in TEXTS).encode(),
    "an array and lines.json": (json.dumps(RECORDS[:20]) + LINES[LINES.index('{"id": 20') :]).encode(),
    "nulls.jsonl": (LINES + '{"text": null}\n{"text": ""}\n').encode(),
}


@pytest.mark.parametrize("name", FILES)
def test_json_is_read_by_its_form(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert read(tmp_path / name) == WANTED


CSV = 'id,text\r\n1,a\r\n2,"b, ""c""\nd"\r\n\r\n3,\r\n'


CSV_FILES = {
    "a.csv": CSV.encode(),
    "a.tsv": CSV.replace("b, ", "b; ").replace(",", "\t").replace(";", ",").encode(),
    "semicolons.csv": CSV.replace("b, ", "b| ").replace(",", ";").replace("|", ",").encode(),
    "spaced.csv": b'id, text\n1, a\n2, "b, ""c""\nd"\n\n3,\n',
    "mark.csv": CSV.encode("utf-8-sig"),
    "a.csv.gz": gzip.compress(CSV.encode()),
    "utf16.csv": CSV.encode("utf-16"),
    "names over lines.csv": CSV.replace("id,", 'id,"when\nit was, by ""clock""",')
    .replace("\n1,", "\n1,,")
    .replace('2,"', '2,,"')
    .replace("3,", "3,,")
    .encode(),
}


@pytest.mark.parametrize("name", CSV_FILES)
def test_csv_is_read_by_the_names_of_its_columns(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CSV_FILES[name])
    assert read(tmp_path / name) == b'a\nb, "c"\nd\n'
    assert read(tmp_path / name, text_field="id") == b"1\n2\n3\n"
    long = "x" * 200_000
    (tmp_path / "long.csv").write_text(f"text\n{long}\n")
    assert read(tmp_path / "long.csv") == f"{long}\n".encode()


@pytest.mark.parametrize("content", [LINES, json.dumps(RECORDS), json.dumps(RECORDS, indent=1), RAW + "\n"])
@pytest.mark.parametrize("name", ["a.txt", "no ending", "a.txt.gz", "mark.txt", "utf16.txt"])
def test_json_that_is_called_text_is_named_and_both_fixes_work(tmp_path: Path, name: str, content: str) -> None:
    packed = {"mark.txt": content.encode("utf-8-sig"), "utf16.txt": content.encode("utf-16")}
    written = gzip.compress(content.encode()) if name.endswith("gz") else packed.get(name, content.encode())
    (tmp_path / name).write_bytes(written)
    with pytest.raises(ConfigError, match="JSON by its content, and text by its name; give it the ending"):
        read(tmp_path / name)
    assert read(tmp_path / name, text_field="") == content.encode()
    (tmp_path / name).rename(tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl") == WANTED
    assert read(tmp_path / "a.jsonl", text_field="") == content.encode()
    (tmp_path / name).write_text(json.dumps({"id": 1, "text": "long" * 50_000}))
    with pytest.raises(ConfigError, match="JSON by its content"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl.1", "a.jsonl.part0", "a.data", "a.log", "a.log.gz"])
@pytest.mark.parametrize("content", [LINES, json.dumps(RECORDS), CSV_FILES["a.csv"].decode()])
def test_records_under_any_other_ending_are_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith("gz") else content.encode())
    with pytest.raises(ConfigError, match="by its content, and text by its name; give it the ending"):
        read(tmp_path / name)
    assert read(tmp_path / name, text_field="") == content.encode()


@pytest.mark.parametrize("name", ["a.ipynb", "a.geojson", "a.md"])
@pytest.mark.parametrize("indent", [None, 1])
def test_one_object_under_an_ending_of_its_own_is_text(tmp_path: Path, name: str, indent: int | None) -> None:
    content = json.dumps({"cells": [{"source": "text"}], "metadata": {}}, indent=indent)
    (tmp_path / name).write_text(content)
    assert read(tmp_path / name) == content.encode()


@pytest.mark.parametrize("name", ["a.jsonlines", "a.jl", "a.ldjson.gz"])
def test_other_endings_of_json_lines(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(LINES.encode()) if name.endswith("gz") else LINES.encode())
    assert read(tmp_path / name) == WANTED


@pytest.mark.parametrize(
    "content",
    ["{name} is a template", "{'a': 1}", "[1, 2]", '{"a": 1} and text', "{}", "[a] b", '{"a": ' + "b\n" * 50_000],
)
def test_text_that_begins_like_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    assert read(tmp_path / "a.txt") == content.encode()


TABLES = {
    "a.txt": 'id,text\r\n1,a\r\n2,"b, ""c""\r\nd"\r\n3,\r\n',
    "other ends of lines within.txt": "id,text\n1,a\u2028b\n2,c\x0cd\n3,e\n",
    "tabs.txt": "id\ttext\n1\ta\n2\tb, c\n3\td\n",
    "spaced.text": 'id, text\n1, a\n2, "b, c"\n3, d\n',
    "no ending": "text;label\na;1\nb, c;2\nd;3\n",
    "packed.txt.gz": "id,text\n1,a\n2,b\n3,c\n",
    "utf16.txt": "id|text\n1|a\n2|b\n3|c\n",
    "long.txt": "id,text\n" + "1,some text\n" * 9000,
    "a row longer than what is looked at.txt": "id,text\n" + "1,some text\n" * 3 + "2," + "long " * 20_000,
}


@pytest.mark.parametrize("name", TABLES)
def test_csv_that_is_called_text_is_named_and_both_fixes_work(tmp_path: Path, name: str) -> None:
    content = TABLES[name].encode("utf-16" if "utf16" in name else "utf-8")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ConfigError, match=r"CSV with a column 'text' by its .*; give it the ending \.csv, to"):
        read(tmp_path / name)
    assert read(tmp_path / name, text_field="") == TABLES[name].encode()
    (tmp_path / name).rename(tmp_path / "a.csv")
    if name == "a.txt":
        assert read(tmp_path / "a.csv") == b'a\nb, "c"\r\nd\n'
    else:
        assert read(tmp_path / "a.csv").count(b"\n") == TABLES[name].rstrip("\n").count("\n")


PROSE = {
    "of text": "Some notes on text, data and models.\nThey are read, of course, line by line.\nThis is one.\n",
    "a line of words": "audio, video, text, images\nare what models take, give,\nas we all, in the end, know,\nor not.",
    "two words, and verse": "image, text\nO sea, O night,\nno line, no light\nbut one\nand one, at last",
    "one word": "text\na, b\nc, d\ne, f\n",
    "two rows": "id,text\n1,a\n2,b\n",
    "another column": "id,body\n1,a\n2,b\n3,c\n4,d\n",
    "a name twice": "text,text\na,b\nc,d\ne,f\n",
    "a ragged row": "id,text\n1,a\n2,b\n3,c,d\n4,e\n",
    "an open quote": 'id,text\n1,a\n2,b\n3,"c\n',
    "nothing": "",
}


@pytest.mark.parametrize("name", PROSE)
def test_text_that_resembles_csv(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text(PROSE[name])
    (tmp_path / "b.txt").write_text(".")
    assert read(tmp_path) == PROSE[name].encode() + b"."


def test_nested_keys_and_keys_with_dots(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"data": {"body": {"text": text}}}) + "\n" for text in TEXTS))
    assert read(file, text_field="data.body.text") == WANTED
    file.write_text("".join(json.dumps({"data.text": text, "data": {"text": "no"}}) + "\n" for text in TEXTS))
    assert read(file, text_field="data.text") == WANTED


TEXT = "\n".join(TEXTS)
TEXT_FILES = {
    "a.txt": TEXT.encode(),
    "mark.txt": b"\xef\xbb\xbf" + TEXT.encode(),
    "a.txt.gz": gzip.compress(TEXT.encode()),
    "a.txt.zst": zst(TEXT.encode()),
    "a.gz": gzip.compress(b"\xef\xbb\xbf" + TEXT.encode()),
    "utf16.txt": TEXT.encode("utf-16"),
    "utf16.txt.xz": lzma.compress(TEXT.encode("utf-16")),
}


@pytest.mark.parametrize("name", TEXT_FILES)
def test_text_of_any_encoding_or_compression_is_read(tmp_path: Path, name: str) -> None:
    """Text files are joined without adding a newline."""
    (tmp_path / name).write_bytes(TEXT_FILES[name])
    assert read(tmp_path / name) == TEXT.encode()
    (tmp_path / "z.txt").write_text("last")
    assert read(tmp_path) == TEXT.encode() + b"last"


def test_marks_are_no_text_under_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "cat": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "words.json"))
    for name, encoding in (("a.txt", "utf-8-sig"), ("b.txt", "utf-16")):
        (tmp_path / name).write_bytes("the cat".encode(encoding))
        stream = open_stream(Data(path=str(tmp_path / name), tokenizer=str(tmp_path / "words.json")), 256)
        assert stream.read(0, len(stream)).tolist() == [1, 2]


def table(texts: Any = TEXTS) -> pa.Table:
    return pa.table({"id": range(len(texts)), "text": texts, "meta": [{"title": text} for text in texts]})


def stream_of(found: pa.Table, file: Path) -> None:
    with pa.OSFile(str(file), "wb") as grad_slot, pa.ipc.new_stream(grad_slot, found.schema) as writer:
        writer.write_table(found, max_chunksize=7)


def file_of(found: pa.Table, file: Path) -> None:
    with pa.OSFile(str(file), "wb") as grad_slot, pa.ipc.new_file(grad_slot, found.schema) as writer:
        writer.write_table(found)


ARROW: dict[str, Callable[[pa.Table, Path], Any]] = {
    "a.parquet": lambda found, file: pq.write_table(found, file, row_group_size=11),
    "stream.arrow": stream_of,
    "file.arrow": file_of,
    "a.feather": file_of,
    "a.ipc": file_of,
    "a.arrows": stream_of,
    "Parquet by its content.arrow": pq.write_table,
    "Arrow by its content.parquet": file_of,
}


@pytest.mark.parametrize("name", ARROW)
def test_arrow(tmp_path: Path, name: str) -> None:
    ARROW[name](table(), tmp_path / name)
    assert read(tmp_path / name) == read(tmp_path / name, text_field="meta.title") == WANTED
    with pytest.raises(
        ConfigError, match=r"no column 'body'; it has id, text, meta; data\.text_field = 'body': set it to the key"
    ):
        read(tmp_path / name, text_field="body")
    with pytest.raises(ConfigError, match="row 1: the key 'id' holds a number, not text"):
        read(tmp_path / name, text_field="id")
    with pytest.raises(ConfigError, match=r"row 1: no key 'meta\.body'; it has meta\.title"):
        read(tmp_path / name, text_field="meta.body")
    ARROW[name](table([*TEXTS, None]), tmp_path / name)
    assert read(tmp_path / name) == WANTED
    assert "1 records of null passed over" in open_stream(Data(path=str(tmp_path / name)), 256).rows["data"]


@pytest.mark.parametrize("offset", [-1, 8, 2**30])
def test_offsets_of_a_damaged_arrow_file(tmp_path: Path, offset: int) -> None:
    """pyarrow alone would read there and crash."""
    file_of(pa.table({"text": ["some text"] * 3}), tmp_path / "a.arrow")
    offsets, wrong = (np.array([0, 9, end, 27], "<i4").tobytes() for end in (18, offset))
    content = (tmp_path / "a.arrow").read_bytes()
    assert content.count(offsets) == 1
    (tmp_path / "a.arrow").write_bytes(content.replace(offsets, wrong))
    with pytest.raises(ConfigError, match=r"a\.arrow': cannot be read, damaged or cut: "):
        read(tmp_path / "a.arrow")


def test_a_saved_dataset_and_a_repository_of_one(tmp_path: Path) -> None:
    """Layouts of `datasets.save_to_disk` and of the Hub."""
    saved, hub = tmp_path / "saved", tmp_path / "hub"
    for split, texts in (("train", TEXTS[:40]), ("validation", TEXTS[40:])):
        (saved / split).mkdir(parents=True)
        stream_of(table(texts), saved / split / "data-00000-of-00001.arrow")
        stream_of(table(texts[::-1]), saved / split / "cache-0123.arrow")
        for name in ("dataset_info.json", "state.json"):
            (saved / split / name).write_text("{}")
        (hub / "data").mkdir(parents=True, exist_ok=True)
        pq.write_table(table(texts), hub / "data" / f"{split}-00000-of-00001.parquet")
    (saved / "dataset_dict.json").write_text("{}")
    (hub / "README.md").write_text("a card")
    for folder in (saved, hub):
        assert read(folder) == WANTED
        stream = open_stream(Data(path=str(folder)), 256)
        assert stream.training == len("".join(text + "\n" for text in TEXTS[:40]).encode())
    assert read(saved / "train") == "".join(text + "\n" for text in TEXTS[:40]).encode()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"body": "a", "meta": {"title": "b", "n": 1}},
            r"no key 'text'; it has body, meta\.title, meta\.n; data\.text_field = 'text': set it",
        ),
        ({}, "no key 'text'; it has none"),
        ({"text": 3}, "the key 'text' holds a number, not text"),
        ({"text": ["a"]}, "the key 'text' holds a list, not text"),
        (3, "a number, not a JSON object; correct or remove it"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "array.json"])
def test_a_line_without_text_names_its_keys(tmp_path: Path, record: Any, message: str, name: str) -> None:
    content = f'{{"text": "a"}}\n{json.dumps(record)}\n'
    if name == "array.json":
        content = '[{"text": "a"},\n' + json.dumps(record) + "]"
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if "gz" in name else content.encode())
    with pytest.raises(ConfigError, match=rf"{name}:2: {message}"):
        read(tmp_path / name)


def test_the_key_that_is_named_works(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"meta": {"body": "abc"}}))
    with pytest.raises(ConfigError, match=r"data\.text_field = 'text': set it to the key of the text") as raised:
        read(tmp_path / "a.jsonl")
    key = str(raised.value).split("it has ")[1].split(";")[0]
    assert read(tmp_path / "a.jsonl", text_field=key) == b"abc\n"


@pytest.mark.parametrize("begin", ["ORCHARD", "GGUF", "PAR1S", "ARROW1", "FEA1", "Rar!", "SQLite format", "BZhou"])
def test_text_that_begins_like_a_file_of_another_format(tmp_path: Path, begin: str) -> None:
    content = f"{begin} is how this text begins, which is plain.\n".encode()
    (tmp_path / "a.txt").write_bytes(content)
    assert read(tmp_path / "a.txt") == content


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 1234567\n"
DAMAGED = {
    "cut.jsonl.gz": (gzip.compress(LINES.encode())[:-20], "cannot be read, damaged or cut"),
    "junk.jsonl.gz": (b"\x1f\x8b" + bytes(range(200)), "cannot be read, damaged or cut"),
    "junk.jsonl.zst": (b"\x28\xb5\x2f\xfd" + bytes(range(200, 250)) * 20, "cannot be read, damaged or cut"),
    "cut.jsonl.zst": (zst(LINES.encode())[:-9], "damaged or cut: a frame of zstd ends before its end"),
    "long.txt.zst": (zst(np.random.default_rng(0).bytes(5000))[:3000], "zst"),
    "behind.jsonl.zst": (zst(LINES.encode()) + b"junk", "cannot be read, damaged or cut"),
    "cut.txt.xz": (lzma.compress(TEXT.encode())[:-20], "cannot be read, damaged or cut"),
    "junk.parquet": (b"PAR1" + bytes(range(128, 256)) * 8 + b"PAR1", "cannot be read, damaged or cut"),
    "text.parquet": (b"some text", "neither Parquet nor Arrow, whatever its name says; rename it to its format"),
    "text.arrow": (b"some text " * 9, "cannot be read, damaged or cut"),
    "half.jsonl": (RAW.encode("utf-16")[:-1], "cannot be read, damaged or cut"),
    "cut.json": (json.dumps(RECORDS).encode()[:-1], r"cut\.json:1: the array is cut"),
    "behind.json": (json.dumps(RECORDS).encode() + b"\nx", r"behind\.json:2: Expecting value"),
    "p.jsonl": (b"PAR1" + bytes(99), "no text: it is a Parquet file; give it the ending .parquet"),
    "a.txt": (b"PK\x03\x04" + bytes(99), "no text: it is a zip archive, .*; unpack it"),
    "a.jsonl.lz4": (b"\x04\x22\x4d\x18" + bytes(99), "packed by lz4; unpack it"),
    "a.orc": (b"ORC\x01 some text", "an ORC file; write it as Parquet"),
    "v1.feather": (b"FEA1" + bytes(99), "a Feather file of version 1; save it again as version 2"),
    "nothing.arrow": (b"", "neither Parquet nor Arrow, it is empty; remove it, or copy it again"),
    "ragged.csv": (
        b"id,text\n1,a\n2,b,c\n",
        r"ragged\.csv:3: 3 values for 2 columns; each row .*: correct or remove this row",
    ),
    "quote.csv": (b'id,text\n1,"a\n', r"quote\.csv:\d: unexpected end of data"),
    "quote within.csv": (b'id,text\n1,a\n2,b\n3,"c"d\n', r"within\.csv:4: ',' expected after '\"'"),
    "twice.csv": (b"text,text\na,b\n", r"twice\.csv:1: 2 columns are called 'text'; give each its own name"),
    "empty.txt.bz2": (bz2.compress(TEXT.encode())[:14], "cannot be read, damaged or cut"),
    "other.csv": (
        b"id,body\n1,a\n",
        r"other\.csv:1: no column 'text'; it has id, body; data\.text_field = 'text': set it",
    ),
    "twice.jsonl": (
        b'{"text": "a", "text": "b"}\n',
        r"twice\.jsonl:1: the key 'text' occurs 2 times; keep one of them",
    ),
    "twice.json": (b'[{"text": "a", "text": "b"}]', r"twice\.json:1: the key 'text' occurs 2 times"),
    "latin1.csv": ("id,text\n1,é\n".encode("latin1"), r"latin1\.csv:2: not UTF-8: .*; convert the file to UTF-8"),
    "late.csv": (("id,text\n" + "1,a\n" * 5000 + "2,é\n").encode("latin1"), r"late\.csv:5002: not UTF-8"),
    "names.csv": ("id,texté\n1,a\n".encode("latin1"), r"names\.csv:1: not UTF-8"),
    "another column.csv": ("text,id\na,1\nb,é\n".encode("latin1"), r"column\.csv:3: not UTF-8"),
    "over lines.csv": ('text\na\n"b\né"\n'.encode("latin1"), r"lines\.csv:3: not UTF-8"),
    "indented latin1.json": ('[{"text":\n"a"},\n{"text":\n"é"}]'.encode("latin1"), r"json:4: not UTF-8.*; convert"),
    "ids.jsonl": (b'{"input_ids": [1, 2]}\n', r"it has input_ids; token ids are read from \.npy and \.bin files"),
    "b.txt": (b"%PDF-1.7 text", "no text: it is a PDF"),
    "utf16.txt": ("plain text".encode("utf-16-le"), "10 of its first 20 bytes are zero, as in UTF-16 .*; convert it"),
    "utf16.jsonl": ('{"text": "a"}'.encode("utf-16-be"), "bytes are zero, as in UTF-16"),
    "latin1.txt.gz": (gzip.compress("é".encode("latin1")), "not UTF-8 at byte 0; convert it to UTF-8"),
    "deep.json": (b"[" * 100_000, r"deep\.json:1: "),
    "a.tar.gz": (gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar".ljust(300, b"\0")), "it is a tar archive"),
    "ids.npy.gz": (gzip.compress(b"ids"), r"\.npy files are not read packed; unpack it"),
    "a.safetensors": (b"any", "weights, no text; give text or token ids"),
    "b.pt": (b"PK", "weights, no text"),
    "meta.pkl": (b"\x80\x04.", "pickles are never opened"),
    "half a line.jsonl": (
        b'{"text": "a"}\n{"text": "b',
        r"jsonl:2: Unterminated .* JSON object: correct or remove this line",
    ),
    "latin1.jsonl": ('{"text": "é"}'.encode("latin1"), r"jsonl:1: not UTF-8: .*; convert the file"),
    "half a pair.jsonl": (b'{"text": "\\ud83d"}', r"jsonl:1: .* half of a surrogate pair; remove that"),
    "page.jsonl": (b"<!doctype html>404", r"jsonl:1: Expecting value.*: correct or remove"),
    **{
        f"lfs{ending}": (LFS, "Git LFS .* fetch it by git lfs pull")
        for ending in (".jsonl", ".parquet", ".bin", ".txt")
    },
}


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe': neither a file nor a folder, as a pipe; give one"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize("name", DAMAGED)
def test_unreadable_files_are_named(tmp_path: Path, name: str) -> None:
    content, message = DAMAGED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read(tmp_path / name)
    assert "\n" not in str(raised.value) and name in str(raised.value)


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1" if "parquet" in name else zst(b"{}"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}, .*; pip install 'jaxdist\[data\]'"):
        read(tmp_path / name)


def test_kinds_that_are_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES[:100])
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"the folder mixes JSON, text files; keep one kind"):
        read(tmp_path)
    (tmp_path / "b.txt").unlink()
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b'[{"text": "b"}]'))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "README.md").write_text("a card")
    assert read(tmp_path) == b"a\nb\n"
    assert open_stream(Data(path=str(tmp_path)), 256).rows["left alone"] == "README.md, tokenizer.json"


@pytest.mark.long
def test_neither_package_is_imported_for_other_data() -> None:
    code = "import sys, jaxdist.data; sys.exit(bool({'pyarrow', 'zstandard'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
