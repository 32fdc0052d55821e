"""The token that ends a document, from the files beside a tokenizer."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxdist.config import ConfigError, Data
from jaxdist.conftest import open_dataset
from jaxdist.data.sources import Stream, open_stream

TEXTS = ["the cat", "the dog sat", "a cat"]
WORDS = ["<unk>", "the", "cat", "dog", "sat", "a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def tokenizer(folder: Path, *special: str, **beside: Any) -> str:
    """A tokenizer.json whose vocabulary ends with the special tokens, and other files beside it by their stems."""
    words = {word: number for number, word in enumerate([*WORDS, *special])}
    found = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    found.save(str(folder / "tokenizer.json"))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / "tokenizer.json")


def opened(folder: Path, tokenizer: str, **fields: Any) -> Stream:
    return open_stream(Data(path=str(folder / "d.jsonl"), tokenizer=tokenizer, **fields), 512)


def ends(stream: Stream) -> set[int]:
    """Last ids of the documents."""
    ids = stream.read(0, len(stream))
    return {int(ids[stop - 1]) for stop in stream.bounds[1:]}


def names(token: Any) -> dict[str, Any]:
    return {"tokenizer_config": {"eos_token": token}}


CASES: dict[str, tuple[list[str], dict[str, Any], str, str]] = {
    "gpt2": (["<|endoftext|>"], names("<|endoftext|>"), "<|endoftext|>", "as tokenizer_config.json says"),
    "gemma": (["<pad>", "<eos>", "<bos>"], names("<eos>"), "<eos>", "tokenizer_config.json"),
    "deepseek": (
        ["<｜end▁of▁sentence｜>"],
        names("<｜end▁of▁sentence｜>"),
        "<｜end▁of▁sentence｜>",
        "tokenizer_config",
    ),
    "another usual name is there": (["</s>", "<|endoftext|>"], names("</s>"), "</s>", "tokenizer_config"),
    "chat": (["<|endoftext|>", "<|im_end|>"], names("<|im_end|>"), "<|im_end|>", "tokenizer_config"),
    "a table": (["<e>"], names({"__type": "AddedToken", "content": "<e>", "lstrip": False}), "<e>", "tokenizer_config"),
    "special_tokens_map": (["<e>"], {"special_tokens_map": {"eos_token": {"content": "<e>"}}}, "<e>", "special_tokens"),
    "generation_config": (["<e>", "<f>"], {"generation_config": {"eos_token_id": 7}}, "<f>", "generation_config.json"),
    "a list of ids": (["<e>", "<f>"], {"generation_config": {"eos_token_id": [7, 6]}}, "<f>", "generation_config.json"),
    "config": (["<e>", "</s>"], {"config": {"eos_token_id": 6}}, "<e>", "as config.json says"),
    "id zero": (["<e>"], {"generation_config": {"eos_token_id": 0}}, "<unk>", "generation_config"),
    "null, and the next": (
        ["<e>"],
        names(None) | {"generation_config": {"eos_token_id": 6}},
        "<e>",
        "generation_config",
    ),
    "the first decides": (
        ["<e>", "<f>"],
        names("<e>") | {"special_tokens_map": {"eos_token": "<f>"}},
        "<e>",
        "tokenizer_c",
    ),
    "guessed": (["</s>", "<eos>"], {}, "</s>", "guessed: a usual name, as is '<eos>'; data.end"),
    "guessed beside others": (["<eos>"], {"tokenizer_config": {"pad_token": "<eos>"}}, "<eos>", "guessed"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_document_ends_as_its_tokenizer_says(folder: Path, case: str) -> None:
    special, beside, token, message = CASES[case]
    file = tokenizer(folder, *special, **beside)
    stream = opened(folder, file)
    number = [*WORDS, *special].index(token)
    assert ends(stream) == {number}
    assert stream.read(0, 3).tolist() == [1, 2, number], "one token alone, after the text"
    row = stream.rows["end of document"]
    assert row.startswith(f"{token!r}, id {number}, ") and message in row
    assert opened(folder, str(folder)).fingerprint == stream.fingerprint, "the folder stands for its tokenizer.json"
    assert "nothing is added" in opened(folder, file, documents="padded").rows["end of document"]
    assert opened(folder, file, end_of_text="sat").read(0, 3).tolist() == [1, 2, 4], "a field overrides it"
    assert opened(folder, file, end_of_text="none").read(0, 3).tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"special_tokens_map": {"eos_token": "<f>"}}, "; special_tokens_map.json names '<f>'"),
        ({"generation_config": {"eos_token_id": [7, 5]}}, "; generation_config.json names '<f>' and 'a'"),
        ({"generation_config": {"eos_token_id": 99}}, "; generation_config.json names none of its"),
        ({"generation_config": {"eos_token_id": [7, 6]}, "config": {"eos_token_id": 6}}, ""),
        ({"special_tokens_map": {"eos_token": {"content": "<e>"}}, "generation_config": {"eos_token_id": None}}, ""),
    ],
)
def test_files_that_name_another_end_are_reported(folder: Path, beside: dict[str, Any], expected: str) -> None:
    """The first file decides; a list that contains its token agrees."""
    row = opened(folder, tokenizer(folder, "<e>", "<f>", **names("<e>"), **beside)).rows["end of document"]
    assert row == f"'<e>', id 6, as tokenizer_config.json says{expected}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vocab.txt", r"vocab\.txt is in another format, which transformers converts: AutoTokenizer"),
        ("tokenizer.model", r"tokenizer\.model is in another format, which"),
        ("cl100k_base.tiktoken", r"cl100k_base\.tiktoken is in another format: look for a tokenizer\.json"),
        ("tekken.json", r"tekken\.json is in another format: look for a tokenizer\.json"),
    ],
)
def test_tokenizers_in_other_formats_are_named(folder: Path, name: str, message: str) -> None:
    (folder / "older").mkdir()
    (folder / "older" / name).write_text("{}")
    for path in (folder / "older", folder / "older" / name):
        with pytest.raises(ConfigError, match=message):
            opened(folder, str(path))


def test_the_table_reports_a_missing_end(folder: Path) -> None:
    stream = opened(folder, tokenizer(folder, "<stop>"))
    assert len(stream) == 7 and "none: documents run into one another" in stream.rows["end of document"]
    assert "data.end_of_text" in stream.rows["end of document"]
    assert len(opened(folder, tokenizer(folder, "<stop>"), end_of_text="<stop>")) == 10


def test_bytes(folder: Path) -> None:
    assert opened(folder, "bytes").rows["end of document"] == r"'\n', the default of bytes"
    for text, wanted in {"auto": "\n", "none": "", "\0": "\0", "é": "é"}.items():
        stream = opened(folder, "bytes", end_of_text=text)
        assert bytes(stream.read(0, len(stream)).tolist()) == "".join(found + wanted for found in TEXTS).encode()


def test_ids_have_their_own_ends(folder: Path) -> None:
    for name, expected in (("a.txt", "files are joined without a separator"), ("a.npy", "as the ids have it")):
        if name == "a.txt":
            (folder / name).write_text("some text")
        else:
            np.save(folder / name, np.arange(9))
        assert open_stream(Data(path=str(folder / name)), 512).rows["end of document"] == expected
        stream = open_stream(Data(path=str(folder / name), end_of_text="x"), 512)
        assert stream.rows["end of document"] == f"{expected}; data.end_of_text applies to text that is encoded here"


def test_another_end_is_other_data(folder: Path) -> None:
    file = tokenizer(folder, "<e>", "<f>", **names("<e>"))
    assert opened(folder, file).fingerprint == opened(folder, file, end_of_text="<e>").fingerprint
    assert opened(folder, file).fingerprint != opened(folder, file, end_of_text="<f>").fingerprint


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (names("</s>"), r"tokenizer_config\.json next to it gives eos_token = '</s>', which is not a token"),
        (
            {"generation_config": {"eos_token_id": 99}},
            r"generation_config\.json .* eos_token_id = 99, which is not a token",
        ),
        ({"config": {"eos_token_id": -1}}, r"config\.json .* eos_token_id = -1, which is not a token"),
        ({"config": {"eos_token_id": 2**40}}, r"config\.json .* eos_token_id = 1099511627776, which is not a token"),
        (names("\ud800"), r"eos_token = '\\ud800', which is not a token"),
        (
            {"tokenizer_config": [{"eos_token": "</s>"}]},
            r"tokenizer_config\.json' next to it: it holds list, not an object of settings; correct or remove it",
        ),
        (
            {"tokenizer_config": "{"},
            r"tokenizer_config\.json' next to it: .*; correct or remove it, or set data\.end_of_text",
        ),
    ],
)
def test_names_that_are_no_tokens_and_the_fix(folder: Path, beside: dict[str, Any], message: str) -> None:
    file = tokenizer(folder, "<e>", **beside)
    with pytest.raises(ConfigError, match=message):
        opened(folder, file)
    assert ends(opened(folder, file, end_of_text="<e>")) == {6}
    with pytest.raises(ConfigError, match=r"end_of_text = 'no': no token of data\.tokenizer = .*, or none for no"):
        opened(folder, file, end_of_text="no")
    assert len(opened(folder, file, end_of_text="none")) == 7


def test_a_folder_with_an_older_format_of_tokenizer(folder: Path) -> None:
    """Following the fix literally creates the missing tokenizer.json."""
    older = folder / "older"
    older.mkdir()
    (older / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (older / "merges.txt").write_text("#version: 0.2\na b\n")
    (older / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match=r"merges\.txt is in another format") as error:
        opened(folder, str(older))
    call = re.search(r"AutoTokenizer.*", str(error.value))
    assert call
    eval(call[0], {"AutoTokenizer": pytest.importorskip("transformers").AutoTokenizer})
    assert opened(folder, str(older)).rows["end of document"].startswith("'<|endoftext|>', id 3")


def test_a_run_that_an_earlier_version_began_ends_documents_as_it_did(folder: Path) -> None:
    file = tokenizer(folder, "<|endoftext|>", "<e>", **names("<e>"))
    size = (folder / "d.jsonl").stat().st_size
    hashed = hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    recorded = hashlib.blake2b(json.dumps([[("d.jsonl", size)], hashed, None]).encode(), digest_size=16).hexdigest()
    data = Data(path=str(folder / "d.jsonl"), tokenizer=file, fingerprint=recorded, sequence=2, validation=0)
    found = open_dataset(data, 512)
    assert 6 in found.batch(1, 4, 0).tokens and 7 not in found.batch(1, 4, 0).tokens
    assert "data.end_of_text = <|endoftext|>" in found.rows["begun with"] and found.fingerprint == recorded
    new = open_dataset(data.model_copy(update={"fingerprint": ""}), 512)
    assert 7 in new.batch(1, 4, 0).tokens and 6 not in new.batch(1, 4, 0).tokens
    padded = open_dataset(data.model_copy(update={"documents": "padded"}), 512)
    assert "read as it did" not in padded.rows["begun with"] and padded.fingerprint != recorded
