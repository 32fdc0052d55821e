"""Mistakes in torch_ref's mixtures: what the router chooses, how rows come to experts, what balances them."""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional

from jaxdist.data import microbatch_order
from parity_tests.validation.mistakes import everywhere, mistake, plant
from torch_ref.families import mixtral
from torch_ref.parallel import experts
from torch_ref.runtime.compat import all_to_all_single_autograd

planted = partial(mistake, "torch_ref")
MIXED = "activation/layers.0.mlp"


@planted("mixture", "mathematics", f"{MIXED}.router")
def router_in_float32() -> None:
    """A float64 run takes the router's logits in float32: `.float()` in the place of an upcast."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.weight.float()).to(x.dtype)

    plant(mixtral.Router, "forward", forward)


@planted("mixture", "mathematics", MIXED)
def one_expert_less() -> None:
    """Each token goes to top_k - 1 experts."""
    right = mixtral.choose
    plant(mixtral, "choose", lambda probabilities, k: right(probabilities, k - 1))


@planted("mixture", "mathematics", MIXED)
def gate_and_up_of_experts_exchanged() -> None:
    """silu(up) · gate: of Mixtral's w1, w2 and w3 the third is up."""

    def rows(self: Any, x: Tensor, counts: list[int]) -> Tensor:
        return self.down_proj(self.gate_proj(x, counts) * functional.silu(self.up_proj(x, counts)), counts)

    plant(mixtral.Experts, "rows", rows)


@planted("mixture", "mathematics", "activation_gradient/layers.1.mlp.router")
def balance_of_the_first_choice() -> None:
    """Balanced is where each token's first choice goes, as in the Switch transformer, not all of them."""
    right = mixtral.tally
    plant(mixtral, "tally", lambda probabilities, chosen, valid: right(probabilities, chosen[..., :1], valid))


@planted("experts", "distribution", "activation_gradient/layers.1.mlp.router")
def balance_of_each_rank() -> None:
    """Each rank balances its own tokens."""
    plant(experts.Dispatch, "sum_over_tokens", lambda self, sums: sums.detach())


@planted("experts", "distribution", f"{MIXED}*")
def rows_back_in_the_order_of_experts() -> None:
    """Rows are sorted by expert, and go back so."""
    right = all_to_all_single_autograd

    class Unsorted:
        """The second of two ways, whose rows are sorted again."""

        ways = 0

        def __call__(self, x: Tensor, of: list[int], to: list[int], group: Any) -> Tensor:
            self.ways += 1
            return right(x if self.ways % 2 else x.flip(0), of, to, group)

    plant(experts, "all_to_all_single_autograd", Unsorted())


@planted("experts", "distribution", "activation_gradient/layers.1.mlp_norm")
def gradients_of_rows_not_sent_back() -> None:
    """Rows are sent without a gradient: tokens learn from the router alone."""
    right = experts.Dispatch.__call__

    def call(self: Any, rows: Any, x: Tensor, *rest: Any) -> Tensor:
        return right(self, rows, x.detach(), *rest)

    plant(experts.Dispatch, "__call__", call)


@planted("capped", "distribution", f"{MIXED}*")
def the_last_are_taken() -> None:
    """An expert's room is filled from the end of a sequence."""
    right = mixtral.places
    plant(mixtral, "places", lambda chosen, *rest: right(chosen.flip(1, 2), *rest).flip(1, 2))


@planted("capped context", "distribution", f"{MIXED}*")
def room_for_each_ranks_times() -> None:
    """An expert has its room for a sequence on each rank that has some of its times."""

    def taken(self: Any, chosen: Tensor, valid: Tensor) -> Tensor:
        rooms = self.rooms(self.context.gather_sequence(valid))
        return mixtral.places(chosen, self.config.experts) < rooms[:, None, None]

    plant(mixtral.Experts, "taken", taken)


@planted("balanced", "distribution", "activation_gradient/layers.*.mlp.router")
def microbatches_of_a_ranks_rows() -> None:
    """Each rank has rows that follow each other, so that on another mesh other ones are balanced together."""
    everywhere(microbatch_order, lambda size, *_: np.arange(size))
