"""A checkpoint put together from several files: weights from some, the optimizer's state and the step from others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from jaxdist.config import Experiment
from jaxdist.convert.content import PARAMETERS, Content, Leaves, Origin, one_count
from jaxdist.convert.entries import kept as kept_by
from jaxdist.convert.entries import trainable
from jaxdist.convert.kinds import torch_files
from jaxdist.convert.kinds.torch_compat import tree_map_only
from jaxdist.convert.kinds.torch_leaves import leaf
from jaxdist.convert.mappings.atoms import Shape
from jaxdist.convert.optimizers import rules
from jaxdist.convert.stream import Conversion
from jaxdist.formats.naming import carried, recognized, renaming
from jaxdist.formats.plan import embedding
from jaxdist.formats.tables import HUGGINGFACE, IN_MEMORY, table_of, tables_of
from jaxdist.formats.torch_files import GROUPS, reading


class State(NamedTuple):
    """An optimizer's state: its rule, kind -> parameter -> tensor, groups with names in `params`, steps of each.

    `shapes`: those of the parameters that the groups name.
    """

    rule: rules.Rule
    moments: Mapping[str, Leaves]
    groups: Sequence[Mapping[str, Any]]
    counts: Sequence[Any]
    shapes: Mapping[str, Shape]

    @property
    def first_group(self) -> Mapping[str, Any]:
        """Settings of the first group; empty without groups."""
        return next(iter(self.groups), {})


# The schedule's fields of an optimizer section, by the steps that are done and the optimizer's state.
Schedule = Callable[[int, State], Mapping[str, Any]]


@dataclass(frozen=True)
class Weights:
    """The weights of a model, `leaves` by the names of their files. `path`: the source, as messages name it."""

    path: Path
    experiment: Experiment
    leaves: Leaves

    @cached_property
    def recognized(self) -> tuple[str, dict[str, str]]:
        """The naming, and its names -> those of the files."""
        return recognized(str(self.path), self.leaves, self.experiment.model)

    @property
    def naming(self) -> str:
        return self.recognized[0]

    @property
    def names(self) -> dict[str, str]:
        return self.recognized[1]

    @cached_property
    def carried(self) -> dict[str, str]:
        """The part of `names` that the naming does not state."""
        return carried(self.names, self.naming, self.experiment.model)

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Names of the trained parameters in the order of the modules, that of `model.parameters()`."""
        entries = trainable(self.naming, self.experiment.model)
        return {name: entry.shape for name, entry in entries.items() if name in self.names}

    @cached_property
    def full_name(self) -> Callable[[str], str]:
        """The function from a file's or an optimizer's name of a parameter to the naming's name: a tied head, which may
        be trained under its own name, is the embedding."""
        rename, model = renaming(self.names, self.naming, self.experiment.model), self.experiment.model
        tied = {table_of(self.naming, model).head: embedding(self.naming, model)} if model.tied else {}
        return lambda name: tied.get(rename(name), rename(name))

    @property
    def parameters(self) -> Leaves:
        """The weights, by their names in the naming."""
        return {full: self.leaves[name] for full, name in self.names.items()}

    def state(self, file: Path, optimizer: Mapping[Any, Any]) -> State | None:
        """Content of a torch state dict, whose tensors are in `file`; None for an optimizer without state. Raises
        ConfigError."""
        with reading(file, "optimizer"):
            optimizer = rules.with_entries(optimizer)
        if not optimizer.get("state"):
            return None
        origin = Origin(naming=self.naming, names=self.carried)
        Content(self.experiment, self.naming, {PARAMETERS: self.parameters}, origin=origin).check_weights(self.path)
        naming, model = self.naming, self.experiment.model
        shapes, rename = self.shapes, self.full_name
        if naming == HUGGINGFACE and IN_MEMORY in tables_of(model.family):
            stacked = {name: entry.shape for name, entry in trainable(IN_MEMORY, model).items()}
            if len(optimizer["state"]) == len(stacked):  # of a model in memory, whose experts are stacked
                naming, shapes, rename = IN_MEMORY, stacked, table_of(IN_MEMORY, model).full_name
        with reading(file, "optimizer"):
            kept = partial(kept_by, naming, model)
            rule, order = rules.order_of(str(file), optimizer, shapes, kept, rename)
            plain_groups = tree_map_only(Tensor, partial(torch_files.number, file), optimizer[GROUPS])
            groups = rules.named(plain_groups, order)
            entries = {name: optimizer["state"][i] for i, name in order.items()}
            moments: Mapping[str, Leaves] = {
                kind: {n: leaf(file, f"{kind} of {n}", e[kind]) for n, e in entries.items() if e.get(kind) is not None}
                for kind in rule.kinds(groups)
            }
            counts = [torch_files.number(file, count) for count in rules.steps_of(optimizer)]
        if naming != self.naming:
            by_rule = torch_files.trained_by(self.experiment, {"name": rule.name}, f"{file}: optimizer")
            moments = Conversion(Content(by_rule, naming, moments), self.naming).groups
        return State(rule, moments, groups, counts, shapes)

    def content(self, state: State | None, step: int | None, schedule: Schedule, origin: Origin) -> Content:
        """The content: with the optimizer of its `state`, which continues by `schedule`.

        `step`: steps done, None where only the optimizer has a count. Raises ConfigError.
        """
        groups: dict[str, Leaves] = {PARAMETERS: self.parameters}
        first = next(iter(groups[PARAMETERS].values()))
        origin = replace(origin, naming=self.naming, names=self.carried, dtype=str(first.dtype))
        experiment, updates = self.experiment, None
        if state:
            groups |= state.moments
            with reading(self.path, "optimizer"):
                if state.rule.counts or any(count is not None for count in state.counts):
                    updates = one_count(str(self.path), (torch_files.count_of(self.path, c) for c in state.counts))
                settings = rules.settings(str(self.path), state.rule, state.groups, state.shapes)
        steps = step if step is not None else updates or 0
        if state:
            with reading(self.path, "optimizer"):
                settings |= schedule(steps, state)
            experiment = torch_files.trained_by(experiment, settings, f"{self.path}: optimizer")
        updates = steps if state and updates is None else updates
        return Content(experiment, self.naming, groups, steps, updates, replace(origin, step=steps)).checked(self.path)
