"""A user's model on either side: its steps, and what is seen of one of them, under torch's names.

Both sides have the same methods. `observe` looks at a step without taking it: gradients of the loss by parameters
and by what modules put out. Nothing that computes is shared, as everywhere.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor, nn

from jaxdist.accounting import traffic
from jaxdist.config import ConfigError, Optimizer
from jaxdist.convert.mappings.mapping import KeyMapping
from jaxdist.convert.mappings.transforms import output_to_theirs
from jaxdist.convert.mappings.trees import flatten, shapes, unflatten
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.training import optim
from parity_tests.runs import compare
from parity_tests.runs.jax_taps import jax_taps
from parity_tests.runs.names import base
from parity_tests.runs.torch_taps import torch_taps
from torch_ref.runtime.compat import TorchDispatchMode
from torch_ref.training import optim as torch_optim

Arrays = dict[str, np.ndarray]
Batch = Mapping[str, np.ndarray]
Values = dict[str, float | None]  # loss, grad_norm, learning_rate; None for what the user's own step does not report
JaxLoss = Callable[[Any, Any], jax.Array]
TorchLoss = Callable[[nn.Module, Any], Tensor]
Loss = TypeVar("Loss")
Step = TypeVar("Step")


class JaxStep(Protocol):
    """A user's own step in JAX: `start(parameters)` makes its state, `parameters(state)` takes them out again."""

    def start(self, parameters: Any) -> Any: ...
    def step(self, state: Any, batch: Any) -> tuple[Any, jax.Array]: ...
    def parameters(self, state: Any) -> Any: ...


TorchStep = Callable[[nn.Module], Callable[[Any], Tensor]]
"""A user's own step in torch: made for a module, it takes a batch, updates the module and returns the loss."""


class Narrow(NamedTuple):
    """An operation whose result has fewer digits than the side's dtype: its name, and the dtype of the result."""

    operation: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.operation} in {self.dtype}"

    @property
    def rounding(self) -> float:
        return compare.rounding(self.dtype)


class Side(Protocol):
    """A model in training. Everything is numpy, under torch's names."""

    def step(self, batch: Batch) -> Values: ...
    def weights(self) -> Arrays: ...
    def moments(self) -> Arrays:
        """The optimizer's state, as `exp_avg/<parameter>`; empty for a user's own step."""

    def observe(self, batch: Batch) -> Arrays:
        """`activation/<module>`, `scalar/loss`, `activation_gradient/<module>` backward, `gradient/<parameter>`."""

    def seen(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        """The shapes of the activations that `observe` would find, by module."""

    def measured(self, batch: Batch) -> dict[str, Any]:
        """Entries of summary.json on the mesh, or on the bytes that a step sends; empty if it can't send any."""

    def narrow(self, batch: Batch) -> dict[str, Narrow]:
        """`loss`, and `step` of a user's own -> its first operation in the dtype of the fewest digits, where that has
        fewer than the side's. Numbers by themselves do not count in a step, whose optimizer counts by them.
        """


class Recipe(NamedTuple, Generic[Loss, Step]):
    """How a side trains: by its loss and our optimizer in that many steps, or by the user's `own` step."""

    loss: Loss | None
    optimizer: Optimizer
    steps: int
    own: Step | None = None
    modules: Mapping[str, str] | None = None
    """Modules whose outputs are noted, ours -> theirs; None: all that have a counterpart."""


class JaxSide:
    """JAX in one dtype. Use it with 64-bit numbers enabled where that is float64."""

    def __init__(
        self,
        tree: Any,
        dtype: str,
        mapping: KeyMapping,
        recipe: Recipe[JaxLoss, JaxStep],
    ):
        """`tree` has the structure and shapes of the parameters, whose values come with `begin`."""
        loss, optimizer, steps, own, modules = recipe
        self.tree, self.dtype, self.mapping, self.loss = tree, dtype, mapping, loss
        self.shapes = shapes(tree)
        self.module_pairs = mapping.modules(self.shapes)
        found = {path: module.theirs for path, module in self.module_pairs.items() if not module.stacked}
        self.modules = found if modules is None else modules
        self.own, self.optimizer, self.steps = own, optimizer, steps
        self.chain = self.ruled()
        self.initial = jax.jit(self.chain.init)
        self.advance: Any = jax.jit(self._advance) if own is None else own.step
        self.look: Any = jax.jit(jax.value_and_grad(self._noted, argnums=(0, 1), has_aux=True))

    def begin(self, parameters: Mapping[str, np.ndarray]) -> "JaxSide":
        """Start from these parameters, ours by name; a second start compiles nothing anew."""
        self.count = 0
        named = {name: self.cast(array) for name, array in parameters.items()}
        tree = unflatten(self.tree, named)
        self.state: Any = (named, self.initial(named)) if self.own is None else self.own.start(tree)
        return self

    def cast(self, array: Any) -> jax.Array:
        array = np.asarray(array)
        return jnp.asarray(array if array.dtype.kind in "iub" else array.astype(self.dtype))

    def ready(self, batch: Batch) -> Any:
        return {name: self.cast(plain(array)) for name, array in batch.items()}

    def ruled(self) -> optax.GradientTransformationExtraArgs:
        """jaxdist's optimizer, with the decay of what is a matrix in torch: a bias [H, C] of ours is none."""
        o, theirs = self.optimizer, self.mapping.their_shapes(self.shapes)
        axes = {pair.ours: len(theirs[pair.theirs]) for pair in self.mapping.pairs(self.shapes)}
        decays = {name: axes.get(name, len(shape)) >= 2 for name, shape in self.shapes.items()}
        param_specs = {
            name: ParamSpec(name, shape, ("positions",) * len(shape), 0, 0) for name, shape in self.shapes.items()
        }
        return optim.chain(o, self.steps, decays, optim.rule(o, param_specs))

    def _advance(self, state: Any, batch: Any) -> Any:
        parameters, moments = state
        loss, gradients = jax.value_and_grad(self._loss)(parameters, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in gradients.values()))
        updates, moments = self.chain.update(gradients, moments, parameters, norm=norm)
        return (optax.apply_updates(parameters, updates), moments), (loss, norm)

    def _loss(self, parameters: Mapping[str, jax.Array], batch: Any) -> jax.Array:
        assert self.loss is not None
        return self.loss(unflatten(self.tree, parameters), batch)

    def step(self, batch: Batch) -> Values:
        self.count += 1
        self.state, results = self.advance(self.state, self.ready(batch))
        if self.own is not None:
            return {"loss": float(results), "grad_norm": None, "learning_rate": None}
        loss, norm = map(float, results)
        rate = optim.learning_rate(self.optimizer, self.steps, jnp.asarray(self.count))
        return {"loss": loss, "grad_norm": norm, "learning_rate": float(rate)}

    def parameters(self) -> dict[str, jax.Array]:
        """Our parameters, by name."""
        return self.state[0] if self.own is None else flatten(self.own.parameters(self.state))

    def theirs(self, named: Mapping[str, Any], kind: str = "") -> Arrays:
        tensors = self.mapping.to_theirs({name: np.asarray(array) for name, array in named.items()})
        return {kind + name: tensor for name, tensor in tensors.items()}

    def weights(self) -> Arrays:
        return self.theirs(self.parameters())

    def moments(self) -> Arrays:
        if self.own is not None:
            return {}
        kept = optim.kept_of(self.state[1])
        return {name: a for kind, tree in kept.items() for name, a in self.theirs(tree, f"{kind}/").items()}

    def observe(self, batch: Batch) -> Arrays:
        if self.loss is None:
            return {}
        ready = self.ready(batch)
        outputs = self.outputs(ready)
        zeros = {path: jnp.zeros(y.shape, y.dtype) for path, y in outputs.items()}
        (loss, noted), (gradients, backward) = self.look(self.parameters(), zeros, ready)
        found = {f"activation/{self.common(p)}": self.laid_out(p, noted[p]) for p in outputs}
        found["scalar/loss"] = np.asarray(loss)
        for path in reversed(outputs):
            found[f"activation_gradient/{self.common(path)}"] = self.laid_out(path, backward[path])
        return found | self.theirs(gradients, "gradient/")

    def outputs(self, batch: Any) -> dict[str, Any]:
        """Shapes of what the modules put out, in forward order, by our paths."""
        seen: dict[str, Any] = {}

        def look(parameters: Any, batch: Any) -> jax.Array:
            with jax_taps(lambda path, y: seen.setdefault(path, y)):
                return self._loss(parameters, batch)

        check_loss("jax_loss", jax.eval_shape(look, self.parameters(), batch))
        return {p: jax.ShapeDtypeStruct(y.shape, y.dtype) for p, y in seen.items() if base(p) in self.modules}

    def _noted(self, parameters: Any, probes: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, and outputs with a probe of zeros added, whose gradient is the output's."""
        noted: dict[str, jax.Array] = {}

        def note(path: str, y: jax.Array) -> jax.Array:
            if path in probes:
                y = noted[path] = y + probes[path]
            return y

        with jax_taps(note):
            return self._loss(parameters, batch), noted

    def common(self, path: str) -> str:
        """The name of theirs of an output of ours."""
        return path.replace(base(path), self.modules[base(path)], 1)

    def laid_out(self, path: str, array: Any) -> np.ndarray:
        return output_to_theirs(self.module_pairs[base(path)].output, np.asarray(array))

    def seen(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        if self.loss is None:
            return {}
        found = self.outputs(self.ready(batch)).items()
        return {self.common(path): self.laid_out(path, np.empty(y.shape, np.bool_)).shape for path, y in found}

    def measured(self, batch: Batch) -> dict[str, Any]:
        traced = self.jaxpr(self.ready(batch))
        return {"sent_bytes": math.fsum(collective.bytes for collective in traffic.count(traced))} if traced else {}

    def jaxpr(self, ready: Any) -> Any:
        """The jaxpr of a step; None for one of the user's own that cannot be traced."""
        try:
            return jax.make_jaxpr(self.advance)(self.state, ready)
        except Exception:  # of many kinds: a step of the user's own may ask for numbers, which a trace has not
            if self.own is None:
                raise
            return None

    def narrow(self, batch: Batch) -> dict[str, Narrow]:
        ready, found = self.ready(batch), {}
        if self.loss is not None:
            traced = jax.make_jaxpr(jax.value_and_grad(self._loss))(self.parameters(), ready)
            found["loss"] = narrower(traced.jaxpr, self.dtype)
        if self.own is not None and (step := self.jaxpr(ready)):
            found["step"] = narrower(step.jaxpr, self.dtype, axes=1)
        return {name: narrow for name, narrow in found.items() if narrow}


class TorchSide:
    """torch in one dtype, from a copy of the module with the given tensors loaded."""

    def __init__(
        self,
        module: nn.Module,
        start: Mapping[str, np.ndarray],
        dtype: str,
        recipe: Recipe[TorchLoss, TorchStep],
        decays: Mapping[str, bool] | None = None,
    ):
        """`decays`: which parameters do, where that is not all matrices."""
        loss, optimizer, steps, own, modules = recipe
        self.module = copy.deepcopy(module).to(getattr(torch, dtype))
        self.dtype, self.names, self.loss = getattr(torch, dtype), list(start), loss
        load(self.module, start)
        self.modules = None if modules is None else set(modules.values())
        self.optimizer, self.steps, self.count = optimizer, steps, 0
        self.own = None if own is None else own(self.module)
        if own is None:
            self.ruled = self.optimizer_of(decays or {})

    def optimizer_of(self, decays: Mapping[str, bool]) -> torch.optim.Optimizer:
        """Our optimizer, for a side without a step of its own."""
        o, trained = self.optimizer, [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        decaying = [decays.get(name, p.ndim >= 2) for name, p in trained]
        groups: list[dict[str, Any]] = [
            {"params": [p for (_, p), d in zip(trained, decaying, strict=True) if d == which], "weight_decay": decay}
            for which, decay in ((True, o.weight_decay), (False, 0.0))
        ]
        rule = torch_optim.rule_of(o)
        return rule.optimizer(groups, lr=o.learning_rate, **rule.settings(o))

    def ready(self, batch: Batch) -> dict[str, Tensor]:
        """Fields as `plain`, floating-point ones in the dtype of the side, and int32 as torch's own, int64."""

        def tensor(array: np.ndarray) -> Tensor:
            t = torch.from_numpy(np.array(plain(array)))
            return t.to(self.dtype) if t.is_floating_point() else t.long() if t.dtype == torch.int32 else t

        return {name: tensor(array) for name, array in batch.items()}

    def step(self, batch: Batch) -> Values:
        self.count += 1
        if self.own is not None:
            with nothing_drawn("torch_step"):
                loss = torch.as_tensor(self.own(self.ready(batch)), dtype=torch.float64).detach()
            return {"loss": float(loss), "grad_norm": None, "learning_rate": None}
        assert self.loss is not None
        self.ruled.zero_grad(set_to_none=True)
        with nothing_drawn("torch_loss"):
            loss = self.loss(self.module, self.ready(batch))
            loss.backward()
        norm = torch_optim.clip(self.module.parameters(), self.optimizer.clip)
        rate = torch_optim.learning_rate(self.optimizer, self.steps, self.count)
        for group in self.ruled.param_groups:
            group["lr"] = rate
        self.ruled.step()
        return {"loss": float(loss.detach()), "grad_norm": float(norm), "learning_rate": rate}

    def weights(self) -> Arrays:
        tensors = self.module.state_dict()
        return {name: tensors[name].numpy(force=True).copy() for name in self.names}

    def moments(self) -> Arrays:
        if self.own is not None:
            return {}
        found: Arrays = {}
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for kind in self.optimizer.kept:
            for name in self.names:
                if name in parameters and kind in self.ruled.state[parameters[name]]:
                    found[f"{kind}/{name}"] = self.ruled.state[parameters[name]][kind].numpy(force=True).copy()
        return found

    def observe(self, batch: Batch) -> Arrays:
        if self.loss is None:
            return {}
        module = copy.deepcopy(self.module)  # a look changes no buffer and no gradient
        loss, noted, values = self.forward(module, batch)
        trained = {n: p for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad}
        targets = {f"activation_gradient/{n}": y for n, y in reversed(noted.items()) if y.requires_grad}
        targets |= {f"gradient/{name}": trained[name] for name in self.names if name in trained}
        gradients = torch.autograd.grad(loss, list(targets.values()), allow_unused=True, materialize_grads=True)
        found = {f"activation/{name}": y for name, y in values.items()} | {"scalar/loss": loss}
        found |= dict(zip(targets, gradients, strict=True))
        return {name: tensor.detach().numpy(force=True).copy() for name, tensor in found.items()}

    def forward(self, module: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The loss, what modules put out, and its values then: a later operation may change an output in place."""
        assert self.loss is not None
        noted: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}

        def note(path: str, y: Tensor) -> None:
            if self.modules is None or base(path) in self.modules:
                noted[path], values[path] = y, y.detach().clone()

        with torch_taps(module, note):
            return self.loss(module, self.ready(batch)), noted, values

    def seen(self, batch: Batch) -> dict[str, tuple[int, ...]]:
        if self.loss is None:
            return {}
        loss, _, values = self.forward(copy.deepcopy(self.module), batch)
        check_loss("torch_loss", loss)
        if not loss.requires_grad:
            raise ConfigError(
                "torch_loss returns a number without a gradient; leave out no_grad, detach and the like, and let the "
                "module's parameters require theirs"
            )
        return {path: tuple(y.shape) for path, y in values.items()}

    def measured(self, batch: Batch) -> dict[str, Any]:
        return {}  # there is no process group to send to

    def narrow(self, batch: Batch) -> dict[str, Narrow]:
        ready, found = self.ready(batch), {}  # what a batch comes in is not the model's doing
        if self.loss is not None:
            module = copy.deepcopy(self.module)
            with _Narrower(self.dtype) as seen:
                self.loss(module, ready).backward()
            found["loss"] = seen.narrow
        if self.own is not None:
            with _Narrower(self.dtype, axes=1) as seen:
                self.own(ready)
            found["step"] = seen.narrow
        return {name: narrow for name, narrow in found.items() if narrow}


class _Narrower(TorchDispatchMode):
    """`narrower` of what torch computes within it."""

    def __init__(self, dtype: torch.dtype, axes: int = 0):
        super().__init__()
        self.eps, self.axes = torch.finfo(dtype).eps, axes
        self.narrow: Narrow | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        for part in y if isinstance(y, tuple | list) else (y,):
            floating = isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= self.axes
            if floating and (eps := torch.finfo(part.dtype).eps) > self.eps:
                dtype = str(part.dtype).removeprefix("torch.")
                self.eps, self.narrow = eps, Narrow(func.overloadpacket.__name__, dtype)
        return y


def plain(array: Any) -> np.ndarray:
    """A field of a batch as both sides take it: floating-point numbers in float64, which each rounds to its dtype;
    bool, and bytes, with which arithmetic may leave their range; all other whole numbers in int32, JAX's own."""
    array = np.asarray(array)
    if array.dtype in (np.bool_, np.uint8):
        return array
    return array.astype(np.int32 if array.dtype.kind in "iu" else np.float64)


@contextmanager
def nothing_drawn(what: str) -> Iterator[None]:
    """Raises ConfigError where torch has drawn random numbers within: what they make equals nothing."""
    before = torch.get_rng_state()
    yield
    if not torch.equal(torch.get_rng_state(), before):
        raise ConfigError(
            f"{what} draws random numbers, as dropout does in train mode, and so equals nothing; call "
            "torch_module.eval(), or set the rate to 0"
        )


def check_loss(name: str, loss: Any) -> None:
    """Raises ConfigError unless `loss` is a scalar."""
    if getattr(loss, "shape", None) != ():
        shown = f"an array of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else repr(loss)
        raise ConfigError(f"{name} returns {shown}, not a scalar; give the mean over the batch, or the sum")


def narrower(jaxpr: Any, dtype: str, axes: int = 0) -> Narrow | None:
    """The first operation in the dtype of the fewest digits among those of a jaxpr whose results have at least that
    many axes; None if none has fewer than `dtype`."""
    eps, narrow = jnp.finfo(dtype).eps, None
    for equation, *_ in traffic.walk(jaxpr, 1, {}):
        for aval in (variable.aval for variable in equation.outvars):
            floating = jnp.issubdtype(getattr(aval, "dtype", jnp.bool_), jnp.floating) and len(aval.shape) >= axes
            if floating and (found := jnp.finfo(aval.dtype).eps) > eps:
                eps, narrow = found, Narrow(equation.primitive.name, str(aval.dtype))
    return narrow


def load(module: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """Give the module these tensors. Raises ConfigError where two of them are one tensor of the module."""
    held = module.state_dict()
    with torch.no_grad():
        for name, array in tensors.items():
            held[name].copy_(torch.from_numpy(np.array(array)))
        for name, array in tensors.items():
            if not torch.equal(held[name], torch.from_numpy(np.array(array)).to(held[name].dtype)):
                raise ConfigError(
                    f"torch's {name} shares its memory with another tensor, but ours are two that differ; tie them in "
                    "JAX, or untie them in torch"
                )
