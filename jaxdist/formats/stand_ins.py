"""Replacements for classes in files of `torch.save` that are neither tensors nor plain values: arrays and scalars of
numpy, and small objects of DeepSpeed.

torch's `weights_only` refuses the numpy functions that rebuild them: a hostile file could allocate any memory by these,
or pass invalid state to numpy's C code. These classes accept plain numbers only
(https://numpy.org/doc/stable/reference/arrays.dtypes.html, `numpy.ndarray.__reduce__`).
"""

import math
import re
from typing import Any

import numpy as np

PLAIN = re.compile(r"[biuf][1248]|c8|c16")


class Dtype:
    """numpy.dtype, of plain numbers."""

    def __init__(self, name: str, *_: Any) -> None:
        if not PLAIN.fullmatch(name):
            raise ValueError(f"its numpy arrays are {name!r}; give plain numbers")
        self.plain = np.dtype(name)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.plain = self.plain.newbyteorder(state[1])


class Array:
    """numpy.ndarray, which gets its numbers after it is made."""

    def __init__(self, *_: Any) -> None:
        self.numbers = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        sizes = type(shape) is tuple and all(type(size) is int and size >= 0 for size in shape)
        if not sizes or type(raw) is not bytes:
            raise ValueError("it has a numpy array of no known form")
        if len(raw) != math.prod(shape) * dtype.plain.itemsize:
            raise ValueError(f"its numpy array {shape} has {len(raw):,} bytes")
        self.numbers = np.frombuffer(raw, dtype.plain).reshape(shape, order="F" if fortran else "C").copy(order="A")


def scalar(dtype: Dtype, raw: bytes) -> Any:
    """numpy's `multiarray.scalar`."""
    (number,) = np.frombuffer(raw, dtype.plain)
    return number


def no_bytes() -> bytes:
    """The bytes of an empty array, which Python's second protocol of pickles writes as `bytes()`."""
    return b""


class Attributes:
    """An object of DeepSpeed's, of which its attributes are kept."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict:
            raise ValueError("it has an object without attributes")
        self.attributes = state


def member(value: int) -> int:
    """A member of an enumeration of numbers."""
    if type(value) is not int:
        raise ValueError("it has a member of an enumeration that is not a number")
    return value


DEEPSPEED: dict[str, Any] = {
    **{f"deepspeed.runtime.fp16.loss_scaler.{name}": Attributes for name in ("LossScaler", "DynamicLossScaler")},
    "deepspeed.utils.tensor_fragment.fragment_address": Attributes,
    "deepspeed.runtime.zero.config.ZeroStageEnum": member,
}
STAND_INS: dict[str, Any] = (
    {"numpy.ndarray": Array, "numpy.dtype": Dtype, "builtins.bytes": no_bytes}
    | DEEPSPEED
    | {
        f"numpy.{core}.multiarray.{name}": stand_in  # numpy 1, numpy 2
        for core in ("core", "_core")
        for name, stand_in in (("_reconstruct", Array), ("scalar", scalar))
    }
)


def restored(tree: Any) -> Any:
    """The tree with numpy arrays and dicts of attributes in place of their replacements. Raises ValueError where a type
    is a value itself. Shared nodes are visited once: expanded, the tree may be huge."""
    restored_nodes: dict[int, tuple[Any, Any]] = {}  # with the node, so that no other gets its id

    def restore(node: Any) -> Any:
        if isinstance(node, Array):
            return node.numbers
        if isinstance(node, Attributes):
            node = vars(node).get("attributes", {})
        if isinstance(node, Dtype) or any(node is stand_in for stand_in in STAND_INS.values()):
            raise ValueError("it holds a type")
        if not isinstance(node, dict | list | tuple):
            return node
        if id(node) not in restored_nodes:
            restored_nodes[id(node)] = node, restored_parts(node)
        return restored_nodes[id(node)][1]

    def restored_parts(node: Any) -> Any:
        if isinstance(node, tuple):
            parts = [restore(part) for part in node]
            return node if all(a is b for a, b in zip(parts, node, strict=True)) else tuple(parts)
        for key, part in list(node.items() if isinstance(node, dict) else enumerate(node)):
            node[restore(key)] = restore(part)
        return node

    return restore(tree)
