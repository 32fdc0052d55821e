"""Documents from text, JSON, CSV and Arrow files, compressed or not. The format is found from the first bytes."""

import codecs
import csv
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxdist.config import ConfigError
from jaxdist.data.arrow import open_table
from jaxdist.data.delimited import begins_with_table, checked, columns
from jaxdist.data.files import is_plain
from jaxdist.data.signatures import begins_with_record, signature
from jaxdist.data.unpacking import unpacked

PIECE = 250_000  # characters, after which a long document is cut, so that those bytes spread over the cores
# A tokenizer that splits at newlines joins nothing across this; one that marks a start marks each piece.
LINE_START = re.compile(r"\S\n(?=\S)")
# Byte order marks, the longest first: a mark of UTF-32 begins with one of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be", codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be",
}  # fmt: skip
CHUNK = 1 << 22  # bytes that are decoded together where they are not UTF-8
HEAD = 1 << 16  # bytes of a file that are looked at
KEYS = 20  # of a record named in a message
IDS = "input_ids"  # of a dataset that was tokenized
FROM_IDS = "token ids are read from .npy and .bin files: join those of all records, and save them by numpy.save"
SPACE = re.compile(r"[\s,]*")
UNPACKING = (OSError, EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError)


class Piece(NamedTuple):
    """A text, the file it comes from, its share of the file in bytes, and whether a document ends with it."""

    text: str
    file: Path
    size: float
    last: bool


class Start(NamedTuple):
    """The start of a text file: its compression ("" for none), encoding, length in bytes of its byte order mark, and
    first characters; `cut` if the file has more.

    `bare`: uncompressed UTF-8, whose bytes may be memory-mapped."""

    packed: str
    encoding: str
    mark: int
    head: str = ""
    cut: bool = False

    @property
    def bare(self) -> bool:
        return not self.packed and self.encoding == "utf-8"


BARE = Start("", "utf-8", 0)


def start_of(file: Path) -> Start:
    """Read the start of a text file. Raises ConfigError for other files, and for UTF-16 without a byte order mark."""
    with _named(file), unpacked(file) as (packed, stream, _):
        head = stream.read(HEAD)
    if what := signature(head):
        raise ConfigError(f"data.path = {str(file)!r}: no text: it is {what.title}; {what.fix}")
    mark, encoding = next(((len(mark), name) for mark, name in MARKS.items() if head.startswith(mark)), (0, "utf-8"))
    if not mark and head.count(0) * 10 > len(head):
        raise ConfigError(
            f"data.path = {str(file)!r}: {head.count(0)} of its first {len(head)} bytes are zero, as in UTF-16 without "
            "a byte order mark, or in no text at all; convert it to UTF-8"
        )
    return Start(packed, encoding, mark, head[mark:].decode(encoding, "ignore"), len(head) == HEAD)


def text_start(file: Path, field: str) -> Start:
    """First characters of a file that is text by its name. Raises ConfigError as `start_of`, and for JSON and for CSV
    with a column `field`, which is data.text_field, unless that is empty. A single JSON object is text under an ending
    of its own, as a notebook is."""
    start = start_of(file)
    if not field:
        return start
    for found, name, ending, unit in (
        (begins_with_record(start.head, start.cut, is_plain(file)), "JSON", ".jsonl", "record"),
        (begins_with_table(start.head, start.cut, field), f"CSV with a column {field!r}", ".csv", "row"),
    ):
        if found:
            raise ConfigError(
                f"data.path = {str(file)!r}: {name} by its content, and text by its name; give it the ending {ending}, "
                f"to read the text of each {unit}, or set data.text_field = '', to read any file as the text that it is"
            )
    return start


class Unusable(ValueError):
    """A record from which no text can be read: what is wrong with it, and how to correct that."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}; {fix}")


class Documents:
    """Reads files, as pieces of documents; `nulls` counts the records whose text is null, which are passed over."""

    def __init__(self, field: str) -> None:
        """`field`: the key of the text in a record, with dots between those of nested ones."""
        self._field, self.nulls = field, 0

    def read(self, file: Path, kind: str) -> Iterator[Piece]:
        """The documents of a file of this kind. Raises ConfigError, naming the file and the line or row."""
        with _named(file):
            yield from {"text": self._text, "JSON": self._json, "CSV": self._csv, "Arrow": self._arrow}[kind](file)

    def _text(self, file: Path) -> Iterator[Piece]:
        """A file as one document. Raises ConfigError when it is not of its encoding."""
        start = text_start(file, self._field)
        with unpacked(file) as (_, stream, _place):
            content = stream.read()[start.mark :]
        try:
            text = content.decode(start.encoding)
        except UnicodeDecodeError as error:
            place = error.start + start.mark
            raise ConfigError(
                f"data.path = {str(file)!r}: not {start.encoding.upper()} at byte {place}; convert it to UTF-8"
            ) from None
        yield from cut(text, file, file.stat().st_size)

    def _json(self, file: Path) -> Iterator[Piece]:
        """One document for each line, or element of an array."""
        start = start_of(file)
        with unpacked(file) as (_, stream, place):
            stream.read(start.mark)
            lines = stream if start.encoding == "utf-8" else _recoded(stream, start.encoding)
            before = 0
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                if before == 0 and not _is_record(line):
                    yield from self._json_document(file, b"".join([line, *lines]), number)
                    return
                try:
                    text = self._text_of(json.loads(line.decode(), object_pairs_hook=self._object))
                except (ValueError, RecursionError) as error:
                    raise self._bad(f"{file}:{number}", error) from None
                now = place()
                yield from cut(text, file, now - before)
                before = now

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """A JSON object. Raises ValueError where it has the text's key twice, of which Python would take the last."""
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            for key in (self._field, *self._field.split(".")):
                if keys.count(key) > 1:
                    raise Unusable(f"the key {key!r} occurs {keys.count(key)} times", "keep one of them")
        return found

    def _json_document(self, file: Path, content: bytes, line: int) -> Iterator[Piece]:
        """The elements of arrays, or objects that take several lines each. `line`: where they begin."""
        number, decoder = line, json.JSONDecoder(object_pairs_hook=self._object)
        try:
            decoded = content.decode()
            array, place, done, counted = False, _after_space(decoded, 0), 0, 0
            while place < len(decoded):
                number, counted = number + decoded.count("\n", counted, place), place
                if decoded[place] == ("]" if array else "["):
                    array, place = not array, _after_space(decoded, place + 1)
                    continue
                record, place = decoder.raw_decode(decoded, place)
                place = _after_space(decoded, place)
                yield from cut(self._text_of(record), file, (place - done) / len(decoded) * file.stat().st_size)
                done = place
            if array:
                raise json.JSONDecodeError("the array is cut: its ] is missing", decoded, len(decoded))
        except UnicodeDecodeError as error:
            number = line + content.count(b"\n", 0, error.start)
            raise self._bad(f"{file}:{number}", error) from None
        except (ValueError, RecursionError) as error:
            raise self._bad(f"{file}:{number}", error) from None

    def _arrow(self, file: Path) -> Iterator[Piece]:
        """One document for each row."""
        table = open_table(file)
        root = self._field if self._field in table.names else self._field.partition(".")[0]
        if root not in table.names:
            raise self._bad(str(file), self._no("column", table.names), "row")
        number = 0
        for values in table.read(root):
            for value in values:
                number += 1
                try:
                    text = self._text_of({root: value.decode() if isinstance(value, bytes) else value})
                except ValueError as error:
                    raise self._bad(f"{file}, row {number}", error, "row") from None
                yield from cut(text, file, file.stat().st_size / max(table.rows, number))

    def _text_of(self, record: Any) -> str:
        """The text of a record, "" for null. Raises ValueError."""
        found = record
        if not isinstance(record, str):
            if not isinstance(record, dict):
                raise Unusable(f"{_called(record)}, not a JSON object", "correct or remove it")
            keys = [self._field] if self._field in record else self._field.split(".")
            for key in keys:
                if not isinstance(found, dict) or key not in found:
                    raise self._no("key", _keys(record))
                found = found[key]
        if found is None:
            self.nulls += 1
            return ""
        if not isinstance(found, str):
            raise self._no_text(f"the key {self._field!r} holds {_called(found)}, not text", [found])
        try:
            found.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which UTF-8 cannot
            raise Unusable("its text has half of a surrogate pair", "remove that from the text") from None
        return found

    def _csv(self, file: Path) -> Iterator[Piece]:
        """One document for each row below that of the columns' names, which shows the delimiter too, and whether spaces
        follow it that belong to no value."""
        start = start_of(file)
        csv.field_size_limit(2**31 - 1)  # the module's own is 131,072 characters
        with unpacked(file) as (_, stream, place):
            errors = "surrogateescape" if start.encoding == "utf-8" else "strict"
            wrapped = io.TextIOWrapper(stream, start.encoding, errors, newline="")
            lines = checked(wrapped)
            number, before = 1, 0
            try:
                wrapped.read(bool(start.mark))
                head = [next(lines, "")]
                while "".join(head).count('"') % 2 and (more := next(lines, "")):  # a quoted name over several lines
                    head.append(more)
                names, mark, spaced = columns(head, self._field)
                if self._field not in names:
                    raise self._no("column", names)
                if (count := names.count(self._field)) > 1:
                    raise Unusable(f"{count} columns are called {self._field!r}", "give each its own name")
                number = 1 + len(head)
                rows = csv.reader(lines, delimiter=mark, skipinitialspace=spaced, strict=True)
                for row in rows:
                    if row and len(row) != len(names):
                        raise csv.Error(f"{len(row)} values for {len(names)} columns")
                    now = place()
                    yield from cut(row[names.index(self._field)] if row else "", file, now - before)
                    number, before = rows.line_num + 1 + len(head), now  # the line where the next row begins
            except (csv.Error, ValueError) as error:
                raise self._bad(f"{file}:{number}", error, "row") from None

    def _no(self, unit: str, names: Sequence[str]) -> Unusable:
        return self._no_text(f"no {unit} {self._field!r}; it has {', '.join(names[:KEYS]) or 'none'}", names)

    def _no_text(self, problem: str, found: Sequence[object]) -> Unusable:
        """The error for a record without text under data.text_field, or with token ids there or among its keys."""
        fix = FROM_IDS if _holds_ids(found) else f"data.text_field = {self._field!r}: set it to the key of the text"
        return Unusable(problem, fix)

    def _bad(self, where: str, error: Exception, unit: str = "line") -> ConfigError:
        """The error for a record of a file; `where` is the file and the line."""
        match error:
            case Unusable():
                message = str(error)
            case UnicodeError():
                message = f"not UTF-8: {error}; convert the file to UTF-8"
            case RecursionError():
                message = "nested too deeply; remove the record"
            case _:
                each = (
                    "each line must be a JSON object"
                    if unit == "line"
                    else "each row must have a value for each column"
                )
                message = f"{error}; {each}: correct or remove this {unit}"
        return ConfigError(f"data.path = {where}: {message}")


def _after_space(text: str, place: int) -> int:
    """The first place from `place` on that is neither space nor a comma."""
    return SPACE.match(text, place).end()  # type: ignore[union-attr]


def cut(text: str, file: Path, size: float) -> Iterator[Piece]:
    """A document of `size` bytes in pieces that begin at the start of a line; none when it is empty."""
    start = 0
    while start < len(text):
        found = LINE_START.search(text, start + PIECE)
        end = found.end() if found else len(text)
        yield Piece(text[start:end], file, size * (end - start) / len(text), end == len(text))
        start = end


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Raises ConfigError for a damaged file; a PermissionError passes through."""
    try:
        yield
    except PermissionError:
        raise
    except UNPACKING as error:
        raise _damaged(file, error) from None
    except Exception as error:
        if {kind.__name__ for kind in type(error).__mro__} & {"ZstdError", "ArrowException"}:
            raise _damaged(file, error) from None
        raise


def _damaged(file: Path, error: Exception) -> ConfigError:
    message = str(error).partition("\n")[0] or type(error).__name__
    return ConfigError(
        f"data.path = {str(file)!r}: cannot be read, damaged or cut: {message}; copy or download it again"
    )


def _recoded(stream: BinaryIO, encoding: str) -> Iterator[bytes]:
    """Lines in UTF-8."""
    decoder, rest = codecs.getincrementaldecoder(encoding)(), ""
    for chunk in iter(lambda: stream.read(CHUNK), b""):
        *lines, rest = (rest + decoder.decode(chunk)).split("\n")
        yield from (line.encode() for line in lines)
    yield (rest + decoder.decode(b"", final=True)).encode()


def _is_record(line: bytes) -> bool:
    """Whether a line is a complete record, or at least no part of one that takes several lines, nor an array."""
    if line.lstrip().startswith(b"["):
        return False
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        pass
    return True


def _keys(record: dict[str, Any]) -> list[str]:
    """Keys of a record, with those of nested records after a dot."""
    return [
        f"{name}.{inner}" if inner else name
        for name, value in record.items()
        for inner in (value if isinstance(value, dict) and value else [""])
    ]


def _holds_ids(found: Sequence[object]) -> bool:
    """Whether a record holds token ids, by the names of its keys or by the first value found."""
    listed = found and isinstance(found[0], list) and found[0] and all(type(number) is int for number in found[0])
    return bool(listed) or IDS in found


def _called(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
