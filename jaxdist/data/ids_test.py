import array
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Data
from jaxdist.data import blocks, ids, number_types
from jaxdist.data.sources import open_stream

RANDOM = np.random.default_rng(0)


def read(path: Path, vocab: int, **fields: Any) -> list[int]:
    stream = open_stream(Data(path=str(path), **fields), vocab)
    return stream.read(0, len(stream)).tolist()


def rewrite(file: Path, message: object, header: int = 0) -> None:
    """Run the code in a message; `header` replaces HEADER, which the user must look up."""
    code = re.findall(r"numpy\.fromfile\(path.*?\.tofile\(path\)", str(message))
    assert len(code) == 1, message
    eval(code[0], {"numpy": np, "path": file, "HEADER": header})


CONTENTS = {
    "uniform": (70_000, lambda: RANDOM.integers(0, 70_000, 5000)),
    "as text has them": (50_257, lambda: np.minimum(RANDOM.zipf(1.2, 5000), 50_256)),
    "of characters": (65, lambda: RANDOM.integers(0, 65, 5000)),
    "of digits": (10, lambda: RANDOM.integers(0, 10, 5000)),
    "two": (2, lambda: RANDOM.integers(0, 2, 5000)),
    "above half a vocabulary": (262_144, lambda: RANDOM.integers(131_072, 262_144, 5000)),
    "mostly padding": (128_256, lambda: RANDOM.integers(0, 128_256, 5000) * (RANDOM.random(5000) < 0.05)),
    "as many as a block and one": (300, lambda: RANDOM.integers(0, 300, 4096 * 70 + 1)),
}


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("content", CONTENTS)
def test_the_type_of_ids_is_detected(tmp_path: Path, content: str, dtype: str) -> None:
    vocab, make = CONTENTS[content]
    if dtype == "uint16" and vocab > 65536:
        return  # this type cannot hold the content
    wanted, file = make(), tmp_path / "a.bin"
    wanted.astype(dtype).tofile(file)
    assert read(file, vocab) == read(file, vocab, bin_dtype=dtype) == wanted.tolist()
    for other in {"uint16", "uint32", "int64"} - {dtype, dtype.replace("int32", "uint32").replace("uu", "u")}:
        if file.stat().st_size % np.dtype(other).itemsize:
            continue
        with pytest.raises(
            ConfigError, match=rf"data\.bin_dtype = {other}: the ids of .* are (u?)int\d\d by"
        ) as raised:
            read(file, vocab, bin_dtype=other)
        fix = str(raised.value).split("set data.bin_dtype = ")[1].split(",")[0]
        assert read(file, vocab, bin_dtype=fix) == wanted.tolist()


def test_a_type_that_is_believed_reads_zeros_and_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows why the content is inspected."""
    np.arange(60_000, 70_000, dtype=np.uint32).tofile(tmp_path / "a.bin")
    monkeypatch.setattr(ids, "width", lambda content, size, vocab: "uint16")
    monkeypatch.setattr(ids, "_check_complete", lambda *arguments: None)
    assert len(read(tmp_path / "a.bin", 65_536)) == 20_000


def test_a_vocabulary_that_is_too_small_is_named_by_the_ids_type(tmp_path: Path) -> None:
    np.arange(60_000, 70_000, dtype=np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"token id 69999 with model\.vocab = 65536; raise model\.vocab above 69999"):
        read(tmp_path / "a.bin", 65_536)
    assert read(tmp_path / "a.bin", 70_000)[-1] == 69_999
    np.array([5, -100, 7, 9] * 20, np.int32).tofile(tmp_path / "b.bin")
    with pytest.raises(ConfigError, match=r"token id -100 .*; token ids start at 0"):
        read(tmp_path / "b.bin", 50_257)


@pytest.mark.parametrize("declared", ["auto", "uint16"])
def test_a_type_that_cannot_hold_the_vocabulary(tmp_path: Path, declared: str) -> None:
    RANDOM.integers(0, 65_536, 1000).astype(np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"uint16, .* hold 65536 tokens .*vocab = 70000: .*write it as uint32"):
        read(tmp_path / "a.bin", 70_000, bin_dtype=declared)
    assert len(read(tmp_path / "a.bin", 65_536)) == 1000


@pytest.mark.parametrize("vocab", [200, 50_257, 64_000])
@pytest.mark.parametrize("dtype", [">u2", ">i4", ">i8", "<f4", "<f8", "|u1"])
def test_ids_in_other_numbers_are_named_and_the_fix_works(tmp_path: Path, dtype: str, vocab: int) -> None:
    file, wanted = tmp_path / "a.bin", RANDOM.integers(0, 100 if dtype == "|u1" else vocab, 6000)
    wanted.astype(dtype).tofile(file)
    with pytest.raises(ConfigError, match=r"its ids are (big-endian|float|uint8).*; write them in .* as by") as raised:
        read(file, vocab)
    rewrite(file, raised.value)
    assert read(file, vocab) == wanted.tolist()


@pytest.mark.parametrize("vocab", [256, 32_000, 50_257])
@pytest.mark.parametrize("count", [2000, 20_000])
@pytest.mark.parametrize("reach", [52_000, 60_000, 65_536])
def test_random_ids_beyond_the_vocabulary_are_not_called_uint8(
    tmp_path: Path, reach: int, count: int, vocab: int
) -> None:
    """Their bytes are as random as uint8 ids: each fix names the ids that it is for."""
    file, wanted = tmp_path / "a.bin", RANDOM.integers(0, reach, count)
    wanted.astype(np.uint16).tofile(file)
    greatest = wanted.max()
    with pytest.raises(ConfigError, match=rf"raise model\.vocab above {greatest}( if they are uint16|, or give)"):
        read(file, vocab)
    assert read(file, greatest + 1) == wanted.tolist()


def test_few_ids_like_a_float_are_not_called_one() -> None:
    """The bytes of 2.0 as big-endian float32."""
    content = np.array([64, 0], np.uint16).tobytes()
    assert number_types.certain_type(3 * content, 65, True) is None
    assert number_types.certain_type(9 * content, 65, True) == ">f4"


def test_random_ids_of_one_byte(tmp_path: Path) -> None:
    file, wanted = tmp_path / "a.bin", RANDOM.integers(0, 256, 6000)
    wanted.astype(np.uint8).tofile(file)
    with pytest.raises(ConfigError, match=r"uint16 up to \d+, .*, or uint8: .* as by .*, if they are uint8") as raised:
        read(file, 256)
    rewrite(file, raised.value)
    assert read(file, 256) == wanted.tolist()


def text_ids(count: int, vocab: int) -> np.ndarray:
    """Ids as of tokenized text: low ids are more common, by Zipf's law."""
    share = 1 / np.arange(1, vocab + 1)
    return np.random.default_rng(count).choice(vocab, count, p=share / share.sum())


BYTES = np.frombuffer(Path(json.__file__).read_bytes(), np.uint8)[:6000].astype(np.int64)
SILENT = {  # type -> vocabulary, and ids that are in the vocabulary when read as uint16, too
    "big-endian of text": (">u2", 65_536, text_ids(300, 65_536)),
    "big-endian of characters": (">u2", 50_257, BYTES),
    "big-endian of few characters": (">u2", 50_257, np.arange(12) % 7 + 1),
    "big-endian 32 bits": (">u4", 65_536, text_ids(300, 65_536)),
    "big-endian 64 bits": (">i8", 128_256, text_ids(300, 128_256)),
    "float16 of characters": ("<f2", 50_257, BYTES),
    "float16 of digits": ("<f2", 50_257, RANDOM.integers(0, 10, 300)),
    "float32 of text": ("<f4", 65_536, text_ids(300, 50_257)),
    "float32 of two": ("<f4", 50_257, RANDOM.integers(0, 3, 300)),
    "big-endian float32": (">f4", 65_536, text_ids(300, 50_257)),
    "float64 of a large vocabulary": ("<f8", 128_256, text_ids(300, 128_256)),
    "bytes of characters": ("|u1", 50_257, BYTES % 65),
    "bytes of few": ("|u1", 512, RANDOM.integers(0, 2, 6000)),
}


@pytest.mark.parametrize("name", SILENT)
def test_ids_of_other_types_within_the_vocabulary_as_uint16(tmp_path: Path, name: str) -> None:
    """Training would use other ids."""
    dtype, vocab, wanted = SILENT[name]
    file = tmp_path / "a.bin"
    wanted.astype(dtype).tofile(file)
    as_uint16 = np.fromfile(file, "<u2")
    assert as_uint16.max() < vocab and as_uint16[: len(wanted)].tolist() != wanted.tolist()
    with pytest.raises(ConfigError, match=rf"its ids are {ids.NAMES[dtype]} by their content; write them") as raised:
        read(file, vocab)
    if "or set data.bin_dtype = uint16" in str(raised.value):
        assert read(file, vocab, bin_dtype="uint16") == as_uint16.tolist()
    elif vocab <= 65_536:
        with pytest.raises(ConfigError, match=rf"its ids are {ids.NAMES[dtype]} by their content; write them"):
            read(file, vocab, bin_dtype="uint16")
    rewrite(file, raised.value)
    assert read(file, vocab) == wanted.tolist()


@pytest.mark.parametrize("vocab", [300, 50_257, 60_500, 65_536, 151_936])
@pytest.mark.parametrize("count", [300, 6000])
def test_real_ids_are_taken_for_no_other_type(tmp_path: Path, vocab: int, count: int) -> None:
    """Ids of text; renumbered; half of them end-of-text; bytes; uniform."""
    text = text_ids(count, vocab)
    ended = np.where(RANDOM.random(count) < 0.5, vocab - 1, text)
    for wanted in (text, RANDOM.permutation(vocab)[text], ended, BYTES % vocab, RANDOM.integers(0, vocab, count)):
        for dtype in ("uint16", "uint32", "int64"):
            if np.iinfo(dtype).max >= vocab - 1:
                wanted.astype(dtype).tofile(tmp_path / "a.bin")
                assert read(tmp_path / "a.bin", vocab) == wanted.tolist(), dtype


def header(*numbers: int, size: int = 0) -> bytes:
    return np.array(numbers, "<i4").tobytes().ljust(size, b"\0")


IDS = 6000  # ids after each header
BEHIND = {  # vocabulary, type of the ids, header
    "magic, version, count": (65_536, "uint16", header(20250101, 1, IDS, 0)),
    "count of 64 bits": (50_257, "uint16", header(IDS, 0)),
    "256 numbers with a count": (50_257, "uint16", header(777, 2, IDS, size=1024)),
    "256 numbers without": (50_257, "uint16", header(777, 2, size=1024)),
    "a name": (50_257, "uint16", b"MYTOKENS"),
    "a name and a version": (50_257, "uint16", b"TOKS" + header(2)),
    "a name, and a number that is not an id": (300, "uint16", b"TOKS" + header(2)),
    "a magic that is not an id": (50_257, "uint32", header(20250101, 1, 2, 3)),
    "512 numbers of wider ids": (128_256, "uint32", header(777, 2, IDS, size=512)),
    "version, type and count of 64 bits": (128_256, "uint32", header(1, 4, IDS, 0)),
    "any bytes": (50_257, "uint16", bytes(range(256)) * 2),
    "3 numbers before ids of 64 bits": (50_257, "int64", header(20250101, 1, IDS)),
}


@pytest.mark.parametrize("name", BEHIND)
def test_ids_behind_a_header_of_an_unknown_format(tmp_path: Path, name: str) -> None:
    vocab, dtype, head = BEHIND[name]
    file, wanted = tmp_path / "a.bin", text_ids(IDS, vocab)
    file.write_bytes(head + wanted.astype(dtype).tobytes())
    with pytest.raises(ConfigError, match="seems to begin with a header of an unknown format: ") as raised:
        read(file, vocab)
    if declared := re.search(r"set data\.bin_dtype = (\w+)", str(raised.value)):
        if declared[1] == dtype:
            assert read(file, vocab, bin_dtype=dtype)[-IDS:] == wanted.tolist()
    elif raises := re.search(r"raise model\.vocab above (\d+) if", str(raised.value)):
        assert read(file, int(raises[1]) + 1, bin_dtype=dtype)[-IDS:] == wanted.tolist()
    assert f"offset={len(head)})" in str(raised.value) or "HEADER being its length" in str(raised.value)
    rewrite(file, raised.value, header=len(head))
    assert read(file, vocab) == wanted.tolist()


def test_an_odd_number_of_bytes(tmp_path: Path) -> None:
    file, wanted = tmp_path / "a.bin", text_ids(IDS, 50_257)
    file.write_bytes(b"TOKENS v1" + wanted.astype("<u2").tobytes())
    with pytest.raises(ConfigError, match=r"not a multiple of 2, .*: copy it again, or write the ids alone") as raised:
        read(file, 50_257)
    rewrite(file, raised.value, header=9)
    assert read(file, 50_257) == wanted.tolist()
    (BYTES[:5999] % 65).astype(np.uint8).tofile(file)
    with pytest.raises(ConfigError, match="its ids are uint8 by their content: write them as uint16") as raised:
        read(file, 50_257)
    rewrite(file, raised.value)
    assert read(file, 50_257) == (BYTES[:5999] % 65).tolist()


def test_the_detected_type_is_in_the_start_up_table(tmp_path: Path) -> None:
    """Content cannot distinguish a header of ids from ids; its first numbers tell a reader."""
    np.array([1, 0, 50_257, 0, *text_ids(IDS, 50_257)], np.uint16).tofile(tmp_path / "a.bin")
    row = open_stream(Data(path=str(tmp_path / "a.bin")), 65_536).rows["data"]
    assert "uint16 ids, as the content shows (they begin 1, 0, 50257, 0; the greatest seen is 50257)" in row


def test_only_zeros_decide_no_type(tmp_path: Path) -> None:
    np.zeros(64, np.uint32).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"holds only zeros, .*; set data\.bin_dtype = uint16, "):
        read(tmp_path / "a.bin", 512)
    assert len(read(tmp_path / "a.bin", 512, bin_dtype="uint32")) == 64
    (tmp_path / "several").mkdir()
    np.zeros(64, np.uint32).tofile(tmp_path / "several" / "a.bin")
    np.arange(64, dtype=np.uint32).tofile(tmp_path / "several" / "b.bin")
    assert read(tmp_path / "several", 512) == [0] * 64 + list(range(64))


ALTERNATING = [50_000, 5, 40_000, 8, 31_000, 2, 20_000, 7, 45_000, 3, 50_001, 9]


@pytest.mark.parametrize(
    ("content", "dtype", "vocab"),
    [
        (ALTERNATING, "uint16", 50_304),
        (ALTERNATING * 50, "uint16", 50_304),  # repeated text gives no more evidence
        ([50_000, 0, 40_000, 0, 31_000, 0], "uint16", 50_304),
        ([300, 0, 0, 0, 301, 0, 0, 0], "uint16", 512),
        ([5, 1, 0, 0], "uint16", 10),
        ([70_000, 3, 5, 80_000, 9], "uint32", 128_256),
        ([5, 7, 300], "int32", 512),
        ([5, 7, 300], "int64", 512),
    ],
)
def test_a_file_that_is_too_small_to_decide_asks_for_the_type(
    tmp_path: Path, content: list[int], dtype: str, vocab: int
) -> None:
    file = tmp_path / "a.bin"
    np.array(content, dtype).tofile(file)
    with pytest.raises(ConfigError, match=r"too few ids to find .*; set data\.bin_dtype = uint16, .*int32 or"):
        read(file, vocab)
    assert read(file, vocab, bin_dtype=dtype) == content


@pytest.mark.parametrize("vocab", [2, 65, 300, 50_257, 65_536])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_no_size_is_read_in_another_type(tmp_path: Path, vocab: int, dtype: str) -> None:
    """A hundred ids are enough to recognize all types."""
    for size in [*range(1, 13), 20, 33, 100, 300] * 3:
        wanted = np.minimum(RANDOM.zipf(1.3, size) - 1, vocab - 1) if size % 2 else RANDOM.integers(0, vocab, size)
        wanted.astype(dtype).tofile(tmp_path / "a.bin")
        try:
            found = read(tmp_path / "a.bin", vocab)
        except ConfigError as error:
            assert "too few ids to find" in str(error) and size < 100, (error, size)
        else:
            assert found == wanted.tolist()


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
@pytest.mark.parametrize("size", [3, 5000])
def test_ids_far_beyond_the_vocabulary_are_read_as_no_narrower_type(tmp_path: Path, dtype: str, size: int) -> None:
    """Both halves of each id, read as uint16, would be within a vocabulary of 65,536."""
    (file := tmp_path / "a.bin").write_bytes(RANDOM.integers(2**20, 2**21, size).astype(dtype).tobytes())
    with pytest.raises(ConfigError, match=r"too few ids to find|token id \d+ with model\.vocab = 65536"):
        read(file, 65_536)


@pytest.mark.parametrize(("narrow", "wide"), [("uint16", "uint32"), ("uint32", "int64")])
def test_bytes_that_are_ids_of_two_types_are_read_as_the_wider_and_it_is_reported(
    tmp_path: Path, narrow: str, wide: str
) -> None:
    """Every second id of the narrower type would be zero: the start-up table names the type, and .npy settles it."""
    ids = RANDOM.integers(1, 50_257, 500)
    file, narrower = tmp_path / "a.bin", np.stack([ids, 0 * ids], 1).reshape(-1).astype(narrow)
    narrower.tofile(file)
    stream = open_stream(Data(path=str(file)), 50_257)
    assert stream.read(0, len(stream)).tolist() == ids.tolist()
    assert f"{wide} ids, as the content shows (they begin {ids[0]}, {ids[1]}, " in stream.rows["data"]
    with pytest.raises(ConfigError, match=rf"if they are {narrow}, save them as \.npy, which names its type"):
        read(file, 50_257, bin_dtype=narrow)
    np.save(tmp_path / "a.npy", narrower)
    assert read(tmp_path / "a.npy", 50_257) == narrower.tolist()


def test_files_of_several_types(tmp_path: Path) -> None:
    np.arange(1, 65, dtype=np.uint32).tofile(tmp_path / "a.bin")
    np.arange(1, 65, dtype=np.uint16).tofile(tmp_path / "b.bin")
    with pytest.raises(
        ConfigError, match=r"several types \(a\.bin uint32, b\.bin uint16\); write all as uint32, as by"
    ):
        read(tmp_path, 512)


@pytest.mark.parametrize("dtype", ["uint32", "int64"])
@pytest.mark.parametrize("vocab", [300, 65_536])
def test_wide_ids_that_are_truncated_or_after_a_header(tmp_path: Path, dtype: str, vocab: int) -> None:
    """They would be read as ids of half the width, every second one zero."""
    wanted, file = RANDOM.integers(0, vocab, 500), tmp_path / "a.bin"
    content = wanted.astype(dtype).tobytes()
    for missing in range(2, np.dtype(dtype).itemsize, 2):
        file.write_bytes(content[:-missing])
        with pytest.raises(
            ConfigError, match=rf"its ids are {dtype} by their content, .* it is cut; copy it again, or drop"
        ) as raised:
            read(file, vocab)
        rewrite(file, raised.value)
        assert read(file, vocab) == wanted[:-1].tolist()
        file.write_bytes(bytes(range(1, missing + 1)) + content + bytes(np.dtype(dtype).itemsize - missing))
        with pytest.raises(
            ConfigError, match=r"header of an unknown format: (the ids behind|all int64 .* of 256)"
        ) as raised:
            read(file, vocab)
        if "bin_dtype = uint16" in str(raised.value):
            assert len(read(file, 65_536, bin_dtype="uint16")) > 900, "which the message names, for ids that are so"
        file.write_bytes(file.read_bytes()[: missing - np.dtype(dtype).itemsize or None])
        rewrite(file, raised.value, header=missing)
        assert read(file, vocab) == wanted.tolist()
    file.write_bytes(wanted.astype(np.dtype(dtype).newbyteorder(">")).tobytes())
    with pytest.raises(ConfigError, match=rf"its ids are big-endian {dtype}") as raised:
        read(file, vocab)
    rewrite(file, raised.value)
    assert read(file, vocab) == wanted.tolist()


def test_ids_of_16_bits_in_any_file_hold_their_vocabulary(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", RANDOM.integers(0, 60_000, 100).astype(np.uint16))
    with pytest.raises(
        ConfigError, match=r"as the \.npy header says, .*write it as uint32, or set model\.vocab = 65536"
    ):
        read(tmp_path / "a.npy", 70_000)
    assert len(read(tmp_path / "a.npy", 65_536)) == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("Some text, café and 猫, of more than one block. " * 3000, r"it is text; give it the ending \.txt"),
        (json.dumps({"text": "a text of JSON, that is long"}) + "\n", r"it is JSON; give it the ending \.jsonl"),
    ],
)
@pytest.mark.parametrize("declared", ["auto", "uint16"])
def test_text_called_bin(tmp_path: Path, content: str, message: str, declared: str) -> None:
    """Two letters form a valid id of a large vocabulary."""
    (tmp_path / "a.bin").write_text(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read(tmp_path / "a.bin", 65_536, bin_dtype=declared)
    renamed = (tmp_path / "a.bin").rename(tmp_path / f"a{str(raised.value).split('ending ')[1].split(',')[0]}")
    assert read(renamed, 256)
    np.fromfile(renamed, np.uint8).astype(np.uint16).tofile(tmp_path / "a.bin")
    assert len(read(tmp_path / "a.bin", 256)) == len(content.encode()), "ids below 256 are not text"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04", "zip archive"),
        (b"\x93NUMPY", ".npy file"),
        (b"PAR1", "Parquet"),
        (b"\x1f\x8b\x08", "gzip"),
        (pickle.dumps(list(range(300))), "pickle, which is never opened; save the ids by numpy.save"),
    ],
)
def test_other_files_called_bin(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(content + bytes(64))
    with pytest.raises(ConfigError, match=rf"a\.bin': no raw token ids: it is .*{message}"):
        read(tmp_path / "a.bin", 70_000)


PICKLED = {
    "list": list(range(300)), "tuple": (*range(300),), "array": np.arange(300, dtype=np.uint16),
    "dict": {"ids": [1, 2, 3]}, "array.array": array.array("H", range(300)), "bytes": bytes(3000),
    "large ids": [70_000] * 4, "pair": ([1, 2], [3]),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_any_protocol_are_refused(tmp_path: Path, name: str, protocol: int) -> None:
    content = pickle.dumps(PICKLED[name], protocol)
    (tmp_path / "a.bin").write_bytes(content + bytes(len(content) % 2))
    for dtype in ("auto", "uint16"):
        with pytest.raises(ConfigError, match="no raw token ids: it is a pickle, which is never opened"):
            read(tmp_path / "a.bin", 65_536, bin_dtype=dtype)


@pytest.mark.parametrize("protocol", [0, 1])
def test_lists_and_arrays_pickled_by_the_oldest_protocols(tmp_path: Path, protocol: int) -> None:
    for name in ("list", "array", "array.array", "large ids"):
        content = pickle.dumps(PICKLED[name], protocol)
        (tmp_path / "a.bin").write_bytes(content + bytes(len(content) % 2))
        with pytest.raises(ConfigError, match="it is a pickle"):
            read(tmp_path / "a.bin", 65_536)


@pytest.mark.parametrize("first", [640, 896, 1152, 1408])
def test_ids_that_begin_as_a_pickle_does_are_ids(tmp_path: Path, first: int) -> None:
    wanted = [first, *RANDOM.integers(0, 2000, 5999).tolist()]
    for second in (41, 67, 88, 93, 99, 125, 149, 350, 1117, 2013):
        wanted[1:4] = second, 300, 1000  # no length of a string
        np.array(wanted, "<u2").tofile(tmp_path / "a.bin")
        assert len(read(tmp_path / "a.bin", 2100)) == 6000


@pytest.mark.parametrize("dtype", [">u4", ">i4", ">i8", "<f4", "<f8"])
def test_a_few_wide_ids_beyond_the_vocabulary_hide_no_byte_order(tmp_path: Path, dtype: str) -> None:
    """Ids for a larger vocabulary; the message's code keeps them."""
    file, wanted = tmp_path / "a.bin", text_ids(6000, 128_256)
    assert wanted.max() >= 65_536 and (wanted < 65_536).mean() > 0.8
    wanted.astype(dtype).tofile(file)
    for declared in ("auto", "uint16"):
        with pytest.raises(
            ConfigError, match=r"its ids are (big-endian|float).*; write them in another type"
        ) as raised:
            read(file, 65_536, bin_dtype=declared)
    rewrite(file, raised.value)
    assert read(file, 128_256) == wanted.tolist()


def test_ids_are_known_at_the_same_cost_for_any_size(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as opened:
        opened.truncate(1 << 40)  # a hole of a terabyte
    assert sum(map(len, blocks.read_blocks([tmp_path / "a.bin"], [1 << 40]))) == blocks.BLOCK * blocks.BLOCKS
