"""From text to token ids: UTF-8 bytes, or a Hugging Face tokenizer."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jaxdist.config import ConfigError

END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>")
TOGETHER = 4_000_000  # bytes handed to a tokenizer at once; it takes some hundred times that in memory
PIECE = 250_000  # characters, after which a long document is cut, so that those bytes spread over the cores
# A tokenizer that splits at newlines joins nothing across this; one that marks a start marks each piece.
LINE_START = re.compile(r"\S\n(?=\S)")


class Piece(NamedTuple):
    """A text, the file it comes from, its share of the file in bytes, and whether a document ends with it."""

    text: str
    file: Path
    size: float
    last: bool


class Encoder(NamedTuple):
    """Texts to arrays of ids; `separator` ends a document, `identity` stands for the tokenizer's content."""

    encode: Callable[[Sequence[str]], list[NDArray]]
    separator: list[int]
    identity: str


def make_encoder(name: str) -> Encoder:
    """The encoder of data.tokenizer: "bytes" or the path of a tokenizer.json. Raises ConfigError.

    The truncation, padding and template (such as a leading <s>) that a tokenizer.json may ask for are not
    applied.
    """
    if name == "bytes":
        return Encoder(lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts], [ord("\n")], name)
    file = Path(name)
    try:
        content = file.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"data.tokenizer = {name!r}: {error}; use bytes, or the path of a Hugging Face tokenizer.json"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    dtype = np.min_scalar_type(max(tokenizer.get_vocab().values(), default=0))

    def encode(texts: Sequence[str]) -> list[NDArray]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in found]

    ends = [number for end in END_OF_TEXT if (number := tokenizer.token_to_id(end)) is not None]
    return Encoder(encode, ends[:1], hashlib.blake2b(content, digest_size=16).hexdigest())


def encode(
    pieces: Iterable[Piece],
    encoder: Encoder,
    separator: Sequence[int],
    vocab: int,
    advance: Callable[[float], None],
) -> tuple[list[NDArray], list[int]]:
    """Ids of all documents, each followed by `separator`, in arrays of some million; and their sizes.

    `advance` is told the bytes done. Raises ConfigError for an id that is not in range(vocab).
    """
    arrays, sizes, length = [], [], 0
    for batch in _batches(pieces):
        encoded = encoder.encode([piece.text for piece in batch])
        for number, (piece, ids) in enumerate(zip(batch, encoded, strict=True)):
            if piece.last:
                # The separator is one of the tokenizer's ids, so this dtype holds it.
                ids = encoded[number] = np.append(ids, np.array(separator, ids.dtype))
            check_ids(ids, piece.file, vocab)
            length += len(ids)
            if piece.last:
                sizes.append(length)
                length = 0
        arrays.append(np.concatenate(encoded))
        advance(sum(piece.size for piece in batch))
    return arrays, sizes


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0.0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= TOGETHER:
            yield batch
            batch, size = [], 0.0
    if batch:
        yield batch


def _cut(text: str, file: Path, size: int) -> Iterator[Piece]:
    """A document of `size` bytes in pieces that begin at the start of a line; none when it is empty."""
    start = 0
    while start < len(text):
        found = LINE_START.search(text, start + PIECE)
        end = found.end() if found else len(text)
        yield Piece(text[start:end], file, size * (end - start) / len(text), end == len(text))
        start = end


def text_file(file: Path) -> Iterator[Piece]:
    """A whole file as one document. Raises ConfigError when it is not UTF-8."""
    content = file.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path = {str(file)!r}: not UTF-8 at byte {error.start}; convert it to UTF-8") from None
    yield from _cut(text, file, len(content))


def json_lines(file: Path, field: str) -> Iterator[Piece]:
    """One document per line that has text. Raises ConfigError with file and line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
                text = record.get(field) if isinstance(record, dict) else None
                if not isinstance(text, str):
                    raise ValueError("no such text")
                text.encode()  # JSON can spell half of a surrogate pair, which UTF-8 cannot
            except ValueError as error:
                raise ConfigError(
                    f"data.path = {file}:{number}: {error}; each line is a JSON object with its text under "
                    f"data.text_field = {field!r}"
                ) from None
            yield from _cut(text, file, len(line))


def check_ids(ids: NDArray, file: Path, vocab: int) -> None:
    """Raises ConfigError unless all ids are in range(vocab)."""
    for number in (int(ids.min()), int(ids.max())) if ids.size else ():
        if not 0 <= number < vocab:
            fix = f"raise model.vocab above {number}" if number >= 0 else "token ids start at 0"
            raise ConfigError(f"data.path = {str(file)!r}: token id {number} with model.vocab = {vocab}; {fix}")
