"""From text to token ids: UTF-8 bytes, or a Hugging Face tokenizer."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from jaxdist.config import ConfigError
from jaxdist.config.bounded import check_fetched
from jaxdist.data.documents import Piece
from jaxdist.formats.described import OLDER_TOKENIZERS

# Guesses, where nothing beside a tokenizer.json names its end of text.
END_OF_TEXT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>")
# Where it is named beside it: files in the order in which they are believed, and their keys.
NAMED_IN = {
    "tokenizer_config.json": "eos_token", "special_tokens_map.json": "eos_token",
    "generation_config.json": "eos_token_id", "config.json": "eos_token_id",
}  # fmt: skip
MOST_IDS = 2**31
TOGETHER = 4_000_000  # characters handed to a tokenizer at once; it takes some hundred times that in memory


class Encoder(NamedTuple):
    """Texts to arrays of ids; `separator` ends a document, `identity` identifies the tokenizer's content, and `end`
    describes the separator and how it was found. `earlier` is the value of data.end_of_text that ends documents as
    versions did that knew three names alone; empty where `separator` does the same."""

    encode: Callable[[Sequence[str]], list[NDArray]]
    separator: list[int]
    identity: str
    end: str
    earlier: str


def make_encoder(name: str, end_of_text: str) -> Encoder:
    """The encoder of data.tokenizer: "bytes", the path of a tokenizer.json, or a folder with one. Raises ConfigError.

    The truncation, padding and template (such as a leading <s>) that a tokenizer.json may ask for are not
    applied. `end_of_text`: data.end_of_text, see `end_of`.
    """
    if name == "bytes":
        text = {"auto": "\n", "none": ""}.get(end_of_text, end_of_text)
        separator = [*text.encode()]
        source = "the default of bytes" if end_of_text == "auto" else "by data.end_of_text"
        earlier = "" if text == "\n" else "auto"
        return Encoder(_as_bytes, separator, name, f"{text!r}, {source}" if text else NO_END, earlier)
    file = Path(name)
    file = file / "tokenizer.json" if file.is_dir() else file
    try:
        content = file.read_bytes()
        check_fetched(content)
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"data.tokenizer = {name!r}: {error}; use bytes, or the path of a Hugging Face tokenizer.json"
            f"{_how_to_convert(file)}"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    dtype = np.min_scalar_type(max(tokenizer.get_vocab().values(), default=0))

    def encode(texts: Sequence[str]) -> list[NDArray]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in found]

    number, source = end_of(tokenizer, file, end_of_text)
    end = NO_END if number is None else f"{tokenizer.id_to_token(number)!r}, id {number}, {source}"
    then = next((text for text in END_OF_TEXT[:3] if tokenizer.token_to_id(text) is not None), "none")
    earlier = "" if tokenizer.token_to_id(then) == number else then
    identity = hashlib.blake2b(content, digest_size=16).hexdigest()
    return Encoder(encode, [] if number is None else [number], identity, end, earlier)


def _how_to_convert(file: Path) -> str:
    """Instructions to make a tokenizer.json from older formats in the folder of `file`; empty without any."""
    older = [name for name in OLDER_TOKENIZERS if file.with_name(name).is_file()]
    others = [*file.parent.glob("*.tiktoken"), *file.parent.glob("tekken.json")] if file.parent.is_dir() else []
    if file.with_name("tokenizer.json").is_file() or not (older or others):
        return ""
    if not older:
        return f"; {others[0].name} is in another format: look for a tokenizer.json of the same model"
    return (
        f"; {older[0]} is in another format, which transformers converts: "
        f"AutoTokenizer.from_pretrained({str(file.parent)!r}).save_pretrained({str(file.parent)!r})"
    )


NO_END = "none: documents run into one another; data.end_of_text sets a token"


def _as_bytes(texts: Sequence[str]) -> list[NDArray]:
    return [np.frombuffer(text.encode(), np.uint8) for text in texts]


def end_of(tokenizer: Tokenizer, file: Path, end_of_text: str) -> tuple[int | None, str]:
    """The id of the token that ends a document, and how it is known; None where there is none. Raises ConfigError.

    `end_of_text` is a token, "none", or "auto": the one that the files beside the tokenizer's `file` name (NAMED_IN),
    or else the first of END_OF_TEXT that it has.
    """
    if end_of_text == "none":
        return None, ""
    if end_of_text != "auto":
        if (number := _id_of(tokenizer, end_of_text)) is None:
            raise ConfigError(
                f"data.end_of_text = {end_of_text!r}: no token of data.tokenizer = {str(file)!r}; give one of its "
                "tokens, or none for no end of documents"
            )
        return number, "by data.end_of_text"
    for name, key in NAMED_IN.items():
        found = _named_in(file.with_name(name), key)
        if found is None:
            continue
        if (number := _id_of(tokenizer, found)) is None:
            raise ConfigError(
                f"data.tokenizer = {str(file)!r}: {name} next to it gives {key} = {found!r}, which is not a token of "
                "it; set data.end_of_text to the token that ends a document, or none"
            )
        return number, f"as {name} says{_others(tokenizer, file, name, number)}"
    known = [name for name in END_OF_TEXT if tokenizer.token_to_id(name) is not None]
    if not known:
        return None, ""
    others = f", as is {' and '.join(map(repr, known[1:]))}" if known[1:] else ""
    return tokenizer.token_to_id(known[0]), f"guessed: a usual name{others}; data.end_of_text sets another"


def _others(tokenizer: Tokenizer, file: Path, decided: str, number: int) -> str:
    """Note on files that name other end tokens than the file that `decided` on `number`."""
    shown = ""
    for name in list(NAMED_IN)[list(NAMED_IN).index(decided) + 1 :]:
        ids = [_id_of(tokenizer, token) for token in _all_named_in(file.with_name(name), NAMED_IN[name])]
        if ids and number not in ids:
            named = " and ".join("none of its" if i is None else repr(tokenizer.id_to_token(i)) for i in ids)
            shown += f"; {name} names {named}"
    return shown


def _id_of(tokenizer: Tokenizer, token: str | int) -> int | None:
    """The id of a token that is given as text or as an id; None where the tokenizer has no such token."""
    try:
        number = tokenizer.token_to_id(token) if isinstance(token, str) else token
        return None if number is None or tokenizer.id_to_token(number) is None else number
    except (OverflowError, UnicodeError):  # ids outside of its range, as -1, and halves of surrogate pairs
        return None


def _named_in(file: Path, key: str) -> str | int | None:
    """The first of `_all_named_in`; None without. Raises ConfigError."""
    return next(iter(_all_named_in(file, key)), None)


def _all_named_in(file: Path, key: str) -> list[str | int]:
    """The tokens, or their ids, under a key of a JSON file: a name, a table with `content`, an id, or a list of these.
    Raises ConfigError."""
    try:
        found = json.loads(file.read_bytes()) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, not an object of settings")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"data.tokenizer: {str(file)!r} next to it: {error}; correct or remove it, or set data.end_of_text"
        ) from None
    value = found.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    listed = value if isinstance(value, list) else [value]
    return [one for one in listed if isinstance(one, str | int) and not isinstance(one, bool) and one != ""]


def encode(
    pieces: Iterable[Piece],
    encoder: Encoder,
    separator: Sequence[int],
    vocab: int,
    advance: Callable[[float], None],
) -> tuple[list[NDArray], list[int]]:
    """Ids of all documents, each followed by `separator`, in arrays of some million; and their sizes.

    `advance` is called with the number of bytes done. Raises ConfigError for an id that is not in range(vocab).
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
            fix = f"raise model.vocab above {number}, or give the data of this model's tokenizer"
            if number < 0:
                fix = "token ids start at 0; write the ids that the model reads, without marks as -100 or -1"
            elif number >= MOST_IDS:
                fix = f"token ids are below {MOST_IDS}; write the ids without marks, as -1 in an unsigned type"
            raise ConfigError(f"data.path = {str(file)!r}: token id {number} with model.vocab = {vocab}; {fix}")
