"""Content of a checkpoint of any kind: tensors, read on demand, and everything beside them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from jaxdist.config import EMA, ConfigError, Experiment, same_model
from jaxdist.convert.entries import entries, kept
from jaxdist.convert.mappings.atoms import Entry
from jaxdist.formats.headers import Header
from jaxdist.formats.leaves import Leaf, Leaves
from jaxdist.formats.plan import Parts, check_tensors, embedding, parted, untied
from jaxdist.formats.tables import LAYERS, OWN
from jaxdist.runs.display import say
from jaxdist.training.loss_scale import LossScale, start

PARAMETERS = "parameters"


class OriginFields(BaseModel, strict=True, extra="forbid"):
    """The fields of an Origin that are plain values, as they are kept beside weights that came from elsewhere."""

    kind: str
    naming: str
    names: dict[str, str]
    metadata: dict[str, str]
    index: dict[str, Any]
    step: int
    own: bool
    dtype: str = ""
    init: bool = False


@dataclass(frozen=True)
class Origin:
    """Facts that only the kind that wrote a checkpoint knows. They are kept, for a conversion back to that kind."""

    kind: str = ""
    naming: str = ""
    names: Mapping[str, str] = field(default_factory=dict)  # in the naming -> in the file, where they differ
    metadata: Mapping[str, str] = field(default_factory=dict)  # of safetensors files; of a DCP folder, its prefixes
    index: Mapping[str, Any] = field(default_factory=dict)  # what else Hugging Face's says; a DCP's, how entries nest
    files: Mapping[str, bytes] = field(default_factory=dict)  # config.json, tokenizer, model card
    left: Sequence[str] = ()  # what of its folder stays behind, in words
    buffers: Leaves = field(default_factory=dict)  # of the model, under the file's names: masks, frequencies
    held: Callable[[], Any] = lambda: None  # reads `extras`
    step: int = 0  # steps done by then
    dtype: str = ""  # of the first tensor
    own: bool = False  # whether a torch file had what we write into one: experiment, files
    init: bool = False  # whether a run began with these weights, and its own have another dtype by its precision

    def fields(self) -> dict[str, Any]:
        """Plain values of the origin, from which `OriginFields` is read."""
        return {name: getattr(self, name) for name in OriginFields.model_fields}

    @property
    def extras(self) -> Any:
        """Further state that a torch training script saved: groups, schedule, scaler, RNG states. Raises ConfigError if
        torch is needed to read it, and missing."""
        return self.held()

    @property
    def from_script(self) -> bool:
        """Whether it is a torch file that was not ours, and gets none of our keys on its way back."""
        return self.kind == "torch" and not self.own

    def names_in(self, kind: str) -> Mapping[str, str]:
        """Tensor names for a target of a kind, if a source of that kind had other names."""
        return self.names if self.kind == kind else {}

    def buffers_in(self, kind: str) -> Leaves:
        """Tensors of a target of a kind that are not parameters, if a source of that kind had them."""
        return self.buffers if self.kind == kind else {}


@dataclass(frozen=True)
class Content:
    """A checkpoint in the tensors of a `naming`, by group: parameters, and what its optimizer keeps, where it has one.

    `step` is the number of steps done, `updates` of those that changed weights; None without an optimizer's state.
    `scaling` is the loss scale that training continues with, where there is one.
    """

    experiment: Experiment
    naming: str
    groups: Mapping[str, Leaves]
    step: int = 0
    updates: int | None = None
    origin: Origin = field(default_factory=Origin)
    metrics: bytes = b""  # the lines that the run logged
    scaling: LossScale | None = None
    checkpoint: Path | None = None  # one with a manifest, with which its large files are still to be compared
    averages: Leaves = field(default_factory=dict)  # of the weights, with which no training continues here

    def entries(self, group: str) -> dict[str, Entry]:
        """The tensors of a group. Raises ConfigError as `kept` does."""
        return entries_of(self.naming, self.experiment, group)

    def weights(self) -> "Content":
        """Without all that training needs."""
        return replace(self, groups={PARAMETERS: self.groups[PARAMETERS]}, step=0, updates=None, scaling=None)

    def averaged(self, source: Path) -> "Content":
        """The moving average of the weights in their place. Raises ConfigError where there is none."""
        averages, weights = self.groups.get(EMA, self.averages), self.groups[PARAMETERS]
        if not averages:
            raise ConfigError(f"--ema: {source} has no average of its weights; train with --optimizer.ema 0.999")
        # Running statistics have no average, as in torch's AveragedModel, which copies them.
        taken = {name: averages.get(name, leaf) for name, leaf in weights.items()}
        if other := [name for name, leaf in taken.items() if leaf.shape != weights[name].shape]:
            raise ConfigError(f"--ema: {source}: the average of {other[0]} has another shape; use an intact copy")
        return replace(self, groups={PARAMETERS: taken}).weights()

    def checked(self, source: Path) -> "Content":
        """The content with its buffers apart, and with a first loss scale where its experiment needs one.

        Raises ConfigError naming a tensor that is missing or does not fit."""
        groups = {group: self._without_extras(source, leaves) for group, leaves in self.groups.items()}
        kinds, o = {*groups} - {PARAMETERS}, self.experiment.optimizer
        if self.updates is not None and kinds != {*o.kept}:
            there, asked = (", ".join(sorted(found)) or "nothing" for found in (kinds, o.kept))
            raise ConfigError(
                f"{source}: its optimizer keeps {there}, where optimizer.name = {o.name} and optimizer.ema = {o.ema} "
                f"keep {asked}; give --model another optimizer, or leave it out"
            )
        for group in groups:
            self._check(source, group, groups[group])
        scaling = None
        if self.updates is not None and (fresh := start(self.experiment.precision)):
            scaling = self.scaling or fresh
            scale, good = float(scaling.scale), int(scaling.good)
            if not (0 < scale < np.inf and 0 <= good < 2**31):
                raise ConfigError(f"{source}: a loss scale of {scale} after {good} good steps; leave it out")
        return replace(self, groups=groups, scaling=scaling, origin=self._with_buffers(source))

    def check_weights(self, source: Path) -> None:
        """Raises ConfigError as `checked` does, of the weights alone: before an optimizer is looked at, whose order or
        shapes would be blamed for what the weights are."""
        self._check(source, PARAMETERS, self._without_extras(source, self.groups[PARAMETERS]))

    def _check(self, source: Path, group: str, leaves: Leaves) -> None:
        what = str(source) if group == PARAMETERS else f"{source}, {group}"
        found = {name: Header(leaf.shape, leaf.dtype.name) for name, leaf in leaves.items()}
        wanted = {name: entry.shape for name, entry in self.entries(group).items()}
        check_tensors(what, found, wanted, self.origin.names)

    def _with_buffers(self, source: Path) -> Origin:
        """The origin, with the model's buffers."""
        found = {name: self.groups[PARAMETERS][name] for name in self._parted(self.groups[PARAMETERS]).buffers}
        if not found:
            return self.origin
        say(
            f"{source}: {len(found)} buffers, {next(iter(found))} first, are not parameters: the model recomputes "
            "them, and they are kept for the way back"
        )
        return replace(self.origin, buffers={self.origin.names.get(n, n): leaf for n, leaf in found.items()})

    def _parted(self, leaves: Leaves) -> Parts:
        """Tensors of the source by group; ours are all parameters."""
        if self.naming in (OWN, LAYERS):
            return Parts([*leaves], [], None)
        return parted(self.naming, self.experiment.model, leaves)

    def _without_extras(self, source: Path, leaves: Leaves) -> Leaves:
        """Without buffers, and without the head where it is the embedding once more."""
        parts = self._parted(leaves)
        found = {name: leaves[name] for name in parts.parameters}
        if parts.head:
            head, first = leaves[parts.head], embedding(self.naming, self.experiment.model)
            if not head.equals(found.setdefault(first, head)):  # moments may be of the head alone
                raise untied(str(source), parts.head)
        return found


def entries_of(naming: str, experiment: Experiment, group: str) -> dict[str, Entry]:
    """The tensors of a group under a naming. Raises ConfigError as `kept` does."""
    model = experiment.model
    return entries(naming, model) if group == PARAMETERS else kept(naming, model, experiment.optimizer, group)


def in_memory(experiment: Experiment, parameters: Mapping[str, np.ndarray]) -> Content:
    """Parameters of ours as a content."""
    leaves = {n: Leaf(array.shape, array.dtype, partial(parameters.__getitem__, n)) for n, array in parameters.items()}
    return Content(experiment, OWN, {PARAMETERS: leaves})


def with_vocabulary(experiment: Experiment, vocab: int, multiple: int = 1) -> Experiment:
    """The experiment of a decoder with that number of tokens in its vocabulary, padded to a multiple."""
    model = experiment.model.model_copy(update={"vocab": vocab, "vocab_multiple": multiple})
    return experiment.model_copy(update={"model": model})


def agreed(source: str, found: Experiment | None, wanted: Experiment | None) -> Experiment:
    """The experiment to go by: `wanted`, which must have the model of the one `found`, or that. Its vocabulary is that
    of the source, which `vocabulary.resized` makes the wanted one. Raises ConfigError."""
    if wanted and found:
        same_model(wanted.model, found.model, source)
    if wanted and wanted.model.vocabulary:
        there = found.model if found else wanted.model.without_padding()  # what others write is not padded
        return with_vocabulary(wanted, there.vocab, there.vocab_multiple)
    if experiment := wanted or found:
        return experiment
    raise ConfigError(f"{source} does not say what model it is; give --model, a TOML file or a shipped config")


def one_count(source: str, counts: Iterable[int]) -> int:
    """Steps that an optimizer took, the same for all parameters. Raises ConfigError."""
    found = sorted(set(counts))
    if len(found) != 1:
        raise ConfigError(f"{source}: its optimizer took {found} steps; jaxdist has one number for all parameters")
    return found[0]
