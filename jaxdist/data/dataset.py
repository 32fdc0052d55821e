"""The global batch of a step: a pure function of the data, the seed and the step, with nothing to save."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from jaxdist.config import ConfigError, Data, Experiment, ImageModel, Model, Train
from jaxdist.config.data import SOURCES
from jaxdist.config.plugins import function, named, running
from jaxdist.data.blocks import Earlier
from jaxdist.data.images import Pictures, open_pictures
from jaxdist.data.permutation import permute
from jaxdist.data.sources import Stream, open_stream

IGNORED = -100
MANY = 1 << 20  # sequences whose targets are counted at a time
Split = Literal["train", "validation"]


class Batch(NamedTuple):
    """tokens [B, T] int32; targets [B, T] int32: the next token, or IGNORED where there is no loss."""

    tokens: Any
    targets: Any


class Images(NamedTuple):
    """images [B, Y, X, C] float32; targets [B] int32: the class, or IGNORED where there is no loss."""

    images: Any
    targets: Any


Batches = Batch | Images  # of either the first is what the model takes


def dataset_of(experiment: Experiment) -> "Dataset":
    """The data of an experiment, such as its model takes. Raises ConfigError."""
    data, model = experiment.data, experiment.model
    open_source = function(SOURCES, data.source, "open", "training", Dataset)
    with _readable(data):
        found = _as_begun(data, lambda fields: open_source(fields, model))
    if not SOURCES.built_in(data.source):
        with running(SOURCES, data.source, "batch"):
            _check_first(experiment, found)
    return found


def _check_first(experiment: Experiment, dataset: "Dataset") -> None:
    """Raises ConfigError where the first row of a plugin's data is not one of the model's."""
    model, train = experiment.model, experiment.train
    split = next((split for split in get_args(Split) if dataset.sequences(split)), None)
    if split is None:
        return
    inputs, targets = map(np.asarray, dataset.batch(1, train.batch, train.seed, split=split, rows=slice(1)))
    shape, tokens = (1, *model.input_shape(experiment.data.sequence)), model.input_kind == "tokens"
    if inputs.shape != shape or targets.shape != (shape if tokens else shape[:1]):
        problem = f"has inputs {[*inputs.shape]} and targets {[*targets.shape]}"
    elif targets.dtype.kind not in "iu" or (tokens and inputs.dtype.kind not in "iu"):
        problem = f"has inputs of {inputs.dtype} and targets of {targets.dtype}"
    else:
        numbers = np.concatenate([inputs.ravel() if tokens else [], targets[targets != IGNORED]])
        if not ((numbers < 0) | (numbers >= model.vocab)).any():
            return
        problem = f"has numbers from {numbers.min():.0f} to {numbers.max():.0f}"
    wanted = f"{[*shape]} with integer targets below model.vocab = {model.vocab}"
    raise ConfigError(f"{named(SOURCES, experiment.data.source)}: its first row {problem}; give rows {wanted}")


def open_files(data: Data, model: Model) -> "Dataset":
    """The sequences or images of data.path. Raises ConfigError.

    Formats, checks and memory: see `sources.open_stream` and `images.open_pictures`. Without a path the text is the
    Python standard library's own source, about 12 MB, which differs between Python versions: `Dataset.fingerprint`
    tells them apart, and a run that has recorded one in data.fingerprint is not continued on other data.
    """
    if model.input_kind == "images":
        return Labelled(data, open_pictures(data, cast(ImageModel, model)))
    return Sequences(data, open_stream(data, model.vocab))


@contextmanager
def _readable(data: Data) -> Iterator[None]:
    """Raises ConfigError for files and folders that the system does not let this process read."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"data.path = {data.path!r}: {error}; give files that can be read") from None


def _as_begun(data: Data, open_source: Callable[[Data], "Dataset"]) -> "Dataset":
    """The data of `open_source`, read as when the run started. Raises ConfigError for other data.

    A run from before content was sampled keeps its fingerprint of names and sizes, and its files are read as its
    version read them.
    """
    dataset = open_source(data)
    recorded, (fingerprints, fields) = data.fingerprint, dataset.earlier
    if recorded in ("", dataset.fingerprint):
        return dataset
    if recorded not in fingerprints:
        raise ConfigError(
            f"data.fingerprint = {recorded!r}: the data at data.path = {data.path!r} (empty: the source of "
            f"this Python, or scikit-learn's digits) are others, {dataset.fingerprint}: their names, sizes, content or "
            "order differ, or their processing; give the data of its start, or begin a new run in another folder, from "
            "these weights by --init, with data.fingerprint = ''"
        )
    row = "known by names and sizes, as an earlier version began the run"
    if fields:
        dataset = open_source(data.model_copy(update=dict(fields)))
        dataset.fingerprint = recorded
        row += ", and read as it did: " + ", ".join(f"data.{name} = {value}" for name, value in fields)
    dataset.rows["begun with"] = row
    return dataset


def microbatch_order(size: int, ways: int, microbatches: int) -> NDArray[np.int64]:
    """The rows of a batch in the order in which devices hold them: a part of each microbatch in turn.

    So microbatch i is the i-th part of the batch however many devices there are: its images are normalized together,
    and its tokens balanced among experts.
    """
    rows = np.arange(size).reshape(microbatches, ways, -1)
    return rows.swapaxes(0, 1).reshape(size)


def in_steps(experiment: Experiment) -> Experiment:
    """The experiment with its epochs counted in steps. Raises ConfigError."""
    if not (epochs := experiment.train.epochs):
        return experiment
    return experiment.with_steps(dataset_of(experiment).steps(experiment.train.batch, epochs))


class Dataset(ABC):
    """Rows, which are sequences or images, split in training and validation."""

    fingerprint: str
    """32 hex digits over names, sizes and sampled content of the files and the tokenizer, equal for the same data."""
    earlier: Earlier
    rows: dict[str, str]
    """Rows for the start-up table: the data that were found."""

    def __init__(self, data: Data, count: int, held: int | None = None) -> None:
        """Split `count` rows: the last `held` are validation, or by default the share data.validation, at least one row
        of two."""
        self._data = data
        share = self._share = held is None
        if held is None:
            held = min(count - 1, max(1, int(count * data.validation))) if data.validation else 0
        self._splits = {"train": (0, count - held), "validation": (count - held, held)}
        self._split_row = f"training {count - held:,}, validation {held:,}" + (
            f" (the last {data.validation:.3g} of them: data.validation)" if share and held else ""
        )

    @abstractmethod
    def _read(self, row: NDArray[np.int64]) -> Batches:
        """The rows with these numbers [B]."""

    @abstractmethod
    def target_tokens(self, after: int, until: int, size: int, seed: int) -> int:
        """Number of tokens (or images) of the training steps `after` + 1 to `until` with a target that counts: padding
        has none, nor has a document's last token. Reads no file."""

    def sequences(self, split: Split) -> int:
        """Number of sequences in one epoch of the split."""
        return self._splits[split][1]

    def table(self, train: Train) -> dict[str, str]:
        """Rows of the start-up table: what was found, and how often a run visits it. Raises ConfigError where it has
        no batch."""
        visits, total = self.visits(train.batch), train.steps * train.batch
        epochs, over = divmod(total, visits)
        epochs_row = f"{total / visits:.4g}" if over else f"{epochs}"
        if epochs and 0 < over < train.batch:
            epochs_row = (
                f"{epochs}, and {over} of the sequences of one more in the last batch (data.last = drop or pad ends "
                "with the epoch)"
            )
        return self.rows | {"epochs": epochs_row}

    def visits(self, size: int) -> int:
        """Sequences that an epoch of training gives to batches of `size`. Raises ConfigError for none."""
        count = self.sequences("train")
        full = count // size * size
        if visits := {"continue": count, "drop": full, "pad": full + size * (full < count)}[self._data.last]:
            return visits
        raise ConfigError(
            f"data.last = drop leaves none of {count} sequences for train.batch = {size}; set data.last = pad, or "
            "continue"
        )

    def steps(self, size: int, epochs: int) -> int:
        """Number of steps in that many epochs, in batches of `size`."""
        return -(-epochs * self.visits(size) // size)

    def batch(
        self, step: int, size: int, seed: int, split: Split = "train", rows: slice | NDArray = slice(None)
    ) -> Any:
        """Rows `rows` of the global batch of `size` at `step`, from 1, as Batch or Images; only they are read.

        Row r of step s is visit (s - 1) · size + r of the run. Each epoch of training visits every row
        once, in the permutation of (seed, epoch) if data.shuffle, except in its last batch as data.last says;
        validation in one permutation, the same for every seed, so that its first few batches are a fair sample
        of all. Raises ConfigError when the split is empty.
        """
        if step < 1:
            raise ValueError(f"step = {step}; steps count from 1")
        return self._read(self._rows((step - 1) * size + np.arange(size, dtype=np.int64)[rows], size, seed, split))

    def pass_over(self, split: Split, step: int, size: int, rows: slice | NDArray = slice(None)) -> Any:
        """Like `batch`, for one pass over the split, in which each row counts once: rows that fill up the last batch
        have IGNORED targets. Needs `passes(split, size)` steps."""
        batch = self.batch(step, size, 0, split=split, rows=rows)
        batch.targets[np.arange(size)[rows] >= self.sequences(split) - (step - 1) * size] = IGNORED
        return batch

    def passes(self, split: Split, size: int) -> int:
        """Batches of `size` in one pass over the split."""
        return -(-self.sequences(split) // size)

    def _rows(self, visit: NDArray[np.int64], size: int, seed: int, split: Split = "train") -> NDArray[np.int64]:
        """The numbers of the rows that these visits [B], counted from 0, meet. Raises ConfigError."""
        first, count = self._splits[split]
        if count == 0:
            why = f"data.path = {self._data.path!r}: the files of {split} hold no sequence; give longer ones"
            if self._share:
                fix = "set data.validation = 0.05" if self.sequences("train") > 1 else "give more data"
                why = f"data.validation = {self._data.validation} leaves no sequence for {split}; {fix}"
            raise ConfigError(f"{why}, or set train.validation_batches = 0")
        epoch, place = np.divmod(visit, count if split == "validation" else self.visits(size))
        if split == "validation":
            seed, epoch = 0, np.zeros_like(epoch)
        return first + self._shuffled(place % count, count, seed, epoch)

    def _shuffled(self, place: NDArray[np.int64], count: int, seed: int, epoch: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows, of `count`, at these places [B] of these epochs [B]."""
        return permute(place, count, seed, epoch) if self._data.shuffle else place


class Targets:
    """Counts the tokens that have a target, from the first step of a run on."""

    def __init__(self, dataset: Dataset, train: Train, start: int) -> None:
        """`start`: steps done before."""
        self.dataset, self.train = dataset, train
        self.total = dataset.target_tokens(0, start, train.batch, train.seed)

    def of(self, step: int, seconds: float) -> dict[str, float]:
        """Fields of metrics.jsonl for `step`, the one after that of the last call, beside `tokens`."""
        count = self.dataset.target_tokens(step - 1, step, self.train.batch, self.train.seed)
        self.total += count
        return {"target_tokens": self.total, "target_tokens_per_second": count / seconds}


class Sequences(Dataset):
    """Sequences of T tokens, split in training and validation.

    Packed, the stream of ids is cut every T ids; a sequence's last target is the first token of the next,
    every target counts, and a remainder too short for a sequence is dropped. Padded, each document is cut
    every T ids from its own start; what its last sequence lacks is token 0 with IGNORED targets, so sequences
    differ in how many targets count. A document of a single id has no target and is dropped.

    Validation, a tail, shares no document with training but the one at the border.
    """

    def __init__(self, data: Data, stream: Stream) -> None:
        self._stream = stream
        self.fingerprint, self.earlier = stream.fingerprint, stream.earlier
        T, bounds, training = data.sequence, stream.bounds, stream.training
        if (training if training is not None else len(stream)) == 0:
            raise ConfigError(f"data.path = {data.path!r}: holds no tokens; give a file or folder that does")
        if data.documents == "packed":  # each split as one document, without the remainder
            edges = np.array([0, len(stream)] if training is None else [0, training, len(stream)], np.int64)
            starts, stops = edges[:-1], edges[:-1] + np.maximum(np.diff(edges) - 1, 0) // T * T + 1
        else:
            starts, stops = bounds[:-1], bounds[1:]
        self._starts, self._stops = starts, stops
        # [documents + 1]: how many sequences come before each document
        self._before = np.cumsum([0, *-(-np.maximum(stops - starts - 1, 0) // T)], dtype=np.int64)
        count = int(self._before[-1])
        before = count if training is None else int(self._before[np.searchsorted(starts, training)])
        if before == 0:
            tokens = len(stream) if training is None else training
            shorter = f"set data.sequence = {tokens - 1} or less, or " * (data.documents == "packed" and tokens > 1)
            raise ConfigError(
                f"data.sequence = {T}: data.path = {data.path!r} has {tokens} tokens, not enough for one sequence and "
                f"its next token; {shorter}give longer text"
            )
        super().__init__(data, count, None if training is None else count - before)
        self.rows = stream.rows | {"sequences": self._split_row}

    def target_tokens(self, after: int, until: int, size: int, seed: int) -> int:
        if self._data.documents == "packed":  # every target counts
            return (until - after) * size * self._data.sequence
        count, visits = self.sequences("train"), self.visits(size)
        begin, end = after * size, until * size
        first, last = -(-begin // visits), end // visits  # complete epochs: `first` to `last` - 1
        if first > last:
            return self._sum(range(last, first), range(begin % visits, end % visits), seed)
        total = self._sum(range(first - 1, first), range(begin - (first - 1) * visits, visits), seed)
        total += self._sum(range(last, last + 1), range(end % visits), seed)
        if first == last:
            return total
        # Each visits every sequence so often, and some of them once more: those, or the others, are fewer than a batch.
        times, more = divmod(visits, count)
        epochs, each = range(first, last), self._targets()
        if 2 * more > count:
            return total + len(epochs) * (times + 1) * each - self._sum(epochs, range(more, count), seed)
        return total + len(epochs) * times * each + self._sum(epochs, range(more), seed)

    def _sum(self, epochs: range, places: range, seed: int) -> int:
        """Targets of the training sequences at these places of each of these epochs."""
        count, total, visits = self.sequences("train"), 0, len(epochs) * len(places)
        for begin in range(0, visits, MANY):
            epoch, place = np.divmod(np.arange(begin, min(begin + MANY, visits)), len(places))
            sequence = self._shuffled((places.start + place) % count, count, seed, epochs.start + epoch)
            total += int((self._found(sequence)[1] - 1).sum())
        return total

    def _targets(self) -> int:
        """Targets of all training sequences."""
        count = self.sequences("train")
        document = int(np.searchsorted(self._before, count, side="right")) - 1  # of which a part, or none, is training
        full = np.maximum(self._stops - self._starts - 1, 0)[:document].sum()
        return int(full + (count - self._before[document]) * self._data.sequence)

    def _found(self, sequence: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts of sequences [B] in the stream, and their numbers of ids, at most T + 1."""
        T = self._data.sequence
        document = np.searchsorted(self._before, sequence, side="right") - 1
        start = self._starts[document] + (sequence - self._before[document]) * T
        return start, np.minimum(self._stops[document] - start, T + 1)

    def _read(self, row: NDArray[np.int64]) -> Batch:
        T = self._data.sequence
        start, length = self._found(row)
        ids = np.zeros((len(row), T + 1), np.int32)
        for i, (begin, some) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
            ids[i, :some] = self._stream.read(begin, begin + some)
        counts = np.arange(1, T + 1) < length[:, None]
        return Batch(ids[:, :T].copy(), np.where(counts, ids[:, 1:], np.int32(IGNORED)))


class Labelled(Dataset):
    """Images with their classes. Each split is in a fixed permutation, as files often are in the order of classes."""

    def __init__(self, data: Data, pictures: Pictures) -> None:
        count, training = len(pictures.labels), pictures.training
        super().__init__(data, count, None if training is None else count - training)
        self._pictures, self._training = pictures, count if training is None else training
        self.fingerprint, self.earlier = pictures.fingerprint, pictures.earlier
        self.rows = pictures.rows | {"splits": self._split_row}

    def target_tokens(self, after: int, until: int, size: int, seed: int) -> int:
        return (until - after) * size

    def _read(self, row: NDArray[np.int64]) -> Images:
        number, count = np.empty_like(row), len(self._pictures.labels)
        for first, stop in ((0, self._training), (self._training, count)):
            own = (row >= first) & (row < stop)
            number[own] = first + permute(row[own] - first, stop - first, 0, np.zeros_like(row[own]))
        return Images(self._pictures.read(number), self._pictures.labels[number])
