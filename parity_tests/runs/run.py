"""Runs of either side through their command lines, and what they left behind, under common names."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np

from jaxdist.command_line.arguments import load
from jaxdist.config import AXES, ConfigError, Experiment, check_shapes, read_record
from jaxdist.config.errors import nearest
from jaxdist.config.optimizer import ALL, ParamRole
from jaxdist.config.record import record_kinds
from jaxdist.config.registry import FAMILIES
from jaxdist.families import models
from jaxdist.runs.checkpoints import newest
from jaxdist.runs.folder import read_metrics
from parity_tests.runs import compare, forkserver, names

METRICS = tuple(compare.FLOOR)
TEXT, NUMBER, PERHAPS = (str,), (int, float), (int, float, type(None))
EVERY = "value"  # stands for all names of a mapping
# Fields of summary.json that are read, if present: the type of each, and of the values in a mapping or of the fields in
# each row.
SUMMARY: dict[str, tuple[type, dict[str, tuple[type, ...]]]] = {
    "memory": (dict, dict.fromkeys(("parameters", "gradients", "optimizer_state"), NUMBER) | {EVERY: PERHAPS}),
    "collectives": (list, {"op": TEXT, "axis": TEXT, "dtype": TEXT, "count": NUMBER, "bytes": NUMBER}),
    "arithmetic": (dict, {EVERY: TEXT}),
    "mesh": (dict, {EVERY: NUMBER}),
    "schedule": (dict, {EVERY: NUMBER}),
    "versions": (dict, {EVERY: TEXT}),
}


SENT = "collectives"  # of one device there are none
FIGURES = ("mesh", "memory", SENT, "arithmetic", "schedule")  # a run of ours reports all of these


@dataclass(frozen=True)
class Run:
    """A finished run folder. `side` is its name in a verdict; what wrote it is seen by its files."""

    side: str
    path: Path

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.path)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty where a loop of one's own wrote none. Raises ConfigError."""
        file = self.path / "summary.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is damaged: {error}; repair or remove it") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{file} is damaged: it is not an object; repair or remove it")
        return found

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of all mesh axes; an axis that the run's version had not is one of size 1."""
        return dict.fromkeys(AXES, 1) | self.summary.get("mesh", {})

    @cached_property
    def states(self) -> dict[str, np.ndarray]:
        """Weights and what the optimizer keeps at the end: `weights/...`, `exp_avg/...`, ...

        From the checkpoint of the last step, of either backend; without one from its record.
        """
        last, checkpoints = self.experiment.train.steps, self.path / "checkpoints"
        if newest(checkpoints) == last:
            for marker, read in (("parameters", _jax_states), (".metadata", _torch_states)):
                if (checkpoints / str(last) / marker).exists():
                    return read(checkpoints / str(last))
        return {n: a for n, a in self.records.get(last, {}).items() if n.partition("/")[0] in self.state_kinds}

    @cached_property
    def records(self) -> dict[int, dict[str, np.ndarray]]:
        """The tensors kept of single steps, by step and `kind/name` (`jaxdist/config/record.py`).

        Raises ConfigError.
        """
        steps = {str(step): step for step in range(1, self.experiment.train.steps + 1)}
        files = {file.stem: file for file in (self.path / "record").glob("*.safetensors")}
        for name, file in files.items():
            if name not in steps:
                raise ConfigError(
                    f"{file} is named by no step of 1 to {len(steps)}; call it STEP.safetensors, or remove it"
                )
        return {steps[name]: self._renamed(read_record(files[name])) for name in sorted(files, key=int)}

    def _renamed(self, record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        record, model = names.unwrapped(record), self.experiment.model
        try:
            if names.is_jax(record):
                return names.from_jax(record)
            if names.is_hf(record):
                return names.from_hf(record, model.family, model.layers)
        except (KeyError, ValueError) as error:  # a name or a shape that such a model has not
            raise ConfigError(
                f"{self.path}: its record does not fit the model: {error!r}; repair or remove it"
            ) from None
        return record

    @cached_property
    def state_kinds(self) -> tuple[str, ...]:
        """Kinds of `states`."""
        return ("weights", *self.experiment.optimizer.kept)

    @cached_property
    def experiment(self) -> Experiment:
        """The resolved config."""
        return load(self.path / "config.toml", {}, "--against")

    @property
    def zero_gradients(self) -> tuple[str, ...]:
        """Endings of the names of parameters whose true gradient is zero."""
        return FAMILIES[self.experiment.model.family].zero_gradients

    def check(self) -> None:
        """Raises ConfigError unless the folder holds a complete run that can be compared, all of its numbers finite."""
        if not (self.path / "config.toml").exists():
            raise ConfigError(f"{self.path} is not a run folder, it lacks config.toml; give the --output of a run")
        steps, last = [record["step"] for record in self.metrics], self.experiment.train.steps
        if steps != list(range(1, last + 1)):
            raise ConfigError(
                f"{self.path / 'metrics.jsonl'} has {len(steps)} complete steps, {_numbered(steps)}, where "
                f"train.steps = {last}: each has to be there once, in order, from 1, on a line that ends; "
                "finish the run, or make it again"
            )
        for name, (kind, fields) in SUMMARY.items():
            if name in self.summary and (wrong := unlike(self.summary[name], kind, fields)):
                raise ConfigError(f"{self.path / 'summary.json'}: {name} {wrong}; mend it or leave it out")
        kinds = record_kinds()
        for step, tensors in self.records.items():
            file = self.path / "record" / f"{step}.safetensors"
            if not tensors:
                raise ConfigError(f"{file} has no tensors; name them KIND/NAME, or remove it")
            for prefix in dict.fromkeys(name.partition("/")[0] for name in tensors):
                if prefix not in kinds:
                    raise ConfigError(f"{file} has tensors of unknown kind {prefix!r}; {nearest(prefix, kinds)}")
        lacking = [kind for kind in self.state_kinds if not self.kept_states(kind)]
        if lacking:
            raise ConfigError(
                f"{self.path} has neither a checkpoint nor a record of {' and '.join(lacking)} at step {last}; see "
                "README, 'A run of your own loop'"
            )
        for what in self.no_numbers():
            raise ConfigError(f"{self.path}: {what} is not a number, which is equal to nothing; mend the run first")

    def no_numbers(self) -> Iterator[str]:
        """Values of a run that are not finite, in its curves and recorded tensors, except in steps that overflowed."""
        for record in self.metrics:
            for name in METRICS:
                if record["step"] not in self.overflown and not one_of(value := record.get(name), NUMBER):
                    yield f"{name} = {value} at step {record['step']}"
        for step, tensors in [*self.records.items(), (len(self.metrics), self.states)]:
            for name, tensor in tensors.items():
                if (step not in self.overflown or name.startswith(self.state_kinds)) and not np.isfinite(tensor).all():
                    yield f"{name} of step {step}"

    @property
    def memory(self) -> dict[str, Any]:
        """Reported memory; empty if the run has none."""
        return self.summary.get("memory") or {}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the model's parameters, by name."""
        param_specs = models.param_specs(models.build(self.experiment.model))
        zeros = {name: np.broadcast_to(np.zeros(()), spec.shape) for name, spec in param_specs.items()}
        return {name: w.shape for name, w in names.as_torch(zeros).items()}

    def shapes_of(self, what: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a kind: running statistics are weights only, and optimizer state may exist for some
        parameters, with one number per row or column."""
        kind = what.partition(" ")[0]
        if kind == "weights":
            return self.shapes
        applies_to = self.experiment.optimizer.states.get(kind, ALL)
        trained = {name: shape for name, shape in self.shapes.items() if not name.endswith(names.STATISTICS)}
        return {
            n: names.kept(shape, kind) for n, shape in trained.items() if applies_to(ParamRole.in_torch(n, len(shape)))
        }

    def parameters(self, steps: Iterable[int]) -> dict[str, dict[str, np.ndarray]]:
        """The tensors that belong to parameters, by their names: states at the end, gradients of these steps."""
        kinds = {f"{kind} at the end": self.kept_states(kind) for kind in self.state_kinds}
        kinds |= {f"gradients of step {step}": self.kept("gradient", step) for step in steps}
        return {what: {n.partition("/")[2]: a for n, a in tensors.items()} for what, tensors in kinds.items()}

    def lacking(self, recorded: Iterable[int]) -> Iterator[str]:
        """Missing files and tensors of a jaxdist or torch_ref run that recorded gradients of these steps."""
        for name in FIGURES:
            found = self.summary.get(name)
            if found is None or (name != SENT and not found):
                yield name
        if self.side in SIDES and self.memory and not self.memory.get("peak"):
            yield "peak of memory"  # which transformers' runs do not measure
        steps = self.experiment.train.steps
        if absent := set(range(1, steps + 1)) - {record["step"] for record in self.metrics}:
            yield f"metrics of {len(absent)} of {steps} steps"
        for what, tensors in self.parameters(step for step in recorded if step not in self.overflown).items():
            if missing := [name for name in self.shapes_of(what) if name not in tensors]:
                yield f"{what} of {missing[0]} and {len(missing) - 1} others" if tensors else what
            elif not any(tensor.any() for tensor in tensors.values()):  # one alone may be zero, as a key's bias
                yield f"{what} other than zeros"

    def check_names(self) -> None:
        """Raises ConfigError where weights, moments or gradients are not those of the model, by name and shape."""
        for what, tensors in self.parameters(self.gradient_steps).items():
            check_shapes(f"{self.path}, {what}", {name: t.shape for name, t in tensors.items()}, self.shapes_of(what))

    def kept(self, kind: str, step: int) -> dict[str, np.ndarray]:
        """The tensors of one kind in the record of a step; none without a record."""
        return {name: a for name, a in self.records.get(step, {}).items() if name.startswith(f"{kind}/")}

    @property
    def gradient_steps(self) -> list[int]:
        """The steps of which gradients were kept, but those whose gradients overflowed."""
        return [step for step in self.records if step not in self.overflown and self.kept("gradient", step)]

    @cached_property
    def overflown(self) -> set[int]:
        """The steps that were passed over because their gradients, times the loss scale, overflowed."""
        scaled = [r for r in self.metrics if r.get("loss_scale") is not None and r.get("skipped") is True]
        if not scaled or not self.experiment.precision.loss_scale:
            return set()
        return {r["step"] for r in scaled if not one_of(r.get("grad_norm"), NUMBER)}

    def kept_states(self, kind: str) -> dict[str, np.ndarray]:
        """The final weights or moments."""
        return {name: a for name, a in self.states.items() if name.startswith(f"{kind}/")}

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """A recorded step, its metrics among it, each as an array of one number."""
        metrics = next(record for record in self.metrics if record["step"] == step)
        numbers = {name: np.array([metrics[name]], np.float64) for name in METRICS}
        return {name: a for name, a in self.records[step].items() if not name.startswith("scalar/")} | numbers


JAX = "jaxdist"
SIDES = (JAX, "torch_ref")
REFERENCES = {"torch": "torch_ref", "transformers": "transformers"}  # --against -> the side
RUN_BY_PROOF = (JAX, *REFERENCES.values())  # the sides whose runs a proof makes


def one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether what JSON holds is of one of these kinds; true and false are not numbers, nor is what is beyond those of
    a float64 or an int64."""
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    most = 2**63 - 1 if isinstance(value, int) else sys.float_info.max
    return not isinstance(value, int | float) or abs(value) <= most


def unlike(value: Any, kind: type, fields: Mapping[str, tuple[type, ...]]) -> str:
    """In what a field of summary.json is not what is read of it, in words; nothing where it is."""
    if not isinstance(value, kind):
        return f"is not a {kind.__name__}"
    for row in value if isinstance(value, list) else [value]:
        for name, kinds in fields.items():
            held = row if isinstance(row, dict) else {}
            for found in held.values() if name == EVERY else [held.get(name)]:
                if not one_of(found, kinds) or (isinstance(found, int | float) and found < 0):
                    return f"has no {name} that is a {'text' if kinds == TEXT else 'number'}, but {found!r}"
    return ""


DEVICES = "--xla_force_host_platform_device_count="  # each run asks for those of its own mesh


def settings() -> dict[str, str]:
    """The variables of the environment that change what JAX and torch compute, as the runs inherit them."""
    found = {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_", "TORCH_", "NVIDIA_TF32"))}
    found.pop("JAX_NUM_CPU_DEVICES", None)
    flags = [flag for flag in found.pop("XLA_FLAGS", "").split() if not flag.startswith(DEVICES)]
    return found | ({"XLA_FLAGS": " ".join(flags)} if flags else {})


def environment(xla_flags: str = "") -> dict[str, str]:
    """Environment of a process like this one, with another number of devices."""
    dropped = {"JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "PYTEST_CURRENT_TEST"}  # the last changes with every test
    inherited = {k: v for k, v in os.environ.items() if k not in dropped}
    flags = f"{settings().get('XLA_FLAGS', '')} {xla_flags}".strip()
    return inherited | {"OMP_NUM_THREADS": "1", "XLA_FLAGS": flags}


def command(module: str, *arguments: str, xla_flags: str = "") -> CompletedProcess[str]:
    """`python -m MODULE ...` in a process of its own."""
    return forkserver.run(module, arguments, environment(xla_flags))


def _jax_states(path: Path) -> dict[str, np.ndarray]:
    from jaxdist.training import checkpoint

    saved = checkpoint.read(path)
    trees = {"weights": saved.parameters, **checkpoint.kept_in(saved.optimizer)}
    found = {f"{kind}/{name}": w for kind, tree in trees.items() for name, w in names.as_torch(tree).items()}
    return {name: w.astype(np.float32) if w.dtype.kind == "V" else w for name, w in found.items()}  # bfloat16


def _torch_states(path: Path) -> dict[str, np.ndarray]:
    from torch_ref.training import checkpoint
    from torch_ref.training.record import array

    _, trees = checkpoint.read(path)
    trees["weights"] = trees.pop("model")
    return {f"{kind}/{name}": array(w) for kind, tree in trees.items() for name, w in tree.items()}


def _numbered(steps: Sequence[int]) -> str:
    """Numbering of steps, in words."""
    twice = next((step for before, step in pairwise(sorted(steps)) if before == step), None)
    if twice is not None:
        return f"step {twice} twice"
    return f"from {min(steps)} to {max(steps)}" if steps else "no step"
