"""Everything derived from an experiment and a mesh: the model, its parameter specs and the compiled functions."""

import math
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
from jaxdist.data import IGNORED, Batch, Batches, Images, microbatch_order
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
from jaxdist.parallel.sharding import BATCH, LOSS_AXES, TOKENS
from jaxdist.runtime import xla
from jaxdist.runtime.processes import on_host
from jaxdist.training import loss_scale, optim
from jaxdist.training.step import Arrays, Step, TrainState


class Evaluated(NamedTuple):
    """Evaluation of a batch: sum of the loss in nats, number of valid tokens or images, and number of images whose
    class has the largest logit."""

    loss: Any
    count: Any
    right: Any


@dataclass(frozen=True, eq=False)
class Program:
    """One experiment on one mesh. Building it checks that every parameter fits (ConfigError) and allocates nothing."""

    experiment: Experiment
    mesh: Mesh

    def __post_init__(self) -> None:
        sharding.check(self.param_specs, axes_of(self.mesh), self.strategy)

    @cached_property
    def model(self) -> Any:
        return models.build(self.experiment.model)

    @cached_property
    def param_specs(self) -> dict[str, sharding.ParamSpec]:
        return models.param_specs(self.model)

    @cached_property
    def strategy(self) -> Strategy:
        return sharding.strategy(self.experiment.parallel)

    @cached_property
    def context(self) -> Context:
        gpu = self.mesh.devices.flat[0].platform == "gpu"
        return context(self.experiment.parallel, axes_of(self.mesh)["context"], fused=gpu)

    @cached_property
    def stacked(self) -> frozenset[str]:
        """The names of the parameters that all layers have."""
        return frozenset(name for name, spec in self.param_specs.items() if "layers" in spec.axes)

    @cached_property
    def schedule(self) -> Schedule:
        e = self.experiment
        return schedule(e.parallel, axes_of(self.mesh)[AXIS], e.train.accumulation, self.stacked)

    @cached_property
    def step_function(self) -> Step:
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
        """The step's model in evaluation mode: it uses running statistics, if it has any."""
        model = models.build(self.experiment.model)
        model.eval()
        return replace(self.step_function, model=model)

    # ---- what and where

    def initial(self) -> TrainState:
        """The starting state, from the seed and the parameters' names alone: the same bits on any mesh."""
        key, model = jax.random.key(self.experiment.train.seed), self.experiment.model

        def tokens(axis: str, size: int) -> int:
            """The size of an axis without padding of the vocabulary."""
            return model.vocab if axis == "vocab" and size == model.vocab_rows else size

        def draw(spec: sharding.ParamSpec) -> jax.Array:
            if not spec.std:
                return jnp.full(spec.shape, spec.mean, self.dtype_of(spec))
            named = jax.random.fold_in(key, zlib.crc32(spec.name.encode()))
            shape = [tokens(axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True)]
            values = spec.mean + spec.std * jax.random.normal(named, shape, jnp.float32)
            if shape != [*spec.shape]:  # the tokens' own rows are the same with any padding, which is their mean
                rows = [(0, size - drawn) for size, drawn in zip(spec.shape, shape, strict=True)]
                values = jnp.pad(values, rows, mode="mean")
            return values.astype(self.experiment.precision.parameters)

        return self.state_from({name: draw(spec) for name, spec in self.param_specs.items()})

    def state_from(self, parameters: Arrays) -> TrainState:
        """A fresh state around given parameters."""
        trained = {name: w for name, w in parameters.items() if not self.param_specs[name].statistic}
        optimizer = self.step_function.optimizer.init(trained)
        return TrainState(parameters, optimizer, loss_scale.start(self.experiment.precision))

    def dtype_of(self, spec: sharding.ParamSpec) -> Any:
        """The dtype at rest: of running statistics float32 or wider, of counts int32."""
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

        def of_state(path: Any, array: jax.ShapeDtypeStruct) -> P:
            spec = self.param_specs.get(getattr(path[-1], "key", ""))  # counts have no name of a parameter
            return spec.partition_spec(self.strategy.optimizer, array.shape) if spec else P()

        optimizer = jax.tree_util.tree_map_with_path(of_state, self.shapes.optimizer)
        return TrainState(parameters, optimizer, jax.tree.map(lambda _: P(), self.shapes.scaling))

    def shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

    @cached_property
    def state_shardings(self) -> TrainState:
        """Shardings of the state between steps, with `memory.offload` on the host."""
        parameters, optimizer, scaling = self.shardings(self.partition_specs)
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
        e, rows = self.experiment, self.experiment.train.batch
        shape = rows, *e.model.input_shape(e.data.sequence)
        if e.model.input_kind == "images":
            return Images(jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32))
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return Batch(tokens, tokens)

    @cached_property
    def batch_specs(self) -> Batches:
        """Rows over the axes BATCH; of tokens times over context, which no images are split by."""
        if self.experiment.model.input_kind == "images":
            return Images(P(TOKENS), P(TOKENS))
        return Batch(P(BATCH, "context"), P(BATCH, "context"))

    def order(self, length: int) -> np.ndarray:
        """The times of sequences of `length` in the order in which devices hold them."""
        return self.context.order(length, axes_of(self.mesh)["context"])

    @cached_property
    def layers(self) -> np.ndarray:
        """Indices of the layers [L] in the order in which devices hold them."""
        return self.schedule.order(self.experiment.model.layers)

    @cached_property
    def rows(self) -> np.ndarray:
        """The rows of the global batch that devices of this process have, which are what it reads of each batch."""
        size = self.experiment.train.batch
        indices = NamedSharding(self.mesh, P(BATCH)).addressable_devices_indices_map((size,)).values()
        bounds = [index[0].indices(size) for index in indices if index]
        return self.microbatch_order[min(start for start, *_ in bounds) : max(stop for _, stop, _ in bounds)]

    @cached_property
    def microbatch_order(self) -> np.ndarray:
        """The rows of a batch in the order in which devices hold them."""
        train, axes = self.experiment.train, axes_of(self.mesh)
        return microbatch_order(train.batch, math.prod(axes[axis] for axis in BATCH), train.accumulation)

    def place(self, batch: Batches) -> Batches:
        """A batch, of which this process has its `rows`, on the devices: each has its rows, and of tokens its times."""
        if isinstance(batch, Batch):
            batch = Batch(*(x[:, self.order(x.shape[1])] for x in batch))
        shardings = self.shardings(self.batch_specs)
        if not self.mesh.is_multi_process:
            local: Batches = jax.device_put(batch, shardings)
            return local

        def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
            array: jax.Array = jax.make_array_from_process_local_data(
                sharding, x, (self.experiment.train.batch, *x.shape[1:])
            )
            return array

        placed: Batches = jax.tree.map(put, batch, shardings)
        return placed

    # ---- compiled functions

    def initialize(self) -> TrainState:
        """The starting state, born sharded: no device holds more than its share."""
        state: TrainState = self.to_device_order(jax.jit(self.initial, out_shardings=self.state_shardings)())
        return state

    def to_device_order(self, tree: Any) -> Any:
        """Arrays by parameter's name, whose layers are in order, in the order in which devices hold them."""
        return self.reordered(tree, self.layers)

    def to_checkpoint_order(self, tree: Any) -> Any:
        """The inverse of `to_device_order`: layers in order, as in checkpoints."""
        return self.reordered(tree, np.argsort(self.layers))

    def reordered(self, tree: Any, order: np.ndarray) -> Any:
        """Reorder one array at a time: a moving array is held twice."""
        if (order == np.arange(len(order))).all():
            return tree

        def one(path: Any, a: jax.Array) -> jax.Array:
            if getattr(path[-1], "key", "") not in self.stacked:
                return a
            moved: jax.Array = jax.jit(lambda a: a[order], out_shardings=a.sharding)(a)
            return moved

        return jax.tree_util.tree_map_with_path(one, tree)

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
        batch, alike = self.shardings((self.batch_specs, P()))
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
        images = self.experiment.model.input_kind == "images"

        def function(parameters: Arrays, batch: Batches) -> Evaluated:
            step = self.evaluation
            weights = step.gathered(parameters)

            def scored(part: Batches, weights: Arrays, stages: Stages) -> tuple[jax.Array, jax.Array]:
                loss, made = step.loss(None, weights, part, stages)
                right = jnp.sum(made.output.argmax(-1) == part.targets) if images else jnp.int32(0)
                return loss, match_varying(right, loss)

            def microbatch(part: Batches) -> Any:
                return self.schedule.forward(partial(scored, part), weights)

            losses, right = lax.map(microbatch, step.microbatches(batch))
            count = lax.psum(jnp.sum(batch.targets != IGNORED), TOKENS)
            return Evaluated(lax.psum(losses.sum(), LOSS_AXES), count, lax.psum(right.sum(), LOSS_AXES))

        specs = (self.partition_specs.parameters, self.batch_specs)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=Evaluated(P(), P(), P()))
        return xla.Jitted(jax.jit(mapped, compiler_options=self.compiler_options), self.mesh)

    @cached_property
    def sound(self) -> Any:
        """arrays -> by name whether all of it is finite, and of a mean of squares not below zero, jitted."""

        def of(name: str, array: jax.Array) -> jax.Array:
            good = jnp.isfinite(array)
            return (good & (array >= 0) if is_square(name) else good).all()

        return jax.jit(lambda arrays: {name: of(name, array) for name, array in on_device(arrays).items()})

    def logits(self, parameters: Arrays, tokens: np.ndarray) -> np.ndarray:
        """Logits [B, T, V] of tokens [B, T], or [B, V] of images [B, Y, X, C], on the host, without padding."""
        if self.experiment.model.input_kind == "images":
            return on_host(self.forward(parameters, tokens))
        order = self.order(tokens.shape[1])
        return on_host(self.forward(parameters, tokens[:, order]))[:, np.argsort(order), : self.experiment.model.vocab]

    @cached_property
    def forward(self) -> Any:
        """(parameters, tokens or images as devices hold them) -> their logits, jitted."""

        def function(parameters: Arrays, inputs: jax.Array) -> jax.Array:
            step = self.evaluation
            logits = self.schedule.forward(
                lambda weights, stages: step.forward(None, weights, inputs, stages).output, step.gathered(parameters)
            )
            total: jax.Array = lax.psum(logits, AXIS)
            return total

        specs = (self.partition_specs.parameters, self.batch_specs[0])
        logits = P(TOKENS) if self.experiment.model.input_kind == "images" else P(BATCH, "context", "tensor")
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=logits)
        return xla.Jitted(jax.jit(mapped), self.mesh)
