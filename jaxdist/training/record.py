"""Record a step's tensors, for a comparison with another run (`jaxdist/config/record.py`).

The training step is not changed: a second program takes the same state and batch. Gradients and the update come from
the step's own methods; activations from a forward pass in which the layers are unrolled, what modules return
and what they `tap` is noted, and a probe of zeros is added to it, whose gradient is that of what was noted. For that
pass each stage of a pipeline has the layers of all.

Outputs of modules are noted by the modules of a copy of the model, each an instance of a subclass of its class: neither
the model nor its classes change. A tap at each module's end would be a line in every module of a family, and plugins'
modules without one would be missing in records. flax's `nnx.capture(method_outputs=...)` rewrites the classes' methods
for all models of the process, and adds no probes.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.config.record import LOGITS
from jaxdist.data import IGNORED, Batches
from jaxdist.ops.varying import at_least_f32, mark_varying
from jaxdist.parallel.collectives import TIME
from jaxdist.parallel.mesh import axes_of
from jaxdist.parallel.pipeline import AXIS, from_first_stage
from jaxdist.parallel.rematerialization import Rematerialize, on_device
from jaxdist.parallel.sharding import LOSS_AXES, TOKENS
from jaxdist.runtime.processes import on_host
from jaxdist.runtime.xla import Jitted
from jaxdist.training import loss_scale
from jaxdist.training.optim import clip_by_norm, kept_of
from jaxdist.training.program import Program
from jaxdist.training.step import Arrays, TrainState

OF_ROWS = ("batch/", "activation/", "activation_gradient/")  # kinds of arrays [B, ...], of tokens [B, T, ...]

Note = Callable[[str, jax.Array], jax.Array]


class NoRematerialization(Rematerialize):
    """No rematerialization: what a tap notes within a block must be visible outside it."""

    def block(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """`block` itself."""
        return block


NO_REMAT = NoRematerialization("none", 1)


@dataclass(eq=False)
class Taps:
    """Pass what the modules of `tapped(model)` return, of several results the first, through `note`, with the module's
    path; and what a module names by `Parallel.tap`, with its own path and that name."""

    note: Note
    path: list[str] = field(default_factory=list)
    stack: str | None = None  # the path of the stack whose layers run one by one
    layer: int | None = None
    calls: Counter[str] = field(default_factory=Counter)

    def tapped(self, model: nnx.Module) -> nnx.Module:
        """A copy of `model`, whose modules know their paths and these taps."""
        named: nnx.Module = nnx.merge(*nnx.split(model))
        module: Any
        for path, module in nnx.iter_modules(named):
            if callable(module):
                module.path, module.taps = ".".join(map(str, path)), self
                object.__setattr__(module, "__class__", tapping(module.__class__))
        return named

    def called(self, module: Any, call: Callable[[], Any]) -> Any:
        """Note and return the output of `call` of a module."""
        if self.layer is not None and self.stack is None:
            self.stack = module.path
        path = module.path if self.stack is None else module.path.replace(self.stack, f"{self.stack}.{self.layer}", 1)
        self.path.append(path)
        y = call()
        self.path.pop()
        several = isinstance(y, tuple)
        noted = self.note(path or LOGITS, y[0] if several else y)
        return (noted, *y[1:]) if several else noted

    def named(self, name: str, x: jax.Array) -> jax.Array:
        """`x`, noted as `name` of the module that runs; what that names so again, as `name#2`."""
        path = f"{self.path[-1]}.{name}"
        self.calls[path] += 1
        return self.note(path if self.calls[path] == 1 else f"{path}#{self.calls[path]}", x)

    def scan(self, block: Callable[[Any, Any], Any], x: Any, weights: Any) -> Any:
        """`x` after the `block` of each layer, whose first call is that of a module of the stack."""
        for layer in range(jax.tree.leaves(weights)[0].shape[0]):
            self.layer = layer
            x = block(x, jax.tree.map(lambda w, layer=layer: w[layer], weights))
        self.layer = self.stack = None
        return x


@cache
def tapping(cls: Any) -> Any:
    """A subclass of a class of modules, whose instances pass what they return through their taps."""

    def call(self: Any, *inputs: Any, **named: Any) -> Any:
        return self.taps.called(self, partial(cls.__call__, self, *inputs, **named))

    return type(cls)(cls.__name__, (cls,), {"__call__": call})


@dataclass(frozen=True)
class Recorder:
    """Records of single steps of a program."""

    program: Program

    def __call__(self, state: TrainState, batch: Batches) -> dict[str, np.ndarray]:
        """Tensors that `record.tensors` selects, of the step that starts from `state`, on the host."""
        every = self.program.experiment.record.tensors == "all"
        before = {"batch": batch._asdict(), "start": state.parameters} if every else {}
        kinds = before | (self.forward(state, batch) if every else {}) | self.update(state, batch)
        if not every:
            kinds = {kind: kinds[kind] for kind in ("scalar", "gradient")}
        found = {f"{kind}/{name}": on_host(a) for kind, arrays in kinds.items() for name, a in arrays.items()}
        placement = self.program.placement
        rows, layers = np.argsort(placement.batch_rows), np.argsort(placement.layers)

        def reorder(name: str, a: np.ndarray) -> np.ndarray:
            if name.startswith(OF_ROWS):
                return placement.times_in_order(a[rows])
            return a[layers] if name.partition("/")[2] in placement.stacked else a

        return {name: reorder(name, a) for name, a in found.items()}

    def first_nonfinite(self, state: TrainState, batch: Batches) -> str | None:
        """The first tensor of the step that begins with `state` that is not finite, in the order of a step."""
        activations = self.forward(state, batch)
        kinds = {"weight": state.parameters, "activation": activations["activation"]}
        kinds |= {"gradient of activation": activations["activation_gradient"]}
        kinds |= {"gradient": dict(reversed(self.update(state, batch)["gradient"].items()))}
        for kind, arrays in kinds.items():
            for name, array in arrays.items():
                if not bool(jnp.isfinite(on_device(array)).all()):
                    return f"{kind} {name}"
        return None

    def mapped(self, function: Callable[..., Any], out_specs: Any) -> Any:
        """`function` of (state, batch) on every device."""
        inputs = (self.program.partition_specs, self.program.batch_specs)
        mapped = jax.shard_map(function, mesh=self.program.mesh, in_specs=inputs, out_specs=out_specs)
        return Jitted(jax.jit(mapped), self.program.mesh)

    @cached_property
    def update(self) -> Any:
        """(state, batch) -> loss, gradients and what the optimizer makes of them, by the step's own methods."""
        step, program = self.program.step_function, self.program
        clip = clip_by_norm(program.experiment.optimizer.clip)

        def function(state: TrainState, batch: Batches) -> dict[str, Any]:
            loss, gradients, statistics = step.gradient(state, batch)
            norm = step.norm(gradients)
            clipped, _ = clip.update(gradients, optax.EmptyState(), norm=norm)
            after = step.update(state, gradients, statistics, loss, norm)
            stages = {"gradient": gradients, "clipped": clipped, **kept_of(after.optimizer)}
            return {"scalar": {"loss": loss, "grad_norm": norm}, **stages, "weights": after.parameters}

        param_specs = {name: spec for name, spec in program.param_specs.items() if not spec.statistic}
        pieces = {name: spec.partition_spec(program.strategy.optimizer) for name, spec in param_specs.items()}
        specs = {"gradient": pieces, "clipped": pieces, **kept_of(program.partition_specs.optimizer)}
        return self.mapped(function, {"scalar": P(), **specs, "weights": program.partition_specs.parameters})

    @cached_property
    def forward(self) -> Any:
        """(state, batch) -> activations in the order of the forward pass, and their gradients from last to first."""
        sequence = self.program.experiment.data.sequence
        shapes: dict[str, Any] = {}  # name -> type of the activation on a device

        def look(name: str, y: jax.Array) -> jax.Array:
            shapes[name] = jax.typeof(y)
            return y

        def see(state: TrainState, batch: Batches) -> jax.Array:
            one = jax.tree.map(lambda x: x[0], self.program.step_function.microbatches(batch))
            total: jax.Array = lax.psum(self.loss(look, state, one, jnp.ones(())), LOSS_AXES)
            return total

        def axes(value: Any) -> tuple[str, ...]:
            return tuple(value.manual_axis_type.varying)

        def spec(value: Any) -> P:
            split = self.program.placement.inputs.spec
            dims: list[Any] = [*split, *[None] * (value.ndim - len(split))]
            if "tensor" in axes(value):  # which splits heads or columns, or times
                own_times = value.shape[TIME] < sequence // axes_of(self.program.mesh)["context"]
                dims[TIME if own_times else 2] = ("context", "tensor") if own_times else "tensor"
            return P(*dims)

        jax.eval_shape(self.mapped(see, P()), self.program.abstract, self.program.abstract_batch)

        def function(state: TrainState, batch: Batches) -> dict[str, Arrays]:
            count = lax.psum(jnp.sum(batch.targets != IGNORED), TOKENS)
            scale = loss_scale.factor(state.scaling)

            def one_microbatch(microbatch: Batches) -> dict[str, Arrays]:
                def loss(probes: Arrays) -> tuple[jax.Array, Arrays]:
                    noted: Arrays = {}

                    def note(name: str, y: jax.Array) -> jax.Array:
                        noted[name] = y + probes[name]
                        return noted[name]

                    return self.loss(note, state, microbatch, count), noted

                probes = {n: mark_varying(jnp.zeros(t.shape, t.dtype), axes(t)) for n, t in shapes.items()}
                gradients, noted = jax.grad(loss, has_aux=True)(probes)
                unscaled = jax.tree.map(lambda g: at_least_f32(g) / scale, gradients)
                return {"activation": noted, "activation_gradient": unscaled}

            found = lax.map(one_microbatch, self.program.step_function.microbatches(batch))
            rows: dict[str, Arrays] = from_first_stage(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found))
            return rows

        specs = {n: spec(t) for n, t in shapes.items()}
        run = self.mapped(function, {"activation": specs, "activation_gradient": specs})

        def ordered(state: TrainState, batch: Batches) -> dict[str, Arrays]:
            found = run(state, batch)  # jit sorts by name
            orders = {"activation": list(shapes), "activation_gradient": list(shapes)[::-1]}
            return {kind: {name: found[kind][name] for name in order} for kind, order in orders.items()}

        return ordered

    def loss(self, note: Note, state: TrainState, microbatch: Batches, count: jax.Array) -> jax.Array:
        """This device's part of what a microbatch adds to the scaled loss of the global batch, of whose targets `count`
        are valid; its activations are passed through `note`."""
        step = self.program.step_function
        of_all = np.argsort(self.program.placement.layers)
        weights = {
            name: lax.all_gather(w, AXIS, tiled=True)[of_all] if name in self.program.stacked else w
            for name, w in step.unsharded_params(on_device(state.parameters)).items()
        }
        taps = Taps(note)
        recorded = replace(
            step, model=taps.tapped(step.model), parallel=replace(step.parallel, taps=taps), rematerialize=NO_REMAT,
            loss_chunks=1,
        )  # fmt: skip
        loss, found = recorded.loss(None, weights, microbatch)
        return (loss / count + found.added / step.accumulation) * loss_scale.factor(state.scaling)
