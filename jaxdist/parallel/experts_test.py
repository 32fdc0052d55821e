"""Routing of tokens to experts, against a loop over tokens: dropless, and with capacity per sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdist.config import AXES
from jaxdist.families.mixtral.config import Mixture
from jaxdist.parallel import experts
from jaxdist.parallel.collectives import Routing
from jaxdist.parallel.context import NoContextParallel
from jaxdist.runtime.xla import Jitted

pytestmark = pytest.mark.long

B, T, D, E, K = 4, 6, 3, 4, 2
MODEL = Mixture(family="mixtral", experts=E, top_k=K)


def tokens() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B, T, D], weights and choices [B, T, k]; the first experts are preferred."""
    random = np.random.default_rng(0)
    liked = random.normal(size=(B, T, E)) - np.arange(E)
    return (
        random.normal(size=(B, T, D)),
        random.random((B, T, K)),
        np.argsort(-liked, axis=-1)[..., :K].astype(np.int32),
    )


def looped(x: np.ndarray, weights: np.ndarray, chosen: np.ndarray, rooms: list[int]) -> np.ndarray:
    """Expert e multiplies by e + 1; it takes the first rooms[b] of the tokens of sequence b routed to it."""
    y = np.zeros_like(x)
    for b in range(B):
        taken = np.zeros(E, int)
        for t in range(T):
            for k in range(K):
                e = chosen[b, t, k]
                y[b, t] += weights[b, t, k] * (e + 1) * x[b, t] * (taken[e] < rooms[b])
                taken[e] += 1
    return y


def dispatched(devices: int, capacity: float, valid: np.ndarray) -> np.ndarray:
    """Result on a mesh with so many devices along `expert`; `valid` [B, T]."""
    sizes = [devices if axis == "expert" else 1 for axis in AXES]
    mesh = jax.make_mesh(sizes, AXES, devices=jax.devices()[:devices], axis_types=(AxisType.Auto,) * len(AXES))
    row = experts.dispatch(MODEL.model_copy(update={"capacity": capacity}))

    def multiply(x_ND: jax.Array, counts_E: jax.Array) -> jax.Array:
        own = lax.axis_index("expert") * len(counts_E) + jnp.arange(len(counts_E)) + 1.0
        return lax.ragged_dot(x_ND, own[:, None, None] * jnp.eye(D), counts_E)

    def function(x: jax.Array, *routing: jax.Array) -> jax.Array:
        return row(multiply, x, Routing(*routing), NoContextParallel())

    spec = P("expert")
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
    return np.asarray(Jitted(jax.jit(mapped), mesh)(*tokens(), valid))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("capacity", [0.0, 0.6, 1.0, 9.0])
def test_experts_take_tokens_up_to_their_capacity(devices: int, capacity: float) -> None:
    room = MODEL.model_copy(update={"capacity": capacity}).room(T)
    assert room == {0.0: T, 0.6: 2, 1.0: 3, 9.0: T}[capacity]
    found = dispatched(devices, capacity, np.ones((B, T), bool))
    np.testing.assert_allclose(found, looped(*tokens(), [room] * B), rtol=1e-5, atol=1e-6)
    if room < T:  # one more token would change the loop's result
        assert np.abs(found - looped(*tokens(), [room + 1] * B)).max() > 0.1


@pytest.mark.parametrize("devices", [1, 2])
def test_padding_makes_no_room(devices: int) -> None:
    """Capacity is an even share of the tokens up to the last valid one: earlier tokens without a loss are not
    padding."""
    lengths = [6, 3, 1, 5]
    valid = np.arange(T) < np.array(lengths)[:, None]
    valid[3, 2] = False
    capped = MODEL.model_copy(update={"capacity": 1.0})
    found = dispatched(devices, 1.0, valid)
    rooms = [capped.room(length) for length in lengths]
    assert rooms == [3, 2, 1, 3]
    right = looped(*tokens(), rooms)
    np.testing.assert_allclose(found[valid], right[valid], rtol=1e-5, atol=1e-6)
    padded = looped(*tokens(), [capped.room(T)] * B)
    assert np.abs(found - padded)[valid].max() > 0.1  # planted: capacity counts padding
