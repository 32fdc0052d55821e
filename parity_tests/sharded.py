"""A user's own model in jaxdist's sharding: declared and written as `jaxdist/models/layers.py` does, on any mesh.

What trains it is jaxdist's own step, what is recorded of it jaxdist's own recorder; names are torch's, by the mapping.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from jaxdist import metrics, optim, traffic
from jaxdist.config import AXES, ConfigError, Experiment, Optimizer
from jaxdist.convert.mapping import LAYER, KeyMapping
from jaxdist.data import Batch as Tokens
from jaxdist.mesh import axes_of
from jaxdist.program import Program
from jaxdist.record import Recorder
from parity_tests.sides import Arrays, Batch, JaxSide, Values, base, narrower

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
    `sections` are those of a config, as `parallel={"mesh": "2x4"}, memory={"remat": "full"}`. Raises ConfigError for
    bad ones, and where there are too few devices.
    """

    model: nnx.Module
    inputs: str = "tokens"
    targets: str = "targets"
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def experiment(self) -> Experiment:
        """The sections, and what a config says where they are silent."""
        return Experiment.parse({name: dict(section) for name, section in self.sections.items()}, source="sections")

    def mesh(self, alone: bool) -> Mesh:
        """Of the section `parallel`, or of one device. Raises ConfigError where there are fewer devices."""
        parallel = self.experiment.parallel
        axes = dict.fromkeys(AXES, 1) if alone else parallel.axes()
        needed, devices = math.prod(axes.values()), jax.devices()
        if len(devices) < needed:
            raise ConfigError(
                f"parallel.mesh = {parallel.mesh!r} needs {needed} devices, there are {len(devices)}; on a CPU set "
                f"JAX_NUM_CPU_DEVICES={needed} in the environment"
            )
        kinds = (AxisType.Auto,) * len(axes)
        return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices[:needed], axis_types=kinds)

    def program(self, alone: bool, dtype: str, optimizer: Optimizer, steps: int, batch: Batch) -> OwnProgram:
        """Raises ConfigError where model, batch and mesh do not fit."""
        example, mesh = self.tokens(batch, dtype), self.mesh(alone)
        rows, accumulation = len(example.targets), self.experiment.train.accumulation
        if rows % (parts := mesh.shape["data"] * mesh.shape["fsdp"] * accumulation):
            raise ConfigError(
                f"batches: {rows} rows are not divided by data × fsdp × train.accumulation = {parts}; give others"
            )
        values = self.experiment.model_dump(exclude_none=True)
        values |= {"precision": {"policy": POLICIES[dtype]}, "optimizer": optimizer.model_dump(exclude_none=True)}
        values["train"] |= {"steps": steps, "batch": rows}
        return OwnProgram(Experiment.parse(values, source="sections"), mesh, self.model, example)

    def tokens(self, batch: Batch, dtype: str) -> Tokens:
        """A batch as the step takes it: floating-point inputs in `dtype`, whole numbers as int32."""
        for name in (self.inputs, self.targets):
            if name not in batch:
                raise ConfigError(f"batches have no field {name!r}, but {', '.join(batch)}; name it in Sharded")
        inputs, targets = (np.asarray(batch[name]) for name in (self.inputs, self.targets))
        whole = inputs.dtype.kind in "iub"
        return Tokens(inputs.astype(np.int32 if whole else dtype), targets.astype(np.int32))

    def parameters(self) -> dict[str, np.ndarray]:
        """Starting weights as the model declares them, drawn from train.seed: by name, on the host."""
        nothing = np.zeros((0, 0), np.int32)
        program = OwnProgram(self.experiment, self.mesh(alone=True), self.model, Tokens(nothing, nothing))
        return {name: np.asarray(w, np.float32) for name, w in program.initial().parameters.items()}


class ShardedSide(JaxSide):
    """`Sharded` in one dtype, on one device or on its mesh."""

    def __init__(
        self,
        sharded: Sharded,
        alone: bool,
        dtype: str,
        mapping: KeyMapping,
        optimizer: Optimizer,
        steps: int,
        batch: Batch,
        modules: Mapping[str, str] | None = None,
    ):
        self.sharded, self.program = sharded, sharded.program(alone, dtype, optimizer, steps, batch)
        self.recorder = Recorder(self.program)
        super().__init__(self.program.abstract.parameters, dtype, mapping, None, optimizer, steps, None, modules)
        stacked = {path: module for path, module in self.layouts.items() if module.stacked}
        for path, module in stacked.items():  # the recorder sees the layers of a scan one by one
            parameter = next(name for name in self.shapes if name.startswith(f"{path}."))
            for i in range(self.shapes[parameter][0]):
                name = path.replace("layers", f"layers.{i}", 1)
                self.layouts[name] = module._replace(theirs=module.theirs.replace(LAYER, str(i)), stacked=False)
        if modules is None:
            self.modules = {path: m.theirs for path, m in self.layouts.items() if path not in stacked}

    def begin(self, parameters: Mapping[str, np.ndarray]) -> "ShardedSide":
        self.count = 0
        state = self.program.state_from({name: self.cast(array) for name, array in parameters.items()})
        self.state = jax.device_put(state, self.program.shardings(self.program.specs))
        return self

    def ready(self, batch: Batch) -> Tokens:
        return self.sharded.tokens(batch, self.dtype)

    def step(self, batch: Batch) -> Values:
        self.count += 1
        self.state, told = self.program.step(self.state, self.ready(batch))
        rate = optim.learning_rate(self.optimizer, self.steps, jnp.asarray(self.count))
        return {"loss": float(told["loss"]), "grad_norm": float(told["grad_norm"]), "learning_rate": float(rate)}

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

    def sent(self, batch: Batch) -> float:
        return math.fsum(collective.bytes for collective in traffic.count(self.traced.jaxpr))

    def narrow(self, batch: Batch) -> str:
        return narrower(self.traced.jaxpr, self.dtype)

    @property
    def copies(self) -> dict[str, bool]:
        """Whether the strategy splits each copy of the model over fsdp."""
        strategy = self.program.strategy
        return {
            "parameters": strategy.parameters,
            "gradients": strategy.gradients,
            "optimizer_state": strategy.optimizer,
        }

    def ways(self, sharded: bool) -> dict[str, int]:
        """Over how many devices each tensor of theirs is split."""
        mesh, layouts = axes_of(self.program.mesh), self.program.layouts
        parts = {name: math.prod(mesh[axis] for axis in layouts[name].mesh_axes(sharded)) for name in layouts}
        return {pair.theirs: parts[pair.ours] for pair in self.mapping.pairs(self.shapes)}

    def measured(self) -> dict[str, Any]:
        """What a run's summary.json says of memory and traffic: of the arrays that lie on the fullest device."""
        held: dict[str, dict[Any, int]] = {"parameters": {}, "optimizer_state": {}}
        for kind, tree in zip(held, self.state, strict=True):
            for array in jax.tree.leaves(tree):
                for shard in array.addressable_shards:
                    held[kind][shard.device] = held[kind].get(shard.device, 0) + shard.data.nbytes
        program, mesh = self.program, axes_of(self.program.mesh)
        return {
            "devices": program.mesh.size,
            "mesh": mesh,
            "strategy": program.experiment.parallel.strategy,
            "memory": metrics.memory(program, self.traced.lower().compile())
            | {kind: max(bytes_on.values()) for kind, bytes_on in held.items()},
            "collectives": [asdict(collective) for collective in traffic.count(self.traced.jaxpr)],
            "least_bytes": traffic.least_of_parameters(program.experiment, program.layouts, mesh),
            "ways": {kind: self.ways(sharded) for kind, sharded in self.copies.items()},
        }
