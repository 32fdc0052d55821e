"""The kinds of sources of weights: how each is recognized, and how its weights are found, for both sides."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError, Experiment, Model
from jaxdist.config.bounded import read_json
from jaxdist.config.plugins import checked, function, named, running
from jaxdist.config.registry import BUILT_IN
from jaxdist.formats import (
    adapters,
    bins,
    deepspeed,
    llmc,
    llmc_files,
    meta,
    models,
    orbax,
    safetensors_files,
    torch_weights,
    trainer,
)
from jaxdist.formats.companions import companions, neighbours
from jaxdist.formats.dcp import no_weights
from jaxdist.formats.dcp_index import EXPERIMENT, INDEX
from jaxdist.formats.folders import CONFIG, is_bin_folder, is_deepspeed, is_hf, is_trainer_folder
from jaxdist.formats.hf import experiment_for, read_model
from jaxdist.formats.kinds import KINDS, CheckpointKind
from jaxdist.formats.leaves import Leaf, Leaves, Reader
from jaxdist.formats.own_files import files_of
from jaxdist.formats.refusals import incomplete, is_torch_zip, mapped, refusal, several
from jaxdist.formats.tables import HUGGINGFACE, LAYERS, TORCH_REF
from jaxdist.formats.torch_files import SUFFIXES
from jaxdist.runs.checkpoints import Looked, canonical, checkpoint_in, complete_checkpoint


def is_torch(path: Path) -> bool:
    """A file of torch.save's: a zip with the pickle, or by its name one of before torch 1.6."""
    if not path.is_file():
        return False
    try:
        return is_torch_zip(path)
    except Exception:  # of a damaged directory, many kinds
        return path.suffix in SUFFIXES


def is_dcp(path: Path) -> bool:
    """A checkpoint of torch.distributed.checkpoint, or a run folder with one."""
    return (checkpoint_in(path) / INDEX).is_file()


def kind_at(path: Path) -> str | None:
    """The kind of checkpoint at `path`, recognized by its files; None where it is of no kind. Raises ConfigError where
    they cannot be looked at."""
    return _looked_at(path)[0]


def _looked_at(path: Path) -> tuple[str | None, list[ConfigError]]:
    """The kind of a source, and the errors of kinds before it whose `recognizes` is broken. Raises ConfigError as
    `kind_at`."""
    errors: list[ConfigError] = []
    for name in KINDS:
        try:
            if not (KINDS.built_in(name) or path.exists()):
                continue
            if function(KINDS, name, "recognizes", "looking at a checkpoint")(path):
                return name, errors
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; give what can be read") from None
        except ConfigError as error:
            if KINDS.built_in(name):
                raise
            errors.append(error)
    return None, errors


def kind_of(path: Path) -> str:
    """The kind of checkpoint at `path`. Raises ConfigError where it is of none, or a file that is a part of one."""
    found, errors = _looked_at(path)
    if found in (None, "torch") and (error := refusal(path)):
        raise error
    if found is None and errors:  # one of these kinds may be its own
        raise errors[0]
    if found is None and adapters.is_adapter(path):
        raise adapters.refusal(path)
    if found is None:
        if error := several(path, kind_at) or incomplete(path):
            raise error
        missing = "no such file or folder" if not path.exists() else "no checkpoint of a known kind"
        if (old := sibling(path.resolve(), "old")).exists() and not path.exists():
            missing += f", it was being replaced when a conversion was killed, and is in {old}"
        raise ConfigError(
            f"{path}: {missing}; give a run folder, its checkpoints/<step>, a folder with config.json and "
            "*.safetensors or pytorch_model.bin, a torch file, a folder with .metadata of "
            "torch.distributed.checkpoint, or --plugins with the package that reads this" + mapped(path)
        )
    return found


def sibling(path: Path, part: str) -> Path:
    """Temporary paths of a conversion beside its target, which it creates and removes."""
    return path.parent / f".{path.name}.jaxdist-{part}"


@dataclass(frozen=True)
class Found:
    """The weights of a source, under its own names.

    `experiment`: that of the source, None where it does not state its model. `rows`: whether such a source may have
    fewer tokens than are wanted. `files`: reads its config.json and tokenizer, where they are not in its own folder.
    `notes`: lines to print about it.
    """

    path: Path
    leaves: Leaves
    experiment: Experiment | None = None
    rows: bool = False
    files: Callable[[], Mapping[str, bytes]] = dict
    notes: Sequence[str] = field(default_factory=tuple)

    def model(self, wanted: Model) -> Model:
        """The model of the weights: the source's, else the wanted one, without padding. Raises ConfigError."""
        if self.experiment:
            return self.experiment.model
        plain = wanted.without_padding()
        return models.fitted(str(self.path), plain, self.leaves) if self.rows else plain


def located(path: Path, verify: Looked = "checksums") -> Path:
    """The verified checkpoint that a run folder stands for; any other path itself. Raises ConfigError."""
    return canonical(complete_checkpoint(path, verify)) if kind_of(path) in ("orbax", "dcp") else path


def found(path: Path, reader: Reader) -> Found:
    """The weights at `path`, none of them read yet; of a run's checkpoints those of the newest complete one as far as
    small files show. Raises ConfigError as `kind_of`, and for a damaged source."""
    return found_as(kind_of(path), path, reader)


def found_as(kind: str, path: Path, reader: Reader) -> Found:
    """The weights at `path`, a checkpoint of a kind. Raises ConfigError as `find` of that kind; for a plugin's also
    where it finds other things, and while its tensors are read."""
    found: Found = function(KINDS, kind, "find", "reading it", Found)(path, reader)
    if KINDS.built_in(kind):
        return found
    label = f"{named(KINDS, kind)}: find returns a Found with"
    leaves = {
        str(name): checked(leaf, Leaf, f"{label} leaves[{name!r}] =")
        for name, leaf in checked(found.leaves, Mapping, f"{label} leaves =").items()
    }
    if found.experiment is not None:
        checked(found.experiment, Experiment, f"{label} experiment =")
    return replace(found, leaves={name: replace(leaf, read=_guarded(kind, leaf)) for name, leaf in leaves.items()})


def _guarded(kind: str, leaf: Leaf) -> Callable[[], Any]:
    """The `read` of a plugin's tensor. It raises ConfigError for errors of its code, and for another shape or dtype."""

    def read() -> Any:
        with running(KINDS, kind, "find"):
            array = leaf.read()
        if (getattr(array, "shape", None), getattr(array, "dtype", None)) != (leaf.shape, leaf.dtype):
            raise ConfigError(
                f"{named(KINDS, kind)}: a tensor that find declares as {leaf.dtype}{[*leaf.shape]} is read as "
                f"{reprlib.repr(array)}; give its Leaf the shape and dtype of the file"
            )
        return array

    return read


def _in_folder(folder: Path) -> Experiment | None:
    """The experiment of its config.json; None without one. Raises ConfigError."""
    return experiment_for(read_model(folder).model_dump(), str(folder)) if (folder / CONFIG).is_file() else None


def _deepspeed(path: Path, reader: Reader) -> Found:
    around = deepspeed.config_around(path)
    return Found(path, deepspeed.read(path, reader), _in_folder(around), files=lambda: companions(around))


def _trainer(path: Path, reader: Reader) -> Found:
    return Found(path, trainer.read(path, reader)[0], _in_folder(path))


def _hf(path: Path, reader: Reader) -> Found:
    experiment = _in_folder(path)  # a model that is not computed is refused before missing weights are
    return Found(path, safetensors_files.read(path)[0], experiment)


def _bin(path: Path, reader: Reader) -> Found:
    return Found(path, bins.read(path, reader)[0], _in_folder(path))


def _orbax(path: Path, reader: Reader) -> Found:
    checkpoint = complete_checkpoint(path, "small")
    experiment = orbax.read_experiment(checkpoint)
    return Found(path, orbax.read(path, checkpoint, experiment.model, reader), experiment)


def _dcp(path: Path, reader: Reader) -> Found:
    checkpoint = complete_checkpoint(path, "small")
    leaves, file = reader.distributed(checkpoint), checkpoint / EXPERIMENT
    if not leaves:
        raise no_weights(path, checkpoint)
    return Found(path, leaves, Experiment.parse(read_json(file), source=str(file)) if file.exists() else None)


def _llmc(path: Path, reader: Reader) -> Found:
    experiment = Experiment.parse(llmc_files.sections(path), f"{path}: header")
    return Found(path, llmc_files.weights(path, experiment.model, reader), experiment)


def _torch(path: Path, reader: Reader) -> Found:
    tree: Any = reader.load(path)
    experiment, notes = models.experiment_in(path, tree), models.notes(path, tree)

    def files() -> dict[str, bytes]:
        return neighbours(path) | files_of(path, tree, reader.leaf)

    return Found(path, torch_weights.weights_of(path, tree, reader.leaf), experiment, True, files, notes)


def _meta(path: Path, reader: Reader) -> Found:
    experiment, leaves = meta.read(path, reader)
    return Found(path, leaves, experiment)


CONVERTERS = "jaxdist.convert.kinds"  # the package of their modules

# In this order: a folder may have copies of its weights in other layouts too, of fewer bits.
for _row in (
    CheckpointKind(
        "deepspeed", "checkpoint of DeepSpeed's", is_deepspeed, _deepspeed, f"{CONVERTERS}.deepspeed_folders",
        state=True, rates=True,
    ),
    CheckpointKind(
        "trainer", "folder of a Trainer or of Accelerate", is_trainer_folder, _trainer, f"{CONVERTERS}.trainer_folders",
        state=True, rates=True,
    ),
    CheckpointKind("hf", "Hugging Face folder", is_hf, _hf, f"{CONVERTERS}.hf", naming=HUGGINGFACE),
    CheckpointKind(
        "orbax", "Orbax checkpoint", orbax.is_checkpoint, _orbax, f"{CONVERTERS}.orbax_files",
        naming=LAYERS, state=True,
    ),
    CheckpointKind(
        "dcp", "torch distributed checkpoint", is_dcp, _dcp, f"{CONVERTERS}.dcp_files",
        naming=TORCH_REF, state=True, rates=True,
    ),
    CheckpointKind("llmc", "checkpoint of llm.c's", llmc.is_model, _llmc, f"{CONVERTERS}.llmc_files", state=True),
    CheckpointKind(
        "torch", "torch file", is_torch, _torch, f"{CONVERTERS}.torch_files",
        naming=HUGGINGFACE, state=True, rates=True,
    ),
    CheckpointKind("meta", "folder of Meta's", meta.is_meta, _meta, f"{CONVERTERS}.meta"),
    CheckpointKind("bin", "folder with pytorch_model.bin", is_bin_folder, _bin, f"{CONVERTERS}.bin_files"),
):  # fmt: skip
    KINDS.register(_row, BUILT_IN)
