"""The data section of an experiment."""

from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from jaxdist.config.model import LISTED, NUMBER, Count, Fraction, Section


def _encodable(value: str) -> str:
    """A resolved config is written in UTF-8; Python keeps other bytes, as of a file's name, as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("encoding", "not in UTF-8; rename the file, or give other text") from None
    return value


Text = Annotated[str, pydantic.AfterValidator(_encodable)]
Numbers = Annotated[tuple[Annotated[float, NUMBER, Field(allow_inf_nan=False)], ...], LISTED]


class Data(Section):
    """Where tokens or images come from. The batch of a step depends on these fields, the seed and the step alone."""

    path: Text = ""
    """File or folder: text, JSON (.json, .jsonl, .ndjson) or CSV (.csv, .tsv), also packed (.gz, .zst, .bz2, .xz),
    Arrow (.parquet, .arrow), or token ids in .npy or .bin; empty: the Python standard library's source. Of images, .npz
    with images and labels, or a folder of a folder for each class; empty: scikit-learn's digits."""
    tokenizer: Text = "bytes"
    """bytes (ids are UTF-8 bytes), or a Hugging Face tokenizer.json or its folder. Pre-tokenized files ignore it."""
    end_of_text: Text = "auto"
    """The token that follows each document that is packed. auto: the one that tokenizer_config.json,
    special_tokens_map.json, generation_config.json or config.json beside the tokenizer names, a newline for bytes;
    none: no token; else the token's own text, as <|endoftext|>. The start-up table tells it."""
    sequence: Count = 128
    """Tokens per sequence, T."""
    documents: Literal["packed", "padded"] = "packed"
    """packed: one stream cut every T tokens. padded: each document starts a sequence; its last is filled up."""
    text_field: Text = "text"
    """The key that holds the text in a JSON record, or the column of CSV and Arrow files; with dots between nested
    ones. Empty: JSON and CSV are read as text."""
    pixel_mean: Numbers = (0.0,)
    """What is taken from pixels, from 0 to 1 where they are bytes: one number, or one for each channel."""
    pixel_std: Numbers = (1.0,)
    """What they are divided by then; ImageNet's are 0.485,0.456,0.406 and 0.229,0.224,0.225."""
    bin_dtype: Literal["auto", "uint16", "uint32", "int32", "int64"] = "auto"
    """Integer type of a .bin file. auto: what its content, llm.c's header or Megatron's .idx says; the start-up table
    tells it. Any other is refused where it contradicts those."""
    split: Literal["auto", "share"] = "auto"
    """auto: files or folders whose names say train and validation (val, valid, dev, or test) are these splits, also
    beside the file of data.path; without such names, and under share, the last data.validation is for validation."""
    validation: Fraction = 0.05
    """Share of the sequences kept from training, for evaluation, where no names of files tell the splits."""
    last: Literal["continue", "drop", "pad"] = "continue"
    """Where an epoch ends within a batch. continue: the next one begins in it; drop: the batch is left out, as by
    DataLoader's drop_last; pad: the epoch's first sequences fill it, as by DistributedSampler."""
    shuffle: bool = True
    """Visit the sequences of each epoch in a seeded permutation."""
    fingerprint: str = ""
    """Names, sizes and sampled content of the data when a run began, hashed to 32 hex digits: others are refused.
    Empty: any."""

    @field_validator("path", "tokenizer")
    @classmethod
    def _absolute(cls, value: str, info: pydantic.ValidationInfo) -> str:
        """A resolved config means the same files from any folder."""
        field = str(info.field_name)
        if value == cls.model_fields[field].default:
            return value
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError as error:  # ~name of a user who is not here
            raise ValueError(f"data.{field} = {value!r}: {error} Write the folder out") from None
