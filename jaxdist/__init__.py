"""Train in JAX on a mesh what PyTorch trains with DDP, FSDP and tensor parallelism, and prove it the same."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist.config.registry import Family, register_family

__version__ = "0.1.0"
__all__ = ["Family", "register_family"]

PUBLIC = {"Family": "jaxdist.config.registry", "register_family": "jaxdist.config.registry"}  # imported when asked for


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)
