import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Data, Train
from jaxdist.conftest import open_dataset
from jaxdist.data import IGNORED, Batch, Targets, dataset
from jaxdist.data.dataset import Dataset
from jaxdist.data.permutation import permute


def numbered(tmp_path: Path, sequences: int, **fields: Any) -> Dataset:
    """Packed data in which sequence i is i, i, ... so that a batch shows which sequences it holds."""
    T = 4
    np.save(tmp_path / "ids.npy", np.append(np.repeat(np.arange(sequences), T), sequences).astype(np.uint16))
    return open_dataset(Data(path=str(tmp_path / "ids.npy"), sequence=T, **fields), vocab=2**15)


def seen(found: Dataset, steps: int, size: int, seed: int = 0, split: Any = "train") -> np.ndarray:
    """Sequence numbers in `steps` batches, in order."""
    return np.concatenate([found.batch(s, size, seed, split).tokens[:, 0] for s in range(1, steps + 1)])


def once_per_epoch(visits: np.ndarray, sequences: int) -> bool:
    epochs = visits[: len(visits) // sequences * sequences].reshape(-1, sequences)
    return len(epochs) > 0 and (np.sort(epochs) == np.arange(sequences)).all()


@pytest.mark.parametrize(("sequences", "size"), [(1, 1), (1, 3), (2, 1), (3, 2), (7, 3), (10007, 1000)])
def test_each_sequence_once_per_epoch(tmp_path: Path, sequences: int, size: int) -> None:
    found = numbered(tmp_path, sequences, validation=0)
    assert found.sequences("train") == sequences and found.sequences("validation") == 0
    assert once_per_epoch(seen(found, -(-2 * sequences // size), size), sequences)


@pytest.mark.parametrize(
    "planted",
    [
        lambda place, n, seed, epoch: np.random.default_rng(seed).integers(n, size=len(place)),
        lambda place, n, seed, epoch: permute(place, n, seed, epoch * n + place),  # a new order per sequence
    ],
)
def test_once_per_epoch_catches_a_broken_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: Callable[..., Any]
) -> None:
    monkeypatch.setattr(dataset, "permute", planted)
    assert not once_per_epoch(seen(numbered(tmp_path, 8, validation=0), 4, 4), 8)


def test_unshuffled_is_in_order_and_wraps(tmp_path: Path) -> None:
    found = numbered(tmp_path, 5, validation=0, shuffle=False)
    assert seen(found, 4, 3).tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_shuffled_differs_by_epoch_and_seed(tmp_path: Path) -> None:
    found = numbered(tmp_path, 100, validation=0)
    first, second = seen(found, 2, 100).reshape(2, 100)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, seen(found, 1, 100, seed=1))


def test_a_batch_does_not_depend_on_earlier_reads(tmp_path: Path) -> None:
    found = numbered(tmp_path, 50)
    late = found.batch(9, 8, 3)
    seen(found, 5, 8)
    fresh = numbered(tmp_path, 50).batch(9, 8, 3)
    for again in (found.batch(9, 8, 3), fresh):
        assert np.array_equal(again.tokens, late.tokens) and np.array_equal(again.targets, late.targets)


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 8), slice(7, 8), slice(0, 0)])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_are_those_of_the_global_batch(tmp_path: Path, rows: slice, split: Any) -> None:
    found = numbered(tmp_path, 13, validation=0.3)
    complete, part = found.batch(4, 8, 1, split), found.batch(4, 8, 1, split, rows)
    assert np.array_equal(part.tokens, complete.tokens[rows]) and np.array_equal(part.targets, complete.targets[rows])


def test_only_the_rows_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = numbered(tmp_path, 100)
    read, reads = found._stream.read, []

    def counted(start: int, stop: int) -> Any:
        reads.append(start)
        return read(start, stop)

    monkeypatch.setattr(found._stream, "read", counted)
    found.batch(1, 64, 0, rows=slice(8, 12))
    assert len(reads) == 4


@pytest.mark.parametrize(("sequences", "share", "held"), [(1, 0.5, 0), (2, 0.01, 1), (2, 0.99, 1), (100, 0.25, 25)])
def test_validation_is_the_tail(tmp_path: Path, sequences: int, share: float, held: int) -> None:
    found = numbered(tmp_path, sequences, validation=share)
    train = seen(found, 1, found.sequences("train"))
    assert found.sequences("validation") == held and sorted(train) == list(range(sequences - held))
    if held:
        epochs = [seen(found, 2, held, seed, "validation").reshape(2, held) for seed in (0, 7)]
        assert np.array_equal(epochs[0], epochs[1]), "the sample depends on the seed"
        assert np.array_equal(epochs[0][0], epochs[0][1])
        assert sorted(epochs[0][0]) == list(range(sequences - held, sequences))


def test_the_first_validation_batches_are_a_sample_of_the_whole_split(tmp_path: Path) -> None:
    first = seen(numbered(tmp_path, 1000, validation=0.5), 1, 50, split="validation")
    assert abs(np.mean(first) - 750) < 4 * (500 / 12**0.5) / 50**0.5  # four standard errors of a fair sample
    in_order = numbered(tmp_path, 1000, validation=0.5, shuffle=False)
    assert seen(in_order, 1, 50, split="validation").tolist() == list(range(500, 550))


@pytest.mark.parametrize(
    ("steps", "size", "last", "expected"),
    [
        (5, 2, "continue", "1"),
        (10, 2, "continue", "2"),
        (4, 3, "continue", "1, and 2 of the sequences of one more in the last batch (data.last = drop or pad"),
        (7, 3, "continue", "2, and 1 of the sequences of one more"),
        (4, 3, "drop", "1.333"),
        (6, 3, "drop", "2"),
        (4, 3, "pad", "1"),
        (7, 2, "continue", "1.4"),
        (0, 2, "continue", "0"),
    ],
)
def test_the_table_shows_where_epochs_end(tmp_path: Path, steps: int, size: int, last: str, expected: str) -> None:
    """Ten sequences; the table agrees with the batches."""
    found = numbered(tmp_path, 10, validation=0, last=last)
    row = found.table(Train(steps=steps, batch=size))["epochs"]
    assert row.startswith(expected) and ("," in row) == ("," in expected)
    if "," in expected:
        epochs, over = int(expected.split(",")[0]), int(expected.split(" ")[2])
        counts = np.bincount(seen(found, steps, size), minlength=10)
        assert (counts == epochs + 1).sum() == over and (counts == epochs).sum() == 10 - over


def test_data_that_changed_are_refused(tmp_path: Path) -> None:
    before = numbered(tmp_path, 10).fingerprint
    assert numbered(tmp_path, 10, fingerprint=before).fingerprint == before
    with pytest.raises(ConfigError, match=rf"data\.fingerprint = '{before}': the data at .* are others"):
        numbered(tmp_path, 11, fingerprint=before)


def test_an_empty_validation_split_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.validation = 0\.0 leaves no sequence for validation; set data\.validation = 0\.05, or set train",
    ):
        numbered(tmp_path, 4, validation=0).batch(1, 1, 0, "validation")


def test_steps_count_from_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step = 0"):
        numbered(tmp_path, 4).batch(0, 1, 0)


def complete(tmp_path: Path, text: bytes, **fields: Any) -> Batch:
    """All sequences of a text in order, as one batch."""
    (tmp_path / "text.txt").write_bytes(text)
    found = open_dataset(Data(path=str(tmp_path / "text.txt"), validation=0, shuffle=False, **fields), vocab=256)
    return found.batch(1, found.sequences("train"), 0)


def joined(batch: Batch) -> bytes:
    """Text that the sequences cover, which must be adjacent as packed ones are."""
    tokens, targets = batch.tokens, batch.targets
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    assert np.array_equal(tokens[:, 1:], targets[:, :-1]), "a target is not the next token"
    assert np.array_equal(tokens[1:, 0], targets[:-1, -1]), "sequences do not touch"
    return bytes(tokens.ravel().tolist()) + bytes([targets[-1, -1]])


@pytest.mark.parametrize(("length", "kept"), [(5, 5), (8, 5), (9, 9), (12, 9), (13, 13)])
def test_packed_covers_the_stream_but_for_the_remainder(tmp_path: Path, length: int, kept: int) -> None:
    text = bytes(range(65, 65 + length))
    assert joined(complete(tmp_path, text, sequence=4)) == text[:kept]


def test_packed_check_catches_unshifted_targets_and_a_wrong_stride(tmp_path: Path) -> None:
    batch = complete(tmp_path, bytes(range(65, 82)), sequence=4)
    with pytest.raises(AssertionError, match="next token"):
        joined(Batch(batch.tokens, batch.tokens))
    with pytest.raises(AssertionError, match="touch"):
        joined(Batch(batch.tokens[::2], batch.targets[::2]))


def padded(tmp_path: Path, documents: Sequence[str], T: int) -> Batch:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    found = open_dataset(Data(path=str(file), sequence=T, documents="padded", validation=0, shuffle=False), vocab=256)
    return found.batch(1, found.sequences("train"), 0)


def test_padded_starts_each_document_anew(tmp_path: Path) -> None:
    batch = padded(tmp_path, ["abcdef", "x", "gh", "", "ijklm"], T=4)
    rows = [bytes(row).rstrip(b"\0").decode() for row in batch.tokens.astype(np.uint8)]
    targets = ["".join(chr(target) for target in row if target != IGNORED) for row in batch.targets]
    assert rows == ["abcd", "ef", "gh", "ijkl"]
    assert targets == ["bcde", "f", "h", "jklm"]
    assert (batch.targets != IGNORED).sum(axis=1).tolist() == [4, 1, 1, 4]
    assert batch.targets[1].tolist() == [ord("f"), IGNORED, IGNORED, IGNORED]


def test_padded_keeps_every_token_of_every_document(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    documents = [chr(97 + number % 26) * int(random.integers(2, 30)) for number in range(40)]
    batch = padded(tmp_path, documents, T=7)
    assert (batch.targets != IGNORED).sum() == sum(len(text) - 1 for text in documents)
    real = batch.targets != IGNORED
    assert np.array_equal(batch.tokens[real], batch.targets[real]), "a sequence mixes two documents"


@pytest.mark.parametrize("suffix", [".npy", ".bin"])
def test_ids_without_documents_are_padded_as_one(tmp_path: Path, suffix: str) -> None:
    ids = np.arange(1, 7, dtype=np.uint16)
    if suffix == ".npy":
        np.save(tmp_path / "ids.npy", ids)
    else:
        ids.tofile(tmp_path / "ids.bin")
    data = Data(path=str(tmp_path / f"ids{suffix}"), sequence=4, documents="padded", validation=0, shuffle=False)
    batch = open_dataset(data, vocab=7).batch(1, 2, 0)
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert batch.targets.tolist() == [[2, 3, 4, 5], [6, IGNORED, IGNORED, IGNORED]]


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        (b"", {}, r"data\.path = .*holds no tokens; give"),
        (
            b"abcd",
            {"sequence": 4},
            r"data\.sequence = 4: .* has 4 tokens, not enough .*; set data\.sequence = 3 or less",
        ),
        (b"a", {"sequence": 4, "documents": "padded"}, r"data\.sequence = 4: .* 1 tokens"),
    ],
)
def test_too_little_text(tmp_path: Path, text: bytes, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        complete(tmp_path, text, **fields)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: Data, vocab: int) -> None:
        raise PermissionError(13, "Permission denied", data.path)

    monkeypatch.setattr(dataset, "open_stream", refuse)
    with pytest.raises(ConfigError, match=r"data\.path = '\S+secret': .*Permission denied.*; give files"):
        open_dataset(Data(path="secret"), vocab=256)


@pytest.mark.parametrize(("rows", "size"), [(13, 4), (13, 1), (13, 13), (3, 8), (8, 4)])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_one_pass_counts_each_row_once(tmp_path: Path, rows: int, size: int, split: Any) -> None:
    """Batches may be larger than the split, and any of their rows read."""
    found = numbered(tmp_path, 2 * rows, validation=0.5)
    first = 0 if split == "train" else rows
    met = []
    for part in (slice(0, size // 2), np.arange(size)[size // 2 :]):
        for step in range(1, found.passes(split, size) + 1):
            batch = found.pass_over(split, step, size, part)
            met += batch.tokens[(batch.targets != IGNORED).any(axis=1), 0].tolist()
    assert sorted(met) == list(range(first, first + rows))


@pytest.mark.parametrize("documents", ["padded", "packed"])
@pytest.mark.parametrize("last", ["continue", "drop", "pad"])
def test_targets_are_counted_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents: Any, last: Any
) -> None:
    """The counts equal those of the batches, across the end of an epoch, in one sum or step by step."""
    monkeypatch.setattr(dataset, "MANY", 5)
    lines = [json.dumps({"text": "x" * (n * n % 19 + 1)}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = Data(path=str(tmp_path / "a.jsonl"), sequence=8, documents=documents, last=last, validation=0.2)
    found, size, steps = open_dataset(data, vocab=300), 6, 25
    held = [int((found.batch(step, size, 3).targets != IGNORED).sum()) for step in range(1, steps + 1)]
    assert [found.target_tokens(step - 1, step, size, 3) for step in range(1, steps + 1)] == held
    assert found.target_tokens(0, steps, size, 3) == sum(held)
    assert (sum(held) == steps * size * 8) == (documents == "packed")
    resumed = Targets(found, Train(batch=size, seed=3), start=steps - 1)
    assert resumed.of(steps, 0.5) == {"target_tokens": sum(held), "target_tokens_per_second": held[-1] / 0.5}


@pytest.mark.parametrize("last", ["continue", "drop", "pad"])
@pytest.mark.parametrize("size", [1, 6, 30, 100])
@pytest.mark.parametrize("validation", [0.0, 0.4])
def test_targets_of_many_epochs_are_the_sum_over_their_steps(
    tmp_path: Path, last: Any, size: int, validation: float
) -> None:
    """Steps from any to any, for batches smaller and larger than an epoch; documents of one id have no target."""
    lines = [json.dumps({"text": "x" * (n * n % 23)}) for n in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = Data(
        path=str(tmp_path / "a.jsonl"), sequence=5, documents="padded", last=last, validation=validation,
        end_of_text="<|endoftext|>",
    )  # fmt: skip
    found = open_dataset(data, vocab=300)
    if last == "drop" and size > found.sequences("train"):
        return
    held = [int((found.batch(step, size, 3).targets != IGNORED).sum()) for step in range(1, 60)]
    for after in (0, 1, 9, 30):
        for until in (after, after + 1, after + 2, 31, 59):
            assert found.target_tokens(after, until, size, 3) == sum(held[after:until]), (after, until)


def test_a_late_resume_looks_at_as_many_rows_as_an_early_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": "x" * (n % 7 + 2)}) for n in range(64)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    met = []
    shuffled = dataset.permute

    def counted(place: np.ndarray, *more: Any) -> Any:
        met.append(len(place))
        return shuffled(place, *more)

    monkeypatch.setattr(dataset, "permute", counted)
    cost = {}
    for documents in ("padded", "packed"):
        data = Data(path=str(tmp_path / "a.jsonl"), sequence=8, documents=documents, validation=0)
        found = open_dataset(data, vocab=300)
        for epochs in (1, 1000):
            met.clear()
            start = epochs * found.sequences("train") // 4 + 3
            Targets(found, Train(batch=4, seed=3), start)
            cost[documents, epochs] = sum(met)
    assert cost == {("padded", 1): 12, ("padded", 1000): 12, ("packed", 1): 0, ("packed", 1000): 0}
