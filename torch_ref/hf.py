"""Weights of a Hugging Face folder for all families: the neutral plan followed with torch's tensors."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jaxdist.config import ConfigError, Decoder, Experiment, Family, same_model
from jaxdist.config.finite import NotFinite
from jaxdist.config.foreign import check_index
from jaxdist.config.hf import read_model
from jaxdist.config.sources import Source, of_experiment, source_of
from jaxdist.formats import models
from jaxdist.formats.folders import BIN_INDEX, bin_files, is_bin_folder
from jaxdist.formats.headers import Header, Headers
from jaxdist.formats.naming import CURRENT, MODEL
from jaxdist.formats.plan import plan_of, stacked, untied
from jaxdist.formats.refusals import check_torch, no_model
from jaxdist.formats.tables import EXPERTS, Stored, stored
from jaxdist.formats.torch_files import SUFFIXES
from torch_ref.finite import not_finite
from torch_ref.models import build
from torch_ref.weights import held


class Weights:
    """The tensors of a Hugging Face folder or a torch file under torch_ref's names, read one at a time."""

    def __init__(self, path: Path, model: Family):
        """Raises ConfigError when the files cannot be read or their config.json describes another model."""
        self.files: Safetensors | Binaries
        if path.is_file():
            self.files = file = Binaries(path)
            found = file.model(model)
        else:
            found = read_model(path)
            self.files = Binaries(path) if has_binaries(path) else Safetensors(path)
        self.path, self.head_dim = path, found.head_dim
        same_model(model, found, str(path))
        with torch.device("meta"):
            shapes = stacked(found, {name: tuple(tensor.shape) for name, tensor in held(build(found))})
        self.plan = plan_of(str(path), self.files.headers, found, shapes)
        self.not_finite: dict[str, NotFinite] = {}  # of the tensors read so far, by their names
        self.atoms, self.targets = self.plan.atoms(), stored("torch_ref", found, shapes)

    def check(self) -> None:
        """Raises ConfigError for tensors that are missing, unexpected, of another shape or dtype, and for a tied head
        that differs from the embedding."""
        names, head = self.plan.names, self.plan.parts.head
        if head and not self._equal(names[head], names[self.plan.embedding]):
            raise untied(str(self.path), head)
        self.plan.check(str(self.path), self.files.headers)

    def read(self, name: str) -> Tensor:
        """The tensor that torch_ref calls `name`, in its layout and the file's dtype. Raises ConfigError."""
        target = self.targets[name]
        places = [self.atoms[atom] for atom in target.atoms]
        sources = {tensor.name: self._theirs(self.plan.names[tensor.name]) for tensor, _ in places}
        for source, theirs in sources.items():
            if found := not_finite(theirs):
                self.not_finite[self.plan.names[source]] = found
        parts = [self._part(sources[tensor.name], tensor, i, target) for tensor, i in places]
        return torch.stack(parts) if EXPERTS in name else parts[0]

    def _part(self, theirs: Tensor, tensor: Stored, atom: int, target: Stored) -> Tensor:
        """One atom of a tensor of the folder, in the layout of `target`."""
        row, several = tensor.row, len(tensor.row.ours)
        if EXPERTS in row.ours[0] and not row.by_expert:
            experts = len(tensor.atoms) // several
            theirs, atom = theirs[atom % experts], atom // experts
        if row.interleaved:  # (heads, pairs, 2) of the outputs -> (heads, 2, pairs)
            theirs = theirs.unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if row.transpose != target.row.transpose:
            theirs = theirs.t()
        return theirs if several == 1 else theirs.chunk(several)[atom]

    def _theirs(self, name: str) -> Tensor:
        with self._reading():
            return self.files.tensor(name)

    def _equal(self, one: str, other: str) -> bool:
        """Whether two tensors of the folder are the same to the bit."""
        if self.files.headers[one] != self.files.headers[other]:
            return False
        a, b = (self._theirs(name).flatten().view(torch.uint8) for name in (one, other))
        return torch.equal(a, b)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"{self.path}: {error!r}; give a folder with whole files of weights") from None


def has_binaries(path: Path) -> bool:
    """Whether the weights of a folder are pytorch_model.bin: safetensors go before it, as in transformers."""
    return is_bin_folder(path) and not any(path.glob("*.safetensors"))


def is_torch_file(path: Path) -> bool:
    """Whether `path` is a file of torch.save's, by its content or its name."""
    return path.is_file() and (path.suffix in SUFFIXES or is_zipfile(path))


def describe(path: Path) -> Source | None:
    """The model of weights of any kind that torch_ref reads; None where they do not say. Raises ConfigError as
    `source_of`."""
    if (found := source_of(path)) or not is_torch_file(path):
        return found
    with suppress(ConfigError):  # whoever reads the weights says what is wrong
        return Binaries(path).source()
    return None


class Safetensors(Headers):
    """The tensors of model.safetensors, or of its shards."""

    def tensor(self, name: str) -> Tensor:
        """One tensor. Raises OSError and SafetensorError."""
        with safe_open(self.places[name].file, framework="pt") as file:
            found: Tensor = file.get_tensor(name)
            return found


class Binaries:
    """The tensors of a torch file, or of pytorch_model.bin or its shards, mapped into memory where they are zips."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError where a file is missing, damaged or holds more than tensors, or is not of the index."""
        self.path = path
        files, index = ([path], None) if path.is_file() else bin_files(path)
        self.tensors: dict[str, Tensor] = {}
        self.told: Experiment | None = None  # what a file that stands alone tells of its model
        self.notes: list[str] = []
        places: dict[str, Path] = {}
        for file in files:
            for name, tensor in self._loaded(file).items():
                if name in places:
                    raise ConfigError(f"{file}: tensor {name} is in {places[name].name} too; give each tensor once")
                self.tensors[name], places[name] = tensor, file
        check_index(path, index, places, BIN_INDEX)
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.tensors.items()}
        self.headers = {name: Header(tuple(t.shape), dtypes[name]) for name, t in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def model(self, wanted: Family) -> Family:
        """What model they are of: that which the file tells, else the one that is wanted, without padding, and with as
        many tokens as the embedding has rows where it has fewer. Raises ConfigError."""
        if self.told:
            return self.told.model
        plain = wanted.model_copy(update={"vocab_multiple": 1}) if isinstance(wanted, Decoder) else wanted
        return models.fitted(str(self.path), plain, self.headers)

    def source(self) -> Source | None:
        """What the file or the config.json beside it tells of its model; None where they tell nothing. Raises
        ConfigError."""
        if self.told:
            return of_experiment(self.path, self.told)._replace(notes=self.notes)
        if not (found := models.told_beside(self.path)):
            return None
        return of_experiment(self.path, found)._replace(model=models.fitted(str(self.path), found.model, self.headers))

    def _loaded(self, file: Path) -> dict[str, Tensor]:
        try:
            if not is_zipfile(file):
                check_torch(file)
            tree = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
            if not isinstance(tree, dict):
                raise no_model(file)
            if file == self.path:
                self.told, self.notes = models.told(file, tree), models.notes(file, tree)
            states = [tree[key] for key in (CURRENT, *MODEL) if isinstance(tree.get(key), dict)]
            state = next((s for s in states if any(isinstance(tensor, Tensor) for tensor in s.values())), tree)
            found = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
            if not found:
                raise no_model(file)
            return found
        except ConfigError:
            raise
        except UnpicklingError:
            raise ConfigError(
                f"{file}: it holds more than tensors and plain values, or is damaged; give a whole file that holds a "
                "state dict alone"
            ) from None
        except Exception as error:  # of a damaged file, many kinds
            raise ConfigError(f"{file}: {str(error)[:200]}; give a whole file that holds a state dict alone") from None
