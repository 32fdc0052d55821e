"""The proof of a model that is not a family of ours: a port from torch to JAX by its author.

Imports `runs`, `expected`, `proof`, `report`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Names of `port.port`, which scripts import from here: looked up when asked for, since that imports torch.
MOVED = ("Port", "torch_shapes")

if not TYPE_CHECKING:  # which would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name in MOVED:
            return getattr(import_module(f"{__name__}.port"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
