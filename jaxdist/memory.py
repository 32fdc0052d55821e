"""Rematerialization: which results of a block's forward pass the backward pass keeps, and which it computes again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.config import Memory

Block = Callable[..., Any]

# Never kept between forward and backward, in any mode: a block's slice of the stacked weights; whole weights, which
# come out of the custom_vjp of `Parallel.use` (else fsdp would hold the whole model); casts and reshapes, which are
# cheaper to repeat than to store: the products that read one norm would each keep a copy of it.
TRANSIENT = {"slice", "squeeze", "reshape", "custom_vjp_call", "pvary", "convert_element_type"}


def _all_but_transient(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in TRANSIENT


_saves = jax.checkpoint_policies
POLICIES = {
    # Every activation is kept, but for what is transient.
    "none": _all_but_transient,
    # Only the block's input is kept; costs one more forward pass, tensor parallelism's all-reduces included.
    "full": _saves.nothing_saveable,
    # Results of matrix products, and of the all-reduces after them, are kept: norms, rotations, softmax are repeated.
    "selective": _saves.save_from_both_policies(
        _saves.dots_with_no_batch_dims_saveable, _saves.save_only_these_names("leave")
    ),
}


@dataclass(frozen=True)
class Rematerialize:
    """`memory.remat`, applied to every `every`-th block."""

    mode: str
    every: int

    @classmethod
    def from_config(cls, memory: Memory) -> "Rematerialize":
        return cls(memory.remat, memory.remat_every)

    def block(self, block: Block) -> Block:
        """`block` under the chosen policy."""
        return jax.checkpoint(block, policy=POLICIES[self.mode], prevent_cse=False)

    def keep(self, block: Block) -> Block:
        """`block` with all its activations kept."""
        return jax.checkpoint(block, policy=POLICIES["none"], prevent_cse=False)
