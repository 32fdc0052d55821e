import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jaxdist.config import Experiment
from jaxdist.config import Optimizer as Config
from torch_ref.training.optim import Optimizer, clip, global_norm, learning_rate

ALONE: Any = SimpleNamespace(device_type="cpu")  # all of a mesh that matters without ZeRO-1


def test_the_schedule_by_hand() -> None:
    o = Config(learning_rate=1.0, warmup=4, final=0.1)
    rates = [learning_rate(o, 12, step) for step in (1, 2, 4, 6, 8, 12, 20)]
    quarter = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2
    assert rates == pytest.approx([0.25, 0.5, 1.0, quarter, 0.55, 0.1, 0.1], rel=1e-15)
    linear = Config(learning_rate=1.0, warmup=0, final=0.0, decay="linear", decay_steps=4)
    assert [learning_rate(linear, 99, step) for step in (1, 2, 4, 5)] == pytest.approx([0.75, 0.5, 0, 0])
    assert learning_rate(Config(learning_rate=1.0, warmup=0, decay="constant"), 9, 9) == 1.0


def gradients() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), (2, 2))]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return parameters


@pytest.mark.parametrize("largest", [1.0, 100.0])
def test_the_clip_is_torchs(largest: float) -> None:
    ours, torchs = gradients(), gradients()
    norm = clip(ours, largest)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(torchs, largest).item(), rel=1e-15)
    for p, q in zip(ours, torchs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-15, atol=0)


def test_the_clip_adds_1e_6_to_the_norm() -> None:
    parameters = gradients()
    norm = clip(parameters, 1.0).item()
    clipped = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in parameters if p.grad is not None))
    assert clipped == pytest.approx(norm / (norm + 1e-6), rel=1e-14)
    assert clipped != pytest.approx(1.0, rel=1e-8)  # optax's formula gives 1


def test_no_clip_leaves_gradients_and_still_measures() -> None:
    parameters = gradients()
    assert clip(parameters, 0.0) > 1
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(parameters, gradients(), strict=True))  # type: ignore[arg-type]


def test_squares_of_bfloat16_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)  # its square needs twice the digits
    exact = pytest.approx(gradient.double().norm().item(), rel=1e-6)
    assert global_norm([gradient]).item() == exact
    monkeypatch.setattr("torch_ref.training.optim.at_least_f32", lambda x: x)
    assert global_norm([gradient]).item() != exact


def updated(**fields: Any) -> nn.Linear:
    """A Linear of ones after one step with gradients of one."""
    model = nn.Linear(2, 2).double()
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    settings = Config(learning_rate=0.5, warmup=0, decay="constant").model_copy(update=fields)
    optimizer = Optimizer(model, Experiment(optimizer=settings), mesh=ALONE)
    optimizer.unscale()
    optimizer.step(1, taken=True)
    return model


def test_the_first_update_by_hand_decays_matrices_only() -> None:
    model = updated()
    step = 0.5 / (1 + 1e-8)  # both corrected moments are 1
    torch.testing.assert_close(model.weight, torch.full_like(model.weight, 1 * (1 - 0.5 * 0.1) - step))
    torch.testing.assert_close(model.bias, torch.full_like(model.bias, 1 - step))


def test_eps_and_betas_reach_the_optimizer() -> None:
    assert not torch.equal(updated(eps=0.1).weight, updated().weight)
    settings = Experiment(optimizer=Config(beta1=0.5, beta2=0.7))
    optimizer = Optimizer(nn.Linear(1, 1), settings, mesh=ALONE)
    assert optimizer.holder.param_groups[0]["betas"] == (0.5, 0.7)
