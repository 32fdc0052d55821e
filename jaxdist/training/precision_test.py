"""Computing in bfloat16 and float16 costs no more than their rounding: gradients against float64, by parameter."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.conftest import GPT2, tiny
from jaxdist.data import Batch
from jaxdist.families import layers
from jaxdist.parallel import collectives
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training.optim import kept_of
from jaxdist.training.program import Program

pytestmark = pytest.mark.long

MODELS: dict[str, dict[str, Any]] = {
    "llama": dict(tiny().model.model_dump(), output_bias=True, mlp_bias=True),
    "gpt2": dict(GPT2, positions=64),
}
# A gradient's longest path: about 12 roundings a block forward, as many backward, through two blocks; independent
# roundings of relative size u add up like a random walk, to √48 u. Sums in bfloat16 err by up to the number of terms.
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
BOUND = {policy: 48**0.5 * unit for policy, unit in UNIT.items()}


def gradients(model: str, mesh: str, **precision: Any) -> dict[str, np.ndarray]:
    """Gradients for 4096 tokens, three in four of them the same: twice Adam's first moment after an unclipped step."""
    experiment = tiny(
        model=MODELS[model],
        data={"sequence": 64},
        train={"batch": 64, "steps": 1},
        optimizer={"clip": 0.0, "beta1": 0.5},
        parallel={"mesh": mesh},
        precision=precision,
    )
    program = Program(experiment, make_mesh(experiment, "cpu")[0])
    random = np.random.default_rng(0)
    ids = random.integers(0, experiment.model.vocab, (64, 65)).astype(np.int32)
    ids[random.random(ids.shape) < 0.75] = 3
    state, _ = program.step(program.initialize(), Batch(ids[:, :-1], ids[:, 1:]))
    moments = kept_of(state.optimizer)["exp_avg"]
    return {name: 2 * np.asarray(moment, np.float64) for name, moment in moments.items()}


@functools.cache
def exact_gradients(model: str) -> dict[str, np.ndarray]:
    return gradients(model, "1x1", policy="fp64")


def errors(model: str, mesh: str = "1x1", **precision: Any) -> dict[str, float]:
    """Relative L2 error of each parameter's gradient, except GPT-2's key bias, whose true gradient is zero."""
    found, exact = gradients(model, mesh, **({"policy": "bf16"} | precision)), exact_gradients(model)
    names = [name for name in exact if (model, name) != ("gpt2", "layers.attention.k_proj.bias")]
    return {n: float(np.linalg.norm(found[n] - exact[n]) / np.linalg.norm(exact[n])) for n in names}


SLOW = [pytest.param(model, "1x1", marks=pytest.mark.slow) for model in MODELS]


@pytest.mark.parametrize(("model", "mesh"), [("llama", "2x4"), *SLOW])
def test_gradients_in_bfloat16(model: str, mesh: str) -> None:
    found = errors(model, mesh)
    assert max(found.values()) <= BOUND["bf16"], found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), [("llama", "2x2"), ("gpt2", "1x1")])
def test_gradients_in_float16(model: str, mesh: str) -> None:
    found = errors(model, mesh, policy="fp16", loss_scale=1024.0)
    assert max(found.values()) <= BOUND["fp16"], found


@pytest.mark.slow
def test_gradients_of_a_loss_that_is_too_small_vanish_in_float16() -> None:
    found = errors("llama", policy="fp16", loss_scale=2.0**-10)
    assert max(found.values()) > BOUND["fp16"]


def plain_sum(y: jax.Array, bias: jax.Array) -> jax.Array:
    return y + bias


@pytest.mark.parametrize(
    ("owner", "name", "planted", "parameter"),
    [
        (collectives, "at_least_f32", lambda x: x, "embed.embedding"),
        pytest.param(layers, "add_bias", plain_sum, "layers.mlp.down_proj.bias", marks=pytest.mark.slow),
    ],
)
def test_sums_over_tokens_in_bfloat16_are_caught(
    owner: Any, name: str, planted: Any, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, planted)
    assert errors("llama")[parameter] > BOUND["bf16"]


@pytest.mark.slow
def test_parameters_in_bfloat16_train() -> None:
    """Weights, gradients and moments in bfloat16 add one rounding each; norm and sums stay float32."""
    found = errors("llama", parameters="bfloat16")
    assert max(found.values()) <= 2 * BOUND["bf16"], found
