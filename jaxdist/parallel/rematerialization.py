"""Activations that a device keeps for the backward pass, recomputes, or offloads to host memory, and offloading of the
state between steps.

An array's type states its memory space: mixing host and device arrays is an error at trace time. Collectives alone lose
it, so that only fetched arrays are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.config import Memory
from jaxdist.config.errors import in_device_memory

Block = Callable[..., Any]

HOST = "pinned_host"  # memory of the host that a device can copy from by itself
ALL_OF_IT = "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 where JAX takes 75 % of a GPU"

# Context manager for computations: turns out-of-memory errors into a TrainingError with a fix.
in_memory = partial(in_device_memory, jax.errors.JaxRuntimeError, says="RESOURCE_EXHAUSTED")


def offloaded(shardings: Any) -> Any:
    """The same shardings in host memory."""
    return jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST), shardings)


def on_device(arrays: Any, after: jax.Array | None = None) -> Any:
    """`arrays` in device memory: arrays on the host are copied, others returned.

    No copy begins before `after` is known. XLA for GPUs has them begin with the step else, and holds them to its end.
    """

    def fetched(x: jax.Array) -> jax.Array:
        if jax.typeof(x).memory_space != jax.memory.Space.Host:
            return x
        if after is not None:
            x, _ = lax.optimization_barrier((x, after))
        copy: jax.Array = jax.device_put(x, jax.memory.Space.Device)
        return copy

    return jax.tree.map(fetched, arrays)


# Never kept between forward and backward, in any mode: a block's slice of the stacked weights; full weights, which
# come out of the custom_vjp of `Parallel.use` (else fsdp would hold the full model); casts and reshapes, which are
# cheaper to repeat than to store: the products that read one norm would each keep a copy of it. So are formulas of one
# number at a time, which XLA makes where they are read.
TRANSIENT = {"slice", "squeeze", "reshape", "custom_vjp_call", "pvary", "convert_element_type"} | {
    "add", "sub", "mul", "neg", "integer_pow", "logistic", "tanh", "erfc", "rsqrt", "split", "concatenate"
}  # fmt: skip


def _all_but_transient(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in TRANSIENT


_saves = jax.checkpoint_policies
POLICIES = {
    # Every activation is kept, except transient ones.
    "none": _all_but_transient,
    # Only the block's input is kept; costs one more forward pass, tensor parallelism's all-reduces included.
    "full": _saves.nothing_saveable,
    # Results of matrix products, and of the all-reduces after them, are kept: norms, rotations, softmax are repeated.
    "selective": _saves.save_from_both_policies(
        _saves.dots_with_no_batch_dims_saveable, _saves.save_only_these_names("leave")
    ),
}

INPUT = "block"  # the name of a block's input
_to_host: dict[str, Any] = {"offload_src": "device", "offload_dst": HOST}
_products = _saves.offload_dot_with_no_batch_dims(**_to_host)


def _only(*names: str) -> Callable[..., Any]:
    policy: Callable[..., Any] = _saves.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, **_to_host
    )
    return policy


def _products_and_sums(primitive: Any, *args: Any, **params: Any) -> Any:
    return (_products if primitive.name == "dot_general" else _only(INPUT, "leave"))(primitive, *args, **params)


# The same, kept on the host. So is a block's input, which has to be named for that.
OFFLOADED = {"full": _only(INPUT), "selective": _products_and_sums}


@dataclass(frozen=True)
class Rematerialize:
    """`memory.remat`, applied to every `every`-th block; with `offloaded` it keeps activations on the host."""

    mode: str
    every: int
    offloaded: bool = False

    @classmethod
    def from_config(cls, memory: Memory) -> "Rematerialize":
        """The mode of the section `memory`."""
        return cls(memory.remat, memory.remat_every, "activations" in memory.offload)

    def block(self, block: Block) -> Block:
        """`block` under the chosen policy."""
        if not self.offloaded:
            return jax.checkpoint(block, policy=POLICIES[self.mode], prevent_cse=False)

        def named(x: jax.Array, *rest: Any) -> jax.Array:
            y: jax.Array = block(checkpoint_name(x, INPUT), *rest)
            return y

        return jax.checkpoint(named, policy=OFFLOADED[self.mode], prevent_cse=False)

    def keep(self, block: Block) -> Block:
        """`block` with all its activations kept."""
        return jax.checkpoint(block, policy=POLICIES["none"], prevent_cse=False)
