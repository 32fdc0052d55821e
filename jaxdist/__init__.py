"""Train in JAX on a mesh what PyTorch trains with DDP, FSDP and tensor parallelism, and prove it the same."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist.config.data import DataSource, register_data_source
    from jaxdist.config.optimizer import UpdateRule, register_optimizer
    from jaxdist.config.registry import Family, register_family
    from jaxdist.config.strategies import Strategy, register_strategy
    from jaxdist.formats.kinds import CheckpointKind, register_checkpoint_kind

__version__ = "0.1.0"
__all__ = [
    "CheckpointKind",
    "DataSource",
    "Family",
    "Strategy",
    "UpdateRule",
    "register_checkpoint_kind",
    "register_data_source",
    "register_family",
    "register_optimizer",
    "register_strategy",
]

# Names for plugins, which register rows by them, imported on first use: name -> module.
PUBLIC = {
    **dict.fromkeys(("CheckpointKind", "register_checkpoint_kind"), "jaxdist.formats.kinds"),
    **dict.fromkeys(("DataSource", "register_data_source"), "jaxdist.config.data"),
    **dict.fromkeys(("Family", "register_family"), "jaxdist.config.registry"),
    **dict.fromkeys(("UpdateRule", "register_optimizer"), "jaxdist.config.optimizer"),
    **dict.fromkeys(("Strategy", "register_strategy"), "jaxdist.config.strategies"),
}


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PUBLIC[name]), name)
