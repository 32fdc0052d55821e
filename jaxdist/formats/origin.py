"""`origin/` of a run folder: what lay beside the weights that a run began with, for the way back to their format.

A run that begins with `--init` keeps the companions of a Hugging Face folder here, whichever backend trains it.
`jaxdist/convert/runs.py` reads them, and keeps more of what it converts itself.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.config import ConfigError, Experiment
from jaxdist.config.bounded import read_json
from jaxdist.formats.companions import CONFIG, OTHER_WEIGHTS, files_of
from jaxdist.formats.headers import Headers
from jaxdist.runs.checkpoints import checkpoint_in, damage, run_of, seal, steps_in
from jaxdist.runs.display import say
from jaxdist.runs.folder import RunFolder

ORIGIN, FILES, FACTS = "origin", "files", "origin.json"
NAMED = 8  # of what stays behind


class CompanionFiles(NamedTuple):
    """The files beside weights by name, the dtype of these by numpy's name, or "" where it is not one, and the names
    of files that stay behind."""

    files: Mapping[str, bytes]
    dtype: str = ""
    left: tuple[str, ...] = ()


def companion_files(source: Path | None) -> CompanionFiles | None:
    """Files beside the weights of a Hugging Face folder, or of a run that keeps them; None without such files.

    Raises ConfigError where it is damaged, or too large.
    """
    if source is None:
        return None
    if (source / CONFIG).is_file():
        files, left = files_of(source)
        return CompanionFiles(files, _dtype(source), tuple(name for name in left if not OTHER_WEIGHTS.fullmatch(name)))
    run = run_of(checkpoint_in(source))
    folder = run / ORIGIN if run else None
    if folder is None or not (folder / FACTS).is_file():
        return None
    if reason := damage(folder):
        raise ConfigError(f"{folder} is damaged: {reason}; remove it, or use a copy")
    files = files_of(folder / FILES)[0] if (folder / FILES).is_dir() else {}
    dtype = read_json(folder / FACTS).get("dtype", "")
    return CompanionFiles(files, dtype if isinstance(dtype, str) else "") if CONFIG in files else None


def begin(folder: RunFolder, experiment: Experiment, step: int, found: Callable[[], CompanionFiles | None]) -> None:
    """Create the run folder of a run that continues after `step`; one without a checkpoint keeps what is `found`.

    Raises ConfigError as `RunFolder.create` and `companion_files` do, TrainingError where there is no room.
    """
    folder.create(experiment, from_step=step)
    if steps_in(folder.checkpoints):
        return
    with folder.writing(ORIGIN):
        shutil.rmtree(folder.path / ORIGIN, ignore_errors=True)  # of a beginning that was killed
        if (kept := found()) is not None:
            keep(folder.path, kept)
            if kept.left:
                say(f"files of the starting folder that are not copied: {', '.join(kept.left[:NAMED])}")


def keep(run: Path, found: CompanionFiles) -> None:
    """Write `origin/` of the run folder `run` atomically."""
    partial = run / f"{ORIGIN}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    for name, file in found.files.items():
        (partial / FILES / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / FILES / name).write_bytes(file)
    facts: dict[str, Any] = {
        "kind": "hf", "naming": "huggingface", "names": {}, "metadata": {"format": "pt"}, "index": {}, "step": 0,
        "own": False, "dtype": found.dtype, "init": True,
    }  # fmt: skip
    (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    seal(partial)
    partial.rename(run / ORIGIN)


def _dtype(folder: Path) -> str:
    """The dtype of all weights of a folder: from their headers, or from config.json where they are in other files."""
    if any(folder.glob("*.safetensors")):
        dtypes = {header.dtype for header in Headers(folder).headers.values() if "int" not in header.dtype}
        return dtypes.pop() if len(dtypes) == 1 else ""
    settings = read_json(folder / CONFIG)
    dtype = settings.get("dtype") or settings.get("torch_dtype")
    return dtype if dtype in ("float32", "bfloat16", "float16", "float64") else ""
