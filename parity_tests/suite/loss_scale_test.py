"""Dynamic loss scaling against `torch.amp.GradScaler`: its rule, runs with overflows at chosen steps, and a change of
backend between them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tomli_w
import torch
from jax import lax

from jaxdist.config import Precision
from jaxdist.convert.__main__ import main as convert
from jaxdist.data import Batch
from jaxdist.runs.folder import read_metrics
from jaxdist.train import main
from jaxdist.training import loss_scale
from jaxdist.training.step import Step, TrainState
from parity_tests.runs import compare
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import Run, command

pytestmark = pytest.mark.long

STEPS = 13
OVERFLOWS = {2, 3, 9}
RULE = {"policy": "fp64", "loss_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
# Lower after steps 2, 3 and 9, higher after 6 and 12, each after three good steps.
SCALES = [1024, 1024, 256, 64, 64, 64, 256, 256, 256, 64, 64, 64, 256]

# On one of two ranks: the other must learn of it.
OVERFLOW = f"""
import torch.distributed as dist
from torch_ref import train
from torch_ref.training import optim
from torch_ref.parallel.weights import local
unscale, train_step = optim.Optimizer.unscale, train.train_step
def at(program, state, batch, step, watch):
    state.optimizer.now = step
    return train_step(program, state, batch, step, watch)
def overflown(optimizer):
    if optimizer.now in {OVERFLOWS} and dist.get_rank() == 1:
        local(optimizer.parameters["norm.weight"].grad).mul_(float("inf"))
    return unscale(optimizer)
train.train_step, optim.Optimizer.unscale = at, overflown
"""


@pytest.fixture
def config(experiments: dict[str, Path], tmp_path: Path) -> Path:
    """Llama on two devices under FSDP with loss scaling."""
    from jaxdist.config.experiment import read_toml

    values = read_toml(experiments["llama"]) | {"precision": RULE}
    values["checkpoint"] = {"every": 1, "keep": 0}
    values["parallel"] = {"mesh": "2x1"}
    file = tmp_path / "scaled.toml"
    file.write_text(tomli_w.dumps(values), encoding="utf-8")
    return file


def line(config: Path, folder: Path, steps: int, *more: str) -> list[str]:
    return ["--config", str(config), "--device", "cpu", "--steps", str(steps), "--output", str(folder), *more]


def torch_run(*arguments: str) -> None:
    done = command("parity_tests.runs.planted", OVERFLOW, TRAIN["torch_ref"], *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's gradients overflow at the same steps, on one of two devices."""
    gradient, accumulate = Step.gradient, Step.accumulate

    def at(self: Step, state: TrainState, batch: Batch) -> Any:
        done = next(part.count for part in state.optimizer if isinstance(part, optax.ScaleByScheduleState))
        bad = jnp.isin(done + 1, jnp.array(sorted(OVERFLOWS))) & (lax.axis_index("fsdp") == 1)

        def overflown(self: Step, *inputs: Any) -> Any:
            loss, gradients, rest = accumulate(self, *inputs)
            return loss, gradients | {"norm.scale": gradients["norm.scale"] * jnp.where(bad, jnp.inf, 1.0)}, rest

        with monkeypatch.context() as patch:
            patch.setattr(Step, "accumulate", overflown)
            return gradient(self, state, batch)

    monkeypatch.setattr(Step, "gradient", at)


@pytest.mark.slow
def test_overflows_at_chosen_steps(
    config: Path, start: dict[tuple[str, str], Path], overflowing: None, tmp_path: Path
) -> None:
    """Both sides have the same scales, skip the same steps, and train the same weights and moments; also if the other
    side runs the second half."""
    main(line(config, tmp_path / "jax", STEPS, "--init", str(start["jaxdist", "llama"])))
    torch_run(*line(config, tmp_path / "torch", STEPS, "--init", str(start["torch_ref", "llama"])))
    convert([str(tmp_path / "jax" / "checkpoints" / "5"), str(tmp_path / "to_torch"), "--to", "dcp"])
    torch_run(*line(config, tmp_path / "to_torch", STEPS, "--resume"))
    convert([str(tmp_path / "torch" / "checkpoints" / "5"), str(tmp_path / "file.pt")])
    convert([str(tmp_path / "file.pt"), str(tmp_path / "to_jax"), "--to", "orbax"])
    main(line(config, tmp_path / "to_jax", STEPS, "--resume"))

    right = Run("jaxdist", tmp_path / "jax")
    for folder in ("jax", "torch", "to_torch", "to_jax"):
        records = read_metrics(tmp_path / folder)
        assert [record["loss_scale"] for record in records] == SCALES, folder
        assert {record["step"] for record in records if record["skipped"]} == OVERFLOWS, folder
        run = Run("torch_ref" if folder in ("torch", "to_torch") else "jaxdist", tmp_path / folder)
        assert compare.curve(run.metrics, right.metrics, "loss").max() <= compare.LOSS, folder
        assert max(compare.states(run.states, right.states).values()) <= compare.STATE, folder

    after = [tmp_path / "torch" / "checkpoints" / str(step) for step in (8, 9)]
    for path in after:
        convert([str(path), str(path.with_suffix(".pt"))])
    before, skipped = (torch.load(path.with_suffix(".pt"), weights_only=True) for path in after)
    assert all(torch.equal(tensor, skipped["model"][name]) for name, tensor in before["model"].items())
    assert (before["scaler"]["scale"], before["scaler"]["_growth_tracker"]) == (256, 2)
    assert (skipped["scaler"]["scale"], skipped["scaler"]["_growth_tracker"]) == (64, 0)


def test_a_scale_is_that_of_grad_scaler() -> None:
    """A thousand steps, a random fifth of which overflow, through growth and the smallest scales."""
    rule = Precision(policy="fp16", loss_scale=2.0**10, growth_factor=3.0, backoff_factor=0.375, growth_interval=2)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", rule.loss_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval)
    state = loss_scale.start(rule)
    for finite in np.random.default_rng(0).random(1000) > 0.2:
        assert state
        scaler.scale(weight.sum()).backward()
        weight.grad = torch.full((1,), 1.0 if finite else np.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        state = loss_scale.after(state, jnp.asarray(finite), rule)
        assert state and np.float32(scaler.get_scale()) == state.scale
        assert scaler.state_dict()["_growth_tracker"] == state.good


@pytest.mark.slow
def test_a_scale_changes_nothing_in_float64(config: Path, tmp_path: Path) -> None:
    """The scale is divided out first."""
    main(line(config, tmp_path / "scaled", 3))
    main(line(config, tmp_path / "plain", 3, "--precision.loss_scale", "0"))
    scaled, plain = (Run("jaxdist", tmp_path / name) for name in ("scaled", "plain"))
    assert compare.curve(scaled.metrics, plain.metrics, "grad_norm").max() <= compare.GRAD_NORM
    assert max(compare.states(scaled.states, plain.states).values()) <= compare.STATE
    assert "loss_scale" not in plain.metrics[0] and "skipped" not in plain.metrics[0]
