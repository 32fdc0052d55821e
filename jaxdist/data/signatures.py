"""File kinds by their first bytes, whatever the file's name."""

import json
import re

from jaxdist.config.bounded import FETCH, LFS, POINTER
from jaxdist.formats.foreign import MODELS, Foreign

UNPACK, CONVERT = "unpack it, and give its content", "extract its text, or token ids, and give those"
# First bytes of files that are neither text nor raw ids.
SIGNATURES = {
    LFS: Foreign(POINTER, FETCH),
    b"PK\x03\x04": Foreign("a zip archive, as torch.save and numpy.savez write", UNPACK),
    b"7z\xbc\xaf'\x1c": Foreign("an archive of 7-Zip", UNPACK),
    b"Rar!": Foreign("an archive of RAR", UNPACK),
    b"\x04\x22\x4d\x18": Foreign("packed by lz4", UNPACK),
    b"\x93NUMPY": Foreign("a .npy file", "give it the ending .npy"),
    b"PAR1": Foreign("a Parquet file", "give it the ending .parquet"),
    b"ARROW1": Foreign("an Arrow file", "give it the ending .arrow"),
    b"FEA1": Foreign("a Feather file of version 1", "save it again as version 2, or as Parquet"),
    b"ORC": Foreign("an ORC file", "write it as Parquet"),
    b"Obj\x01": Foreign("an Avro file", "write it as Parquet"),
    b"%PDF-": Foreign("a PDF", CONVERT),
    b"\x89PNG": Foreign("a picture", CONVERT),
    b"\xff\xd8\xff": Foreign("a picture", CONVERT),
    b"SQLite format": Foreign("a database", CONVERT),
    **{start: Foreign(title, CONVERT) for start, title in MODELS.items()},
}
# Signatures that are also words, as "ORCHARD" begins with one of them: a file of plain text is none of these formats.
WORDS = {b"Rar!", b"PAR1", b"ARROW1", b"FEA1", b"ORC", b"SQLite format", b"GGUF"}
TAR = Foreign("a tar archive", UNPACK)
CONTROL = bytes({*range(32), 127} - {*b"\t\n\v\f\r\x1b"})  # characters that text has not
BEFORE = re.compile(r"\ufeff?\s*(\[\s*)?")  # the first object
KEYED = re.compile(r'\{\s*"[^"\\]*"\s*:')
LEAST = 32  # bytes that distinguish text from ids


def signature(head: bytes) -> Foreign | None:
    """The format of a file whose first bytes are `head`, and what to do about it; None for text and raw ids."""
    if head[257:262] == b"ustar":
        return TAR
    begin = next((begin for begin in SIGNATURES if head.startswith(begin)), None)
    return None if begin is None or (begin in WORDS and is_text(head)) else SIGNATURES[begin]


def is_text(content: bytes) -> bool:
    """Whether the bytes (of a file, or sampled blocks) are UTF-8 text: no control characters, which any ids contain."""
    if len(content) < LEAST or len(content.translate(None, CONTROL)) < len(content):
        return False
    return content.decode("utf-8", "replace").count("\ufffd") * 100 <= len(content)  # a block may begin in a character


def begins_with_record(head: str, cut: bool, one: bool = True) -> bool:
    """Whether text begins with a JSON object, alone or in an array, followed by JSON. `cut`: there is more text.
    `one`: whether a single object is enough."""
    text = BEFORE.sub("", head, count=1)
    if not KEYED.match(text):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return one and cut and "\n" not in text.strip()  # one line, of which the rest is not seen
    return text[end:].lstrip()[:1] in ("{", ",", *("", "]") * one)
