"""Records agree with the results of the compiled step, on any mesh."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxdist.config import Experiment
from jaxdist.config.record import read_record, write_record
from jaxdist.conftest import GPT2, tiny
from jaxdist.families.llama.model import Attention
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.mesh import make_mesh
from jaxdist.training.program import Program
from jaxdist.training.record import Recorder

pytestmark = pytest.mark.long

KEY = "attention.k_proj.bias"
ALL = {"steps": [1], "tensors": "all"}
MESHES = {
    "1x1": {"mesh": "1x1"},
    "2x4": {"mesh": "2x4"},
    "zero1": {"mesh": "2x2", "strategy": "zero1"},
}


def program(mesh: str, **sections: Any) -> Program:
    experiment = tiny(parallel=MESHES[mesh], record=ALL, **sections)
    return Program(experiment, make_mesh(experiment, "cpu")[0])


def recorded(program: Program, batches: Any) -> dict[str, np.ndarray]:
    with jax.enable_x64(True):
        batch = batches(program.experiment, 1)[0]
        return Recorder(program)(program.initialize(), batch)


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> dict[str, float]:
    assert list(a) == list(b)
    # absolute for GPT-2's key bias: its gradient is zero, and it moves by rounding alone
    return {n: float(np.linalg.norm(a[n] - b[n]) / (1 if KEY in n else np.linalg.norm(b[n]) or 1)) for n in a}


OFFLOADED = {"memory": {"offload": ["optimizer", "parameters"]}}


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("zero1", {"model": GPT2}), ("2x4", OFFLOADED))]


@pytest.mark.parametrize(("mesh", "sections"), [("2x4", {}), *SLOW])
@pytest.mark.slow
def test_a_record_is_the_same_on_every_mesh(batches: Any, mesh: str, sections: dict[str, Any]) -> None:
    alone = {name: section for name, section in sections.items() if name != "memory"}
    found = distance(recorded(program(mesh, **sections), batches), recorded(program("1x1", **alone), batches))
    assert max(found.values()) < 1e-10, max(found, key=lambda name: found[name])
    kinds = {name.partition("/")[0] for name in found}
    assert kinds >= {"batch", "start", "activation", "activation_gradient", "gradient", "clipped", "exp_avg", "weights"}
    assert {"activation/layers.1.attention.attended", "activation/logits", "activation_gradient/embed"} <= found.keys()


def test_a_record_is_of_the_step_that_trains(batches: Any) -> None:
    """Loss, norm, weights and moments equal the compiled step's."""
    p = program("2x4", memory={"remat": "selective"}, train={"accumulation": 2})
    record = recorded(p, batches)
    with jax.enable_x64(True):
        state, metrics = p.step(p.initialize(), batches(p.experiment, 1)[0])
    np.testing.assert_allclose(record["scalar/loss"], float(metrics["loss"]), rtol=1e-12)
    np.testing.assert_allclose(record["scalar/grad_norm"], float(metrics["grad_norm"]), rtol=1e-12)
    for name, w in state.parameters.items():
        np.testing.assert_allclose(record[f"weights/{name}"], w, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
def test_another_clip_is_recorded(batches: Any) -> None:
    wrong, right = (recorded(program("1x1", optimizer={"clip": clip}), batches) for clip in (0.01, 1.0))
    assert not np.allclose(wrong["clipped/norm.scale"], right["clipped/norm.scale"])


def test_activation_gradients_are_derivatives(batches: Any) -> None:
    """The gradient of v_proj's output, summed over tokens, is the gradient of its bias."""
    p = program("1x1")
    record = recorded(p, batches)
    bias = record["activation_gradient/layers.1.attention.v_proj"].sum((0, 1))
    np.testing.assert_allclose(bias, record["gradient/layers.attention.v_proj.bias"][1], rtol=1e-10)


def test_gradients_alone(batches: Any) -> None:
    p = program("1x1")
    fewer = Experiment.parse(p.experiment.model_dump() | {"record": {"steps": [1]}}, source="test")
    record = recorded(replace(p, experiment=fewer), batches)
    assert {name.partition("/")[0] for name in record} == {"scalar", "gradient"}


def test_recording_changes_no_class(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules outside the recorded model are unaffected, also while a step is recorded."""
    called, right = list[Any](), Parallel.tap

    def tap(self: Parallel, name: str, x: jax.Array) -> jax.Array:
        called.append(Attention.__call__)
        return right(self, name, x)

    monkeypatch.setattr(Parallel, "tap", tap)
    before = Attention.__call__
    recorded(program("1x1"), batches)
    assert called and all(call is before for call in called)


def test_files_keep_order_and_values(tmp_path: Any) -> None:
    arrays = {
        "b/x": np.arange(6.0).reshape(2, 3).T,
        "a/y": np.ones(2, np.int32),
        "a/half": np.asarray(jax.numpy.ones(2, "bfloat16")),
    }
    write_record(tmp_path, 7, arrays)
    found = read_record(tmp_path / "record" / "7.safetensors")
    assert list(found) == list(arrays)
    np.testing.assert_array_equal(found["b/x"], arrays["b/x"])
    assert found["a/half"].dtype == np.float32
