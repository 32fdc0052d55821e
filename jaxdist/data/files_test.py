import gzip
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Data
from jaxdist.conftest import open_dataset
from jaxdist.data import Dataset
from jaxdist.data.files import find_files, split_of


def write(file: Path, first: int, count: int = 41) -> None:
    """Write ids from `first` on, in the name's format."""
    file.parent.mkdir(exist_ok=True)
    ids = np.arange(first, first + count, dtype=np.uint16)
    match file.suffix:
        case ".npy":
            np.save(file, ids)
        case ".bin":
            ids.tofile(file)
        case ".jsonl":
            file.write_text(json.dumps({"text": "".join(map(chr, ids))}) + "\n")
        case _:
            file.write_text("".join(map(chr, ids)))


def opened(path: Path, **fields: Any) -> Dataset:
    return open_dataset(Data(path=str(path), sequence=4, shuffle=False, **fields), 512)


def test_folders_that_cannot_be_read_are_of_no_interest_beside_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lost+found, for instance, at the root of every ext4 disk."""
    (tmp_path / "lost+found").mkdir()
    entries = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied", str(path))
        return entries(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    write(tmp_path / "train/a.npy", 40)
    write(tmp_path / "validation/a.npy", 90)
    assert held(opened(tmp_path), "validation")[1] == 90
    (tmp_path / "train/a.npy").unlink()
    (tmp_path / "validation/a.npy").unlink()
    with pytest.raises(ConfigError, match=r"Permission denied: .*lost\+found'; give files that can be read"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / name).write_bytes(b"text")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=rf"Permission denied: .*{name}'; give files that can be read"):
        opened(tmp_path)


def held(found: Dataset, split: Any) -> tuple[int, int, int]:
    """A split's number of sequences, its first token, and its last target."""
    batch = found.batch(1, found.sequences(split), 0, split=split)
    return found.sequences(split), int(batch.tokens.min()), int(batch.targets.max())


PAIRS = [
    ("train.bin", "val.bin"), ("train.npy", "val.npy"), ("train.jsonl", "validation.jsonl"), ("train.txt", "valid.txt"),
    ("TRAIN.npy", "test.npy"), ("wiki.train.npy", "wiki.dev.npy"), ("fineweb_train_01.bin", "fineweb_val_00.bin"),
    ("train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl"), ("train/a.npy", "validation/a.npy"),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_names_show_the_splits(tmp_path: Path, pair: tuple[str, str]) -> None:
    train, validation = (tmp_path / name for name in pair)
    write(train, 40)
    write(validation, 85)
    paths = [tmp_path] if "/" in pair[0] else [tmp_path, train]
    for path in paths:
        found = opened(path)
        assert held(found, "train") == (10, 40, 80)
        assert held(found, "validation") == (10, 85, 125)
        assert validation.name in found.rows["data"] and "training 10, validation 10" in found.rows["sequences"]
        assert opened(path, validation=0.0).sequences("validation") == 10
    assert find_files(tmp_path, by_name=False).validation == []
    assert opened(tmp_path, split="share", validation=0.25, documents="padded").sequences("train") == 15
    if len(paths) > 1:
        assert held(opened(validation, validation=0.0), "train") == (10, 85, 125), "a file named is that file"


def test_sequences_do_not_cross_splits(tmp_path: Path) -> None:
    """Two of 43 ids remain in each split."""
    write(tmp_path / "train.bin", 40, 43)
    write(tmp_path / "val.bin", 100, 43)
    found = opened(tmp_path)
    assert held(found, "train") == (10, 40, 80) and held(found, "validation") == (10, 100, 140)
    padded = opened(tmp_path, documents="padded")
    assert held(padded, "train")[::2] == (11, 82) and held(padded, "validation")[::2] == (11, 142)


def test_a_test_file_serves_only_without_validation(tmp_path: Path) -> None:
    for number, name in enumerate(("train.bin", "val.bin", "test.bin")):
        write(tmp_path / name, 1 + 100 * number)
    found = opened(tmp_path)
    assert held(found, "validation")[1] == 101 and found.rows["left alone"] == "test.bin"


def test_nanogpts_folder(tmp_path: Path) -> None:
    """The ids have a pickle, text and script beside them; loading the pickle would raise."""

    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it was unpickled",))

    write(tmp_path / "train.bin", 1)
    write(tmp_path / "val.bin", 100)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "input.txt").write_text("text")
    (tmp_path / "prepare.py").write_text("import os")
    found = opened(tmp_path)
    assert held(found, "train") == (10, 1, 41) and held(found, "validation") == (10, 100, 140)
    assert found.rows["left alone"] == "meta.pkl, prepare.py, input.txt"
    for name in ("input.txt", "prepare.py", "val.bin"):
        (tmp_path / name).unlink()
    assert opened(tmp_path).sequences("train") == 9, "a share of the only file"


def test_other_files_beside_data_are_left_alone(tmp_path: Path) -> None:
    """Locks, copies, checksums, files of Spark and of the system; beside records and ids also scripts, but no other
    text."""
    beside = ["Thumbs.db", "a.lock", "a.tmp", "a.txt.bak", "a.txt~", "b.md5", "_SUCCESS", "x.part", "_metadata"]
    for name in beside:
        (tmp_path / name).write_bytes(b"\xff\xfe\xfd")
    for name, more in (("a.txt", []), ("a.jsonl", ["get.sh", "make.py", "README.md", "config.yaml"])):
        write(tmp_path / name, 40)
        for other in more:
            (tmp_path / other).write_text("text")
        found = opened(tmp_path)
        assert found.sequences("train") == 9 and set(found.rows["left alone"].split(", ")) == {*beside, *more}
        (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=r"cannot be read|not UTF"):  # a named file is read
        opened(tmp_path / "a.lock")


def test_data_in_folders_and_other_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "en" / "a.npy", 1)
    (tmp_path / "README.md").write_text("a card")
    with pytest.raises(ConfigError, match=r"folders whose names say no split \(en\); give one of these"):
        opened(tmp_path)
    assert opened(tmp_path / "en").sequences("train") == 9
    (tmp_path / "en").rename(tmp_path / "train_sft")
    write(tmp_path / "test_sft" / "a.npy", 100)
    assert held(opened(tmp_path), "validation") == (10, 100, 140)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tokens.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"the folder holds no data, only tokens\.pt; put text"):
        opened(tmp_path / "weights")


def test_missing_shards_are_reported(tmp_path: Path) -> None:
    """Counted from 0, as `datasets` does, or from 1; unrelated folders beside them are ignored."""
    for name in ("a-00000-of-00003.npy", "a-00002-of-00003.npy", "b-1-of-2.npy", "b-2-of-2.npy"):
        write(tmp_path / name, 1)
    write(tmp_path / "more" / "a.npy", 1)
    rows = opened(tmp_path).rows
    assert rows["not there"] == "1 of the files that names count: a-00001-of-00003.npy"
    assert rows["left alone"] == "more/"
    write(tmp_path / "a-00001-of-00003.npy", 1)
    assert "not there" not in opened(tmp_path).rows


def test_a_file_twice_and_rows_in_another_order(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 40)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    with pytest.raises(ConfigError, match=r"a\.jsonl and a\.jsonl\.gz are the same file, packed and not"):
        opened(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "state.json").write_text(json.dumps({"_indices_data_files": None}))
    assert opened(tmp_path).sequences("train") == 9
    (tmp_path / "state.json").write_text(json.dumps({"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with pytest.raises(ConfigError, match=r"save it again by dataset\.flatten_indices\(\)"):
        opened(tmp_path)


def test_a_file_of_neither_split_and_the_fixes(tmp_path: Path) -> None:
    for number, name in enumerate(("train.npy", "val.npy", "more.npy")):
        write(tmp_path / name, 1 + 100 * number)
    with pytest.raises(ConfigError, match=r"name of more\.npy says neither; put train or validation in it, move it"):
        opened(tmp_path)
    assert opened(tmp_path, split="share", validation=0.0).sequences("train") == 30
    (tmp_path / "more.npy").rename(tmp_path / "more_train.npy")
    assert opened(tmp_path).sequences("train") == 20


def test_words_of_names() -> None:
    for name, split in {
        "training.bin": "train", "a-VAL-1.txt": "validation", "evaluation.txt": None, "strain.txt": None,
        "train_test.txt": None, "test.txt": "test", "a.eval.jsonl": "validation", "constraint.val": "validation",
    }.items():  # fmt: skip
        assert split_of(Path("folder", name), Path("folder")) == split, name


def test_splits_of_too_little(tmp_path: Path) -> None:
    write(tmp_path / "train.bin", 1, 3)
    write(tmp_path / "val.bin", 1, 30)
    with pytest.raises(ConfigError, match=r"data\.sequence = 4: .* has 3 tokens, not enough"):
        opened(tmp_path)
    write(tmp_path / "train.bin", 1, 30)
    write(tmp_path / "val.bin", 1, 3)
    found = opened(tmp_path)
    assert "validation 0" in found.rows["sequences"]
    with pytest.raises(ConfigError, match=r"the files of validation hold no sequence; give longer ones, or set train"):
        found.batch(1, 1, 0, split="validation")
