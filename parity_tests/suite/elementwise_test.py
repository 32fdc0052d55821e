"""Update rules that depend on whole tensors are found by updating halves of a parameter, on both sides."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jax import numpy as jnp

import jaxdist
import torch_ref
from jaxdist import train
from jaxdist.config import ConfigError, Experiment, Optimizer
from jaxdist.config.optimizer import ALL
from jaxdist.training import elementwise
from parity_tests.suite.plugin_forward_test import data, one_rank
from parity_tests.suite.plugins_test import PLUGIN, TOY, registered
from torch_ref import train as torch_train
from torch_ref.training import elementwise as torch_elementwise


def optimizer(name: str, **fields: Any) -> Optimizer:
    return Experiment.parse({"optimizer": {"name": name, **fields}}, source="test").optimizer


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_ours_are_elementwise(name: str) -> None:
    assert elementwise.is_elementwise(optimizer(name)) and torch_elementwise.is_elementwise(optimizer(name))


def test_the_toy_optimizer_is_elementwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOY))
    with registered(PLUGIN):
        elementwise.check_elementwise(optimizer("centered"))
        torch_elementwise.check_elementwise(optimizer("centered"))


def normed(o: Any, g: Any, kept: Any, step: Any, param: Any) -> Any:
    return g / jnp.linalg.norm(g), kept


def by_rows(o: Any, g: Any, kept: Any, step: Any, param: Any) -> Any:
    return g / jnp.linalg.norm(g, axis=-1, keepdims=True), kept


def by_mean(o: Any, g: Any, kept: Any, step: Any, param: Any) -> Any:
    return g / param.rms(g), kept


def clipped(o: Any, g: Any, kept: Any, step: Any, param: Any) -> Any:
    """Depends on the whole only where the norm is large."""
    return g / jnp.maximum(jnp.linalg.norm(g), 1), kept


def later(o: Any, g: Any, kept: Any, step: Any, param: Any) -> Any:
    """Depends on the whole only through its state."""
    m = step.select(kept["m"] + jnp.mean(g), kept["m"])
    return kept["m"] + g, {"m": m}


RULES: list[Callable[..., Any]] = [normed, by_rows, by_mean, clipped, later]


class Normed(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad /= p.grad.norm(dim=group["dim"], keepdim=True) if group["dim"] else p.grad.norm()
        super().step()


class Along(Normed):
    def __init__(self, groups: Any, dim: int | None, **settings: Any):
        super().__init__([group | {"dim": dim} for group in groups], **settings)


@pytest.fixture
def plugin() -> Iterator[Callable[..., Any]]:
    """plugin(rule, dim, ...): registers this module's optimizer, with fields of its rows `jax` and `torch`."""

    def register(rule: Any = None, dim: int | None = None, **more: Any) -> Optimizer:
        row = jaxdist.UpdateRule("looks", {"m": ALL}, rule or normed)
        jaxdist.register_optimizer(dataclasses.replace(row, **more.get("jax", {})))
        made = torch_ref.UpdateRule("looks", lambda groups, **s: Along(groups, dim, **s), lambda o: {})
        torch_ref.register_optimizer(dataclasses.replace(made, **more.get("torch", {})))
        return optimizer("looks")

    with registered():
        yield register


SAYS = "the optimizer 'looks' of plugin .* its rule is not elementwise, .* register it with elementwise = False and let"
TORCH_SAYS = (
    "the optimizer of torch's side 'looks' of plugin .* it is not elementwise, .* register it with pieces = True"
)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_looks_at_whole_tensors_is_refused_in_jax(rule: Any, plugin: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=SAYS):
        elementwise.check_elementwise(plugin(rule))
    with pytest.raises(ConfigError, match=SAYS):
        elementwise.check_elementwise(plugin(rule, jax={"elementwise": True}))
    elementwise.check_elementwise(plugin(rule, jax={"elementwise": False}))


@pytest.mark.parametrize("dim", [None, 1])
def test_a_rule_that_looks_at_whole_tensors_is_refused_in_torch(dim: int | None, plugin: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=TORCH_SAYS):
        torch_elementwise.check_elementwise(plugin(dim=dim))
    torch_elementwise.check_elementwise(plugin(dim=dim, torch={"pieces": True}))


def test_training_refuses_it(plugin: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin()
    (np.arange(999, dtype=np.uint16) % 5).tofile(tmp_path / "ids.bin")
    line = ["--device", "cpu", "--mesh", "1x1", "--steps", "1", "--optimizer.name", "looks", *data(tmp_path)]
    with pytest.raises(ConfigError, match=SAYS):
        train.main(line)
    one_rank(monkeypatch)
    with pytest.raises(ConfigError, match=TORCH_SAYS):
        torch_train.main(line)
