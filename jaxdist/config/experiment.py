"""The experiment: every field that both backends read, with its unit, its default and its limits.

Shape letters, here and everywhere: B batch, T time, D model, H heads, K kv heads, F hidden, V vocabulary, E experts.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import Field, PrivateAttr, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from jaxdist.config.aliases import SECTION_NAMES, field_here, plain, value_hint
from jaxdist.config.data import SOURCES, Data
from jaxdist.config.errors import ConfigError, nearest, shown
from jaxdist.config.fitting import multiple
from jaxdist.config.model import Model
from jaxdist.config.optimizer import OPTIMIZERS, Optimizer
from jaxdist.config.parallel import Parallel
from jaxdist.config.plugins import Plugins, load_plugins, running, used
from jaxdist.config.precision import Precision
from jaxdist.config.record import Record, Steps
from jaxdist.config.registry import FAMILIES, default_family
from jaxdist.config.section import LISTED, Count, CountOrZero, NotNegative, Section, Seed
from jaxdist.config.strategies import STRATEGIES

MOST_PROBLEMS = 20


class Train(Section):
    """Length of training and size of a batch."""

    steps: CountOrZero = 300
    """Number of optimizer steps. 0: write the starting weights as checkpoint 0."""
    epochs: CountOrZero = 0
    """Number of passes over the training sequences, in place of `steps`; the resolved config states the steps. 0: use
    `steps`."""
    batch: Count = 16
    """Global batch size in sequences, over all devices and microbatches."""
    accumulation: Count = 1
    """Microbatches per step."""
    seed: Seed = 0
    """Random seed of the starting weights and the data order."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """Response to a NaN or infinite loss or gradient norm. stop: end the run before the update; skip: leave out the
    update and take the next batch. Weights or optimizer state that are not finite when they are read are refused
    in both cases."""
    skip: Steps = ()
    """Steps to leave out, as 120,121: weights and moments stay, the schedule advances. For batches that make the loss
    jump (arXiv:2204.02311, section 5.1)."""
    compile: bool = False
    """Use torch.compile: for the model on one rank, for each block on several. JAX always compiles its step."""
    validation_batches: CountOrZero = 8
    """Batches of the validation split that are evaluated after the last step; 0: none."""


def model_of(value: Any) -> Model:
    """A model section, by the class of its family. Raises ValueError for a family that nothing has registered."""
    if isinstance(value, Model) or not isinstance(value, Mapping):
        return Model.model_validate(value)
    family = value.get("family", default_family())
    if not isinstance(family, str) or family not in FAMILIES:
        hint = value_hint("model.family", family, FAMILIES) or f"choose one of {', '.join(map(repr, FAMILIES))}"
        raise ValueError(f"model.family = {shown(family)}: no such family; {hint}")
    return FAMILIES[family].config.model_validate({"family": family, **value})


Offloaded = Literal["optimizer", "parameters", "activations"]


class Memory(Section):
    """Rematerialization of activations, and offloading to host memory."""

    remat: Literal["none", "full", "selective"] = "none"
    """Rematerialization in the backward pass. none: keep all activations; full: keep only the input of each block;
    selective: keep also the results of matrix products."""
    remat_every: Count = 1
    """Apply `remat` to every n-th block, starting with the first."""
    loss_chunks: Count = 1
    """Number of chunks of tokens in which a device computes the output head and the cross-entropy of a microbatch; the
    backward pass recomputes the logits, so that only one chunk of them is in memory. 1: all logits at once, kept for
    the backward pass."""
    offload: Annotated[tuple[Offloaded, ...], LISTED] = ()
    """State kept in host memory while it is not in use, as optimizer,parameters,activations. optimizer: Adam's moments;
    parameters: fetched block by block; activations: the ones that `remat` keeps. torch takes optimizer,parameters
    together, since FSDP2 has one policy for both, and activations only with remat = full."""

    @model_validator(mode="after")
    def _keeps_what_is_offloaded(self) -> "Memory":
        if "activations" in self.offload and self.remat == "none":
            raise ValueError(
                "memory.offload = activations with memory.remat = none: only what remat keeps of a block is moved "
                "to the host; use memory.remat = selective or full, or leave it out"
            )
        return self


Verify = Literal["checksums", "sizes"]


class Checkpoint(Section):
    """When a run is saved, and how far a checkpoint is trusted. Signals save too: see `jaxdist/runs/signals.py`."""

    every: CountOrZero = 0
    """Steps between checkpoints; 0: one checkpoint, after the last step."""
    final: bool = True
    """Save after the last step. false: the run can't be resumed from its end; for benchmarks."""
    minutes: NotNegative = 0.0
    """Longest time between checkpoints, in minutes: one is written at the end of the step in which it has passed. 0: no
    limit."""
    keep: CountOrZero = 0
    """Number of newest checkpoints to keep; 0: all."""
    keep_every: CountOrZero = 0
    """Always keep checkpoints whose step is a multiple of this number, whatever `keep` is; 0: none."""
    verify: Verify = "checksums"
    """Check against the manifest when a checkpoint is restored. checksums: read every file once more; sizes: compare
    file sizes only, which takes no time."""
    failure: Literal["stop", "go on"] = "stop"
    """Response to a checkpoint that can't be written, as on a full disk. stop: end with exit code 1; go on: report it
    and train on, with exit code 1 at the end if the last checkpoint is missing."""


class Metrics(Section):
    """Outputs beside metrics.jsonl."""

    tensorboard: bool = False
    """Also write TensorBoard events to the run folder."""


class Experiment(Section):
    """One experiment, as both backends read it."""

    plugins: Plugins = None
    """Packages to import, which register families, optimizers, strategies, data sources and kinds of checkpoints."""
    model: Annotated[pydantic.SerializeAsAny[Model], pydantic.PlainValidator(model_of)] = Field(
        default_factory=lambda: model_of({})
    )
    data: Data = Data()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    record: Record = Record()
    _pinned: frozenset[str] = PrivateAttr(frozenset())

    @property
    def pinned(self) -> frozenset[str]:
        """Fields, with their sections, that given weights or a resumed run determine: no fix changes them."""
        return self._pinned

    def naming_plugins(self) -> "Experiment":
        """This experiment, with the plugins that registered what it names."""
        owners = (
            FAMILIES.owner(self.model.family),
            OPTIMIZERS.owner(self.optimizer.name),
            STRATEGIES.owner(self.parallel.strategy),
            SOURCES.owner(self.data.source),
        )
        plugins = dict.fromkeys((*(self.plugins or ()), *used(owners)))
        return self.model_copy(update={"plugins": tuple(plugins)}) if plugins else self

    def pinning(self, fields: Iterable[str]) -> "Experiment":
        """This experiment, in which given weights or a resumed run determine the `fields`."""
        pinned = self.model_copy()
        pinned._pinned = frozenset(fields)
        return pinned

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Unpickle, as in a rank of torch's. Raises ConfigError as `load_plugins`."""
        super().__setstate__(state)
        load_plugins(self.plugins or ())

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> "Experiment":
        model, train = self.model, self.train
        self._pinned = frozenset(info.context or ())
        model.check(self)
        if model.layers % self.memory.remat_every:
            raise ValueError(
                f"memory.remat_every = {self.memory.remat_every} does not divide model.layers = {model.layers}; use "
                f"{math.gcd(self.memory.remat_every, model.layers)}"
            )
        if train.batch % train.accumulation:
            batch = f"train.batch = {multiple(train.accumulation, train.batch)}, or "
            raise ValueError(
                f"train.batch = {train.batch} cannot be divided into train.accumulation = {train.accumulation} equal "
                f"microbatches; use {'' if 'train.batch' in self.pinned else batch}train.accumulation = "
                f"{math.gcd(train.batch, train.accumulation)}"
            )
        return self

    @classmethod
    def sections(cls) -> dict[str, FieldInfo]:
        """The fields that are tables."""
        return {name: field for name, field in cls.model_fields.items() if name != "plugins"}

    @property
    def per_row(self) -> int:
        """Units that a row of the batch counts for: its tokens, or one image."""
        return self.data.sequence if self.model.input_kind == "tokens" else 1

    def check_mesh(self, axes: Mapping[str, int]) -> None:
        """Raises ConfigError where the mesh does not divide what it must."""
        with running(FAMILIES, self.model.family, "config"):
            self.model.check_mesh(self, axes)

    def on_data(self, fingerprint: str) -> "Experiment":
        """This experiment, bound to the data that it was begun with."""
        return self.model_copy(update={"data": self.data.model_copy(update={"fingerprint": fingerprint})})

    def with_steps(self, steps: int) -> "Experiment":
        """This experiment, with that number of steps."""
        return self.model_copy(update={"train": self.train.model_copy(update={"steps": steps, "epochs": 0})})

    def to_toml(self) -> str:
        """The resolved config as TOML, which `--config` accepts back."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    @classmethod
    def parse(cls, values: dict[str, Any], source: str, pinned: Iterable[str] = ()) -> "Experiment":
        """Validate nested `values`, read from `source`, where the weights or the run determine the fields `pinned`.

        Raises ConfigError, one line per problem: of MOST_PROBLEMS at most, since a file may have any number.
        """
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise ConfigError(f"{source}: {shown(values)} is not a table of settings; give the sections of a config")
        try:
            with _guarded(values.get("model")):
                found = cls.model_validate(values, context=pinned)
                hash(found), found.model.describe()  # as commands do later
            return found.naming_plugins()
        except pydantic.ValidationError as error:
            problems = error.errors()  # fields of plugins that are not loaded are wrong for that alone
            problems = [problem for problem in problems if problem["loc"] == ("plugins",)] or problems
            lines = [_explain(problem, values) for problem in problems[:MOST_PROBLEMS]]
            lines += [f"{len(problems) - MOST_PROBLEMS:,} more are wrong"] if problems[MOST_PROBLEMS:] else []
            raise ConfigError("\n".join(f"{source}: {line}" for line in lines)) from None


def _guarded(model: Any) -> AbstractContextManager[None]:
    """Context manager for the checks of a model section. Raises ConfigError for other errors than ValueErrors of the
    code of a plugin's family."""
    family = model.get("family") if isinstance(model, Mapping) else None
    if not (isinstance(family, str) and family in FAMILIES):
        return nullcontext()
    return running(FAMILIES, family, "config", lambda error: isinstance(error, ValueError))


def read_toml(path: Path, source: str = "--config") -> dict[str, Any]:
    """The tables of a TOML file, which `source` asked for. Raises ConfigError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # tomllib's own errors are ValueErrors
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{source} {path}: {problem}; give a readable TOML file") from None


def section_type(name: str, values: Mapping[str, Any]) -> type[Section]:
    """The class of a section; the model's depends on its family."""
    if name == "model":
        family = values.get("model", {}).get("family")
        return FAMILIES[family if family in FAMILIES else default_family()].config
    return Experiment.model_fields[name].annotation  # type: ignore[return-value]


def _explain(problem: Any, values: dict[str, Any]) -> str:
    """One pydantic error in the config's own terms: field, value and fix."""
    place = [str(part) for part in problem["loc"]]
    field, value, kind = ".".join(f"{part:.80}" for part in place), problem["input"], problem["type"]
    if kind == "extra_forbidden":
        return f"{field} = {shown(value)}: no such field; {_field_hint(place, value, values)}"
    if kind == "value_error":  # our own validators already say everything
        return str(problem["ctx"]["error"])
    if kind in ("model_type", "model_attributes_type"):  # pydantic speaks of models, and means tables
        return f"{field} = {shown(value)}: must be a table of fields"
    choices = re.findall("'([^']*)'", problem.get("ctx", {}).get("expected", ""))  # of a Literal
    hint = value_hint(field, value, choices)
    return f"{field} = {shown(value)}: {problem['msg'][0].lower()}{problem['msg'][1:]}{f'; {hint}' if hint else ''}"


def _field_hint(place: Sequence[str], value: Any, values: Mapping[str, Any]) -> str:
    """A hint for an unknown section or field."""
    name, fields = plain(place[-1]), Experiment.model_fields
    if len(place) == 1 and isinstance(value, Mapping):
        section = SECTION_NAMES.get(name)
        return f"[{place[0]}] is [{section}] here" if section else nearest(name, fields)
    if len(place) > 1:
        fields = section_type(place[0], values).model_fields
    if name in fields:
        return f"did you mean {name!r}?"
    return field_here(place[-1], value) or nearest(place[-1], fields)


def as_argument(value: Any) -> str:
    """A field's value as the command line takes it."""
    if isinstance(value, tuple | list):
        return ",".join(map(as_argument, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
