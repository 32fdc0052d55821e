"""Token ids with their own header or index: llm.c's files and Megatron's pairs."""

import struct
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import ConfigError, Data
from jaxdist.conftest import open_dataset
from jaxdist.data import ids
from jaxdist.data.ids_test import RANDOM, read
from jaxdist.data.sources import open_stream


def llm_c(file: Path, magic: int, version: int, tokens: np.ndarray, count: int | None = None) -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    file.write_bytes(header.tobytes() + tokens.tobytes())
    return file


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_headers_of_llm_c(tmp_path: Path, magic: int, version: int, dtype: str) -> None:
    tokens = RANDOM.integers(0, 50_257, 3000).astype(dtype)
    file = llm_c(tmp_path / "a.bin", magic, version, tokens)
    assert read(file, 50_304) == read(file, 50_304, bin_dtype=dtype) == tokens.tolist()
    assert f"{dtype} ids, as llm.c's header {magic} says" in open_stream(Data(path=str(file)), 50_304).rows["data"]
    with pytest.raises(ConfigError, match=rf"are {dtype}, as llm\.c's header {magic} says; set data\.bin_dtype = auto"):
        read(file, 50_304, bin_dtype="int64")
    with pytest.raises(
        ConfigError, match=r"for 4000 ids .* the file has \d+ bytes: it is cut, .*; copy it again, or write"
    ):
        read(llm_c(tmp_path / "b.bin", magic, version, tokens, 4000), 50_304)
    with pytest.raises(ConfigError, match=rf"of version 9 for .* where version {version} is known"):
        read(llm_c(tmp_path / "c.bin", magic, 9, tokens), 50_304)


def test_other_files_of_llm_c_are_named(tmp_path: Path) -> None:
    for magic, what in {20240522: "evaluation set", 20240326: "checkpoint"}.items():
        with pytest.raises(ConfigError, match=rf"llm\.c's {what} \({magic}\), not its token ids"):
            read(llm_c(tmp_path / "a.bin", magic, 1, np.zeros(64, np.uint16)), 512)


def megatron(
    prefix: Path, documents: list[list[int]], dtype: str = "int32", version: int = 1, code: int | None = None
) -> Path:
    """A pair as written by preprocess_data.py: a sequence for each document."""
    lengths = np.array([len(document) for document in documents], np.int32)
    size = np.dtype(dtype).itemsize
    np.concatenate([np.array(document, dtype) for document in documents]).tofile(f"{prefix}.bin")
    known = {name: number for number, name in ids.MEGATRON_TYPES.items()}
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, known[dtype], len(lengths), len(lengths) + 1)
        + lengths.tobytes()
        + (np.append(0, np.cumsum(lengths, dtype=np.int64))[:-1] * size).tobytes()
        + np.arange(len(lengths) + 1, dtype=np.int64).tobytes()
    )
    return prefix


DOCUMENTS = [[5, 6, 7, 0], [8, 0], [300, 301, 302, 303, 0]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
@pytest.mark.parametrize("named", ["", ".bin", ".idx"])
def test_megatrons_pairs(tmp_path: Path, dtype: str, named: str) -> None:
    documents = [[number % 256 for number in document] if dtype == "uint8" else document for document in DOCUMENTS]
    prefix = megatron(tmp_path / "my.corpus_text_document", documents, dtype)
    stream = open_stream(Data(path=f"{prefix}{named}"), 512)
    assert stream.read(0, len(stream)).tolist() == [number for document in documents for number in document]
    assert stream.bounds.tolist() == [0, 4, 6, 11]
    padded = open_dataset(
        Data(path=f"{prefix}{named}", documents="padded", sequence=4, validation=0, shuffle=False), 512
    )
    assert padded.batch(1, 3, 0).tokens[1].tolist() == [8, 0, 0, 0]
    assert read(tmp_path, 512) == [number for document in documents for number in document], "the folder"


def test_megatrons_pairs_that_are_not_whole(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "a", DOCUMENTS)
    index = tmp_path / "a.idx"
    intact = index.read_bytes()
    for content, message in {
        intact[:-8]: "is cut",
        intact[:20]: "is not Megatron's",
        b"TNTIDX\x00\x00" + intact[8:]: "is not Megatron's",
        intact[:34] + struct.pack("<i", 9) + intact[38:]: "do not belong together",
        intact[:9] + struct.pack("<Q", 2) + intact[17:]: "is of version 2",
        intact[:17] + b"\x07" + intact[18:]: "for float32; move the index elsewhere",
    }.items():
        index.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"a\.bin': its index a\.idx .*{message}"):
            read(prefix.with_suffix(".bin"), 512)
    index.write_bytes(intact)
    with pytest.raises(ConfigError, match=r"dtype = uint16: the ids of .* are int32, as Megatron's a\.idx says; set"):
        read(prefix, 512, bin_dtype="uint16")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ConfigError, match=r"a\.idx': an index without a\.bin next to it"):
        read(index, 512)
