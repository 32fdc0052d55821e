"""The data section of an experiment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from jaxdist.config.errors import shown
from jaxdist.config.names import OneOf
from jaxdist.config.registry import BUILT_IN, Reference, Registry, registrant
from jaxdist.config.section import LISTED, NUMBER, Count, Fraction, Section


def _encodable(value: str) -> str:
    """A resolved config is written in UTF-8; Python keeps other bytes, as of a file's name, as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("encoding", "not in UTF-8; rename the file, or give other text") from None
    return value


Text = Annotated[str, pydantic.AfterValidator(_encodable)]
Numbers = Annotated[tuple[Annotated[float, NUMBER, Field(allow_inf_nan=False)], ...], LISTED]


@dataclass(frozen=True)
class DataSource:
    """A source of data."""

    name: str
    """Value of `data.source`."""
    open: Reference | None = None
    """The function (data section, model section) -> `jaxdist.data.Dataset`, which raises ConfigError."""
    files: bool = False
    """Whether `data.path` names files: then it becomes absolute, else it stays unchanged."""


SOURCES: Registry[DataSource] = Registry("data source", DataSource)


def register_data_source(row: DataSource) -> None:
    """Make a data source known to both sides. Raises ConfigError for a name that is taken."""
    SOURCES.register(row, registrant())


SOURCES.register(DataSource("files", "jaxdist.data.dataset:open_files", files=True), BUILT_IN)


class Data(Section):
    """Source of tokens or images. The batch of a step depends on these fields, the seed and the step alone."""

    source: Annotated[str, OneOf(SOURCES)] = "files"
    """files, or a data source that a plugin registers; the plugin documents the other fields."""
    path: Text = ""
    """File or folder of data: text, JSON (.json, .jsonl, .ndjson, .jsonlines, .jl, .ldjson) or CSV (.csv, .tsv), each
    also compressed (.gz, .zst, .bz2, .xz); Arrow (.parquet, .arrow); or token ids in .npy or .bin. Empty: the source of
    Python's standard library. For images: an .npz with images and labels, or a folder with one folder per class; empty:
    scikit-learn's digits."""
    tokenizer: Text = "bytes"
    """bytes (ids are UTF-8 bytes), or a Hugging Face tokenizer.json or the folder that holds it. Token ids in a file
    ignore it."""
    end_of_text: Text = "auto"
    """Token after each packed document. auto: the end-of-sequence token named beside the tokenizer
    (tokenizer_config.json, special_tokens_map.json, generation_config.json or config.json), a newline for bytes; none:
    no token; else the text of a token, as <|endoftext|>. The start-up table shows the choice."""
    sequence: Count = 128
    """Tokens per sequence, T."""
    documents: Literal["packed", "padded"] = "packed"
    """packed: one stream of tokens, cut every T tokens. padded: each document starts a new sequence, and its last
    sequence is padded."""
    text_field: Text = "text"
    """Key of the text in a JSON record, or column of a CSV or Arrow file; nested keys are joined with dots. Empty: JSON
    and CSV are read as plain text."""
    pixel_mean: Numbers = (0.0,)
    """Mean subtracted from pixels, which are scaled to 0..1 if they are bytes: one number, or one per channel."""
    pixel_std: Numbers = (1.0,)
    """Standard deviation that pixels are divided by, after the mean is subtracted: one number, or one per channel.
    ImageNet's are 0.229,0.224,0.225, with means 0.485,0.456,0.406."""
    bin_dtype: Literal["auto", "uint16", "uint32", "int32", "int64"] = "auto"
    """Integer type of a .bin file. auto: detected from its content, llm.c's header or Megatron's .idx, and shown in the
    start-up table. A type that contradicts these is refused."""
    split: Literal["auto", "share"] = "auto"
    """auto: files or folders named as training or validation data (val, valid, dev, test) are these splits, also beside
    the file data.path. share, or no such names: the last data.validation of the sequences is the validation split."""
    validation: Fraction = 0.05
    """Share of the sequences held out for validation, where no file names state the splits."""
    last: Literal["continue", "drop", "pad"] = "continue"
    """Batch at the end of an epoch that the sequences do not fill. continue: filled from the next epoch; drop: left out
    (DataLoader's drop_last); pad: filled with the epoch's first sequences (DistributedSampler)."""
    shuffle: bool = True
    """Visit the sequences of each epoch in a seeded permutation."""
    fingerprint: str = ""
    """Hash of the names, sizes and sampled content of the data (32 hex digits), set when a run starts; other data are
    refused. Empty: any data."""

    @field_validator("path", "tokenizer")
    @classmethod
    def _absolute(cls, value: str, info: pydantic.ValidationInfo) -> str:
        """A resolved config means the same files from any folder."""
        field = str(info.field_name)
        source = SOURCES.get(info.data.get("source", "files"))
        if value == cls.model_fields[field].default or (field == "path" and source and not source.files):
            return value
        try:
            return str(Path(value).expanduser().absolute())
        except RuntimeError as error:  # ~name of a user who is not here
            raise ValueError(f"data.{field} = {shown(value)}: {error} Write the folder out") from None
