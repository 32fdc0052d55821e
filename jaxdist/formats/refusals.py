"""Refusals of paths that are not readable checkpoints: found by both sides before they open one, in the same words."""

import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple
from zipfile import ZipFile, is_zipfile

from jaxdist.config import ConfigError
from jaxdist.formats import llmc
from jaxdist.formats.folders import (
    BIN_INDEX,
    CONFIG,
    is_bin_folder,
    is_deepspeed,
    is_hf,
    is_trainer_folder,
    part_of,
    unreadable,
)
from jaxdist.formats.foreign import INDEX, SINGLE, Foreign, foreign_content, indexed
from jaxdist.formats.naming import MODEL
from jaxdist.formats.torch_zips import BEGIN


def is_read(folder: Path) -> bool:
    """Whether a folder has weights in a layout that is read."""
    return any(holds(folder) for holds in (is_deepspeed, is_trainer_folder, is_hf, is_bin_folder))


def refusal(path: Path) -> ConfigError | None:
    """The error of a file that is a part of a checkpoint, or of a format that is not read; None of all else."""
    folder = path.parent
    if (magic := llmc.magic_of(path)) == llmc.STATE:
        return ConfigError(f"{path} is an optimizer's state of llm.c's; give the model_*.bin of its step next to it")
    if magic in llmc.OTHERS and magic != llmc.MODEL:
        return ConfigError(f"{path} is llm.c's {llmc.OTHERS[magic]}, which is not read; give its GPT-2's model_*.bin")
    if part := part_of(path):
        folder_to_give = f"its folder {folder}" if is_read(folder) else f"a folder with {part.needs}"
        return ConfigError(f"{path} is {part.title}; give {folder_to_give}")
    if not is_read(path) and (title := unreadable(path)):
        return ConfigError(f"{path} is {title}; give the weights as safetensors, in a Hugging Face folder")
    if not path.is_file():
        return None
    if path.suffix != ".safetensors":
        return _foreign(path)
    place = "" if is_hf(folder) and path.name == SINGLE else f" and it as {SINGLE}"
    return ConfigError(
        f"{path}: a safetensors file does not say what model it is; give its folder {folder}, with config.json{place}; "
        "or, to `python -m jaxdist.convert`, --mapping"
    )


def is_torch_zip(path: Path) -> bool:
    """Whether `path` is a zip with the pickle that torch.save puts there. Raises OSError and BadZipFile."""
    with ZipFile(path) as file:
        return any(name.endswith("/data.pkl") for name in file.namelist())


def _is_cut_zip(path: Path) -> bool:
    """Whether `path` begins as a zip does, and lacks the directory at its end."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(BEGIN)) == BEGIN and not is_zipfile(path)
    return False


def check_torch(path: Path) -> None:
    """Raises ConfigError where the file `path`, which is to be torch's, begins as one of another kind does."""
    if error := _foreign(path):
        raise error


def _foreign(path: Path) -> ConfigError | None:
    found = foreign_content(path)
    with suppress(Exception):  # of a damaged directory, many kinds: whoever reads the file says what is wrong
        if is_zipfile(path) and not is_torch_zip(path):
            found = Foreign(
                "a zip that torch.save did not write",
                "give one that it wrote, or give --plugins the package that reads this",
            )
    return ConfigError(f"{path} is {found.title}; {found.fix}") if found else None


def several(path: Path, holds: Callable[[Path], object]) -> ConfigError | None:
    """The error of a folder of checkpoints, as trainers leave them: it names the last by the number in its name. None
    where no folder in it `holds` one."""
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    if not (found := [folder for folder in folders if holds(folder)]):
        return None
    last = max(found, key=lambda folder: int((re.findall(r"\d{1,18}", folder.name) or ["-1"])[-1]))
    return ConfigError(f"{path}: it is not a checkpoint, and has {len(found)} in it; give one, as {last}")


class Companion(NamedTuple):
    """A file that a folder needs: patterns of the files that need it, its name, and what it says."""

    of: tuple[str, ...]
    name: str
    says: str


SAYS_MODEL, SAYS_PLACES = "what model the weights are of", "which file has which tensors"
ADAPTER = Companion(("adapter_model.safetensors", "adapter_model.bin"), "adapter_config.json", "how to merge them")
COMPANIONS = (
    ADAPTER,
    Companion(("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", BIN_INDEX), CONFIG, SAYS_MODEL),
    Companion(("model-*-of-*.safetensors",), INDEX, SAYS_PLACES),
    Companion(("pytorch_model-*-of-*.bin",), BIN_INDEX, SAYS_PLACES),
    Companion(("consolidated.*.pth",), "params.json", SAYS_MODEL),
    Companion(("*.distcp",), ".metadata", SAYS_PLACES),
)


def incomplete(path: Path) -> ConfigError | None:
    """The error of a folder of weights that lacks other files; None of all else. Raises ConfigError where an index
    names shards that are not there."""
    for name in (INDEX, BIN_INDEX):
        indexed(path, name)
    lacking = [c for c in COMPANIONS if any(any(path.glob(of)) for of in c.of) and not (path / c.name).exists()]
    if not lacking:
        alone = (path / CONFIG).is_file() and not mapped(path)
        why = f"{CONFIG} is there, without weights; copy {SINGLE} there, or its shards and {INDEX}"
        return ConfigError(f"{path}: {why}") if alone else None
    lacking = lacking[:1] if lacking[0] is ADAPTER else lacking
    missing = " and ".join(f"{c.name}, which says {c.says}," for c in lacking)
    own = ["; or, for a model of your own, --mapping"] if lacking[0].name == CONFIG and len(lacking) == 1 else []
    are = "are" if lacking[1:] else "is"
    return ConfigError(f"{path}: {missing} {are} missing; copy it there, or download the folder again{''.join(own)}")


# Where Orbax and TensorStore keep what describes a tree of arrays: the second is Levanter's, below its `model`.
OF_TREES = ("_METADATA", "*/_METADATA", "manifest.ocdbt", "*/manifest.ocdbt", "model/**/.zarray", "model/**/zarr.json")


def mapped(path: Path) -> str:
    """Advice for a tree of arrays that another program wrote, for the end of a message; else empty."""
    if not path.is_dir() or not any(next(path.glob(pattern), None) for pattern in OF_TREES):
        return ""
    return (
        f"; it is a tree of arrays by Orbax or TensorStore: `python -m jaxdist.convert {path} OUT --mapping FILE` "
        "makes a Hugging Face folder of one by a mapping of its names, yours or a shipped one, as maxtext or levanter"
    )


def no_model(path: Path) -> ConfigError:
    """The error of a file of torch's without the weights of a model."""
    return ConfigError(f"{path}: no state dict of a model; give one, or a dict that has it as {', '.join(MODEL)}")


TORCH_WROTE = "give a file that torch.save wrote"


@contextmanager
def loading(path: Path, fix: str = TORCH_WROTE) -> Iterator[None]:
    """Raises ConfigError for any error of the loading of a file of torch.save's."""
    try:
        yield
    except UnpicklingError as error:
        reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line.upper()), "")
        raise ConfigError(
            f"{path} is refused: it holds more than tensors and plain values, or is damaged, and loading it could run "
            f"code ({textwrap.shorten(reason or str(error), 200)}); save state dicts alone, or use an intact copy"
        ) from None
    except ConfigError:
        raise
    except Exception as error:  # of a damaged file, many kinds
        reason = str(error) if isinstance(error, ValueError) else f"it is damaged, or of another format ({error!r})"
        again = "copy it there, or download it again" if fix == TORCH_WROTE else fix
        if isinstance(error, FileNotFoundError):
            reason, fix = "the file is missing", again
        elif _is_cut_zip(path):
            reason, fix = "it is cut: its end, with the list of what a zip holds, is missing", again
        raise ConfigError(f"{path}: {textwrap.shorten(reason, 200)}; {fix}") from None
