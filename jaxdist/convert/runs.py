"""What a run folder keeps beside its checkpoints when the weights came from elsewhere: `origin/`, for the way back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, RunFolder, read_metrics
from jaxdist.config.checkpoints import damage, run_of, seal
from jaxdist.config.foreign import read_json
from jaxdist.convert.content import Content, Origin
from jaxdist.convert.hf import companions

ORIGIN, EXTRAS = "origin", "extras.pt"


def begin(path: Path, content: Content) -> RunFolder:
    """A new run folder at `path` that has all but the checkpoint. Raises ConfigError."""
    with RunFolder(path, content.experiment) as folder:
        folder.create(content.experiment)
    if content.metrics:
        folder.metrics.write_bytes(content.metrics)
    origin = content.origin
    if origin.kind:
        beside = path / ORIGIN
        (beside / "files").mkdir(parents=True)
        said = {name: getattr(origin, name) for name in ("kind", "naming", "names", "metadata", "index", "step", "own")}
        (beside / "origin.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        for name, file in origin.files.items():
            (beside / "files" / name).parent.mkdir(exist_ok=True)
            (beside / "files" / name).write_bytes(file)
        if origin.extras:
            _torch_files().save_plain(beside / EXTRAS, origin.extras)
        seal(beside)
    return folder


def origin_of(checkpoint: Path) -> Origin:
    """Where the weights of a run came from, as far as the run folder around `checkpoint` knows."""
    run = run_of(checkpoint)
    if run is None or not (beside := run / ORIGIN).exists():
        return Origin()
    if reason := damage(beside):
        raise ConfigError(f"{beside} is damaged: {reason}; remove it, or use a copy")
    try:
        said: dict[str, Any] = read_json(beside / "origin.json")
        origin = Origin(**said)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{beside / 'origin.json'} is damaged: {error}; remove {beside}, or use a copy") from None
    files = companions(beside / "files")
    extras = _torch_files().load(beside / EXTRAS, map_location="cpu", mmap=True) if (beside / EXTRAS).exists() else None
    return replace(origin, files=files, extras=extras)


def metrics_of(checkpoint: Path) -> bytes:
    """The lines that the run logged up to `checkpoint`. Raises ConfigError."""
    run = run_of(checkpoint)
    if run is None or not checkpoint.name.isdecimal():
        return b""
    kept = [record for record in read_metrics(run) if record["step"] <= int(checkpoint.name)]
    return "".join(json.dumps(record) + "\n" for record in kept).encode()


def _torch_files() -> Any:
    """What torch alone had is for torch alone: it is imported where a run has some."""
    from jaxdist.convert import torch_files

    return torch_files
