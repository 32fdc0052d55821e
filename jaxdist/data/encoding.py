"""From text to token ids: UTF-8 bytes, or a Hugging Face tokenizer."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jaxdist.config import ConfigError
from jaxdist.data.documents import Piece

END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>")
TOGETHER = 4_000_000  # characters handed to a tokenizer at once; it takes some hundred times that in memory


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
    length = 0
    for piece in pieces:
        batch.append(piece)
        length += len(piece.text)
        if length >= TOGETHER:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def check_ids(ids: NDArray, file: Path, vocab: int) -> None:
    """Raises ConfigError unless all ids are in range(vocab)."""
    for number in (int(ids.min()), int(ids.max())) if ids.size else ():
        if not 0 <= number < vocab:
            fix = f"raise model.vocab above {number}" if number >= 0 else "token ids start at 0"
            raise ConfigError(f"data.path = {str(file)!r}: token id {number} with model.vocab = {vocab}; {fix}")
