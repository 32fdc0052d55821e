"""Record outputs of the modules of a JAX model (flax nnx and linen), without changing the model. Twin: torch_taps.py.

Modules are named by their path; a function without modules names what it computes by `note`. An output that is a tuple,
a list or one of transformers' outputs counts as its first array. A module that is called again is named `path#2`. In
JAX what runs within another trace, as in a scan, a rematerialized block or a jitted function, cannot be passed out and
is not seen.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax.extend.core import get_opaque_trace_state

from parity_tests.runs.names import numbered

Note = Callable[[str, jax.Array], jax.Array]
_taps: list[Callable[[str, Any], Any]] = []


def note(path: str, y: jax.Array) -> jax.Array:
    """`y`, seen by a proof as the output of the part of a plain JAX model whose parameters lie at `path`.

    To be used in place of `y`: x = note("layers.0.mlp", mlp(parameters["layers"][0]["mlp"], x)).
    """
    return _taps[-1](path, y) if _taps else y


@contextmanager
def jax_taps(seen: Note) -> Iterator[None]:
    """Within, the output of every module continues as what `seen(path, output)` returns. Enter it inside of a trace.

    Paths are those in the model that `nnx.merge` returned, or of which the outermost module was called.
    """
    calls: Counter[str] = Counter()
    trace = _trace()

    def tap(path: str, y: Any) -> Any:
        if not path or _trace() != trace:
            return y
        first = y[0] if isinstance(y, tuple | list) and y else y
        if not isinstance(first, jax.Array) or not jnp.issubdtype(first.dtype, jnp.floating):
            return y
        calls[path] += 1
        noted = seen(numbered(path, calls[path]), first)
        return noted if first is y else _with_first(y, noted)

    with ExitStack() as stack:
        _taps.append(tap)
        stack.callback(_taps.pop)
        stack.enter_context(linen.intercept_methods(_linen_interceptor(tap)))
        for owner, name, value in _nnx_patches(tap):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _trace() -> Any:
    return get_opaque_trace_state(convention="nnx")


def _linen_interceptor(tap: Callable[[str, Any], Any]) -> Callable[..., Any]:
    def interceptor(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        y = call(*args, **kwargs)
        return tap(".".join(context.module.path), y) if context.method_name == "__call__" else y

    return interceptor


def _nnx_patches(tap: Callable[[str, Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, attribute, what it is replaced by) for `nnx.merge` and the call of every class of modules."""
    paths: dict[int, str] = {}
    kept: list[Any] = []  # or another module could come to have the id of one that is gone
    inside: list[int] = []

    def learn(root: nnx.Module) -> None:
        kept.append(root)
        paths.update({id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(root)})

    merge: Any = nnx.merge

    @wraps(merge)
    def merging(*args: Any, **kwargs: Any) -> Any:
        model = merge(*args, **kwargs)
        if isinstance(model, nnx.Module):
            learn(model)
        return model

    def calling(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def tapped(module: Any, *args: Any, **kwargs: Any) -> Any:
            if id(module) in inside:  # the call of a base class
                return call(module, *args, **kwargs)
            if not paths:
                learn(module)
            inside.append(id(module))
            try:
                y = call(module, *args, **kwargs)
            finally:
                inside.pop()
            return tap(paths.get(id(module), ""), y)

        return tapped

    yield nnx, "merge", merging
    for cls in _subclasses(nnx.Module):
        if "__call__" in vars(cls):
            yield cls, "__call__", calling(vars(cls)["__call__"])


def _subclasses(cls: type) -> set[type]:
    below: list[type] = cls.__subclasses__()
    return {*below, *(deeper for each in below for deeper in _subclasses(each))}


def _with_first(y: Any, first: jax.Array) -> Any:
    """A tuple or list with another first element, of its own type."""
    return type(y)(first, *y[1:]) if hasattr(y, "_fields") else type(y)([first, *y[1:]])
