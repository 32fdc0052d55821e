"""Mistakes in jaxdist's mixtures: what the router chooses, how tokens come to experts, what balances them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.families.mixtral import model as mixtral
from jaxdist.ops.varying import mark_varying
from jaxdist.parallel import experts
from jaxdist.parallel.collectives import Parallel, Routing
from jaxdist.parallel.context import Ring
from jaxdist.training import placement
from jaxdist.training.step import Step
from parity_tests.validation.mistakes import altered, mistake, plant

planted = partial(mistake, "jaxdist")
MIXED = "activation/layers.0.mlp"


@planted("mixture", "mathematics", f"{MIXED}.router")
def router_in_float32() -> None:
    """A float64 run takes the router's logits in float32, as a bf16 run would in bfloat16."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        low = (a.astype(jnp.float32) for a in (x, self.kernel[...]))
        return jnp.einsum("BTD,DE->BTE", *low).astype(x.dtype)

    plant(mixtral.Router, "__call__", call)


@planted("mixture", "mathematics", MIXED)
def one_expert_more() -> None:
    """Each token goes to top_k + 1 experts."""
    right = mixtral.choose
    plant(mixtral, "choose", lambda probabilities, k: right(probabilities, k + 1))


@planted("mixture", "mathematics", MIXED)
def weights_not_renormalized() -> None:
    """The probabilities of the chosen experts are not divided by their sum, as Qwen2-MoE's are not."""
    right = mixtral.Mixture.__init__

    def init(self: Any, c: Any) -> None:
        right(self, c)
        self.norm_topk_prob = False

    plant(mixtral.Mixture, "__init__", init)


@planted("mixture", "mathematics", "activation_gradient/layers.1.mlp.router")
def balance_left_out() -> None:
    """The config asks for a load-balance loss, the model adds none."""
    right = mixtral.Mixtral.balance
    plant(mixtral.Mixtral, "balance", lambda self, *inputs: 0 * right(self, *inputs))


@planted("experts", "distribution", "activation_gradient/layers.1.mlp.router")
def balance_of_each_device() -> None:
    """Each device balances its own tokens, and the mean over devices is taken."""
    axes = ("fsdp", "expert")
    plant(Parallel, "sum_over_tokens", lambda self, sums: lax.stop_gradient(sums) * lax.axis_size(axes) ** 0.5)


@planted("experts", "distribution", "gradient/layers.*.mlp.experts.*")
def experts_summed_over_expert() -> None:
    """Gradients of experts are summed over the axis that splits them, as all others are."""
    right = Step.reduce

    def reduce(self: Step, gradients: Any) -> Any:
        summed = {
            n: mark_varying(lax.psum(g, "expert"), ("expert",)) if ".experts." in n else g for n, g in gradients.items()
        }
        return right(self, summed)

    plant(Step, "reduce", reduce)


@planted("experts", "distribution", MIXED)
def experts_of_the_first_device() -> None:
    """Every device takes its experts for the first ones."""
    plant(experts, "lax", altered(lax, axis_index=lambda axis: 0 * lax.axis_index(axis)))


@planted("experts", "distribution", MIXED)
def results_of_own_experts_alone() -> None:
    """Results of other devices' experts are not returned."""

    def own(x: jax.Array, axis: str, **_: Any) -> jax.Array:
        size = x.shape[0] // lax.axis_size(axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size)

    plant(experts, "lax", altered(lax, psum_scatter=own))


@planted("experts", "traffic", "traffic/jaxdist, expert:*")
def results_summed_whole() -> None:
    """The sums of all tokens of the group are made on each device, which keeps its own: the same for more bytes."""

    def summed(x: jax.Array, axis: str, **_: Any) -> jax.Array:
        size = x.shape[0] // lax.axis_size(axis)
        return lax.dynamic_slice_in_dim(lax.psum(x, axis), lax.axis_index(axis) * size, size)

    plant(experts, "lax", altered(lax, psum_scatter=summed))


@planted("capped", "distribution", MIXED)
def room_shared_by_sequences() -> None:
    """An expert's room is that of all sequences of a device together, so that other tokens are left out."""
    right = experts.Capped.__call__

    def call(self: Any, rows: Any, x: jax.Array, routing: Routing, context: Any) -> jax.Array:
        B, T = routing.valid_BT.shape
        x_1, weights_1, chosen_1 = (a.reshape(1, B * T, -1) for a in (x, *routing[:2]))
        together = Routing(weights_1, chosen_1, routing.valid_BT.reshape(1, B * T))
        return right(self, rows, x_1, together, context).reshape(x.shape)

    plant(experts.Capped, "__call__", call)


@planted("capped", "distribution", MIXED)
def overflow_in_the_place_of_another() -> None:
    """Tokens beyond an expert's capacity overwrite its last slot."""

    def take(a: jax.Array, index: jax.Array, axis: int) -> jax.Array:
        return jnp.minimum(jnp.take_along_axis(a, index, axis), 12)  # of 32 times, top_k 3 and 8 experts: the last one

    plant(experts, "jnp", altered(jnp, take_along_axis=take))


@planted("capped context", "distribution", f"{MIXED}*")
def choices_in_the_order_of_devices() -> None:
    """An expert's room is filled in the order in which devices have times, of which each has early and late ones."""

    def gather_sequence(self: Ring, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, "context", axis=1, tiled=True)

    plant(Ring, "gather_sequence", gather_sequence)


@planted("balanced", "distribution", "activation_gradient/layers.*.mlp.router")
def microbatches_of_a_devices_rows() -> None:
    """Each device has rows that follow each other, so that on another mesh other ones are balanced together."""
    plant(placement, "microbatch_order", lambda size, *_: np.arange(size))
