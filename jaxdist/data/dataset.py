"""The global batch of a step: a pure function of the data, the seed and the step, with nothing to save."""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxdist.config import ConfigError, Data, Experiment
from jaxdist.data.permutation import permute
from jaxdist.data.sources import Stream, open_stream

IGNORED = -100
Split = Literal["train", "validation"]


class Batch(NamedTuple):
    """tokens [B, T] int32; targets [B, T] int32: the next token, or IGNORED where there is no loss."""

    tokens: Any
    targets: Any


def open_dataset(data: Data, vocab: int) -> "Dataset":
    """The sequences of data.path for a model of `vocab` tokens. Raises ConfigError.

    Formats, checks and memory: see `sources.open_stream`. Without a path the text is the Python standard
    library's own source, about 12 MB, which differs between Python versions: `Dataset.fingerprint` tells them
    apart, and a run that has recorded one in data.fingerprint is not continued on other data.
    """
    try:
        dataset = Dataset(data, open_stream(data, vocab))
    except OSError as error:
        raise ConfigError(f"data.path = {data.path!r}: {error}; give files that can be read") from None
    if data.fingerprint not in ("", dataset.fingerprint):
        raise ConfigError(
            f"data.fingerprint = {data.fingerprint!r}: the data at data.path = {data.path!r} (empty: the source of "
            f"this Python) are others, {dataset.fingerprint}; give the data of then, or data.fingerprint = '' for any"
        )
    return dataset


def in_steps(experiment: Experiment) -> Experiment:
    """The experiment with its epochs counted in steps. Raises ConfigError."""
    if not (epochs := experiment.train.epochs):
        return experiment
    dataset = open_dataset(experiment.data, experiment.model.vocab)
    return experiment.of_steps(dataset.steps(experiment.train.batch, epochs))


class Dataset:
    """Sequences of T tokens, split in training and validation.

    Packed, the stream of ids is cut every T ids; a sequence's last target is the first token of the next,
    every target counts, and a remainder too short for a sequence is dropped. Padded, each document is cut
    every T ids from its own start; what its last sequence lacks is token 0 with IGNORED targets, so sequences
    differ in how many targets count. A document of a single id has no target and is dropped.

    Validation is the last data.validation of the sequences, at least one where there are two: a tail shares
    no document with training but the one at the border.
    """

    def __init__(self, data: Data, stream: Stream) -> None:
        self._data, self._stream = data, stream
        T, bounds = data.sequence, stream.bounds
        if len(stream) == 0:
            raise ConfigError(f"data.path = {data.path!r}: holds no tokens; give a file or folder that does")
        if data.documents == "packed":  # as one document, without the remainder
            bounds = np.array([0, (len(stream) - 1) // T * T + 1], np.int64)
        self._bounds = bounds
        # [documents + 1]: how many sequences come before each document
        self._before = np.cumsum([0, *-(-np.maximum(np.diff(bounds) - 1, 0) // T)], dtype=np.int64)
        count = int(self._before[-1])
        if count == 0:
            raise ConfigError(
                f"data.sequence = {T}: data.path = {data.path!r} has {len(stream)} tokens, not enough for "
                "one sequence and its next token; shorten the sequence or give longer text"
            )
        held = min(count - 1, max(1, int(count * data.validation))) if data.validation else 0
        self._splits = {"train": (0, count - held), "validation": (count - held, held)}

    @property
    def fingerprint(self) -> str:
        """32 hex digits over names and sizes of the files and the tokenizer: equal for the same data."""
        return self._stream.fingerprint

    def sequences(self, split: Split) -> int:
        """How many sequences one epoch of the split has."""
        return self._splits[split][1]

    def visits(self, size: int) -> int:
        """Sequences that an epoch of training gives to batches of `size`. Raises ConfigError for none."""
        count = self.sequences("train")
        whole = count // size * size
        if visits := {"continue": count, "drop": whole, "pad": whole + size * (whole < count)}[self._data.last]:
            return visits
        raise ConfigError(
            f'data.last = "drop" leaves none of {count} sequences for a train.batch of {size}; give "pad" or "continue"'
        )

    def steps(self, size: int, epochs: int) -> int:
        """Steps of so many epochs in batches of `size`."""
        return -(-epochs * self.visits(size) // size)

    def batch(self, step: int, size: int, seed: int, split: Split = "train", rows: slice = slice(None)) -> Batch:
        """Rows `rows` of the global batch of `size` sequences at `step`, from 1; only they are read.

        Row r of step s is visit (s - 1) · size + r of the run. Each epoch of training visits every sequence
        once, in the permutation of (seed, epoch) if data.shuffle, but for what data.last says of its last batch;
        validation in one permutation, the same for every seed, so that its first few batches are a fair sample
        of all. Raises ConfigError when the split is empty.
        """
        if step < 1:
            raise ValueError(f"step = {step}; steps count from 1")
        first, count = self._splits[split]
        if count == 0:
            raise ConfigError(
                f"data.validation = {self._data.validation} leaves no sequence for {split}; raise it, "
                "give more text, or set train.validation_batches = 0"
            )
        visits = count if split == "validation" else self.visits(size)
        epoch, place = np.divmod((step - 1) * size + np.arange(size, dtype=np.int64)[rows], visits)
        place %= count
        if split == "validation":
            seed, epoch = 0, np.zeros_like(epoch)
        if self._data.shuffle:
            place = permute(place, count, seed, epoch)
        return self._read(first + place)

    def _read(self, sequence: NDArray[np.int64]) -> Batch:
        """The sequences with these numbers [B]."""
        T = self._data.sequence
        document = np.searchsorted(self._before, sequence, side="right") - 1
        start = self._bounds[document] + (sequence - self._before[document]) * T
        length = np.minimum(self._bounds[document + 1] - start, T + 1)
        ids = np.zeros((len(sequence), T + 1), np.int32)
        for row, (begin, some) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
            ids[row, :some] = self._stream.read(begin, begin + some)
        counts = np.arange(1, T + 1) < length[:, None]
        return Batch(ids[:, :T].copy(), np.where(counts, ids[:, 1:], np.int32(IGNORED)))
