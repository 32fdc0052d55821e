"""ResNet against Hugging Face transformers' ResNetForImageClassification, in float64."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.config import Experiment
from jaxdist.conftest import often
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds.hf import read_hf
from jaxdist.families.resnet.model import BatchNorm
from jaxdist.parallel.collectives import Parallel
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.sharding import LOSS_AXES
from jaxdist.runtime.xla import Jitted
from jaxdist.training.program import Program
from jaxdist.training.step import Arrays

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch", reason="the reference is a torch model: pip install 'jaxdist[test]'")
transformers = pytest.importorskip("transformers", reason="the reference: pip install 'jaxdist[test]'")

SMALL: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1]}
MODELS: dict[str, dict[str, Any]] = {
    "small": SMALL | {"layer_type": "bottleneck"},
    "18": {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"},
    "50": {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3], "layer_type": "bottleneck"},
}
BOUND = 1e-12
LABELS = {i: f"LABEL_{i}" for i in range(10)}
Tensors = dict[str, np.ndarray]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def hf_reference(name: str, folder: Path) -> tuple[Any, np.ndarray, np.ndarray, Tensors]:
    """transformers' model, first saved to `folder`; images; its logits in evaluation; and its state after a forward
    pass in training."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(num_channels=3, id2label=LABELS, **MODELS[name])
    model = transformers.ResNetForImageClassification(config).double()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():  # statistics and scales as after training
            if key.endswith(("running_mean", "normalization.bias")):
                tensor.normal_(std=0.3)
            elif key.endswith(("running_var", "normalization.weight")):
                tensor.uniform_(0.5, 1.5)
            elif key.endswith("num_batches_tracked"):
                tensor.fill_(7)
    model.save_pretrained(folder)
    images = np.random.default_rng(0).normal(size=(4, 40, 40, 3))
    pixels = torch.from_numpy(images).movedim(-1, 1)
    with torch.no_grad():
        logits = model.eval()(pixels).logits.numpy()
        model.train()(pixels)
    return model, images, logits, {key: tensor.numpy() for key, tensor in model.state_dict().items()}


def ours(folder: Path, images: np.ndarray, **more: Any) -> tuple[np.ndarray, Tensors]:
    """Our logits in evaluation, and the statistics after a forward pass in training on two devices."""
    model, parameters = read_hf(folder)
    values = {
        "model": model.model_dump() | {"image": 40} | more,
        "train": {"batch": len(images)},
        "parallel": {"mesh": "data=2", "strategy": "ddp"},
        "precision": {"policy": "fp64"},
    }
    experiment = Experiment.parse(values, source="test")
    program = Program(experiment, make_mesh(experiment, "cpu")[0])

    def function(parameters: Arrays, inputs: jax.Array) -> Arrays:
        return program.step_function.forward(None, parameters, inputs).statistics

    specs = program.partition_specs.parameters, program.batch_specs[0]
    mapped = jax.shard_map(function, mesh=program.mesh, in_specs=specs, out_specs=P())
    moved = Jitted(jax.jit(mapped), program.mesh)
    weights = {name: jax.numpy.asarray(array) for name, array in parameters.items()}
    logits = program.logits(weights, images)
    return logits, {name: np.asarray(s) for name, s in moved(weights, images).items()}


def apart(name: str, folder: Path, **more: Any) -> tuple[float, float]:
    """Relative differences: of the logits, and the largest of running statistics and counts."""
    _, images, logits, state = hf_reference(name, folder)
    found, statistics = ours(folder, images, **more)
    model, _ = read_hf(folder)
    theirs = {entry.atoms[0][0]: state[key] for key, entry in entries("huggingface", model).items()}
    assert statistics.keys() == {
        n for n in theirs if n.endswith(("running_mean", "running_var", "num_batches_tracked"))
    }
    return relative(found, logits), max(relative(s, theirs[n]) for n, s in statistics.items())


@pytest.mark.parametrize("name", often(["small", "18", "50"], ["small"]))
def test_transformers(name: str, tmp_path: Path) -> None:
    logits, statistics = apart(name, tmp_path)
    assert logits < BOUND and statistics < BOUND, (logits, statistics)


@pytest.mark.slow
def test_mistakes_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """flax's momentum, the biased variance, and per-device statistics."""
    logits, statistics = apart("small", tmp_path, momentum=0.9)
    assert logits < BOUND and statistics > 1e-2
    right = BatchNorm.track
    with monkeypatch.context() as patch:
        biased = lambda self, mean, var, n: right(self, mean, var * ((n - 1) / n), n)  # noqa: E731
        patch.setattr(BatchNorm, "track", biased)
        assert apart("small", tmp_path)[1] > 1e-4

    def own(_: Parallel, sums: jax.Array) -> Any:
        first = jax.lax.axis_index(LOSS_AXES) == 0
        return jax.lax.psum(jax.numpy.where(first, 2 * sums, 0), LOSS_AXES)  # of the first device, for both

    monkeypatch.setattr(Parallel, "sum_over_images", own)
    assert apart("small", tmp_path)[1] > 1e-3
