import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from jaxdist.config import ConfigError, Data
from jaxdist.conftest import open_dataset
from jaxdist.data import documents as reading
from jaxdist.data import encoding, files, ids, sources
from jaxdist.data.sources import open_stream

WORDS = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, "<s>": 4, "</s>": 5, "far": 300}


def ids_of(path: Path | str, vocab: int = 512, **fields: Any) -> list[int]:
    stream = open_stream(Data(path=str(path), **fields), vocab)
    return stream.read(0, len(stream)).tolist()


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(path: Path, *records: Any) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A word-level tokenizer.json whose truncation, padding and leading <s> must be ignored."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def test_text_as_bytes_is_mapped(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "naïve 猫\n")
    assert ids_of(file) == list("naïve 猫\n".encode())
    assert all(isinstance(part, ids.Mapped) for part in open_stream(Data(path=str(file)), 256)._parts)


def test_folder_is_read_by_name_without_hidden_files(tmp_path: Path) -> None:
    for name, text in (
        ("b.txt", "two"),
        ("a.md", "one"),
        ("c", ""),
        ("d.txt", "three"),
        (".hidden.npy", "no"),
    ):
        write(tmp_path / name, text)
    (tmp_path / "folder").mkdir()
    assert bytes(ids_of(tmp_path)) == b"onetwothree"
    assert open_stream(Data(path=str(tmp_path)), 256).bounds.tolist() == [0, 3, 6, 11]


def test_reads_across_files_agree_with_the_whole(tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path / f"{number:03}.txt", bytes([number]) * (number % 4))
    stream = open_stream(Data(path=str(tmp_path)), 256)
    everything = np.concatenate([[number] * (number % 4) for number in range(100)]).astype(int)
    for start in range(len(stream)):
        for stop in (start, start + 1, start + 7):
            assert stream.read(start, min(stop, len(stream))).tolist() == everything[start:stop].tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64", ">i4"])
def test_npy(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 1, 200], dtype))
    assert ids_of(tmp_path / "a.npy") == [3, 1, 200]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32"])
def test_bin(tmp_path: Path, dtype: str) -> None:
    np.array([3, 1, 500], dtype).tofile(tmp_path / "a.bin")
    assert ids_of(tmp_path / "a.bin", bin_dtype=dtype) == [3, 1, 500]


def test_a_replaced_file_is_mapped_anew(tmp_path: Path) -> None:
    assert ids_of(write(tmp_path / "a.txt", "old")) == list(b"old")
    (tmp_path / "a.txt").unlink()
    assert ids_of(write(tmp_path / "a.txt", "new")) == list(b"new")


def test_jsonl_as_bytes(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "ä"}, {"text": ""}, {"text": "b", "id": 7})
    write(file, file.read_bytes() + b"\n  \n")
    assert ids_of(file) == list("ä\nb\n".encode())
    stream = open_stream(Data(path=str(file), documents="padded"), 256)
    assert stream.read(0, len(stream)).tolist() == list("äb".encode()) and stream.bounds.tolist() == [0, 2, 3]


def test_jsonl_field(tmp_path: Path) -> None:
    assert ids_of(lines(tmp_path / "a.jsonl", {"body": "x", "text": "y"}), text_field="body") == list(b"x\n")


def test_tokenizer_on_jsonl_ends_documents(tmp_path: Path, words: str) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "the cat sat"}, {"text": "far cat"})
    assert ids_of(file, tokenizer=words) == [1, 2, 3, 5, 300, 2, 5]
    assert ids_of(file, tokenizer=words, documents="padded") == [1, 2, 3, 300, 2]


def test_tokenizer_on_text(tmp_path: Path, words: str) -> None:
    write(tmp_path / "corpus.txt", "the\r\ncat")
    stream = open_stream(Data(path=str(tmp_path / "corpus.txt"), tokenizer=words), 512)
    assert stream.read(0, len(stream)).tolist() == [1, 2, 5]
    assert stream._parts[0].dtype == np.uint16


def test_batches_of_documents_do_not_show(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = lines(tmp_path / "a.jsonl", *({"text": "the cat " * number} for number in range(1, 30)))
    one = ids_of(file, tokenizer=words)
    monkeypatch.setattr(encoding, "TOGETHER", 100)
    stream = open_stream(Data(path=str(file), tokenizer=words), 512)
    assert len(stream._parts) > 3
    assert stream.read(0, len(stream)).tolist() == one


@pytest.mark.parametrize("documents", ["packed", "padded"])
def test_pieces_of_long_documents_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: Any) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = Path(json.__file__).read_text()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["</s>"],
        initial_alphabet=tokenizer.pre_tokenizer.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(str(tmp_path / "bpe.json"))
    file = lines(tmp_path / "a.jsonl", {"text": text}, {"text": "short"}, {"text": text[:3000]})
    data = Data(path=str(file), tokenizer=str(tmp_path / "bpe.json"), documents=documents)
    one = open_stream(data, 512)
    monkeypatch.setattr(encoding, "TOGETHER", 900)
    monkeypatch.setattr(reading, "PIECE", 100)

    def same() -> bool:
        cut = open_stream(data, 512)
        assert len(cut._parts) > 3
        return np.array_equal(cut.bounds, one.bounds) and np.array_equal(cut.read(0, len(cut)), one.read(0, len(one)))

    assert same()
    monkeypatch.setattr(reading, "LINE_START", re.compile("[a-z]"))
    assert not same(), "a cut inside words went unseen"


def test_standard_library_is_its_files_end_to_end() -> None:
    stream = open_stream(Data(), 256)
    found = files.library_files(Path(sysconfig.get_path("stdlib")))
    text = b"".join(file.read_bytes() for file in found)
    assert bytes(stream.read(0, len(stream)).astype(np.uint8)) == text and 5e6 < len(text) < 50e6


def test_progress_bar_over_all_bytes(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.txt", "the cat")

    def shown(**fields: Any) -> str:
        screen = io.StringIO()
        monkeypatch.setattr(sources, "console", Console(force_terminal=True, file=screen))
        ids_of(file, **fields)
        return screen.getvalue()

    assert shown() == ""
    monkeypatch.setattr(sources, "SHOW_BAR_FROM", 0)
    for text in (shown(), shown(tokenizer=words)):
        assert "reading data" in text and "100%" in text


def test_fingerprint(tmp_path: Path, words: str) -> None:
    def fingerprint(path: Path | str, **fields: Any) -> str:
        return open_stream(Data(path=str(path), **fields), 512).fingerprint

    for name in ("a", "b", "other"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        write(tmp_path / name / "x.txt", "the cat")
    write(tmp_path / "other" / "x.txt", "the cats")
    same = fingerprint(tmp_path / "a")
    assert same == fingerprint(tmp_path / "b") and len(same) == 32
    assert same != fingerprint(tmp_path / "other")
    assert same != fingerprint(tmp_path / "a", tokenizer=words)
    assert fingerprint("") == fingerprint("")


def begun_earlier(path: Path, identity: str | None, *names: str) -> str:
    """Fingerprint by earlier versions, over names and sizes alone."""
    facts = [[(name, (path / name).stat().st_size) for name in names], identity, None]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize("size", [50, 6000])
def test_data_in_another_order_are_others(tmp_path: Path, size: int) -> None:
    """Lines of one length reordered, as by an editor or a shuffle; and one changed byte in a small file."""
    texts = [{"text": f"line {number:08} " * 20} for number in range(size)]
    file = lines(tmp_path / "a.jsonl", *texts)
    before = open_stream(Data(path=str(file)), 512).fingerprint
    (tmp_path / "copy").mkdir()
    shutil.copy(file, tmp_path / "copy")
    assert open_stream(Data(path=str(tmp_path / "copy" / "a.jsonl")), 512).fingerprint == before
    lines(file, *(texts[number] for number in np.random.default_rng(0).permutation(size)))
    with pytest.raises(ConfigError, match=rf"'{before}': the data at .* are others, .* order differ"):
        open_dataset(Data(path=str(file), fingerprint=before), 512)
    if size < 1000:
        lines(file, *texts[:-1], {"text": "line 00000000 " * 20})
        with pytest.raises(ConfigError, match="are others"):
            open_dataset(Data(path=str(file), fingerprint=before), 512)


def test_an_earlier_versions_run_continues(tmp_path: Path, words: str) -> None:
    file = lines(tmp_path / "a.jsonl", *[{"text": "the cat sat"}] * 100)
    hashed = hashlib.blake2b(Path(words).read_bytes(), digest_size=16).hexdigest()
    for identity, tokenizer in (("bytes", "bytes"), (hashed, words)):
        recorded = begun_earlier(tmp_path, identity, "a.jsonl")
        found = open_dataset(Data(path=str(file), fingerprint=recorded, sequence=8, tokenizer=tokenizer), 512)
        assert found.fingerprint not in ("", recorded), "what it continues with knows the content"
    with pytest.raises(ConfigError, match="are others"):
        open_dataset(Data(path=str(file), fingerprint=begun_earlier(tmp_path, "other", "a.jsonl")), 512)
    for dtype in ("uint16", "uint32", "int32"):
        np.arange(300, dtype=dtype).tofile(tmp_path / "a.bin")
        recorded = begun_earlier(tmp_path, dtype, "a.bin")
        assert open_dataset(Data(path=str(tmp_path / "a.bin"), fingerprint=recorded), 512).sequences("train") == 1
    recorded = begun_earlier(tmp_path, "uint16", "a.bin")  # earlier versions read it in halves
    with pytest.raises(ConfigError, match="are others"):
        open_dataset(Data(path=str(tmp_path / "a.bin"), fingerprint=recorded), 512)


def test_a_run_that_read_all_files_together_continues_so(tmp_path: Path) -> None:
    for name in ("train", "val"):
        np.save(tmp_path / f"{name}.npy", np.arange(300, dtype=np.uint16))
    recorded = begun_earlier(tmp_path, "uint16", "train.npy", "val.npy")
    found = open_dataset(Data(path=str(tmp_path), fingerprint=recorded), 512)
    together = open_dataset(Data(path=str(tmp_path), split="share"), 512)
    assert found.sequences("train") == together.sequences("train") == 3
    assert found.batch(1, 3, 0).tokens.tolist() == together.batch(1, 3, 0).tokens.tolist()
    assert found.rows["begun with"].endswith("and read as it did: data.split = share")
    assert found.fingerprint == recorded, "and is read so at the next resume"
    assert open_dataset(Data(path=str(tmp_path)), 512).sequences("train") == 2


ERRORS: dict[str, tuple[bytes | None, dict[str, Any], str]] = {
    "missing": (None, {}, r"no such file or folder; give one that exists"),
    "latin1.txt": ("ok é".encode("latin1"), {}, r"not UTF-8 at byte 3; convert"),
    "cut.txt": ("ok é".encode()[:-1], {}, r"not UTF-8 at byte 3; convert"),
    "odd.bin": (b"123", {"bin_dtype": "uint16"}, r"3 bytes are not a multiple of 2, .*data\.bin_dtype = uint16; set"),
    "cut.bin": (b"123", {}, r"3 bytes are not a multiple of 2, .*.*: copy it again, or write the ids"),
    "high.bin": (
        b"\0\0\xff\xff",
        {},
        r"high\.bin': token id 65535 with model\.vocab = 512; raise model\.vocab",
    ),
    "low.bin": (b"\xff" * 4, {"bin_dtype": "int32"}, r"token id -1 .*; token ids start at 0"),
    "junk.npy": (b"junk", {}, r"junk\.npy': .*; write it with numpy\.save"),
    "empty.npy": (b"", {}, r"empty\.npy': .*; write it with numpy\.save"),
    "broken.jsonl": (b'{"text": "a"}\n{"text"\n', {}, r"broken\.jsonl:2: .*; each line must be a JSON object"),
    "list.jsonl": (b"[1]\n", {}, r"list\.jsonl:1: a number, not a JSON object; correct or remove it"),
    "field.jsonl": (b'{"body": "a"}\n', {}, r"field\.jsonl:1: .*data\.text_field = 'text'"),
    "number.jsonl": (b'{"text": 3}\n', {}, r"number\.jsonl:1: .*data\.text_field = 'text'"),
    "latin1.jsonl": ('{"text": "é"}\n'.encode("latin1"), {}, r"latin1\.jsonl:1: .*utf-8"),
    "surrogate.jsonl": (b'{"text": "\\ud800"}\n', {}, r"surrogate\.jsonl:1: .*half of a surrogate pair; remove that"),
    "t.txt": (b"a", {"tokenizer": "no/such.json"}, r"data\.tokenizer = '/\S*no/such\.json': .*; use bytes"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(tmp_path: Path, name: str) -> None:
    content, fields, message = ERRORS[name]
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=message) as raised:
        ids_of(tmp_path / name, **fields)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), r"float64 with shape \(3,\); save token ids as a 1-D array"),
        (np.zeros((2, 2), np.uint16), r"uint16 with shape \(2, 2\); save"),
        (np.zeros(2, bool), r"bool with shape"),
        (np.array([1, 2, 900], np.uint16), r"token id 900 with model\.vocab = 512; raise"),
        (np.array([1, -5]), r"token id -5 .*; token ids start at 0"),
        (np.array(["a", None], object), r"write it with numpy\.save"),
    ],
)
def test_bad_npy(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ConfigError, match=r"data\.path = .*a\.npy'.*" + message):
        ids_of(tmp_path / "a.npy")


def test_empty_npy_holds_no_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(0, np.uint16))
    with pytest.raises(ConfigError, match=r"holds no tokens"):
        open_dataset(Data(path=str(tmp_path / "a.npy")), 512)


def test_an_id_late_in_a_large_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK", 4)
    np.save(tmp_path / "a.npy", np.array([0] * 13 + [600], np.uint16))
    with pytest.raises(ConfigError, match="token id 600"):
        ids_of(tmp_path / "a.npy")


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_utf8_is_checked_across_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(sources, "CHUNK", chunk)
    assert ids_of(write(tmp_path / "good.txt", "a猫é猫")) == list("a猫é猫".encode())
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7;"):
        ids_of(write(tmp_path / "bad.txt", "a猫猫".encode() + b"\xff" + b"abc"))


def test_bytes_need_their_vocabulary(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "az")
    assert ids_of(file, vocab=123) == [97, 122]
    with pytest.raises(ConfigError, match=r"token id 122 with model\.vocab = 122; raise model\.vocab above 122"):
        ids_of(file, vocab=122)
    with pytest.raises(ConfigError, match=r"data\.path = .*\.py': token id \d+ with model\.vocab = 100"):
        ids_of("", vocab=100)


def test_a_vocabulary_too_large_is_no_error_until_an_id_is(tmp_path: Path, words: str) -> None:
    assert ids_of(write(tmp_path / "a.txt", "the cat"), vocab=6, tokenizer=words) == [1, 2, 5]
    with pytest.raises(ConfigError, match=r"b\.txt': token id 300 with model\.vocab = 6"):
        ids_of(write(tmp_path / "b.txt", "far"), vocab=6, tokenizer=words)
    with pytest.raises(ConfigError, match="token id 5 "):  # the end-of-text token
        ids_of(tmp_path / "a.txt", vocab=5, tokenizer=words)


def test_text_under_a_tokenizer_must_be_utf8(tmp_path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.txt': not UTF-8 at byte 1;"):
        ids_of(write(tmp_path / "a.txt", b"a\xff"), tokenizer=words)


def test_unreadable_tokenizer(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .*bad\.json': .*; use bytes, or the path"):
        ids_of(tmp_path / "a.txt", tokenizer=str(write(tmp_path / "bad.json", "{}")))


def test_folders_without_files_or_of_mixed_kinds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder holds no files; put"):
        ids_of(tmp_path)
    write(tmp_path / "a.txt", "a")
    np.save(tmp_path / "b.npy", np.zeros(3, np.uint16))
    with pytest.raises(ConfigError, match=r"the folder mixes \.npy, text files; keep one kind"):
        ids_of(tmp_path)


def test_a_python_without_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path = '': this Python has no source at .*; give"):
        files.library_files(tmp_path)


def test_library_leaves_out_tests_packages_and_build_paths(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a/x.py",
        "a.py",
        "test/t.py",
        "a/tests/t.py",
        "site-packages/p.py",
        "_sysconfigdata_x.py",
        "n.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, "pass")
    found = [file.relative_to(tmp_path).as_posix() for file in files.library_files(tmp_path)]
    assert found == ["a.py", "a/x.py", "b.py"]


@pytest.mark.long
def test_neither_jax_nor_torch_is_imported() -> None:
    code = "import sys, jaxdist.data; sys.exit(bool({'jax', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
