"""Everything derived from an experiment and a mesh: the model, its parameter specs and the compiled functions."""

import zlib
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import Experiment
from jaxdist.config.strategies import Strategy
from jaxdist.data import IGNORED, Batches
from jaxdist.families import models
from jaxdist.formats.finite import is_square
from jaxdist.ops.varying import match_varying
from jaxdist.parallel import sharding
from jaxdist.parallel.collectives import Context, Parallel, Stages
from jaxdist.parallel.context import context
from jaxdist.parallel.experts import dispatch
from jaxdist.parallel.mesh import axes_of
from jaxdist.parallel.pipeline import AXIS, Schedule, schedule
from jaxdist.parallel.rematerialization import Rematerialize, offloaded, on_device
from jaxdist.parallel.sharding import LOSS_AXES, TOKENS
from jaxdist.runtime import xla
from jaxdist.runtime.processes import on_host
from jaxdist.training import loss_scale, optim
from jaxdist.training.placement import Placement, shardings
from jaxdist.training.step import Arrays, Step, TrainState


class Evaluated(NamedTuple):
    """Evaluation of a global batch, of scalars []."""

    loss: Any
    """Sum of the loss, nats."""
    count: Any
    """Number of valid tokens or images."""
    correct: Any
    """Number of images whose class has the largest logit; 0 for tokens."""


@dataclass(frozen=True, eq=False)
class Program:
    """One experiment on one mesh. Building it checks that every parameter fits (ConfigError) and allocates nothing."""

    experiment: Experiment
    mesh: Mesh

    def __post_init__(self) -> None:
        sharding.check(self.param_specs, axes_of(self.mesh), self.strategy)

    @cached_property
    def model(self) -> Any:
        """The abstract model: a tree of declarations."""
        return models.build(self.experiment.model)

    @cached_property
    def param_specs(self) -> dict[str, sharding.ParamSpec]:
        """The declared parameters, by dotted name."""
        return models.param_specs(self.model)

    @cached_property
    def strategy(self) -> Strategy:
        """The row of `parallel.strategy`, as `parallel.reduce` and `parallel.reshard_after_forward` change it."""
        return sharding.strategy(self.experiment.parallel)

    @cached_property
    def context(self) -> Context:
        """The split of sequences over the mesh axis `context`, and its attention."""
        gpu = self.mesh.devices.flat[0].platform == "gpu"
        return context(self.experiment.parallel, axes_of(self.mesh)["context"], fused=gpu)

    @cached_property
    def stacked(self) -> frozenset[str]:
        """Names of the parameters with a layer axis, [L, ...]."""
        return frozenset(name for name, spec in self.param_specs.items() if "layers" in spec.axes)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of microbatches in the stages of the mesh axis `pipeline`."""
        e = self.experiment
        return schedule(e.parallel, axes_of(self.mesh)[AXIS], e.train.accumulation, self.stacked)

    @cached_property
    def placement(self) -> Placement:
        """Orders of layers, rows and times on the devices, and batches put onto them."""
        return Placement(self.experiment, self.mesh, self.context, self.schedule, self.stacked)

    @cached_property
    def step_function(self) -> Step:
        """The step of one device, to be run inside `jax.shard_map`."""
        e = self.experiment
        sharded, compute = self.strategy.optimizer, e.precision.compute
        optimizer = optim.optimizer(e.optimizer, e.train.steps, self.param_specs, sharded, compute)
        parallel = Parallel(
            strategy=self.strategy,
            precision=e.precision,
            context=self.context,
            dispatch=dispatch(e.model),
            sequence=e.parallel.sequence,
            batch_norm=e.parallel.batch_norm,
        )
        return Step(
            model=self.model,
            param_specs=self.param_specs,
            parallel=parallel,
            optimizer=optimizer,
            rematerialize=Rematerialize.from_config(e.memory),
            loss_chunks=e.memory.loss_chunks,
            accumulation=e.train.accumulation,
            schedule=self.schedule,
            skip=e.train.skip,
            family=e.model.family,
        )

    @cached_property
    def evaluation(self) -> Step:
        """The step's model in evaluation mode, which uses running statistics."""
        model = models.build(self.experiment.model)
        model.eval()
        return replace(self.step_function, model=model)

    # ---- what and where

    def initial(self) -> TrainState:
        """The starting state, a function of the seed and the parameters' names alone: the same bits on any mesh."""
        key, model = jax.random.key(self.experiment.train.seed), self.experiment.model

        def unpadded(axis: str, size: int) -> int:
            """The size of an axis without padding of the vocabulary."""
            return model.vocab if axis == "vocab" and size == model.vocab_rows else size

        def draw(spec: sharding.ParamSpec) -> jax.Array:
            if not spec.std:
                return jnp.full(spec.shape, spec.mean, self.dtype_of(spec))
            named = jax.random.fold_in(key, zlib.crc32(spec.name.encode()))
            shape = [unpadded(axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True)]
            values = spec.mean + spec.std * jax.random.normal(named, shape, jnp.float32)
            if shape != [*spec.shape]:  # the tokens' own rows are the same with any padding, which is their mean
                rows = [(0, size - drawn) for size, drawn in zip(spec.shape, shape, strict=True)]
                values = jnp.pad(values, rows, mode="mean")
            return values.astype(self.experiment.precision.parameters)

        return self.state_from({name: draw(spec) for name, spec in self.param_specs.items()})

    def state_from(self, parameters: Arrays) -> TrainState:
        """A new state with these parameters."""
        trained = {name: w for name, w in parameters.items() if not self.param_specs[name].statistic}
        optimizer = self.step_function.optimizer.init(trained)
        return TrainState(parameters, optimizer, loss_scale.start(self.experiment.precision))

    def dtype_of(self, spec: sharding.ParamSpec) -> Any:
        """The stored dtype: float32 or wider for running statistics, int32 for counts."""
        parameters = jnp.dtype(self.experiment.precision.parameters)
        if not spec.statistic:
            return parameters
        return jnp.promote_types(parameters, jnp.float32) if spec.shape else jnp.int32

    @cached_property
    def shapes(self) -> TrainState:
        """Shapes and dtypes of the state."""
        shapes: TrainState = jax.eval_shape(self.initial)
        return shapes

    @cached_property
    def partition_specs(self) -> TrainState:
        """PartitionSpecs of the state."""
        parameters = {n: spec.partition_spec(self.strategy.parameters) for n, spec in self.param_specs.items()}

        def spec_of(path: Any, array: jax.ShapeDtypeStruct) -> P:
            spec = self.param_specs.get(getattr(path[-1], "key", ""))  # counts have no name of a parameter
            return spec.partition_spec(self.strategy.optimizer, array.shape) if spec else P()

        optimizer = jax.tree_util.tree_map_with_path(spec_of, self.shapes.optimizer)
        return TrainState(parameters, optimizer, jax.tree.map(lambda _: P(), self.shapes.scaling))

    @cached_property
    def state_shardings(self) -> TrainState:
        """Shardings of the state between steps, with `memory.offload` on the host."""
        parameters, optimizer, scaling = shardings(self.mesh, self.partition_specs)
        offload = self.experiment.memory.offload
        if "parameters" in offload:
            parameters = offloaded(parameters)
        if "optimizer" in offload:  # counts of steps stay on the device
            optimizer = jax.tree.map(lambda a, s: offloaded(s) if a.ndim else s, self.shapes.optimizer, optimizer)
        return TrainState(parameters, optimizer, scaling)

    @cached_property
    def abstract(self) -> TrainState:
        """Shapes, dtypes and shardings of the state at rest; a trace of it keeps the memory of offloaded state."""

        def abstract(a: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        state: TrainState = jax.tree.map(abstract, self.shapes, self.state_shardings)
        return state

    @cached_property
    def abstract_batch(self) -> Batches:
        """Shapes and dtypes of the global batch: tokens [B, T] or images [B, Y, X, C], and targets."""
        e = self.experiment
        return self.placement.inputs.abstract((e.train.batch, *e.model.input_shape(e.data.sequence)))

    @cached_property
    def batch_specs(self) -> Batches:
        """PartitionSpecs of a batch."""
        return self.placement.inputs.specs

    # ---- compiled functions

    def initialize(self) -> TrainState:
        """The starting state, created sharded: no device holds more than its shards."""
        state = jax.jit(self.initial, out_shardings=self.state_shardings)()
        ordered: TrainState = self.placement.to_device_order(state)
        return ordered

    @cached_property
    def compiler_options(self) -> dict[str, Any]:
        """Options of XLA's compiler for the step and for evaluation."""
        return xla.options(self.experiment.parallel) | xla.on_cpus(self.mesh)

    @cached_property
    def step(self) -> Any:
        """(state, batch) -> (state, metrics), jitted; the old state's memory is reused."""
        inputs = (self.partition_specs, self.batch_specs)
        function = jax.shard_map(
            self.step_function, mesh=self.mesh, in_specs=inputs, out_specs=(self.partition_specs, P()), check_vma=True
        )
        batch, alike = shardings(self.mesh, (self.batch_specs, P()))
        jitted = jax.jit(
            function,
            in_shardings=(self.state_shardings, batch),
            out_shardings=(self.state_shardings, alike),
            donate_argnums=0,
            compiler_options=self.compiler_options,
        )
        return xla.Jitted(jitted, self.mesh)

    @cached_property
    def evaluate(self) -> Any:
        """(parameters, batch) -> Evaluated, jitted. By microbatches, so that it takes no more memory than the step."""
        count_correct = self.placement.inputs.correct

        def function(parameters: Arrays, batch: Batches) -> Evaluated:
            step = self.evaluation
            weights = step.unsharded_params(parameters)

            def scored(part: Batches, weights: Arrays, stages: Stages) -> tuple[jax.Array, jax.Array]:
                loss, found = step.loss(None, weights, part, stages)
                return loss, match_varying(count_correct(found.output, part.targets), loss)

            def microbatch(part: Batches) -> Any:
                return self.schedule.forward(partial(scored, part), weights)

            losses, correct = lax.map(microbatch, step.microbatches(batch))
            count = lax.psum(jnp.sum(batch.targets != IGNORED), TOKENS)
            return Evaluated(lax.psum(losses.sum(), LOSS_AXES), count, lax.psum(correct.sum(), LOSS_AXES))

        specs = (self.partition_specs.parameters, self.batch_specs)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=Evaluated(P(), P(), P()))
        return xla.Jitted(jax.jit(mapped, compiler_options=self.compiler_options), self.mesh)

    @cached_property
    def all_valid(self) -> Any:
        """Arrays by name -> bool [] by name, jitted: all values are finite, and not negative in a mean of squares."""

        def valid(name: str, array: jax.Array) -> jax.Array:
            finite = jnp.isfinite(array)
            return (finite & (array >= 0) if is_square(name) else finite).all()

        return jax.jit(lambda arrays: {name: valid(name, array) for name, array in on_device(arrays).items()})

    def logits(self, parameters: Arrays, inputs: np.ndarray) -> np.ndarray:
        """Logits [B, T, V] of tokens [B, T], or [B, V] of images [B, Y, X, C], on the host, without padding."""
        placement = self.placement
        logits = on_host(self.forward(parameters, placement.times_to_devices(inputs)))
        return placement.times_in_order(logits)[..., : self.experiment.model.vocab]

    @cached_property
    def forward(self) -> Any:
        """(parameters, tokens or images in device order) -> logits, jitted."""

        def function(parameters: Arrays, inputs: jax.Array) -> jax.Array:
            step = self.evaluation
            logits = self.schedule.forward(
                lambda weights, stages: step.forward(None, weights, inputs, stages).output,
                step.unsharded_params(parameters),
            )
            total: jax.Array = lax.psum(logits, AXIS)
            return total

        specs = (self.partition_specs.parameters, self.batch_specs[0])
        out = self.placement.inputs.logits
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=out)
        return xla.Jitted(jax.jit(mapped), self.mesh)
