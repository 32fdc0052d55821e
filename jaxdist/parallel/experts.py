"""Exchange of tokens with their experts, which the mesh axis `expert` splits.

| row | a device sends, forward (backward) | what exceeds an expert's room |
|---|---|---|
| `Dropless` | x by all-gather, results by reduce-scatter, (n-1)/n of each of the group (the same) | there is none |
| `Capped` | boxes of x and of results by all-to-all, (n-1)/n of each (the same) | is left out |

x being the bytes of the group's tokens, those of the n devices along the axis, Dropless sends 2x(n-1)/n each way, and
beside it k weights and numbers of experts a token. Boxes have room for C = capacity · k · T / E rows of each sequence
and expert, of which a device with B sequences sends 2 · E·B·C·D · (n-1)/n numbers each way. They are fewer where
capacity · k < n. Room is by sequence, in the order of time: what is left out depends on no mesh. Padding takes no room
and makes none: T above counts the tokens of a sequence up to its last valid one, and the boxes are as large as a
sequence without padding needs. Where `context` splits sequences, the choices of all times are gathered, and a device's
boxes have room for as many rows as it has times, if that is less than C.
"""

from dataclasses import dataclass
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.config import Model
from jaxdist.ops.varying import at_least_f32
from jaxdist.parallel.collectives import Context, Dispatch, Routing, Rows

AXIS = "expert"


def weighted(y_BTkD: jax.Array, weights_BTk: jax.Array) -> jax.Array:
    """The weighted sum over k, in float32 or wider, rounded once."""
    return (at_least_f32(y_BTkD) * weights_BTk[..., None]).sum(2).astype(y_BTkD.dtype)


@dataclass(frozen=True)
class Dropless:
    """Every device receives all tokens of its group and computes its own of `count` experts."""

    count: int

    def __call__(self, experts: Rows, x_BTD: jax.Array, routing: Routing, context: Context) -> jax.Array:
        x_BTD, weights_BTk, chosen_BTk = (
            lax.all_gather(a, AXIS, axis=0, tiled=True) for a in (x_BTD, routing.weights_BTk, routing.chosen_BTk)
        )
        own = self.count // lax.axis_size(AXIS)
        index_N = (chosen_BTk - lax.axis_index(AXIS) * own).reshape(-1)
        index_N = jnp.where((index_N >= 0) & (index_N < own), index_N, own)  # those of other devices come last
        order_N, counts_E = jnp.argsort(index_N, stable=True), jnp.bincount(index_N, length=own)
        mine = (jnp.arange(len(index_N)) < counts_E.sum())[:, None]  # of other rows a grouped product leaves anything
        rows_ND = x_BTD.reshape(-1, x_BTD.shape[-1])[order_N // chosen_BTk.shape[-1]]
        y_ND = jnp.where(mine, experts(jnp.where(mine, rows_ND, 0), counts_E.astype(jnp.int32)), 0)
        y_BTkD = y_ND[jnp.argsort(order_N)].reshape(*chosen_BTk.shape, -1)
        y_BTD: jax.Array = lax.psum_scatter(weighted(y_BTkD, weights_BTk), AXIS, scatter_dimension=0, tiled=True)
        return y_BTD


def places(chosen_BTk: jax.Array, count: int) -> jax.Array:
    """Number of earlier choices of the same one of `count` experts in a sequence [B, T, k]."""
    chosen_BN = chosen_BTk.reshape(len(chosen_BTk), -1)
    until_BNE = jnp.cumsum(jax.nn.one_hot(chosen_BN, count, dtype=jnp.int32), axis=1)
    return jnp.take_along_axis(until_BNE, chosen_BN[..., None], axis=-1).reshape(chosen_BTk.shape) - 1


class Limited(Protocol):
    """A config with a `capacity`."""

    experts: int

    def room(self, times: int) -> int:
        """Capacity of an expert, in tokens, for a sequence of `times` tokens."""


@dataclass(frozen=True)
class Capped:
    """Each sequence has a box of C rows for each expert, which travels to the expert's device and back."""

    model: Limited

    def taken(self, routing: Routing, context: Context) -> jax.Array:
        """Whether an expert has capacity for a token [B, T, k]: per sequence, in order of time."""
        E = self.model.experts
        # Which tokens are valid travels with the choices: those of others are E higher.
        marked_BTk = jnp.where(routing.valid_BT[..., None], routing.chosen_BTk, E + routing.chosen_BTk)
        marked_BSk = context.gather_sequence(marked_BTk)
        place_SBk = places(marked_BSk % E, E).swapaxes(0, 1)
        return context.rows(place_SBk).swapaxes(0, 1) < self.rooms(marked_BSk[..., 0] < E)[:, None, None]

    def rooms(self, valid_BS: jax.Array) -> jax.Array:
        """Capacity of an expert, in tokens, for each sequence [B], by its length up to the last valid token."""
        S = valid_BS.shape[1]
        length_B = jnp.where(valid_BS, jnp.arange(1, S + 1), 0).max(1)
        return jnp.asarray(np.array([self.model.room(length) for length in range(S + 1)]))[length_B]

    def __call__(self, experts: Rows, x_BTD: jax.Array, routing: Routing, context: Context) -> jax.Array:
        weights_BTk, chosen_BTk, _ = routing
        (B, T, k), D, E = chosen_BTk.shape, x_BTD.shape[-1], self.model.experts
        taken_BTk = self.taken(routing, context)
        C = min(
            self.model.room(T * lax.axis_size("context")), T
        )  # the first of a sequence are the first of this device's
        place_BN = jnp.where(taken_BTk, places(chosen_BTk, E), C).reshape(B, T * k)
        at = chosen_BTk.reshape(B, T * k), jnp.arange(B)[:, None], place_BN  # place C is outside of the box
        empty = jnp.zeros_like(x_BTD, shape=(E, B, C, D))
        boxes = empty.at[at].set(jnp.repeat(x_BTD, k, axis=1), mode="drop")
        rows = lax.all_to_all(boxes, AXIS, split_axis=0, concat_axis=1, tiled=True)
        own, group = rows.shape[:2]
        y = experts(rows.reshape(-1, D), jnp.full(own, group * C, jnp.int32)).reshape(rows.shape)
        boxes = lax.all_to_all(y, AXIS, split_axis=1, concat_axis=0, tiled=True)
        y_BND = boxes.at[at].get(mode="fill", fill_value=0)
        return weighted(y_BND.reshape(B, T, k, D), weights_BTk)


def dispatch(model: Model) -> Dispatch:
    """Expert exchange of a model: Capped if it has a capacity, else Dropless."""
    if model.capacity:
        return Capped(cast(Limited, model))
    return Dropless(model.experts)
