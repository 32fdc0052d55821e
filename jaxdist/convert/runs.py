"""`origin/`, which a run folder keeps beside its checkpoints if the weights came from elsewhere, for the way back."""

import json
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.config.bounded import read_json
from jaxdist.convert.content import Content, Origin, OriginFields
from jaxdist.convert.kinds import safetensors_writer
from jaxdist.formats import buffers
from jaxdist.formats.companions import files_of
from jaxdist.formats.dcp_index import MOST_BYTES
from jaxdist.formats.origin import FACTS, FILES, ORIGIN
from jaxdist.formats.safetensors_files import Tensors, leaves
from jaxdist.runs.checkpoints import canonical, damage, run_of, seal
from jaxdist.runs.display import say
from jaxdist.runs.folder import RunFolder, each_metrics

EXTRAS, BUFFERS = "extras.pt", "buffers.safetensors"


def begin(path: Path, content: Content) -> RunFolder:
    """A new run folder at `path` that has all but the checkpoint. Raises ConfigError."""
    with RunFolder(path, content.experiment) as folder:
        folder.create(content.experiment)
    if content.metrics:
        folder.metrics.write_bytes(content.metrics)
    origin = content.origin
    if origin.kind:
        directory = path / ORIGIN
        (directory / FILES).mkdir(parents=True)
        (directory / FACTS).write_text(json.dumps(origin.fields(), indent=1) + "\n", encoding="utf-8")
        for name, file in origin.files.items():
            (directory / FILES / name).parent.mkdir(exist_ok=True)
            (directory / FILES / name).write_bytes(file)
        if extras := origin.extras:
            _torch_files().save_plain(directory / EXTRAS, extras)
        kept = {name: leaf for name, leaf in origin.buffers.items() if leaf.dtype in safetensors_writer.NAMES}
        for name in origin.buffers.keys() - kept.keys():
            say(f"buffer {name} is {origin.buffers[name].dtype}, which safetensors has not: it stays behind")
        if kept:
            places = safetensors_writer.lay_out_file(directory / BUFFERS, kept)
            for name, leaf in kept.items():
                buffers.write(*places[name], leaf.contiguous())
        seal(directory)
    return folder


def origin_of(checkpoint: Path) -> Origin:
    """Origin of a run's weights, as far as the run folder around `checkpoint` records it."""
    run = run_of(checkpoint)
    if run is None or not (directory := run / ORIGIN).exists():
        return Origin()
    if reason := damage(directory):
        raise ConfigError(f"{directory} is damaged: {reason}; remove it, or use a copy")
    try:
        # It may be as long as the index whose nesting it describes.
        facts = OriginFields.model_validate(read_json(directory / FACTS, MOST_BYTES))
    except (OSError, ValueError) as error:
        reason = textwrap.shorten(str(error), 200)
        raise ConfigError(f"{directory / FACTS} is damaged: {reason}; remove {directory}, or use a copy") from None
    kept = leaves(Tensors(directory / BUFFERS)) if (directory / BUFFERS).exists() else {}
    files = files_of(directory / FILES)[0] if (directory / FILES).is_dir() else {}  # git keeps no empty folder
    return Origin(**dict(facts), files=files, buffers=kept, held=partial(_extras, directory))


def _extras(directory: Path) -> Any:
    """Content that only torch had. Raises ConfigError."""
    if not (directory / EXTRAS).exists():
        return None
    found = _torch_files().load(directory / EXTRAS, mapped=True)
    if not isinstance(found, dict):
        raise ConfigError(f"{directory / EXTRAS} is damaged: it holds no dict; remove {directory}, or use a copy")
    return found


def metrics_of(checkpoint: Path) -> bytes:
    """The lines that the run logged up to `checkpoint`. Raises ConfigError."""
    run, name = run_of(checkpoint), canonical(checkpoint).name
    if run is None or not name.isdecimal():
        return b""
    kept = (record for record in each_metrics(run) if record["step"] <= int(name))
    return b"".join(f"{json.dumps(record)}\n".encode() for record in kept)


def _torch_files() -> Any:
    """The module that reads and writes it, imported on demand. Raises ConfigError if torch is missing."""
    from jaxdist.convert.kinds.registry import KINDS

    return KINDS["torch"].format
