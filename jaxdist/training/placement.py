"""Orders in which the devices of a mesh hold layers, rows and times, where checkpoints and data have them in order."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import Experiment
from jaxdist.data import Batches, microbatch_order
from jaxdist.parallel.collectives import TIME, Context
from jaxdist.parallel.mesh import axes_of
from jaxdist.parallel.pipeline import Schedule
from jaxdist.parallel.sharding import BATCH
from jaxdist.training.inputs import INPUTS, InputKind

A = TypeVar("A", jax.Array, np.ndarray)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The NamedSharding of each PartitionSpec of a pytree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


@dataclass(frozen=True, eq=False)
class Placement:
    """Orders of an experiment's layers, rows and times on a mesh; `stacked`: names of the parameters [L, ...]."""

    experiment: Experiment
    mesh: Mesh
    context: Context
    schedule: Schedule
    stacked: frozenset[str]

    @property
    def inputs(self) -> InputKind:
        """The row of the model's kind of inputs."""
        return INPUTS[self.experiment.model.input_kind]

    # ---- layers

    @cached_property
    def layers(self) -> np.ndarray:
        """Indices of the layers [L] in the order in which devices hold them."""
        return self.schedule.order(self.experiment.model.layers)

    def to_device_order(self, tree: Any) -> Any:
        """Reorder the layers of arrays by parameter name from checkpoint order to device order."""
        return self._reordered(tree, self.layers)

    def to_checkpoint_order(self, tree: Any) -> Any:
        """The inverse of `to_device_order`: layers from first to last."""
        return self._reordered(tree, np.argsort(self.layers))

    def _reordered(self, tree: Any, order: np.ndarray) -> Any:
        """Reorder one array at a time: a moving array is held twice."""
        if (order == np.arange(len(order))).all():
            return tree

        def one(path: Any, a: jax.Array) -> jax.Array:
            if getattr(path[-1], "key", "") not in self.stacked:
                return a
            moved: jax.Array = jax.jit(lambda a: a[order], out_shardings=a.sharding)(a)
            return moved

        return jax.tree_util.tree_map_with_path(one, tree)

    # ---- rows and times

    @cached_property
    def batch_rows(self) -> np.ndarray:
        """Indices of the rows [B] of the global batch in the order in which devices hold them."""
        train, axes = self.experiment.train, axes_of(self.mesh)
        return microbatch_order(train.batch, math.prod(axes[axis] for axis in BATCH), train.accumulation)

    @cached_property
    def rows(self) -> np.ndarray:
        """Indices of the rows of the global batch that devices of this process hold: those that it reads."""
        size = self.experiment.train.batch
        indices = NamedSharding(self.mesh, P(BATCH)).addressable_devices_indices_map((size,)).values()
        bounds = [index[0].indices(size) for index in indices if index]
        return self.batch_rows[min(start for start, *_ in bounds) : max(stop for _, stop, _ in bounds)]

    def times(self, length: int) -> np.ndarray:
        """Indices of the times [T] of sequences of `length` in the order in which devices hold them."""
        return self.context.order(length, axes_of(self.mesh)["context"])

    def times_to_devices(self, x: A) -> A:
        """Tokens [B, T, ...] with their times in device order; images as they are."""
        return x[:, self.times(x.shape[TIME])] if self.inputs.has_times else x

    def times_in_order(self, x: A) -> A:
        """The inverse of `times_to_devices`."""
        return x[:, np.argsort(self.times(x.shape[TIME]))] if self.inputs.has_times else x

    def put(self, batch: Batches) -> Batches:
        """A batch, of which this process has its `rows`, on the devices: each has its rows and times."""
        batch = type(batch)(*map(self.times_to_devices, batch))
        places = shardings(self.mesh, self.inputs.specs)
        if not self.mesh.is_multi_process:
            local: Batches = jax.device_put(batch, places)
            return local

        def put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
            array: jax.Array = jax.make_array_from_process_local_data(
                sharding, x, (self.experiment.train.batch, *x.shape[1:])
            )
            return array

        placed: Batches = jax.tree.map(put, batch, places)
        return placed
