"""Proofs of users' models that compute in float32 for any input dtype."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from torch import nn

from jaxdist.config import Optimizer
from jaxdist.convert.mappings.mapping import KeyMapping, Row
from parity_tests.port.port import Port
from parity_tests.port.port_test import AdamW, Square, proved, square, torch_adamw

pytestmark = pytest.mark.long


class Narrow(linen.Module):
    """Square with its hidden layer normalized in float32 for any input dtype, as in many models."""

    scale: float = 1.0

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = linen.Dense(6)(x).astype(jnp.float32)
        return linen.Dense(6)(self.scale * jnp.tanh(x).astype(jnp.result_type(float)))


class Wave(linen.Module):
    """Narrow with waves in place of tanh; training amplifies any difference."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.sin(3 * linen.Dense(6)(x).astype(jnp.float32))
        return linen.Dense(6)(x.astype(jnp.result_type(float)))


class TorchSine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(3 * x)


class TestNarrow:
    """float32 within the float64 run is reported and bounded by float32's noise; larger mistakes are still found."""

    def port(self, scale: float) -> Port:
        model = Narrow(scale)
        return square(jax_loss=lambda v, b: jnp.mean((model.apply(v, b["x"]) - b["y"]) ** 2))

    def test_equivalent(self, tmp_path: Path) -> None:
        verdict, written = proved(self.port(1.0), tmp_path)
        assert verdict.word == "equivalent"
        assert "jax_loss computes in less than float64 whatever it is given, first by" in written["notes"][0]
        assert "in float32" in written["notes"][0]
        assert max(check["value"] for check in written["checks"]) > 1e-9

    def test_a_mistake(self, tmp_path: Path) -> None:
        verdict, written = proved(self.port(1.0001), tmp_path)
        assert verdict.word == "not_equivalent" and verdict.failed[0].level == "mathematics"
        assert written["parting"]["tensor"] == "activation/2"

    def test_runs_amplified_beyond_float32_are_left_open(self, tmp_path: Path) -> None:
        """Equal runs may then differ by so much that a mistake would pass."""
        wave = Wave()
        port = square(
            jax_loss=lambda v, b: jnp.mean((wave.apply(v, b["x"]) - b["y"]) ** 2),
            torch_module=nn.Sequential(nn.Linear(6, 6), TorchSine(), nn.Linear(6, 6)),
            optimizer=Optimizer(learning_rate=0.3, warmup=0, clip=0.0),
        )
        verdict, _ = proved(replace(port, batches=[*port.batches] * 10), tmp_path)
        assert verdict.word == "undecided", verdict.sentence
        assert "where more than 0.001 could be a mistake" in verdict.sentence

    def test_torch_too(self) -> None:
        port = square(torch_loss=lambda m, b: ((m(b["x"]).float() - b["y"]) ** 2).mean())
        assert port.narrow == {"torch_loss": ("_to_copy", "float32")}

    def test_batches_in_float32_are_not_the_models_doing(self, tmp_path: Path) -> None:
        """float64's bounds apply to a model that follows its side's dtype, even with float32 batches."""
        port = square()
        batches = [{name: array.astype(np.float32) for name, array in batch.items()} for batch in port.batches]
        verdict, written = proved(replace(port, batches=batches), tmp_path)
        assert verdict.word == "equivalent" and written["notes"] == []
        assert max(check["bound"] for check in written["checks"] if check["level"] == "mathematics") < 1e-8

    def test_a_side_that_is_float32_throughout(self, tmp_path: Path) -> None:
        """Its float32 run loses nothing against its float64 run, which does not make the other side wrong."""
        model = Square()

        def loss(variables: Any, batch: Any) -> jax.Array:
            v, b = jax.tree.map(lambda x: x.astype(jnp.float32), (variables, batch))
            return jnp.mean((model.apply(v, b["x"]) - b["y"]) ** 2)

        verdict, _ = proved(square(jax_loss=loss), tmp_path)
        assert verdict.word == "equivalent", verdict.sentence


class TorchHalf(nn.Module):
    """Layers that compute in bfloat16 for any input dtype, as for mixed precision by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = torch.tanh(nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()))
        return x


class TestHalf:
    """bfloat16 on both sides: equal runs differ by more than a mistake may, so nothing is decided."""

    def port(self, scale: float = 1.0) -> Port:
        random, half = np.random.default_rng(0), jnp.bfloat16
        layers = [{"weight": 0.3 * random.normal(size=(16, 16)), "bias": np.zeros(16)} for _ in range(3)]

        def loss(parameters: Any, batch: Any) -> jax.Array:
            x = batch["x"]
            for layer in parameters["layers"]:
                x = jnp.tanh(scale * (x.astype(half) @ layer["weight"].astype(half) + layer["bias"].astype(half)))
            return jnp.mean((x.astype(batch["x"].dtype) - batch["y"]) ** 2)

        batches = [{name: random.normal(size=(8, 16)) for name in "xy"} for _ in range(6)]
        mse = lambda m, b: ((m(b["x"]).to(b["x"].dtype) - b["y"]) ** 2).mean()  # noqa: E731
        return Port({"layers": layers}, TorchHalf(), None, batches, loss, mse)

    def test_it_is_open(self, tmp_path: Path) -> None:
        verdict, written = proved(self.port(), tmp_path)
        assert verdict.word == "undecided", verdict.sentence
        assert "jax_loss computes in bfloat16 whatever it is given, first by convert_element_type" in verdict.sentence
        assert "the bounds of the mathematics are those of bfloat16" in written["notes"][0]

    def test_a_mistake_that_rounding_does_not_hide(self, tmp_path: Path) -> None:
        verdict, _ = proved(self.port(1.5), tmp_path)
        assert verdict.word == "not_equivalent" and verdict.failed[0].level == "mathematics"


class Coarse(torch.autograd.Function):
    """y = x·Wᵀ with gradients computed in float32 for any input dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = (t.float() for t in ctx.saved_tensors)
        found = gradient.float() @ weight, gradient.float().T @ x
        return tuple(g.to(gradient.dtype) for g in found)


class CoarseLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Coarse.apply(x, self.weight) + self.bias


class TestBackward:
    """float32 in the gradients alone, as from a user's custom derivative, is found too."""

    def port(self) -> Port:
        @jax.custom_vjp
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return x @ w

        def backward(kept: Any, g: jax.Array) -> Any:
            x, w = (a.astype(jnp.float32) for a in kept)
            g32 = g.astype(jnp.float32)
            return (g32 @ w.T).astype(g.dtype), (x.T @ g32).astype(g.dtype)

        product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
        random = np.random.default_rng(0)
        layers = {"0": {"kernel": random.normal(size=(6, 6)), "bias": np.zeros(6)}}

        def loss(v: Any, b: Any) -> jax.Array:
            return jnp.mean((product(b["x"], v["0"]["kernel"]) + v["0"]["bias"] - b["y"]) ** 2)

        rows = (Row("0.kernel", "0.weight", "transpose"), Row("0.bias", "0.bias"))
        module = nn.Sequential(CoarseLinear(6, 6))
        return square(jax_parameters=layers, jax_loss=loss, torch_module=module, mapping=KeyMapping(rows))

    def test_it_is_reported(self, tmp_path: Path) -> None:
        port = self.port()
        assert port.narrow.keys() == {"jax_loss", "torch_loss"}
        verdict, _ = proved(port, tmp_path)
        assert verdict.word == "equivalent", verdict.sentence


class TestOwnSteps:
    """User-defined steps with float32 losses that they do not return."""

    def port(self, settings: dict[str, Any] | None = None, **mistake: float) -> Port:
        model, settings = Narrow(), settings or {}
        loss = lambda v, b: jnp.mean((model.apply(v, b["x"]) - b["y"]) ** 2)  # noqa: E731
        step = AdamW(loss, **settings | mistake)
        return square(jax_loss=None, torch_loss=None, jax_step=step, torch_step=partial(torch_adamw, **settings))

    def test_equivalent(self, tmp_path: Path) -> None:
        port = self.port()
        assert list(port.narrow) == ["jax_step"]
        verdict, _ = proved(port, tmp_path)
        assert verdict.word == "equivalent", verdict.sentence

    def test_torch_too(self) -> None:
        def step(module: nn.Module) -> Any:
            optimizer = torch.optim.AdamW(module.parameters())

            def step(batch: Any) -> torch.Tensor:
                loss = ((module(batch["x"]).float() - batch["y"]) ** 2).mean()
                loss.backward()
                optimizer.step()
                return loss

            return step

        assert replace(self.port(), torch_step=step).narrow.keys() == {"jax_step", "torch_step"}

    def test_adams_count_is_no_loss(self) -> None:
        port = square()
        assert not replace(port, jax_step=AdamW(port.jax_loss), torch_step=torch_adamw).narrow

    @pytest.mark.parametrize(
        ("settings", "mistake"),
        [
            ({"lr": 1e-5, "weight_decay": 1e-2}, {"weight_decay": 1e-4}),
            pytest.param({"lr": 1e-5}, {"lr": 1.001e-5}, marks=pytest.mark.slow),
            pytest.param({"lr": 1e-6}, {"lr": 1.01e-6}, marks=pytest.mark.slow),
        ],
    )
    def test_weights_that_hardly_moved_decide_nothing(
        self, settings: dict[str, float], mistake: dict[str, float], tmp_path: Path
    ) -> None:
        """float32's noise is as large as the effect of these mistakes at such rates."""
        verdict, _ = proved(self.port(settings, **mistake), tmp_path)
        assert verdict.word != "equivalent"
        right, _ = proved(self.port(settings), tmp_path / "right")
        assert right.word == "undecided" and "training moved the weights so little" in right.sentence
