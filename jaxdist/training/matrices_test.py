"""Functions of whole parameters sharded over several devices, against those of one array."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxdist.conftest import MIXTRAL, tiny
from jaxdist.parallel.mesh import make_mesh
from jaxdist.parallel.sharding import ParamSpec
from jaxdist.runtime.xla import Jitted
from jaxdist.training.matrices import ShardedParam, orthogonal

SPECS = {
    "inputs over fsdp": ParamSpec("layers.k", (3, 8, 4), ("layers", "embed", "hidden"), 0, 0),
    "outputs over fsdp": ParamSpec("layers.k", (3, 4, 8), ("layers", "hidden", "embed"), 0, 0),
    "experts": ParamSpec("layers.k", (3, 2, 8, 4), ("layers", "experts", "embed", "hidden"), 0, 0),
    "no layers": ParamSpec("embed.embedding", (4, 8), ("vocab", "embed"), 0, 0),
}
MESHES = {"2x2": "2x2", "context too": "fsdp=2,context=2,tensor=2", "experts": "fsdp=2,expert=2,tensor=2"}


def on_devices(mesh: str, spec: ParamSpec, function: Any, x: np.ndarray, kept: Any = None) -> np.ndarray:
    """`function(param, shard)` on a mesh."""
    devices, _ = make_mesh(tiny(model=MIXTRAL, parallel={"mesh": mesh}, precision={"policy": "fp64"}), "cpu")
    partition = spec.partition_spec(True)

    def one(piece: jax.Array) -> Any:
        return function(ShardedParam(spec, True, piece, jnp.float64), piece)

    out = spec.partition_spec(True, kept) if kept else partition
    mapped = jax.shard_map(one, mesh=devices, in_specs=partition, out_specs=out, check_vma=True)
    return np.asarray(Jitted(jax.jit(mapped), devices)(jax.device_put(x, NamedSharding(devices, partition))))


@pytest.fixture
def numbers() -> Any:
    random = np.random.default_rng(0)
    return lambda spec: random.normal(size=spec.shape)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_matrices_are_whole(spec: ParamSpec, mesh: str, numbers: Any) -> None:
    """Shards would give another result; the number of matrices is not divisible by the devices."""
    x, function = numbers(spec), partial(orthogonal, steps=5)
    found = on_devices(mesh, spec, lambda param, piece: param.by_matrix(function, piece), x)
    expected = np.asarray(function(jnp.asarray(x)))
    np.testing.assert_allclose(found, expected, atol=1e-14)
    pieces = on_devices(mesh, spec, lambda _, piece: function(piece), x)
    assert np.abs(pieces - expected).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_means_are_of_the_whole(spec: ParamSpec, mesh: str, numbers: Any) -> None:
    x, rows = numbers(spec), spec.matrix[0]
    found = on_devices(mesh, spec, lambda param, piece: param.mean(piece, rows), x, spec.state_shape("col_var"))
    np.testing.assert_allclose(found, x.mean(rows, keepdims=True), atol=1e-15)
    every = tuple(range("layers" in spec.axes, x.ndim))
    one = tuple(1 if dim in every else size for dim, size in enumerate(spec.shape))
    found = on_devices(mesh, spec, lambda param, piece: param.rms(piece), x, one)
    np.testing.assert_allclose(found, np.sqrt((x * x).mean(every, keepdims=True)), rtol=1e-14)


def test_orthogonal() -> None:
    """Singular values come near 1; vectors stay unchanged, as in torch.optim.Muon."""
    x = np.random.default_rng(0).normal(size=(2, 5, 3))
    with jax.enable_x64(True):
        found = np.asarray(orthogonal(jnp.asarray(x), 5))
    for before, after in zip(x, found, strict=True):
        u, _, v = np.linalg.svd(before, full_matrices=False)
        values = np.diag(u.T @ after @ v.T)
        assert 0.6 < values.min() <= values.max() < 1.3
        np.testing.assert_allclose(u @ np.diag(values) @ v, after, atol=1e-13)
