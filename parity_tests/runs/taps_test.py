"""Outputs of modules by path, full gradients, and nothing that outlives its trace."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from parity_tests.runs.jax_taps import jax_taps
from parity_tests.runs.torch_taps import torch_taps

pytestmark = pytest.mark.long


class Leaf(nnx.Module):
    def __init__(self, scale: float):
        self.scale = nnx.Param(jnp.array(scale))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...]


class Derived(Leaf):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + 1


class Model(nnx.Module):
    """`a` is called twice, `b` by its base class, `c` within a rematerialized function, and `d` returns two."""

    def __init__(self) -> None:
        self.a, self.b, self.c = Leaf(2.0), Derived(3.0), Leaf(5.0)
        self.parts = nnx.List([Pair(7.0)])

    def loss(self, x: jax.Array) -> jax.Array:
        x = self.b(self.a(self.a(x)))
        x = jax.checkpoint(lambda model, x: model(x))(self.c, x)
        return self.parts[0](x)[0].sum()


class Pair(Leaf):
    def __call__(self, x: jax.Array) -> tuple[jax.Array, str]:  # type: ignore[override]
        return super().__call__(x), "and more"


def seen(
    forward: Callable[[], Any], probe: Callable[[str, jax.Array], jax.Array] | None = None
) -> dict[str, jax.Array]:
    noted: dict[str, jax.Array] = {}

    def note(path: str, y: jax.Array) -> jax.Array:
        noted[path] = probe(path, y) if probe else y
        return noted[path]

    with jax_taps(note):
        forward()
    return noted


class TestJax:
    def test_paths_and_values(self) -> None:
        """The root is not called, so paths come from `nnx.merge`."""
        graph, state = nnx.split(Model())
        noted = seen(lambda: nnx.merge(graph, state).loss(jnp.array([1.0, 2.0])))
        assert list(noted) == ["a", "a#2", "b", "parts.0"]
        assert [float(y[0]) for y in noted.values()] == [2.0, 4.0, 13.0, 13 * 5 * 7.0]

    def test_a_probes_result_replaces_the_output(self) -> None:
        graph, state = nnx.split(Model())
        probe = lambda path, y: y + 1 if path == "b" else y  # noqa: E731
        noted = seen(lambda: nnx.merge(graph, state).loss(jnp.array([1.0])), probe)
        assert float(noted["parts.0"][0]) == 14 * 5 * 7

    def test_within_grad_and_jit(self) -> None:
        graph, state = nnx.split(Model())

        def loss(probes: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
            noted: dict[str, jax.Array] = {}

            def note(path: str, y: jax.Array) -> jax.Array:
                noted[path] = y + probes.get(path, 0)
                return noted[path]

            with jax_taps(note):
                return nnx.merge(graph, state).loss(jnp.array([1.0, 2.0])), noted

        zeros = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
        gradients, noted = jax.jit(jax.grad(loss, has_aux=True))(zeros)
        assert list(np.asarray(gradients["b"])) == [35.0, 35.0] and list(np.asarray(gradients["a"])) == [210.0, 210.0]
        assert set(noted) == {"a", "a#2", "b", "parts.0"}

    def test_the_outermost_module_is_the_root(self) -> None:
        model = nnx.Sequential(Leaf(2.0), Leaf(3.0))
        assert list(seen(lambda: model(jnp.ones(2)))) == ["layers.0", "layers.1"]

    def test_nothing_is_left_behind(self) -> None:
        before = Leaf.__call__, nnx.merge
        with pytest.raises(ZeroDivisionError):
            seen(lambda: 1 / 0)
        assert (Leaf.__call__, nnx.merge) == before


class TestTorch:
    def test_paths_and_values(self) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.relu = nn.Linear(2, 2), nn.ReLU(inplace=True)
                self.lstm = nn.LSTM(2, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.lstm(self.relu(self.a(self.a(x))))[0]

        noted: dict[str, torch.Tensor] = {}
        model = Twice()
        with torch_taps(model, lambda path, y: noted.__setitem__(path, y)):
            model(torch.ones(4, 2))
        assert list(noted) == ["a", "a#2", "relu", "lstm", ""] and noted["lstm"].shape == (4, 3)
        noted.clear()
        model(torch.ones(4, 2))
        assert not noted
