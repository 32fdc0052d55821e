"""A user's own model in jaxdist's sharding: declared and written as `jaxdist/families/layers.py` does, on any mesh.

jaxdist's own step trains it and jaxdist's own recorder records it; names are torch's, by the mapping.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxdist.accounting import traffic
from jaxdist.config import ConfigError, Experiment, Optimizer
from jaxdist.config import Parallel as ParallelSection
from jaxdist.convert.mappings.mapping import LAYER, KeyMapping
from jaxdist.data import Batch as Tokens
from jaxdist.families import models
from jaxdist.parallel.mesh import axes_of, lay_out
from jaxdist.parallel.sharding import BATCH, ParamSpec
from jaxdist.training import metrics, optim
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder
from parity_tests.port.trainers import Arrays, Batch, JaxSide, Narrow, Recipe, Values, narrower, plain
from parity_tests.runs.names import base

SECTIONS = {  # of a config, that say how a model is laid out; what is trained, and in which dtypes, the proof says
    "parallel": {"mesh", "strategy", "reduce"},
    "memory": {"remat", "remat_every"},
    "train": {"accumulation", "seed"},
}
POLICIES = {"float64": "fp64", "float32": "fp32"}


@dataclass(frozen=True, eq=False)
class OwnProgram(Program):
    """The program of a model that belongs to no family; `example` has the shapes of a batch."""

    declared: nnx.Module
    example: Tokens

    @property
    def model(self) -> nnx.Module:
        return self.declared

    @property
    def abstract_batch(self) -> Tokens:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.example)


@dataclass(frozen=True, eq=False)
class Sharded:
    """`model(par, inputs, rematerialize)` returns this device's logits, as jaxdist's own models do.

    Its loss is the mean cross-entropy over the batch's valid targets. `inputs` and `targets` are fields of a batch;
    `sections` are those of a config that say how it is laid out: `parallel={"mesh": "2x4"}, memory={"remat": "full"},
    train={"accumulation": 2}`. Raises ConfigError for bad ones and for a model that declares no parameter specs.
    """

    model: nnx.Module
    inputs: str = "tokens"
    targets: str = "targets"
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, section in self.sections.items():
            if name not in SECTIONS or not isinstance(section, Mapping) or not section.keys() <= SECTIONS[name]:
                known = "; ".join(f"{key}: {', '.join(sorted(fields))}" for key, fields in SECTIONS.items())
                raise ConfigError(f"sections: {name} = {section!r}; give a mapping of fields ({known})")
        bare = [path for path, p in nnx.to_flat_state(nnx.state(self.model, nnx.Param)) if not hasattr(p, "axes")]
        if bare:
            raise ConfigError(
                f"parameter {'.'.join(map(str, bare[0]))} has no axes; declare it by jaxdist.families.layers.parameter"
            )
        self.experiment()

    @cached_property
    def param_specs(self) -> dict[str, ParamSpec]:
        return models.param_specs(self.model)

    def experiment(self, rows: int | None = None, **sections: Any) -> Experiment:
        """Sections of an experiment with a step of that many rows, or of the fewest; the first family's model with as
        many layers is a placeholder."""
        stacked = [spec.shape[0] for spec in self.param_specs.values() if "layers" in spec.axes]
        values: dict[str, Any] = {name: dict(section) for name, section in self.sections.items()} | sections
        values["model"] = {"layers": max(stacked, default=1)}
        values["train"] = {"steps": 1} | dict(self.sections.get("train", {})) | sections.get("train", {})
        values["train"]["batch"] = rows or values["train"].get("accumulation", 1)
        return Experiment.parse(values, source="sections", pinned=["train.batch"])  # that of `batches`

    def mesh(self, parallel: ParallelSection) -> Mesh:
        """The mesh, of accelerators if there are enough, else of CPU devices. Raises ConfigError for too few."""
        axes = parallel.axes()
        needed, devices = math.prod(axes.values()), jax.devices()
        devices = devices if len(devices) >= needed else jax.devices("cpu")
        if len(devices) < needed:
            raise ConfigError(
                f"parallel.mesh = {parallel.mesh!r} needs {needed} devices, there are {len(devices)}; on a CPU set "
                f"JAX_NUM_CPU_DEVICES={needed} in the environment"
            )
        return lay_out(axes, devices[:needed])

    def program(self, alone: bool, dtype: str, optimizer: Optimizer, steps: int, batch: Batch) -> OwnProgram:
        """The program on one device or on the mesh. Raises ConfigError where model, batch and mesh do not fit."""
        example = self.tokens(batch, dtype)
        sections: dict[str, Any] = {
            "precision": {"policy": POLICIES[dtype]},
            "optimizer": optimizer.model_dump(exclude_none=True),
            "train": {"steps": steps},
        }
        if alone:
            sections["parallel"] = {**self.sections.get("parallel", {}), "mesh": "1x1"}
        experiment = self.experiment(len(example.targets), **sections)
        mesh = self.mesh(experiment.parallel)
        parts = math.prod(mesh.shape[axis] for axis in BATCH) * experiment.train.accumulation
        if experiment.train.batch % parts:
            raise ConfigError(
                f"batches: {len(example.targets)} rows are not divided by {' × '.join(BATCH)} × train.accumulation = "
                f"{parts}; give a multiple of {parts} rows"
            )
        return OwnProgram(experiment, mesh, self.model, example)

    def check(self, parameters: Mapping[str, np.ndarray], batches: Sequence[Batch], optimizer: Optimizer) -> None:
        """Raises ConfigError unless the weights are the model's, and a step on the mesh takes every batch."""
        shapes = {name: spec.shape for name, spec in self.param_specs.items()}
        for name in sorted(shapes.keys() | parameters.keys()):
            here, there = parameters[name].shape if name in parameters else None, shapes.get(name)
            if here != there:
                raise ConfigError(f"jax_parameters: {name} is {here}, and {there} in sharded's model; give the same")
        first = self.tokens(batches[0], "float32")
        for number, batch in enumerate(batches, 1):
            tokens = self.tokens(batch, "float32")
            if [x.shape for x in tokens] != [x.shape for x in first]:
                raise ConfigError(f"batches: {number} has other shapes than the first; give all the same")
        program = self.program(False, "float32", optimizer, len(batches), batches[0])
        try:
            program.step.trace(program.abstract, program.abstract_batch)
        except (TypeError, ValueError) as error:
            message = next(iter(str(error).strip().splitlines()), repr(error))
            raise ConfigError(f"sharded: a step of the model cannot be traced: {message}") from error

    def tokens(self, batch: Batch, dtype: str) -> Tokens:
        """A batch as the step takes it: floating-point inputs in `dtype`, others as `plain`."""
        for name in (self.inputs, self.targets):
            if name not in batch or not np.ndim(batch[name]):
                raise ConfigError(f"batches have no array {name!r}, but {', '.join(batch)}; name it in Sharded")
        inputs, targets = (plain(batch[name]) for name in (self.inputs, self.targets))
        return Tokens(inputs.astype(dtype) if inputs.dtype == np.float64 else inputs, targets.astype(np.int32))

    def parameters(self) -> dict[str, np.ndarray]:
        """Starting weights as the model declares them, drawn from train.seed: by name, on the host."""
        experiment, nothing = self.experiment(), np.zeros((0, 0), np.int32)
        alone = experiment.parallel.model_copy(update={"mesh": "1x1"})
        program = OwnProgram(experiment, self.mesh(alone), self.model, Tokens(nothing, nothing))
        return {name: np.asarray(w, np.float32) for name, w in program.initial().parameters.items()}


class ShardedSide(JaxSide):
    """`Sharded` in one dtype, on one device or on its mesh."""

    def __init__(
        self,
        sharded: Sharded,
        program: OwnProgram,
        dtype: str,
        mapping: KeyMapping,
        recipe: Recipe[Any, Any],
    ):
        self.sharded, self.program = sharded, program
        self.recorder = Recorder(self.program)
        super().__init__(self.program.abstract.parameters, dtype, mapping, recipe)
        stacked = {path: module for path, module in self.module_pairs.items() if module.stacked}
        stacks = stacks_of(sharded.param_specs)
        for path, module in stacked.items():  # the recorder sees the layers of a scan one by one
            stack = next(name for name in stacks if f"{path}.".startswith(f"{name}."))
            for i in range(stacks[stack]):
                name = path.replace(stack, f"{stack}.{i}", 1)
                self.module_pairs[name] = module._replace(theirs=module.theirs.replace(LAYER, str(i)), stacked=False)
        if recipe.modules is None:
            self.modules = {path: m.theirs for path, m in self.module_pairs.items() if path not in stacked}

    def begin(self, parameters: Mapping[str, np.ndarray]) -> "ShardedSide":
        self.count = 0
        state = self.program.state_from({name: self.cast(array) for name, array in parameters.items()})
        self.state = jax.device_put(state, self.program.state_shardings)
        return self

    def ready(self, batch: Batch) -> Tokens:
        return self.sharded.tokens(batch, self.dtype)

    def step(self, batch: Batch) -> Values:
        self.count += 1
        self.state, metrics = self.compiled(self.state, self.ready(batch))
        rate = optim.learning_rate(self.optimizer, self.steps, jnp.asarray(self.count))
        return {"loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"]), "learning_rate": float(rate)}

    def observe(self, batch: Batch) -> Arrays:
        forward, update = (f(self.state, self.ready(batch)) for f in (self.recorder.forward, self.recorder.update))
        found: Arrays = {}
        for kind in ("activation", "activation_gradient"):
            noted = {path: y for path, y in forward[kind].items() if base(path) in self.modules}
            found |= {f"{kind}/{self.common(path)}": self.laid_out(path, y) for path, y in noted.items()}
            if kind == "activation":
                found["scalar/loss"] = np.asarray(update["scalar"]["loss"])
        return found | self.theirs(update["gradient"], "gradient/")

    def seen(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        found = self.observe(batch).items()
        return {name.removeprefix("activation/"): a.shape for name, a in found if name.startswith("activation/")}

    @cached_property
    def traced(self) -> Any:
        return self.program.step.trace(self.program.abstract, self.program.abstract_batch)

    @cached_property
    def compiled(self) -> Any:
        """The step, for training and for what it says of its memory."""
        return self.program.step.lowered(self.traced).compile()

    @cached_property
    def collectives(self) -> list[traffic.Collective]:
        return traffic.count(self.traced.jaxpr)

    def narrow(self, batch: Batch) -> dict[str, Narrow]:
        narrow = narrower(self.traced.jaxpr, self.dtype)
        return {"loss": narrow} if narrow else {}

    def shares(self, sharded: bool) -> dict[str, Any]:
        """Over how many devices each tensor of theirs is split, and numbers on a device that they have not."""
        mesh, param_specs = axes_of(self.program.mesh), self.program.param_specs
        ways = {name: math.prod(mesh[axis] for axis in param_specs[name].mesh_axes(sharded)) for name in param_specs}
        return {
            "ways": {pair.theirs: ways[pair.ours] for pair in self.mapping.pairs(self.shapes)},
            "ours_only": sum(math.prod(self.shapes[name]) // ways[name] for name in self.mapping.ours_only),
        }

    def measured(self, batch: Batch) -> dict[str, Any]:
        """Memory and traffic, as in a run's summary.json."""
        program, mesh = self.program, axes_of(self.program.mesh)
        return {
            "devices": program.mesh.size,
            "sent_bytes": math.fsum(collective.bytes for collective in self.collectives),
            "mesh": mesh,
            "strategy": program.experiment.parallel.strategy,
            "memory": metrics.memory(program, self.traced, self.compiled, self.state),
            "collectives": [asdict(collective) for collective in self.collectives],
            "least_bytes": traffic.least_of_parameters(program.experiment, program.param_specs, mesh),
            "shares": {
                "parameters": self.shares(program.strategy.parameters),
                "optimizer_state": self.shares(program.strategy.optimizer),
            },
        }


def stacks_of(param_specs: Mapping[str, ParamSpec]) -> dict[str, int]:
    """The paths under which all parameters are stacked, the outermost of them, with the number of layers."""
    found: dict[str, int] = {}
    for spec in param_specs.values():
        parts = spec.name.split(".")
        paths = (".".join(parts[:depth]) for depth in range(1, len(parts))) if "layers" in spec.axes else ()
        for path in paths:
            if all("layers" in other.axes for name, other in param_specs.items() if name.startswith(f"{path}.")):
                found[path] = spec.shape[0]
                break
    return found
